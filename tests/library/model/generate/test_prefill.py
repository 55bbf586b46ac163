"""Prompts run in chunks, and position states in a narrower type, in caches."""

import functools

import chex
import jax.numpy as jnp
import pytest

from tape_jax import init_cache
from tape_jax._src.model.generate import extend, generate, prefill
from tests.library.model.generate.passes import (
    CAPACITY,
    CASES,
    LENGTHS,
    NEW,
    jit_apply,
    jit_extend,
    jit_model,
    jit_prefill,
    ragged_tokens,
    tape,
)
from tests.models import (
    FLOAT64,
    assert_near,
    encoding,
    random_tokens,
    random_variables,
    small_model,
)
from tests.selection import mostly_slow


@functools.partial(jit_model, static_argnames="chunk")
def prefilled(model, variables, tokens, lengths, *, chunk):
    """Logits and the cache of a prefill, ``chunk`` tokens at a time, and of one token more."""
    options = {"capacity": CAPACITY, "chunk": chunk}
    logits, cache = prefill(model, variables, tokens[:, :-1], lengths, **options)
    return logits, cache, extend(model, variables, cache, tokens[:, -1:])[0]


CHUNKED = {
    "operands with the highest digit first": {
        "position": encoding("position_coupling", reverse_operands=False)
    },
    **{n: CASES[n] for n in ("tape", "a schedule", "window", "one group, dynamic scaling")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHUNKED)
def test_a_prefill_in_chunks_equals_one_at_once(name, x64):
    model = small_model(**FLOAT64, **CHUNKED[name])
    variables = random_variables(model)
    left, _ = ragged_tokens()
    lengths = jnp.asarray(LENGTHS) + NEW - 1
    whole, cache, after = prefilled(model, variables, left, lengths, chunk=None)
    for chunk in (4, 3):  # Of 9 tokens: the first chunk is shorter, and is not.
        logits, chunked, next_logits = prefilled(model, variables, left, lengths, chunk=chunk)
        real = cache.segment_ids[:, : whole.shape[1], None] > 0
        assert_near(jnp.where(real, logits, 0), jnp.where(real, whole, 0), 1e-10)
        assert_near(next_logits, after, 1e-10)
        for name in ("index", "tokens", "positions", "segment_ids", "length"):
            chex.assert_trees_all_equal(getattr(chunked, name), getattr(cache, name))


@pytest.mark.slow
def test_generation_with_a_prefill_in_chunks():
    model = small_model("rope", num_layers=1)
    variables = random_variables(model, std=1.0)
    prompts = [[4, 7, 7, 1, 5, 2, 2, 9], [6, 1], [2, 9, 8, 1, 1]]
    expected = generate(model, variables, prompts, 4)
    chex.assert_trees_all_equal(generate(model, variables, prompts, 4, prefill_chunk=3), expected)


@pytest.mark.parametrize("places", mostly_slow([None, "floats"], None))
def test_a_prefill_in_chunks_takes_segments_and_positions(places):
    model = small_model(num_layers=2)
    variables = random_variables(model)
    tokens = random_tokens(2, 7)
    segments = jnp.array([[1, 1, 1, 2, 2, 2, 2], [0, 3, 3, 3, 3, 5, 5]])
    given = {"segment_ids": segments, "capacity": 8}
    if places == "floats":
        given["positions"] = jnp.linspace(0.0, 3.0, 7)
    whole, _ = jit_prefill(model, variables, tokens, **given)
    chunked, _ = jit_prefill(model, variables, tokens, chunk=2, **given)
    assert_near(chunked[segments > 0], whole[segments > 0], 1e-5)


def test_wrong_chunks():
    model = small_model("rope", num_layers=1)
    variables = random_variables(model)
    with pytest.raises(ValueError, match=r"chunk must be a positive integer; got 0"):
        prefill(model, variables, jnp.ones((1, 4), jnp.int32), capacity=4, chunk=0)
    with pytest.raises(ValueError, match=r"prefill_chunk must be an integer or None; got 1.5"):
        generate(model, variables, [[1, 2]], 1, prefill_chunk=1.5)
    with pytest.raises(ValueError, match=r"token ids must lie in 0 .. 12; got 99"):
        prefill(model, variables, jnp.full((1, 4), 99), capacity=4, chunk=2)


@pytest.mark.parametrize("form", mostly_slow(["rotary", "tensor"], "rotary"))
def test_states_in_the_compute_type_lose_nothing(form):
    model = small_model(tape(form=form), num_layers=2, dtype="bfloat16")
    variables = random_variables(model)
    tokens = random_tokens(2, 7)

    def logits(state_dtype):
        cache = init_cache(model, 2, 7, state_dtype=state_dtype)
        first, cache = jit_extend(model, variables, cache, tokens[:, :6])
        return cache.layers[0].e.dtype, first, jit_extend(model, variables, cache, tokens[:, 6:])[0]

    kind, *given = logits(None)
    assert kind == jnp.bfloat16
    wide, *expected = logits("float32")
    assert wide == jnp.float32
    chex.assert_trees_all_equal(given, expected)


def test_states_in_bfloat16_are_near():
    model = small_model(num_layers=2)
    variables = random_variables(model)
    tokens = random_tokens(2, 7)
    cache = init_cache(model, 2, 7, state_dtype="bfloat16")
    logits, cache = jit_extend(model, variables, cache, tokens)
    assert cache.layers[0].e.dtype == jnp.bfloat16
    assert cache.layers[0].k.dtype == jnp.float32
    assert_near(logits, jit_apply(model, variables, tokens), 2e-2)
