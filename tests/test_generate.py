"""Cached decoding against the full pass, generation, sampling."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, RopeScaling, Transformer, init_cache, positions
from tape_jax.generate import (
    _generate,
    decode,
    extend,
    generate,
    pad_prompts,
    prefill,
    sample_logits,
)
from tests.models import DIGITS, VOCAB, random_variables, small_model

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
    "attention alone": {"position": tape(mlp_mix=False, learn_alpha=True)},
    "a range of layers": {"position": tape(layers=(1, 3)), "num_layers": 5},
    "not scanned": {"position": tape(layers=(1, 2)), "scan_layers": False, "tie_embeddings": True},
    "window": {"position": tape(), "window": 3},
    "window, bias": {"position": positions.Alibi(), "window": 4},
    "a draw for each layer": {"position": positions.RandomRope(range=64, each_layer=True)},
}
CASES = {**{kind: {"position": kind} for kind in positions.registry}, **VARIANTS}

PROMPTS = (5, 1, 3)  # lengths of the prompts
PADDED = max(PROMPTS)
NEW = 4  # tokens after each
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
    """The same from a prefill with padding, and chunks of two tokens."""
    first, cache = prefill(model, variables, tokens[:, :PADDED], lengths, capacity=CAPACITY)

    def step(cache, chunk):
        logits, cache = extend(model, variables, cache, chunk)
        return cache, logits

    chunks = tokens[:, PADDED:].reshape(len(tokens), -1, 2).transpose(1, 0, 2)
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


def ragged_tokens():
    """The same tokens padded on the left and on the right, each time with digits."""
    generator = np.random.default_rng(0)
    left = np.full((len(PROMPTS), PADDED + NEW), DIGITS[0])
    right = np.full_like(left, DIGITS[1])
    for i, length in enumerate(PROMPTS):
        row = generator.integers(0, VOCAB, length + NEW)
        left[i, -row.size :] = row
        right[i, : row.size] = row
    return jnp.asarray(left, jnp.int32), jnp.asarray(right, jnp.int32)


def assert_near(actual, expected, tolerance):
    """Equality to ``tolerance``, relative to the largest value where that exceeds 1."""
    allowed = tolerance * max(1.0, float(jnp.abs(expected).max()))
    chex.assert_trees_all_close(actual, expected, atol=allowed, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_chunks_behind_ragged_prompts_equal_the_full_pass(name, x64):
    model = small_model(dtype="float64", param_dtype="float64", **CASES[name])
    variables = random_variables(model)
    left, right = ragged_tokens()
    full = full_pass(model, variables, right)
    chunked = chunked_pass(model, variables, left, jnp.asarray(PROMPTS))
    for i, length in enumerate(PROMPTS):
        assert_near(chunked[i, PADDED - length :], full[i, : length + NEW], 1e-10)


@pytest.mark.parametrize("name", positions.registry)
def test_single_steps_equal_the_full_pass(name):
    model = small_model(name)
    variables = random_variables(model)
    _, tokens = ragged_tokens()
    full = full_pass(model, variables, tokens)
    assert_near(stepwise_pass(model, variables, tokens), full, 1e-5)


@pytest.mark.parametrize("name", positions.registry)
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
