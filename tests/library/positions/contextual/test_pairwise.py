"""What the encodings that look at pairs of tokens have in common, and what they refuse."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tape_jax.positions import (
    Cable,
    Cope,
    DapeKerple,
    DapeV2Alibi,
    DapeV2Kerple,
    DdaPerRow,
    GrapeAdditive,
    GrapePath,
    Inkling,
    Kerple,
    PathAttention,
    StickBreaking,
    Wall,
)
from tests.library.positions import pairs as by_pairs
from tests.library.positions.pairs import drawn
from tests.models import random_variables, small_model
from tests.selection import mostly_slow

ENCODINGS = {
    "kerple": Kerple(),
    "dape_kerple": DapeKerple(width=6),
    "dapev2_kerple": DapeV2Kerple(width=6),
    "cope": Cope(positions=5),
    "stickbreaking": StickBreaking(),
    "grape_additive": GrapeAdditive(),
    "grape_path": GrapePath(width=4),
    "wall": Wall(chunk=3),
    "inkling": Inkling(width=3, reach=5, floor=2.5),
    "dda_per_row": DdaPerRow(width=3),
}


@pytest.mark.parametrize("name", mostly_slow(ENCODINGS, "cope", "grape_path", "stickbreaking"))
def test_half_precision_is_summed_in_float32(name):
    """Of the same numbers in bfloat16, terms differ by the rounding of single products alone."""
    time, rng = 90, np.random.default_rng(0)
    exact = drawn(ENCODINGS[name], time=time, dtype="float32")
    half = {n: jnp.asarray(x, jnp.bfloat16) for n, x in exact.arrays.items()}
    params = {
        n: jnp.asarray(jnp.asarray(x, jnp.bfloat16), jnp.float32) for n, x in exact.params.items()
    }
    rows = tape.AttentionRows(
        jnp.arange(time, dtype=jnp.int32),
        jnp.arange(time, dtype=jnp.int32),
        jnp.tril(jnp.ones((1, 1, time, time), bool)),
    )
    heads = by_pairs.HEADS
    logits = jnp.asarray(rng.normal(size=(by_pairs.BATCH, heads, time, time)), jnp.float32)
    logits = jnp.where(rows.visible, logits, -jnp.inf if name == "stickbreaking" else 0)

    @jax.jit
    def added(arrays, logits):
        pairs = dataclasses.replace(exact, arrays=arrays)
        terms = exact.encoding.layer_terms(params, by_pairs.layer_of(pairs, arrays))
        if terms.bias is not None:
            return terms.bias(rows.queries, rows.queries)
        return (terms.weights_fn or terms.logits_fn)(logits, rows)

    found = added(half, logits)
    want = added({n: x.astype(jnp.float32) for n, x in half.items()}, logits)
    assert found.dtype == want.dtype == jnp.float32
    scale = max(1, float(jnp.abs(want).max()))
    np.testing.assert_allclose(found / scale, want / scale, atol=1e-5)


CAUSAL = [
    Cable(), Cope(), DapeV2Alibi(), DdaPerRow(), GrapePath(), Inkling(), PathAttention(),
    StickBreaking(), Wall(),
]  # fmt: skip


@pytest.mark.parametrize("encoding", CAUSAL, ids=lambda x: x.kind)
def test_what_is_for_the_causal_rule(encoding):
    with pytest.raises(ValueError, match=f"'{encoding.kind}' needs is_causal=True: "):
        drawn(encoding).attend(is_causal=False)


def test_distances_in_a_table_are_integers():
    model = small_model(Inkling())
    with pytest.raises(ValueError, match="inkling: positions must be integers"):
        jax.eval_shape(
            lambda: model.apply(
                random_variables(model), jnp.zeros((1, 2), int), positions=jnp.arange(2.0)
            )
        )
