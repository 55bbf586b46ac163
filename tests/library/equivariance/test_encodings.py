"""The symmetries that other encodings have, and those that ablations of TAPE break."""

import jax
import jax.numpy as jnp
import pytest

from tape_jax import testing
from tape_jax._src.parity import language_models
from tape_jax.testing import SymmetryError
from tests.library.equivariance.checks import (
    build,
    check_group,
    check_permutations,
    check_shift,
    inputs_of,
    raises,
)
from tests.paths import GOLDEN


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["xpos", "t5", "random_rope"])
def test_tokens_may_be_permuted_with_their_positions(x64, name):
    """And all positions moved, but draws, which positions index."""
    model = build(name, "float64")
    check_permutations(model, 0)
    if name != "random_rope":
        check_shift(model, 0)


def test_no_equivariance_breaks_the_group_and_the_shift_but_not_permutations(x64):
    model = build("tape_no_equivariance", "float64")
    check_permutations(model, 1)
    with raises(1.0, "orthogonal equivariance"):
        check_group(model, 1)
    with raises(1.0, "shift of positions by 37"):
        check_shift(model, 1)


def test_relaxed_equivariance_is_whole_without_its_mirror_and_broken_by_degrees(x64):
    model = build("tape_relaxed_equivariance", "float64")
    variables = inputs_of(model, 1)[-1]

    def shrunk(factor):
        def shrink(path, x):
            return x * factor if path[-1].key == "position_mirror" else x

        return jax.tree.map_with_path(shrink, variables)

    check_group(model, 1, variables=shrunk(0.0))
    broken = []
    for factor in (1e-3, 1e-4):
        with pytest.raises(SymmetryError) as caught:
            check_group(model, 1, variables=shrunk(factor))
        broken.append(caught.value.difference)
    assert broken[0] == pytest.approx(10 * broken[1], rel=0.05)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("file", "moved_by"), [("adatensor_tiny", 1.3), ("adape_tiny", None), ("adawoeq_tiny", 2.4)]
)
def test_recorded_models_move_by_what_was_measured_on_the_reference(x64, file, moved_by):
    """Logits of the published code after a shift by 37, from the notes on the recorded runs."""
    golden = language_models.Golden(GOLDEN / f"{file}.npz")
    model = golden.model("float64")
    weights = {name: jnp.asarray(x, "float64") for name, x in golden.weights().items()}
    variables = {"params": language_models.convert(weights, golden, model)}
    tokens = jnp.asarray(golden.arrays["input_ids"])

    def fn(places):
        return model.apply(variables, tokens, positions=places)

    places = jnp.arange(tokens.shape[1])
    if moved_by is None:
        testing.assert_shift_invariant(fn, places)
        return
    with pytest.raises(SymmetryError) as caught:
        testing.assert_shift_invariant(fn, places)
    assert caught.value.difference == pytest.approx(moved_by, abs=0.05)
