"""Cached decoding against the full pass."""

import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import decode, extend, init_cache, prefill
from tests.library.model.generate.passes import (
    CASES,
    LENGTHS,
    NEW,
    PADDED,
    chunked_pass,
    full_pass,
    jit_apply,
    jit_extend,
    jit_prefill,
    ragged_tokens,
    stepwise_pass,
)
from tests.models import VOCAB, assert_near, random_variables, small_model
from tests.selection import mostly_slow

QUICK = ("one group, dynamic scaling", "window, bias")


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(CASES, *QUICK))
def test_chunks_behind_ragged_prompts_equal_the_full_pass(name, x64):
    model = small_model(dtype="float64", param_dtype="float64", **CASES[name])
    variables = random_variables(model)
    left, right = ragged_tokens()
    full = full_pass(model, variables, right)
    chunked = chunked_pass(model, variables, left, jnp.asarray(LENGTHS))
    for i, length in enumerate(LENGTHS):
        assert_near(chunked[i, PADDED - length :], full[i, : length + NEW], 1e-10)


@pytest.mark.parametrize("name", ["tape", "abacus"])
def test_single_steps_equal_the_full_pass(name):
    model = small_model(name)
    variables = random_variables(model)
    _, tokens = ragged_tokens()
    full = full_pass(model, variables, tokens)
    assert_near(stepwise_pass(model, variables, tokens), full, 1e-5)


@pytest.mark.slow
def test_what_follows_a_cache_goes_on_with_its_last_token():
    """With the id of each row's last real token, and its position plus one."""
    model = small_model("learned")
    variables = random_variables(model)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (4, 8)), jnp.int32)
    ids = jnp.array([[1, 1, 2, 2], [5, 5, 5, 5], [0, 0, 3, 3], [3, 3, 0, 0]])
    empty = init_cache(model, 4, 8)
    _, cache = jit_apply(model, variables, tokens[:, :4], segment_ids=ids, cache=empty)
    followed = [jit_extend(model, variables, cache, tokens[:, 4:])]
    followed.append(jit_apply(model, variables, tokens[:, 4:], cache=cache))
    rest, positions = [2, 5, 3, 3], [2, 4, 2, 2]
    for logits, after in followed:
        np.testing.assert_array_equal(after.segment_ids[:, 4:], np.tile(rest, (4, 1)).T)
        np.testing.assert_array_equal(after.positions[:, 4:], np.add.outer(positions, range(4)))
        for i, own in enumerate(ids):
            row = jnp.concatenate([tokens[i, :4][own == rest[i]], tokens[i, 4:]])
            assert_near(logits[i], jit_apply(model, variables, row)[-4:], 1e-5)


@pytest.mark.slow
def test_new_tokens_may_name_their_segment():
    """Their positions go on behind the last token of that segment, wherever it is."""
    model = small_model("learned", num_layers=2)
    variables = random_variables(model)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (1, 9)), jnp.int32)
    ids = jnp.array([[1, 1, 2, 0, 2, 1, 3, 1, 0]])
    full = jit_apply(model, variables, tokens, segment_ids=ids)
    _, cache = jit_prefill(model, variables, tokens[:, :3], segment_ids=ids[:, :3], capacity=9)
    rest, cache = jit_extend(model, variables, cache, tokens[:, 3:], segment_ids=ids[:, 3:])
    np.testing.assert_array_equal(cache.positions[ids != 0], [0, 1, 0, 1, 2, 0, 3])
    real = ids[:, 3:] != 0
    assert_near(rest[real], full[:, 3:][real], 1e-5)
    for segment in (1, 2, 3):
        own = ids == segment
        assert_near(full[own], jit_apply(model, variables, tokens[own]), 1e-5)


FRACTIONAL = ("none", "rope", "tape", "xpos", "alibi", "fire", "sinusoidal")


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_slow(FRACTIONAL, "tape", "alibi"))
def test_fractional_positions_are_kept(kind):
    model = small_model(kind, num_layers=2)
    variables = random_variables(model)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 8)), jnp.int32)
    at = jnp.array([[0.5], [3.75]]) + jnp.concatenate([jnp.arange(5) * 0.25, 2.0 + jnp.arange(3)])
    full = jit_apply(model, variables, tokens, positions=at)
    cut = jit_apply(model, variables, tokens, positions=at.astype(int))
    assert kind == "none" or jnp.abs(full - cut).max() > 1e-3
    first, cache = jit_prefill(model, variables, tokens[:, :4], positions=at[:, :4], capacity=8)
    second, cache = jit_extend(model, variables, cache, tokens[:, 4:6], positions=at[:, 4:6])
    third, cache = jit_extend(model, variables, cache, tokens[:, 6:])
    np.testing.assert_array_equal(cache.positions, at)
    assert_near(jnp.concatenate([first, second, third], axis=1), full, 1e-5)


@pytest.mark.parametrize("kind", mostly_slow(["tape", "fox"], "tape"))
def test_a_conversation_goes_on_behind_a_stop(kind):
    """Padding behind a stop is none of a row's text, whenever the row has stopped."""
    model = small_model(kind)
    variables = random_variables(model)
    prompts = jnp.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    turn = jnp.array([[3, 1, 2], [2, 2, 5], [6, 1, 1]])

    def said(stop):
        _, cache = prefill(model, variables, prompts[:, :-1], capacity=16)
        return decode(model, variables, cache, prompts[:, -1], 6, stop=stop)

    first = np.asarray(said(None)[0])
    # The first row stops at once, another one later or never.
    stop = [int(first[0, 0])]
    new, cache = said(stop)
    logits, _ = extend(model, variables, cache, turn)
    for row, own in enumerate(np.asarray(new)):
        (ends,) = np.nonzero(own == stop[0])
        text = own[: ends[0] + 1] if ends.size else own[:-1]
        whole = jnp.concatenate([prompts[row], text, turn[row]])[None]
        want = model.apply(variables, whole)[0, -3:]
        assert_near(logits[row], want, 1e-5)
