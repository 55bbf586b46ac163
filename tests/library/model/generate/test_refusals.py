"""Prompts, lengths and tokens that cannot be: errors that say what was given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import add_tape, init_cache, positions, sample_logits
from tape_jax._src.model.generate import decode, generate, prefill
from tests.models import VOCAB, small_model

RAGGED = [[1, 2], [3]]
# Variables that nobody reads.
ANY = {"params": {}}


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "non-empty sequence"),
        ([[1], []], {}, r"prompts\[1\] must be a non-empty sequence"),
        ([1, 2], {}, r"prompts\[0\] must be a non-empty sequence of token ids; got shape \(\)"),
        ("12", {}, "must be an array"),
        (None, {}, "got None"),
        (np.zeros((0, 3), int), {}, r"\(0, 3\)"),
        (np.zeros((2, 0), int), {}, r"\(2, 0\)"),
        (np.zeros(3, int), {}, r"\[B, P\].*got \(3,\)"),
        (np.zeros((2, 3)), {}, "integer token ids; got float64"),
        ([[1.0, 2.0]], {}, "integer token ids; got float64"),
        ([[1, VOCAB]], {}, r"ids in 0\.\.12; got ids from 1 to 13"),
        ([[-1, 2]], {}, "got ids from -1 to 2"),
        (np.full((1, 2), 2**33), {}, "got ids from 8589934592"),
        (RAGGED, {"max_new_tokens": 0}, "max_new_tokens must be a positive integer; got 0"),
        (RAGGED, {"max_new_tokens": 2.0}, "max_new_tokens must be an integer; got 2.0"),
        (
            RAGGED,
            {"max_new_tokens": 7},
            "prompt of 2 tokens and max_new_tokens = 7.* 9 tokens .* 8",
        ),
        (RAGGED, {"capacity": 3}, "capacity of 4; got 3"),
        (RAGGED, {"capacity": 9}, "exceeds the model's max_length of 8"),
        (RAGGED, {"temperature": -0.1}, "temperature must be finite and not negative; got -0.1"),
        (RAGGED, {"temperature": 1.0}, "needs a random key"),
        (RAGGED, {"top_k": 0}, "top_k must be an integer of at least 1; got 0"),
        (RAGGED, {"top_p": 0.0}, r"top_p must be in \(0, 1\]; got 0.0"),
        (RAGGED, {"stop": 3}, "stop must be of the type Iterable or None; got 3"),
        (RAGGED, {"stop": [VOCAB]}, "stop must hold token ids in 0..12"),
        (RAGGED, {"stop": [1.5]}, "stop must hold integer token ids"),
        (RAGGED, {"pad_id": -1}, "pad_id must hold token ids in 0..12"),
    ],
)
def test_bad_calls(prompts, options, message):
    model = small_model("rope", num_layers=1, max_length=8)
    with pytest.raises(ValueError, match=message):
        generate(model, ANY, prompts, **{"max_new_tokens": 2, **options})


@pytest.mark.parametrize(("kind", "limit"), [("learned", 40), ("random_rope", 64)])
def test_the_limit_of_the_encoding(kind, limit):
    with pytest.raises(ValueError, match=f"exceeds the limit of the encoding '{kind}' of {limit}"):
        generate(small_model(kind), ANY, [[1, 2]], limit - 1)


def test_coordinates_of_several_axes_are_not_made_up():
    with pytest.raises(ValueError, match=r"axes=2: give positions= of shape \(1, 1, 2\)"):
        generate(small_model(positions.Rope(axes=2)), ANY, [[1, 2]], 3)


@pytest.mark.parametrize("lengths", [[4, 1], [-1, 1], [1.0, 2.0], [1], 2])
def test_lengths_of_prompts_that_cannot_be(lengths):
    model = small_model("rope", num_layers=1)
    with pytest.raises(ValueError, match=r"lengths must be integers in 0 \.\. 3 of shape \(2,\)"):
        prefill(model, ANY, jnp.ones((2, 3), int), np.asarray(lengths), capacity=4)


def test_what_decoding_does_not_take():
    model = small_model("rope", num_layers=1)
    cache = init_cache(model, 2, 4)
    for token in (np.array([1.5, 2.0]), np.array([1]), 1):
        with pytest.raises(ValueError, match=r"token must be integers of shape \(2,\)"):
            decode(model, ANY, cache, token, 1)
    with pytest.raises(ValueError, match="max_new_tokens must be a positive integer; got 0"):
        decode(model, ANY, cache, np.array([1, 2]), 0)


def test_parameters_in_place_of_variables():
    model, params = small_model("rope", num_layers=1), {"embedding": 0, "head": {}}
    cache, token = init_cache(model, 1, 4), jnp.array([1])
    for call in (
        lambda: generate(model, params, [[1]], 2),
        lambda: prefill(model, params, token[None], capacity=4),
        lambda: decode(model, params, cache, token, 1),
        lambda: add_tape(model, params, key=jax.random.key(0)),
    ):
        with pytest.raises(ValueError, match=r"must be \{'params': .* keys \['embedding'"):
            call()
    with pytest.raises(ValueError, match=r"variables must be .* got list"):
        generate(model, [], [[1]], 2)


@pytest.mark.parametrize("logits", [[0.5, 1.0], np.array([1, 2]), jnp.array([True])])
def test_logits_that_are_no_array_of_floats(logits):
    with pytest.raises(ValueError, match="logits must be an array of floats"):
        sample_logits(logits)
