"""Caches: what follows them, when they grow, are full, or are another model's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import RopeScaling, init_cache, positions
from tape_jax._src.model.cache import grow_cache
from tape_jax._src.model.generate import decode, extend, prefill
from tests.library.model.generate.passes import jit_apply, jit_extend, jit_prefill, tape
from tests.models import FLOAT64, assert_near, random_tokens, random_variables, small_model

KEY = jax.random.key(0)
DYNAMIC = RopeScaling("dynamic", 2.0, original_length=4)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("position", ["random_rope", positions.Tape(scaling=DYNAMIC)], ids=str)
def test_a_cache_for_given_lengths(position):
    """Equals the full pass that is given the same, whatever its capacity, and can grow."""
    model = small_model(position, num_layers=2)
    variables, length = random_variables(model), jnp.array([6, 30])
    tokens = random_tokens(2, 6)
    full = jit_apply(model, variables, tokens, length=length)
    first, cache = jit_prefill(model, variables, tokens[:, :3], capacity=3, length=length)
    rest, _ = jit_extend(model, variables, grow_cache(model, cache, 9), tokens[:, 3:])
    assert_near(jnp.concatenate([first, rest], axis=1), full, 1e-5)
    with pytest.raises(ValueError, match=r"the cache's: give init_cache length=9"):
        model.apply(variables, tokens, cache=cache, length=9)


ROPE = small_model("rope", num_layers=1, max_length=8)
TAPE = small_model("tape", num_layers=1)
ONES = jnp.ones((1, 2), int)


def deeper():
    return init_cache(small_model("tape", num_layers=4), 1, 4)


def grown(kind, *, capacity=9, used=0, **options):
    """A cache of five tokens that is to grow."""
    model = small_model(kind, num_layers=1, **options)
    return grow_cache(model, init_cache(model, 1, 5).replace(index=jnp.int32(used)), capacity)


def followed(other, **options):
    """TAPE after the cache of another model."""
    return extend(TAPE, random_variables(TAPE), init_cache(other, 1, 4), ONES, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: grown("random_rope"), "'random_rope' depends on the capacity, 5"),
        (lambda: grown("xpos"), "'xpos' depends on the capacity, 5"),
        (lambda: grown("rope", capacity=4), "cannot shrink to 4"),
        (lambda: grown("rope", max_length=8), "exceeds the model's max_length of 8"),
        (lambda: grown("rope", used=6), "capacity 5 was written past it, 6 tokens in all"),
        (lambda: grow_cache(TAPE, init_cache(ROPE, 1, 4), 8), "'rope'; this model has 'tape'"),
        (lambda: followed(ROPE), "encoding, 'rope'; this model has 'tape'"),
        (lambda: followed(small_model(num_layers=1, num_kv_heads=1)), "cache is of another model"),
        (lambda: followed(small_model(num_layers=4)), "its layers are .*one's"),
        (
            lambda: followed(small_model(tape(norm="rms"), num_layers=1)),
            r"norm='rms'.*; this model has Tape\(.*norm='none'",
        ),
        (
            lambda: TAPE.apply({}, ONES, cache=init_cache(TAPE, 1, 4), rngs={"positions": KEY}),
            "key of a draw is the cache's: give init_cache key=",
        ),
        (
            lambda: followed(TAPE, positions=jnp.arange(2) * 0.5),
            "float32 would be cut to the int32 of the cache: give",
        ),
        (
            lambda: init_cache(ROPE, 1, 3, position_dtype=jnp.bfloat16),
            "unknown position_dtype 'bfloat16': expected one of",
        ),
        (lambda: init_cache(ROPE, 1, 3, position_dtype="foo"), "unknown position_dtype 'foo'"),
        (
            lambda: decode(TAPE, {"params": {}}, deeper(), ONES[:, 0], 2),
            "its layers are .*one's",
        ),
        (
            lambda: init_cache(TAPE, 1, 3, state_dtype="int8"),
            "unknown the cache's state_dtype 'int8': expected one of",
        ),
        (
            lambda: init_cache(TAPE, 1, 3, dtype="float8_e4m3fn"),
            "unknown the cache's dtype 'float8",
        ),
        (
            lambda: init_cache(ROPE, 2, 8, length=jnp.ones(3, int)),
            r"broadcast to the batch \(2,\); got int32 of shape \(3,\)",
        ),
    ],
)
def test_what_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("kind", ["learned", "random_rope", "t5"])
def test_fractions_index_no_table(kind):
    model = small_model(kind, num_layers=1)
    for call in (model.apply, functools.partial(prefill, model, capacity=3)):
        with pytest.raises(ValueError, match=f"{kind}: positions must be integers, since"):
            call(random_variables(model), ONES, positions=jnp.arange(2) * 0.5)


def test_decoding_past_the_capacity():
    """No token is made up: those that nobody can know are -1, and nothing follows them."""
    variables, cache = random_variables(ROPE), init_cache(ROPE, 2, 3)
    token = jnp.array([1, 2])
    with pytest.raises(ValueError, match="5 tokens do not fit into a cache of capacity 3 with 0"):
        decode(ROPE, variables, cache, token, 5)
    for key in (None, KEY):
        go = jax.jit(lambda c, key=key: decode(ROPE, variables, c, token, 5, key=key, top_k=3))
        out, after = go(cache)
        np.testing.assert_array_equal(out == -1, [[False] * 3 + [True] * 2] * 2)
    run = jax.jit(functools.partial(ROPE.apply, output="hidden"))
    assert jnp.isnan(run(variables, token[:, None], cache=after)[0]).all()


@pytest.mark.slow
def test_text_goes_on_behind_an_image(x64):
    """Three tokens of text, an image of 1 x 2 x 4 patches, text: as Qwen2-VL counts."""
    model = small_model(positions.MRope(sections=(1, 1, 2), base=20.0), num_layers=2, **FLOAT64)
    variables = random_variables(model)
    tokens = random_tokens(2, 14)
    image = 3 + np.stack(np.unravel_index(np.arange(8), (1, 2, 4)), axis=-1)
    before, after = (np.repeat(n[:, None], 3, axis=1) for n in (np.arange(3), np.arange(7, 10)))
    places = np.concatenate([before, image, after])
    full = jit_apply(model, variables, tokens, positions=jnp.asarray(places))
    first, cache = jit_prefill(model, variables, tokens[:, :3], capacity=14)
    second, cache = extend(model, variables, cache, tokens[:, 3:11], positions=jnp.asarray(image))
    third = []
    for n in range(11, 14):
        logits, cache = extend(model, variables, cache, tokens[:, n : n + 1])
        third.append(logits)
    assert_near(jnp.concatenate([first, second, *third], axis=1), full, 1e-10)
    np.testing.assert_array_equal(cache.positions[1], places)


@pytest.mark.slow
def test_what_follows_a_cache_goes_on_with_its_last_token():
    """With the id of each row's last real token, and its position plus one."""
    model = small_model("learned")
    variables = random_variables(model)
    tokens = random_tokens(4, 8)
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
    tokens = random_tokens(1, 9)
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


