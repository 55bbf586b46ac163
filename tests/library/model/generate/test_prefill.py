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
)
from tests.models import (
    FLOAT64,
    assert_near,
    encoding,
    random_tokens,
    random_variables,
    small_model,
)


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
    **{n: CASES[n] for n in ("a schedule", "window", "one group, dynamic scaling")},
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


@pytest.mark.parametrize(("kind", "places"), [("learned", None), ("rope", "floats")])
def test_a_prefill_in_chunks_takes_segments_and_positions(kind, places):
    model = small_model(kind, num_layers=1)
    variables = random_variables(model)
    tokens = random_tokens(2, 7)
    segments = jnp.array([[1, 1, 1, 2, 2, 2, 2], [0, 3, 3, 3, 3, 5, 5]])
    given = {"segment_ids": segments, "capacity": 8}
    if places == "floats":
        given["positions"] = jnp.linspace(0.0, 3.0, 7)
    whole, _ = jit_prefill(model, variables, tokens, **given)
    chunked, _ = jit_prefill(model, variables, tokens, chunk=2, **given)
    assert_near(chunked[segments > 0], whole[segments > 0], 1e-5)


def test_states_of_other_types():
    """In the compute type they lose nothing; in a narrower one little."""
    narrow = small_model(num_layers=2, dtype="bfloat16")
    wide = small_model(num_layers=2)
    variables = random_variables(wide)
    tokens = random_tokens(2, 6)

    def logits(model, state_dtype):
        cache = init_cache(model, 2, 6, state_dtype=state_dtype)
        first, cache = jit_extend(model, variables, cache, tokens[:, :3])
        rest, cache = jit_extend(model, variables, cache, tokens[:, 3:])
        return jnp.concatenate([first, rest], axis=1), cache.layers[0]

    given, layer = logits(narrow, None)
    assert layer.e.dtype == jnp.bfloat16
    expected, layer = logits(narrow, "float32")
    assert layer.e.dtype == jnp.float32
    chex.assert_trees_all_equal(given, expected)
    near, layer = logits(wide, "bfloat16")
    assert (layer.e.dtype, layer.k.dtype) == (jnp.bfloat16, jnp.float32)
    assert_near(near, jit_apply(wide, variables, tokens), 2e-2)
