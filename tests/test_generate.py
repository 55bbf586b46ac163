"""Cached decoding against the full pass, generation, sampling."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, RopeScaling, Transformer, init_cache, positions
from tape_jax._src.cache import (
    grow_cache,
)
from tape_jax._src.generate import (
    _generate,
    decode,
    extend,
    generate,
    pad_prompts,
    prefill,
    sample_logits,
)
from tests.models import DIGITS, VOCAB, random_variables, small_model
from tests.selection import mostly_slow

tape = positions.Tape

VARIANTS = {
    "tensor, 2 x 3 blocks, heads": {
        "position": tape(form="tensor", r=3, attention_mix="heads", norm="rms")
    },
    "tensor, 4 x 4 blocks, grouped": {
        "position": tape(form="tensor", l=4, r=4, norm="unit"),
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "heads, grouped": {
        "position": tape(attention_mix="heads", norm="unit"),
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "one group, dynamic scaling": {
        "position": tape(norm="rms", scaling=RopeScaling("dynamic", 2.0, original_length=4)),
        "num_heads": 4,
        "num_kv_heads": 1,
    },
    "MLP alone": {"position": tape(attention_mix="none", learn_alpha=True)},
    "learned base": {"position": tape(learn_base=True, learn_alpha=True, alpha_per_head=True)},
    "attention alone": {"position": tape(mlp_mix=False, learn_alpha=True)},
    "a range of layers": {"position": tape(layers=(1, 3)), "num_layers": 5},
    "not scanned": {"position": tape(layers=(1, 2)), "scan_layers": False, "tie_embeddings": True},
    "window": {"position": tape(), "local_window_size": 3},
    "window, bias": {"position": positions.Alibi(), "local_window_size": 4},
    "a draw for each layer": {"position": positions.RandomRope(range=64, each_layer=True)},
}
CASES = {**{kind: {"position": kind} for kind in positions.registry}, **VARIANTS}

LENGTHS = (5, 1, 3)  # lengths of the prompts
PADDED = max(LENGTHS)
NEW = 5  # tokens after each
CAPACITY = PADDED + NEW + 1

# The tests below compile much and compute little.
FAST_COMPILATION = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
jit_model = functools.partial(jax.jit, static_argnums=0, compiler_options=FAST_COMPILATION)


@jit_model
def full_pass(model, variables, tokens):
    """Logits ``[B, T, vocab]`` of whole sequences."""
    return model.apply(variables, tokens, length=CAPACITY)


@jit_model
def chunked_pass(model, variables, tokens, lengths):
    """The same from a prefill with padding of all but the last tokens, and chunks of two tokens."""
    start = PADDED - 1
    first, cache = prefill(model, variables, tokens[:, :start], lengths - 1, capacity=CAPACITY)

    def step(cache, chunk):
        logits, cache = extend(model, variables, cache, chunk)
        return cache, logits

    chunks = tokens[:, start:].reshape(len(tokens), -1, 2).transpose(1, 0, 2)
    _, rest = jax.lax.scan(step, cache, chunks)
    return jnp.concatenate([first, *rest], axis=1)


@jit_model
def stepwise_pass(model, variables, tokens):
    """The same token by token, from an empty cache."""

    def step(cache, token):
        logits, cache = extend(model, variables, cache, token[:, None])
        return cache, logits[:, 0]

    cache = init_cache(model, tokens.shape[0], CAPACITY)
    return jax.lax.scan(step, cache, tokens.T)[1].transpose(1, 0, 2)


jit_prefill = jax.jit(
    prefill,
    static_argnums=0,
    static_argnames=("capacity", "chunk"),
    compiler_options=FAST_COMPILATION,
)
jit_extend = jit_model(extend)
jit_apply = jit_model(Transformer.apply)


def ragged_tokens():
    """The same tokens padded on the left and on the right, each time with digits."""
    generator = np.random.default_rng(0)
    left = np.full((len(LENGTHS), PADDED + NEW), DIGITS[0])
    right = np.full_like(left, DIGITS[1])
    for i, length in enumerate(LENGTHS):
        row = generator.integers(0, VOCAB, length + NEW)
        left[i, -row.size :] = row
        right[i, : row.size] = row
    return jnp.asarray(left, jnp.int32), jnp.asarray(right, jnp.int32)


def assert_near(actual, expected, tolerance):
    """Equality to ``tolerance``, relative to the largest value where that exceeds 1."""
    allowed = tolerance * max(1.0, float(jnp.abs(expected).max()))
    chex.assert_trees_all_close(actual, expected, atol=allowed, rtol=0)


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


@pytest.mark.parametrize("name", mostly_slow(positions.registry, "tape", "abacus"))
def test_greedy_generation_is_the_argmax_of_full_passes_of_each_row_alone(name):
    model = small_model(name)
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
@pytest.mark.parametrize("kind", mostly_slow(["random_rope", "dynamic"], "random_rope"))
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


@pytest.mark.parametrize("kind", ["random_rope", "dynamic"])
def test_a_cache_for_given_lengths(kind):
    """Equals the full pass that is given the same, whatever its capacity, and can grow."""
    dynamic = positions.Rope(scaling=RopeScaling("dynamic", 2.0, original_length=4))
    model = small_model(dynamic if kind == "dynamic" else kind, num_layers=2)
    variables, length = random_variables(model), jnp.array([6, 30])
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 6)), jnp.int32)
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
    for prompts in (
        np.array(rows),
        np.array(rows, np.uint8),
        jnp.array(rows),
        [np.array(row, np.int64) for row in rows],
        tuple(tuple(row) for row in rows),
    ):
        chex.assert_trees_all_equal(generate(model, variables, prompts, LENGTH), expected)


def test_prompts_may_be_traced(roped):
    model, variables = roped
    prompts = jnp.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    traced = jax.jit(lambda prompts: generate(model, variables, prompts, LENGTH))(prompts)
    chex.assert_trees_all_equal(traced, generate(model, variables, prompts, LENGTH))


def test_bfloat16(roped):
    model = small_model("rope", num_layers=1, dtype="bfloat16")
    out = generate(model, roped[1], PROMPTS, 3)
    assert out.shape == (3, 6)
    assert ((out >= 0) & (out < VOCAB)).all()


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
    for given in (stop, list(stop), np.array(list(stop))):
        out = generate(model, variables, PROMPTS, LENGTH, stop=given, pad_id=pad)
        np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(
        generate(model, variables, PROMPTS, LENGTH, stop=[], pad_id=pad), free, "no stop at all"
    )


def test_decoding_ends_when_all_rows_have(roped):
    model, variables = roped
    token = jnp.array([1, 2])
    everything = jnp.arange(VOCAB)
    cache = init_cache(model, 2, 9)
    out, cache = jax.jit(lambda c, t: decode(model, variables, c, t, 8, stop=everything))(
        cache, token
    )
    assert int(cache.index) == 1
    assert (out[:, 1:] == 0).all()


def test_pad_prompts():
    tokens, lengths = pad_prompts([[1, 2, 3], [4]], pad_id=9)
    np.testing.assert_array_equal(tokens, [[1, 2, 3], [9, 9, 4]])
    np.testing.assert_array_equal(lengths, [3, 1])
    tokens, lengths = pad_prompts(np.array([[1, 2], [3, 4]]))
    np.testing.assert_array_equal(lengths, [2, 2])
    chex.assert_type([tokens, lengths], jnp.int32)


PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
DRAWS = 20_000
sample = jax.jit(sample_logits)


def frequencies(probabilities, seed=0, **options):
    """Frequency of each token in many draws."""
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(probabilities, jnp.float32)), (DRAWS, 5))
    drawn = sample(logits, jax.random.key(seed), **options)
    chex.assert_shape(drawn, (DRAWS,))
    chex.assert_type(drawn, jnp.int32)
    return np.bincount(drawn, minlength=5) / DRAWS


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 50}, [0, 1, 2, 3, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"top_p": 0.96}, [0, 1, 2, 3, 4]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 3, "top_p": 0.8}, [1, 3]),  # 0.4 / 0.85 and 0.3 / 0.85 make 0.82
        ({"top_k": 2, "top_p": 0.99}, [1, 3]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5, "top_k": 3}, [1, 3, 4]),
        # At temperature 2 the likeliest have 0.29, 0.25 and 0.18.
        ({"temperature": 2.0, "top_p": 0.6}, [1, 3, 4]),
    ],
)
def test_sampling_has_the_right_distribution(options, kept):
    expected = PROBABILITIES ** (1 / options.get("temperature", 1.0))
    expected = np.where(np.isin(np.arange(5), kept), expected, 0)
    expected /= expected.sum()
    actual = frequencies(PROBABILITIES, **options)
    assert set(np.flatnonzero(actual)) == set(kept)
    error = 5 * np.sqrt(expected * (1 - expected) / DRAWS)
    np.testing.assert_array_less(np.abs(actual - expected), error + 1e-9)


def test_top_k_keeps_exactly_k_of_equal_tokens():
    assert np.count_nonzero(frequencies(np.full(5, 0.2), top_k=2)) == 2


def test_impossible_tokens_are_never_drawn():
    with np.errstate(divide="ignore"):
        actual = frequencies([0.5, 0.0, 0.5, 0.0, 0.0], top_p=1.0, top_k=5, temperature=3.0)
    np.testing.assert_array_equal(actual > 0, [True, False, True, False, False])


def test_without_a_key_the_most_likely_token_is_taken():
    logits = jnp.log(jnp.asarray([PROBABILITIES, PROBABILITIES[::-1]]))
    np.testing.assert_array_equal(sample(logits), [1, 3])
    tiny = sample(logits, jax.random.key(0), temperature=1e-42)
    np.testing.assert_array_equal(tiny, [1, 3])


RAGGED = [[1, 2], [3]]


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
        ([[True, False]], {}, "integer token ids; got bool"),
        (["12"], {}, "non-empty sequence of token ids"),
        ([[1, VOCAB]], {}, r"ids in 0\.\.12; got ids from 1 to 13"),
        ([[-1, 2]], {}, "got ids from -1 to 2"),
        (np.full((1, 2), 2**33), {}, "got ids from 8589934592"),
        (RAGGED, {"max_new_tokens": 0}, "max_new_tokens must be a positive integer; got 0"),
        (RAGGED, {"max_new_tokens": 2.0}, "max_new_tokens must be a positive integer; got 2.0"),
        (
            RAGGED,
            {"max_new_tokens": 7},
            "prompt of 2 tokens and max_new_tokens = 7.* 9 tokens .* 8",
        ),
        (RAGGED, {"capacity": 3}, "capacity of 4; got 3"),
        (RAGGED, {"capacity": 9}, "exceeds the model's max_length of 8"),
        (RAGGED, {"temperature": -0.1}, "temperature must be finite and not negative; got -0.1"),
        (RAGGED, {"temperature": float("nan")}, "temperature must be finite"),
        (RAGGED, {"temperature": 1.0}, "needs a random key"),
        (RAGGED, {"top_k": 0}, "top_k must be an integer of at least 1; got 0"),
        (RAGGED, {"top_k": 1.5}, "top_k must be an integer"),
        (RAGGED, {"top_p": 0.0}, r"top_p must be in \(0, 1\]; got 0.0"),
        (RAGGED, {"top_p": 1.1}, r"top_p must be in \(0, 1\]; got 1.1"),
        (RAGGED, {"stop": 3}, "stop must be a collection of token ids; got 3"),
        (RAGGED, {"stop": [VOCAB]}, "stop must hold token ids in 0..12"),
        (RAGGED, {"stop": [1.5]}, "stop must hold integer token ids"),
        (RAGGED, {"pad_id": -1}, "pad_id must hold token ids in 0..12"),
    ],
)
def test_bad_calls(prompts, options, message):
    model = small_model("rope", num_layers=1, max_length=8)
    with pytest.raises(ValueError, match=message):
        generate(model, {}, prompts, **{"max_new_tokens": 2, **options})


@pytest.mark.parametrize(("kind", "limit"), [("learned", 40), ("random_rope", 64)])
def test_the_limit_of_the_encoding(kind, limit):
    with pytest.raises(ValueError, match=f"exceeds the limit of the encoding '{kind}' of {limit}"):
        generate(small_model(kind), {}, [[1, 2]], limit - 1)


def test_coordinates_of_several_axes_cannot_be_cached():
    with pytest.raises(ValueError, match="one coordinate per token; 'rope' has axes=2"):
        generate(small_model(positions.Rope(axes=2)), {}, [[1, 2]], 3)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"top_k": 0},
        {"top_p": 2.0},
        {"top_p": 0},
        {"temperature": np.float32(np.nan)},
        {"top_k": np.int64(0)},
    ],
)
def test_bad_sampling_options(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        sample_logits(jnp.zeros(5), jax.random.key(0), **options)


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


@pytest.mark.parametrize("lengths", [[4, 1], [-1, 1], [1.0, 2.0], [1], 2])
def test_lengths_of_prompts_that_cannot_be(lengths):
    model = small_model("rope", num_layers=1)
    with pytest.raises(ValueError, match=r"lengths must be integers in 0 \.\. 3 of shape \(2,\)"):
        prefill(model, {}, jnp.ones((2, 3), int), np.asarray(lengths), capacity=4)


def test_what_decoding_does_not_take():
    model = small_model("rope", num_layers=1)
    cache = init_cache(model, 2, 4)
    for token in (np.array([1.5, 2.0]), np.array([1]), 1):
        with pytest.raises(ValueError, match=r"token must be integers of shape \(2,\)"):
            decode(model, {}, cache, token, 1)
    with pytest.raises(ValueError, match="max_new_tokens must be a positive integer; got 0"):
        decode(model, {}, cache, np.array([1, 2]), 0)


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
