"""Caches: what follows them, when they grow, are full, or are another model's."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import RopeScaling, init_cache, positions
from tape_jax._src.model.cache import grow_cache
from tape_jax._src.model.generate import decode, extend, prefill
from tests.library.model.generate.passes import jit_apply, jit_extend, jit_prefill, tape
from tests.models import FLOAT64, assert_near, random_tokens, random_variables, small_model
from tests.selection import mostly_slow


@pytest.mark.mostly_slow
@pytest.mark.parametrize("kind", ["random_rope", "dynamic"])
def test_a_cache_for_given_lengths(kind):
    """Equals the full pass that is given the same, whatever its capacity, and can grow."""
    dynamic = positions.Rope(scaling=RopeScaling("dynamic", 2.0, original_length=4))
    model = small_model(dynamic if kind == "dynamic" else kind, num_layers=2)
    variables, length = random_variables(model), jnp.array([6, 30])
    tokens = random_tokens(2, 6)
    full = jit_apply(model, variables, tokens, length=length)
    first, cache = jit_prefill(model, variables, tokens[:, :3], capacity=3, length=length)
    rest, _ = jit_extend(model, variables, grow_cache(model, cache, 9), tokens[:, 3:])
    assert_near(jnp.concatenate([first, rest], axis=1), full, 1e-5)
    with pytest.raises(ValueError, match=r"the cache's: give init_cache length=9"):
        model.apply(variables, tokens, cache=cache, length=9)
    with pytest.raises(
        ValueError, match=r"broadcast to the batch \(2,\); got int32 of shape \(3,\)"
    ):
        init_cache(model, 2, 9, length=jnp.ones(3, int))


@pytest.mark.slow
def test_a_grown_cache_goes_on_as_a_large_one():
    model = small_model("tape")
    variables, tokens = random_variables(model), jnp.array([[3, 1, 4, 1, 5]])
    _, small = jit_prefill(model, variables, tokens[:, :-1], capacity=5)
    grown = grow_cache(model, small, 12)
    _, large = jit_prefill(model, variables, tokens[:, :-1], capacity=12)
    chex.assert_trees_all_close(grown, large, atol=1e-6)
    chex.assert_trees_all_equal_shapes(grown, large)
    go = jax.jit(lambda cache: decode(model, variables, cache, tokens[:, -1], 6)[0])
    one, other = go(grown), go(large)
    chex.assert_trees_all_equal(one, other)


def test_a_cache_that_was_written_past_its_capacity_does_not_grow():
    model = small_model("rope", num_layers=1)
    variables, step = random_variables(model), jax.jit(functools.partial(extend, model))
    cache = init_cache(model, 1, 4)
    for _ in range(2):
        _, cache = step(variables, cache, jnp.ones((1, 3), int))
    with pytest.raises(ValueError, match="capacity 4 was written past it, 6 tokens in all"):
        grow_cache(model, cache, 8)
    with pytest.raises(ValueError, match="cache is of another model"):
        grow_cache(small_model("rope", num_layers=2), init_cache(model, 1, 4), 8)


@pytest.mark.slow
def test_a_cache_that_cannot_grow():
    for kind in ("random_rope", "xpos"):
        model = small_model(kind)
        with pytest.raises(ValueError, match=f"'{kind}' depends on the capacity, 5"):
            grow_cache(model, init_cache(model, 1, 5), 9)
    model = small_model("rope", max_length=8)
    with pytest.raises(ValueError, match="cannot shrink to 4"):
        grow_cache(model, init_cache(model, 1, 5), 4)
    with pytest.raises(ValueError, match="exceeds the model's max_length of 8"):
        grow_cache(model, init_cache(model, 1, 5), 9)


@pytest.mark.slow
def test_fractional_positions_that_cannot_be_kept():
    model = small_model("rope", num_layers=1)
    tokens, at = jnp.ones((1, 3), int), jnp.arange(3) * 0.5
    with pytest.raises(ValueError, match="float32 would be cut to the int32 of the cache: give"):
        extend(model, random_variables(model), init_cache(model, 1, 3), tokens, positions=at)
    with pytest.raises(ValueError, match=r"unknown position_dtype 'bfloat16': expected one of"):
        init_cache(model, 1, 3, position_dtype=jnp.bfloat16)
    for kind in ("learned", "random_rope", "t5"):
        model = small_model(kind, num_layers=1)
        for call in (model.apply, functools.partial(prefill, model, capacity=3)):
            with pytest.raises(ValueError, match=f"{kind}: positions must be integers, since"):
                call(random_variables(model), tokens, positions=at)


@pytest.mark.parametrize("chunk", mostly_slow([1, 3], 3))
def test_a_cache_written_past_its_capacity_gives_nan_for_ever(chunk):
    model = small_model("tape", num_layers=2)
    variables = random_variables(model)
    step = jax.jit(functools.partial(extend, model, variables))
    cache, tokens = init_cache(model, 2, 7), jnp.ones((2, chunk), int)
    for start in range(0, 15, chunk):
        logits, cache = step(cache, tokens)
        assert jnp.isfinite(logits).all() if start + chunk <= 7 else jnp.isnan(logits).all()
    hidden, _ = jax.jit(functools.partial(model.apply, output="hidden"))(
        variables, tokens, cache=cache
    )
    assert jnp.isnan(hidden).all()
    with pytest.raises(ValueError, match=f"{chunk} tokens do not fit into a cache of capacity 7"):
        extend(model, variables, cache, tokens)


def test_decoding_past_the_capacity():
    """No token is made up: those that nobody can know are -1."""
    model = small_model("rope", num_layers=1)
    variables, cache = random_variables(model), init_cache(model, 2, 3)
    token = jnp.array([1, 2])
    with pytest.raises(ValueError, match="5 tokens do not fit into a cache of capacity 3 with 0"):
        decode(model, variables, cache, token, 5)
    for key in (None, jax.random.key(0)):
        go = jax.jit(lambda c, key=key: decode(model, variables, c, token, 5, key=key, top_k=3))
        out, _ = go(cache)
        np.testing.assert_array_equal(out == -1, [[False] * 3 + [True] * 2] * 2)


def test_a_cache_of_another_model():
    model, tokens = small_model("tape"), jnp.ones((2, 1), int)
    variables = random_variables(model)
    for other in (
        small_model("tape", num_layers=4),
        small_model("tape", scan_layers=False),
        small_model("tape", num_kv_heads=1),
    ):
        cache = init_cache(other, 2, 5)
        with pytest.raises(ValueError, match=r"cache is of another model: its layers are .*one's"):
            extend(model, variables, cache, tokens)
    for other, words in (
        (small_model("rope"), "encoding, 'rope'; this model has 'tape'"),
        (small_model(tape(norm="rms")), r"norm='rms'.*; this model has Tape\(.*norm='none'"),
    ):
        cache = init_cache(other, 2, 5)
        for call in (extend, lambda *args: grow_cache(args[0], args[2], 8)):
            with pytest.raises(ValueError, match=words):
                call(model, variables, cache, tokens)
    cache = init_cache(model, 2, 5, dtype=jnp.bfloat16)
    assert jnp.isfinite(jit_extend(model, variables, cache, tokens)[0]).all()
    with pytest.raises(ValueError, match=r"key of a draw is the cache's: give init_cache key="):
        model.apply(variables, tokens, cache=cache, rngs={"positions": jax.random.key(0)})


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
def test_coordinates_of_a_grid_can_be_cached():
    model = small_model(positions.Tape(axes=2), num_layers=2)
    variables, tokens = random_variables(model), jnp.arange(6).reshape(1, 6)
    grid = jnp.stack(jnp.unravel_index(jnp.arange(6), (2, 3)), axis=-1)
    full = jit_apply(model, variables, tokens, positions=grid)
    first, cache = jit_prefill(model, variables, tokens[:, :4], capacity=6, positions=grid[:4])
    rest, _ = extend(model, variables, cache, tokens[:, 4:], positions=grid[4:])
    assert_near(jnp.concatenate([first, rest], axis=1), full, 1e-5)


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
