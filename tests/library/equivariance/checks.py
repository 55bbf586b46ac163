"""Models of every form and encoding, and the symmetries that they are checked for.

Every check runs in float64 (differences to 1e-10).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import tape_jax as tape
from tape_jax import positions, testing
from tape_jax.testing import SymmetryError
from tests import models

# The same few examples in every run: each costs a compilation, and CI must not be a lottery.
few = functools.partial(
    settings,
    max_examples=2,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
seeds = st.integers(0, 2**20)


def raises(minimum: float, symmetry: str):
    """Expects a SymmetryError with a difference of at least ``minimum``."""
    return pytest.raises(
        SymmetryError, match=symmetry, check=lambda error: error.difference >= minimum
    )


BATCH, TIME = 2, 6
TAPE = {
    "default": {},
    "heads-rms": {"attention_mix": "heads", "norm": "rms", "learn_alpha": True},
    "tensor2x4-heads-range": {"form": "tensor", "r": 4, "attention_mix": "heads", "layers": (0, 1)},
    "tensor4x5-rms": {"form": "tensor", "l": 4, "r": 5, "norm": "rms"},
    "shifted-still": {"attention_mix": "heads", "head_shift": 3.0, "still_heads": 1},
    "partial-shifted": {"partial_rotary_factor": 0.5, "head_shift": (0.0, -2.5), "norm": "rms"},
    "degree3-shifted": {"degree": 3, "norm": "rms", "head_shift": 3.0, "attention_mix": "heads"},
    "tensor4x5-degree3": {
        "form": "tensor",
        "l": 4,
        "r": 5,
        "norm": "unit",
        "degree": 3,
        "attention_mix": "none",
    },
}
MODEL = {
    "heads-rms": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
    "tensor2x4-heads-range": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
    "shifted-still": {"num_heads": 6, "num_kv_heads": 3, "head_dim": 4},
}
WINDOW = {"default": 3, "tensor2x4-heads-range": 2}


@functools.cache
def build(name: str, dtype: str, *, local_window_size: int | None = None):
    """A model: one of ``TAPE``, or with an encoding of the registry."""
    if name in TAPE:
        encoding = positions.create("tape", **TAPE[name])
    else:
        encoding = models.encoding(name)
    return models.small_model(
        encoding,
        dtype=dtype,
        param_dtype=dtype,
        attention_implementation="reference",
        local_window_size=local_window_size,
        **MODEL.get(name, {}),
    )


@functools.cache
def apply(model: tape.Transformer):
    """Logits as a function of positions, tokens, segment ids, mask and variables."""

    def fn(places, tokens, segment_ids, mask, variables):
        options = {"segment_ids": segment_ids, "mask": mask, "is_causal": False}
        return model.apply(variables, tokens, positions=places, **options)

    return fn


@functools.cache
def apply_from(model: tape.Transformer):
    """Logits and states of the causal model as a function of the first state and the tokens."""

    def fn(state, tokens, variables):
        return model.apply(variables, tokens, initial_state=state, return_states=True)

    return fn


def inputs_of(model: tape.Transformer, seed: int):
    """Positions with gaps, tokens, two segments a row, and variables."""
    rng = np.random.default_rng(seed)
    places = np.sort(rng.choice(20, TIME, replace=False))
    tokens = rng.permutation(models.VOCAB)[: BATCH * TIME].reshape(BATCH, TIME)
    segment_ids = np.sort(rng.integers(1, 3, (BATCH, TIME)), axis=-1)
    if model.encoding.kind == "random_rope":  # Positions index the draw.
        places = np.arange(TIME)
    return (
        *(jnp.asarray(x, jnp.int32) for x in (places, tokens, segment_ids)),
        models.random_variables(model, seed, std=0.4),
    )


CAUSAL = np.tril(np.ones((TIME, TIME), bool))
VISIBLE = {"all": np.ones_like(CAUSAL), "causal": CAUSAL, "window": CAUSAL & ~np.tril(CAUSAL, -3)}


def check_permutations(model: tape.Transformer, seed: int):
    """Tokens with positions and segments; with the mask of a causal or windowed model too."""
    places, tokens, segment_ids, variables = inputs_of(model, seed)
    for mask in VISIBLE.values():
        testing.assert_permutation_equivariant(
            apply(model),
            *(places, tokens, segment_ids, jnp.asarray(mask), variables),
            in_axes=(-1, -1, -1, {-2, -1}, None),
            out_axes=-2,
            key=jax.random.key(seed),
        )


def check_shift(model: tape.Transformer, seed: int):
    places, tokens, segment_ids, variables = inputs_of(model, seed)
    for mask in (VISIBLE["causal"], VISIBLE["window"]):
        testing.assert_shift_invariant(
            apply(model),
            *(places, tokens, segment_ids, jnp.asarray(mask), variables),
        )


def state_of(model: tape.Transformer, seed: int):
    """A first state of the model's form, one per key/value head."""
    c, encoding = model.config, model.encoding
    tensor = encoding.form == "tensor"
    return testing.random_state(
        jax.random.key(seed),
        (BATCH, TIME, c.kv_heads, c.dim),
        l=encoding.l if tensor else None,
        r=encoding.r if tensor else None,
        dtype=c.dtype,
    )


def check_group(
    model: tape.Transformer,
    seed: int,
    *,
    variables: Any = None,
):
    """One phase per frequency, or O(R): logits stay, the states of all layers go along."""
    _, tokens, _, random = inputs_of(model, seed)
    variables = random if variables is None else variables
    check = (
        testing.assert_phase_equivariant
        if model.encoding.form == "rotary"
        else testing.assert_orthogonal_equivariant
    )
    check(
        apply_from(model),
        *(state_of(model, seed), tokens, variables),
        in_states=(True, False, False),
        out_states=(False, tape.States(hidden=False, position=True, final_norm=False)),
        key=jax.random.key(seed),
    )
