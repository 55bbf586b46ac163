"""Inkling's logits against loops over pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import attention
from tape_jax.positions import Inkling, InklingLocal, Layer
from tests.library.positions.pairs import DIM, HEADS, IDS, KV_HEADS, config_of, drawn

ENCODINGS = [
    Inkling(width=3, reach=4, alpha=0.4, floor=2.5),
    Inkling(width=3, reach=20),
    InklingLocal(width=3, reach=3),
]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_formula(encoding, x64):
    pairs = drawn(encoding, ids=IDS)
    q, k, x, p = (*(pairs.arrays[name] for name in "qkx"), pairs.params)
    r = (x @ p["relative_kernel"]).reshape(*x.shape[:2], HEADS, -1)

    def logit(b, h, i, j):
        apart = pairs.place(b, i) - pairs.place(b, j)
        score = q[b, i, h] @ k[b, j, h // (HEADS // KV_HEADS)] / DIM
        if apart < encoding.reach:
            score += r[b, i, h] @ p["table"][:, apart]
        elif encoding.kind == "inkling_local":
            return -np.inf
        floor = getattr(encoding, "floor", None)
        count = pairs.place(b, i) + 1
        return score * (1 + encoding.alpha * np.log(max(count / floor, 1)) if floor else 1)

    pairs.assert_attends(pairs.softmax(logit))


def temporary_bytes(time):
    """What attention and its gradients need beside their arguments and results."""
    encoding, shape = Inkling(), (1, time, 2, 16)
    sizes = config_of(encoding, 2, 2, "float32").sizes
    params = {
        name: jax.ShapeDtypeStruct(spec.shape, "float32")
        for name, spec in encoding.layer_params(sizes, updates=False).items()
    }

    def total(params, q, x):
        places = jnp.arange(time, dtype=jnp.int32)
        terms = encoding.layer_terms(params, Layer(x, places, None, True, sizes, q=q, k=q))
        options = {"is_causal": True, "implementation": "rows"}
        return attention(q, q, q, **options, **terms.keywords())[0].sum()

    of = (params, jax.ShapeDtypeStruct(shape, "float32"),
          jax.ShapeDtypeStruct((1, time, sizes.hidden_size), "float32"))  # fmt: skip
    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*of).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_is_linear_in_the_length():
    """Of 8,192 tokens the biases of two heads alone would take 512 MiB."""
    assert temporary_bytes(8192) < min(4.4 * temporary_bytes(2048), 2**27)
