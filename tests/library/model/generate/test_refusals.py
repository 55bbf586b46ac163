"""Prompts, lengths and tokens that cannot be: errors that say what was given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import add_tape, init_cache, pad_prompts, positions, sample_logits
from tape_jax._src.model.generate import decode, generate, prefill
from tests.models import VOCAB, small_model

RAGGED = [[1, 2], [3]]
# Variables that nobody reads.
ANY = {"params": {}}
MODEL = small_model("rope", num_layers=1, max_length=8)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "non-empty sequence"),
        ([[1], []], {}, r"prompts\[1\] must be a non-empty sequence"),
        ("12", {}, "must be an array"),
        (np.zeros((2, 0), int), {}, r"\(2, 0\)"),
        (np.zeros(3, int), {}, r"\[B, P\].*got \(3,\)"),
        ([[1.0, 2.0]], {}, "integer token ids; got float64"),
        ([[1, VOCAB]], {}, r"ids in 0\.\.12; got ids from 1 to 13"),
        ([[-1, 2]], {}, "got ids from -1 to 2"),
        (np.full((1, 2), 2**33), {}, "got ids from 8589934592"),
        (RAGGED, {"max_new_tokens": 0}, "max_new_tokens must be a positive integer; got 0"),
        (RAGGED, {"max_new_tokens": 7}, "prompt of 2 tokens and .* = 7.* 9 tokens .* 8"),
        (RAGGED, {"capacity": 3}, "capacity of 4; got 3"),
        (RAGGED, {"capacity": 9}, "exceeds the model's max_length of 8"),
        (RAGGED, {"temperature": -0.1}, "temperature must be finite and not negative; got -0.1"),
        (RAGGED, {"temperature": 1.0}, "needs a random key"),
        (RAGGED, {"top_p": 0.0}, r"top_p must be in \(0, 1\]; got 0.0"),
        (RAGGED, {"stop": [VOCAB]}, "stop must hold token ids in 0..12"),
        (RAGGED, {"stop": [1.5]}, "stop must hold integer token ids"),
        (RAGGED, {"pad_id": -1}, "pad_id must hold token ids in 0..12"),
        (RAGGED, {"prefill_chunk": 1.5}, "prefill_chunk must be an integer or None; got 1.5"),
    ],
)
def test_bad_calls(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(MODEL, ANY, prompts, **{"max_new_tokens": 2, **options})


def filled(tokens=(2, 3), value=1, **options):
    return prefill(MODEL, ANY, jnp.full(tokens, value), capacity=4, **options)


def decoded(token, count=1, **options):
    return decode(MODEL, ANY, init_cache(MODEL, 2, 4), np.array(token), count, **options)


LENGTHS = r"lengths must be integers in 0 \.\. 3 of shape \(2,\)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: filled(lengths=np.array([4, 1])), LENGTHS),
        (lambda: filled(lengths=np.array([1.0, 2.0])), LENGTHS),
        (lambda: filled(lengths=np.array([1])), LENGTHS),
        (
            lambda: pad_prompts([[2**40 + 3]]),
            r"prompts\[0\] must hold token ids in 0\.\.2147483647",
        ),
        (lambda: filled(chunk=0), "chunk must be a positive integer; got 0"),
        (lambda: filled(value=99, chunk=2), r"token ids must lie in 0 .. 12; got 99"),
        (lambda: decoded([1.5, 2.0]), r"token must be integers of shape \(2,\)"),
        (lambda: decoded([1]), r"token must be integers of shape \(2,\)"),
        (lambda: decoded([1, 2], pad_id=[1]), r"pad_id must be an integer, or .* \(2,\)"),
        (lambda: decoded([1, 2], pad_id=1.5), "pad_id must be .*; got float32 of shape"),
        (lambda: decoded([1, 2], 0), "max_new_tokens must be a positive integer; got 0"),
        (
            lambda: generate(small_model("learned"), ANY, [[1, 2]], 39),
            "exceeds the limit of the encoding 'learned' of 40",
        ),
        (
            lambda: generate(small_model(positions.Rope(axes=2)), ANY, [[1, 2]], 3),
            r"axes=2: give positions= of shape \(1, 1, 2\)",
        ),
        (lambda: generate(MODEL, [], [[1]], 2), "variables must be .* got list"),
        (lambda: sample_logits([0.5, 1.0]), "logits must be an array of floats"),
        (lambda: sample_logits(np.array([1, 2])), "logits must be an array of floats"),
    ],
)
def test_other_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_parameters_in_place_of_variables():
    params = {"embedding": 0, "head": {}}
    cache, token = init_cache(MODEL, 1, 4), jnp.array([1])
    for call in (
        lambda: generate(MODEL, params, [[1]], 2),
        lambda: prefill(MODEL, params, token[None], capacity=4),
        lambda: decode(MODEL, params, cache, token, 1),
        lambda: add_tape(MODEL, params, key=jax.random.key(0)),
    ):
        with pytest.raises(ValueError, match=r"must be \{'params': .* keys \['embedding'"):
            call()
