"""The symmetries of whole models with TAPE, and causality."""

import jax.numpy as jnp
import pytest
from hypothesis import given

from tape_jax import testing
from tests import models
from tests.drawn import precision
from tests.library.equivariance.checks import (
    BATCH,
    TAPE,
    TIME,
    WINDOW,
    build,
    check_group,
    check_permutations,
    check_shift,
    few,
    seeds,
    state_of,
)
from tests.selection import mostly_slow


@pytest.mark.parametrize("name", mostly_slow(TAPE, "tensor4x5-rms", "shifted-still"))
@given(seed=seeds)
@few()
def test_model(name, seed):
    with precision("float64"):
        model = build(name, "float64")
        check_permutations(model, seed)
        check_shift(model, seed)
        check_group(build(name, "float64", local_window_size=WINDOW.get(name)), seed)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("name", "local_window_size"), [("tensor2x4-heads-range", None), ("default", 3)]
)
def test_model_is_causal(x64, name, local_window_size):
    """In its first states and in the embedding of every token: each token id occurs once."""
    model = build(name, "float64", local_window_size=local_window_size)
    tokens = jnp.arange(BATCH * TIME).reshape(BATCH, TIME)
    variables = models.random_variables(model)

    def fn(embedded, state):
        table = variables["params"]["embedding"].at[tokens].set(embedded)
        params = variables["params"] | {"embedding": table}
        return model.apply({"params": params}, tokens, initial_state=state)

    embedded = testing.random_state(None, (BATCH, TIME, model.config.hidden_size), dtype="float64")
    testing.assert_causal(fn, embedded, state_of(model, 3), in_axes=1, out_axes=1)


def test_abacus_is_causal_in_token_ids(x64):
    model = build("abacus", "float64")
    variables = models.random_variables(model)
    tokens = jnp.array([[3, 4, 0, 9, 8, 7], [0, 0, 5, 6, 1, 12]])
    testing.assert_causal(
        lambda tokens: model.apply(variables, tokens), tokens, in_axes=-1, out_axes=-2
    )
