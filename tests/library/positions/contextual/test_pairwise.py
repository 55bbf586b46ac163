"""What the encodings that look at pairs of tokens have in common, in models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tape_jax import attention_plan, positions
from tape_jax.positions import (
    Combined,
    Cope,
    DapeFire,
    DapeKerple,
    DapeV2Kerple,
    DdaPerRow,
    GrapeAdditive,
    GrapePath,
    Inkling,
    Kerple,
    StickBreaking,
    Wall,
)
from tests.library.positions import pairs as by_pairs
from tests.library.positions.pairs import drawn
from tests.models import VOCAB, random_variables, small_model
from tests.selection import mostly_slow

ENCODINGS = {
    "kerple": Kerple(),
    "dape_kerple": DapeKerple(width=6),
    "dapev2_kerple": DapeV2Kerple(width=6),
    "dape_fire": DapeFire(width=6, fire_width=4, threshold=3.0),
    "cope": Cope(positions=5),
    "cope, own keys": Cope(positions=5, separate_key=True, divide=False),
    "stickbreaking": StickBreaking(),
    "grape_additive": GrapeAdditive(),
    "grape_path": GrapePath(width=4),
    "wall": Wall(chunk=3),
    "inkling": Inkling(width=3, reach=5, floor=2.5),
    "dda_per_row": DdaPerRow(width=3),
}


def test_the_path_depends_on_where_positions_start():
    model = small_model(GrapePath(), num_layers=2)
    variables, tokens = random_variables(model), np.arange(8)[None] % VOCAB
    apply = jax.jit(lambda at: model.apply(variables, tokens, positions=at))
    assert jnp.abs(apply(jnp.arange(8.0)) - apply(jnp.arange(8.0) + 1)).max() > 1e-3


@pytest.mark.parametrize("name", mostly_slow(ENCODINGS, "cope", "grape_path", "stickbreaking"))
def test_half_precision_is_summed_in_float32(name):
    """Of the same numbers in bfloat16, terms differ by the rounding of single products alone."""
    time, rng = 300, np.random.default_rng(0)
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
    # CoPE's own keys are a product in the compute type, as all keys are.
    tolerance = 2e-2 if name == "cope, own keys" else 1e-5
    scale = max(1, float(jnp.abs(want).max()))
    np.testing.assert_allclose(found / scale, want / scale, atol=tolerance)


@pytest.mark.parametrize("name", ["kerple", "cope", "stickbreaking"])
def test_which_implementations_can_do_it(name):
    """Functions of pairs stay with ``chunked``; rows need those that have them."""
    pairs = drawn(ENCODINGS[name], dtype="float32")
    arrays = {n: jnp.asarray(x) for n, x in pairs.arrays.items()}
    layer = by_pairs.layer_of(pairs, arrays)
    terms = pairs.encoding.layer_terms({n: jnp.asarray(x) for n, x in pairs.params.items()}, layer)
    given = {n: getattr(terms, n) for n in ("bias", "logits_fn", "weights_fn") if getattr(terms, n)}
    plan = attention_plan(
        *(arrays[n] for n in "qkv"), is_causal=True, implementation="chunked", **given
    )
    if "bias" in given:
        assert plan.implementation == "chunked"
    else:
        assert "'rows' and 'reference' have" in plan.rejected["chunked"]


@pytest.mark.parametrize(
    ("position", "words"),
    [
        ("cope+dape_alibi", "'cope' and 'dape_alibi' do not go together: each rewrites the logits"),
        ("dda_per_row+grape_path", "each rewrites the logits"),
        ("path+cable", "'path' and 'cable' do not go together: each scales the logits by a factor"),
        ("cable+inkling", "'cable' and 'inkling' do not go together: each scales the logits"),
        ("cope+grape_path", "each rewrites the logits"),
    ],
)
def test_what_does_not_go_together(position, words):
    with pytest.raises(ValueError, match=words):
        positions.create(position)


def test_what_goes_together():
    both = positions.create("rope+kerple", form="power")
    assert both == Combined((positions.Rope(), Kerple("power")))
    config = small_model(both).config
    assert set(both.layer_params(config.sizes, updates=False)) == {"kerple_r1", "kerple_r2"}
