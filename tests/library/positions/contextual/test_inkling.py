"""Inkling's logits against loops over pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import attention
from tape_jax.positions import Inkling, InklingLocal, Layer
from tests.library.positions.pairs import DIM, HEADS, IDS, KV_HEADS, config_of, drawn
from tests.models import random_variables, small_model

ENCODINGS = [
    Inkling(width=3, reach=4),
    Inkling(width=3, reach=20, alpha=0.4, floor=2.5),
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

    want = pairs.softmax(logit)
    np.testing.assert_allclose(pairs.attend(), want, atol=1e-12)
    found = pairs.attend(implementation="rows", block_q=4)
    np.testing.assert_allclose(found, want, atol=1e-12)


@pytest.mark.slow
def test_local_layers_are_global_ones_with_a_window():
    window = small_model(Inkling(width=3, reach=4), local_window_size=(3, 0))
    local = small_model(InklingLocal(width=3, reach=4))
    variables, tokens = random_variables(local), np.arange(12)[None]
    want = window.apply(variables, tokens)
    np.testing.assert_allclose(local.apply(variables, tokens), want, atol=1e-5)


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


def test_wrong_options():
    with pytest.raises(ValueError, match="inkling: reach must be a positive integer; got 0"):
        Inkling(reach=0)
    with pytest.raises(ValueError, match="inkling_local: width must be a positive integer; got 0"):
        InklingLocal(width=0)
    with pytest.raises(ValueError, match="inkling: floor must be positive or None; got 0"):
        Inkling(floor=0.0)
    with pytest.raises(ValueError, match="inkling: alpha must not be negative; got -1"):
        Inkling(alpha=-1.0)
    with pytest.raises(ValueError, match="'inkling' needs is_causal=True"):
        drawn(Inkling()).attend(is_causal=False)
    model = small_model(Inkling())
    with pytest.raises(ValueError, match="inkling: positions must be integers"):
        model.apply(random_variables(model), np.zeros((1, 2), int), positions=jnp.arange(2.0))
