"""Generation: equal for every kind of prompt, and at an end where it should be."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, RopeScaling, Transformer, init_cache, positions
from tape_jax._src.model.generate import _generate, decode, generate, prefill
from tests.library.model.generate.passes import CAPACITY, NEW, PADDED, full_pass
from tests.library.positions.test_combined import combined
from tests.models import DIGITS, VOCAB, random_variables, small_model
from tests.selection import OF_EACH_SORT, mostly_slow


@pytest.mark.parametrize("name", mostly_slow((*OF_EACH_SORT, "mrope+abacus"), "tape", "abacus"))
def test_greedy_generation_is_the_argmax_of_full_passes_of_each_row_alone(name):
    model = small_model(combined(name) if "+" in name else name)
    variables = random_variables(model)
    prompts = [[4, 7, 7, 1, 5], [6], [2, 9, 8]]
    out = np.asarray(generate(model, variables, prompts, NEW, pad_id=DIGITS[0], capacity=CAPACITY))
    assert out.shape == (3, PADDED + NEW)
    assert out.dtype == np.int32
    alone = np.full_like(out, DIGITS[1])
    for i, prompt in enumerate(prompts):
        padding = PADDED - len(prompt)
        np.testing.assert_array_equal(out[i, :padding], DIGITS[0])
        np.testing.assert_array_equal(out[i, padding:PADDED], prompt)
        alone[i, : out.shape[1] - padding] = out[i, padding:]
    best = np.asarray(full_pass(model, variables, jnp.asarray(alone)).argmax(-1))
    for i, prompt in enumerate(prompts):
        n = len(prompt)
        np.testing.assert_array_equal(alone[i, n : n + NEW], best[i, n - 1 : n + NEW - 1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random_rope", "dynamic"])
def test_generation_does_not_depend_on_the_other_prompts(kind):
    """Though the capacity does: draws and dynamic scaling are for each row's own tokens."""
    dynamic = positions.Rope(scaling=RopeScaling("dynamic", 8.0, original_length=2))
    model = small_model(dynamic if kind == "dynamic" else kind, num_layers=2)
    variables = random_variables(model, std=0.7, seed=3)
    prompts = [[4, 7, 7, 1, 5, 2, 2, 9], [6, 1], [2, 9, 8, 1, 1]]
    together = generate(model, variables, prompts, 12)
    alone = [generate(model, variables, [prompt], 12)[0, -12:] for prompt in prompts]
    chex.assert_trees_all_equal(together[:, -12:], jnp.stack(alone))
    other = generate(model, variables, prompts, 12, capacity=64)
    assert (other[:, -12:] != together[:, -12:]).any(), "the test would not notice other lengths"


PROMPTS = [[1, 2, 3], [4], [5, 6]]
LENGTH = 8  # tokens generated after each


@pytest.fixture(scope="module")
def roped():
    """A model without position parameters, whose compiled functions many tests share."""
    model = small_model("rope", num_layers=1)
    return model, random_variables(model, std=1.0)


def test_every_kind_of_prompt_gives_the_same(roped):
    model, variables = roped
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    expected = generate(model, variables, rows, LENGTH)
    for prompts in (np.array(rows, np.uint8), [np.array(row, np.int64) for row in rows]):
        chex.assert_trees_all_equal(generate(model, variables, prompts, LENGTH), expected)
    traced = jax.jit(lambda prompts: generate(model, variables, prompts, LENGTH))(jnp.array(rows))
    chex.assert_trees_all_equal(traced, expected)


def test_x64(roped, x64):
    model, variables = roped
    options = {"temperature": 0.5, "top_p": 0.9, "key": jax.random.key(0), "stop": [5]}
    out = generate(model, variables, PROMPTS, 3, **options)
    assert out.dtype == jnp.int32
    assert out.shape == (3, 6)


def test_equal_calls_share_one_compilation(roped):
    model, variables = roped
    key = jax.random.key(0)
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "key": key}
    generate(model, variables, PROMPTS, LENGTH, **options)
    before = _generate._cache_size()
    again = Transformer(ModelConfig(**vars(model.config)))
    options = {"temperature": 1.5, "top_k": 2, "top_p": 0.5, "key": key}
    generate(again, variables, [[1], [2, 3], [4, 5, 6]], LENGTH, **options)
    assert _generate._cache_size() == before


def test_the_same_key_gives_the_same_text(roped):
    model, variables = roped
    prompts = np.ones((3, 3), int)

    def sample(seed, **options):
        options = {"temperature": 2.0, "top_k": VOCAB, "top_p": 1.0, **options}
        return generate(model, variables, prompts, LENGTH, key=jax.random.key(seed), **options)

    first = sample(0)
    chex.assert_trees_all_equal(sample(0), first)
    assert (sample(1) != first).any()
    greedy = generate(model, variables, prompts, LENGTH)
    chex.assert_trees_all_equal(sample(0, top_k=1), greedy)
    chex.assert_trees_all_equal(sample(0, top_p=1e-6), greedy)


@pytest.mark.slow
def test_decoding_in_two_calls_draws_what_one_call_does(roped):
    model, variables = roped
    tokens, key = jnp.array([[1, 2, 3], [4, 5, 6]]), jax.random.key(0)
    _, cache = jax.jit(lambda t: prefill(model, variables, t, capacity=9))(tokens[:, :-1])
    go = jax.jit(
        lambda c, t, n: decode(model, variables, c, t, n, key=key, temperature=1e6),
        static_argnums=2,
    )
    whole, _ = go(cache, tokens[:, -1], 6)
    first, cache = go(cache, tokens[:, -1], 3)
    second, cache = go(cache, first[:, -1], 3)
    assert int(cache.index) == 8
    assert (whole[0] != whole[1]).any(), "rows draw independently"
    assert (whole[:, 0] != whole[:, 1]).any(), "steps draw independently"
    chex.assert_trees_all_equal(jnp.concatenate([first, second], axis=1), whole)


def test_rows_end_at_a_stop(roped):
    model, variables = roped
    pad = 12
    free = np.asarray(generate(model, variables, PROMPTS, LENGTH, pad_id=pad))
    stop = {int(free[0, 4]), int(free[1, 6])}
    expected = free.copy()
    for row in expected[:, 3:]:
        ends = np.flatnonzero(np.isin(row, list(stop)))
        if ends.size:
            row[ends[0] + 1 :] = pad
    assert (expected != free).any()
    out = generate(model, variables, PROMPTS, LENGTH, stop=stop, pad_id=pad)
    np.testing.assert_array_equal(out, expected)


def test_each_row_may_have_its_own_padding(roped):
    model, variables = roped
    _, cache = prefill(model, variables, jnp.ones((2, 3), jnp.int32), capacity=8)
    given = {"stop": jnp.arange(VOCAB), "pad_id": jnp.array([7, 8])}
    out, _ = decode(model, variables, cache, jnp.array([1, 2]), 2, **given)
    assert out[:, 1].tolist() == [7, 8]


def test_decoding_ends_when_all_rows_have(roped):
    model, variables = roped
    token = jnp.array([1, 2])
    everything = jnp.arange(VOCAB)
    cache = init_cache(model, 2, 9)
    out, cache = jax.jit(lambda c, t: decode(model, variables, c, t, 8, stop=everything))(
        cache, token
    )
    # The stop itself is in the cache.
    assert int(cache.index) == 2
    assert (out[:, 1:] == 0).all()