def test_numbers_of_64_bits_stay_whole(x64):
    """Segment ids that are hashes, positions that are times, tokens that are none."""
    model = small_model("rope", num_layers=2, **FLOAT64)
    variables, tokens = random_variables(model), random_tokens(1, 4)
    ids = jnp.array([[7, 7, 7 + 2**32, 7 + 2**32]], "int64")
    for given in ({"segment_ids": ids}, {"positions": 2**31 - 2 + jnp.arange(4, dtype="int64")}):
        cached, _ = prefill(model, variables, tokens, capacity=5, **given)
        assert_near(cached, model.apply(variables, tokens, **given), 1e-10)
    with pytest.raises(ValueError, match=r"token ids must lie in 0 \.\. 12; got 42949673"):
        prefill(model, variables, tokens.astype("int64") + 2**32, capacity=5)


def test_parameters_may_be_numpy_arrays():
    variables, tokens = random_variables(TAPE), random_tokens(1, 4)
    cached, _ = prefill(TAPE, jax.device_get(variables), tokens, capacity=4, chunk=2)
    assert_near(cached, TAPE.apply(variables, tokens), 1e-5)


def test_a_cache_of_a_narrower_type():
    cache = init_cache(TAPE, 1, 4, dtype=jnp.bfloat16)
    logits, cache = jit_extend(TAPE, random_variables(TAPE), cache, ONES)
    assert jnp.isfinite(logits).all()
    assert {x.dtype for x in jax.tree.leaves(cache.layers)} == {jnp.dtype(jnp.bfloat16)}
