"""A loop over tokens with layers by themselves, beside the one that scans them."""

import chex
import jax
import jax.numpy as jnp
import pytest

from tape_jax._src.model import by_layer
from tape_jax._src.model.generate import decode, generate, prefill
from tests.library.model.generate.passes import CAPACITY, CASES
from tests.models import FLOAT64, assert_near, random_variables, small_model
from tests.selection import mostly_slow

# Layers of one kind, of several kinds, without a scan, and states that are drawn.
NAMES = ("tape", "a schedule", "not scanned", "a draw for each layer")


def test_remat_is_of_no_concern():
    tokens = {}
    for remat in ("none", "groups"):
        model = small_model("tape", num_layers=2, remat=remat)
        tokens[remat] = generate(model, random_variables(model), [[1, 2, 3], [4, 5]], 3)
    chex.assert_trees_all_equal(tokens["groups"], tokens["none"])


@pytest.mark.parametrize("name", mostly_slow(NAMES, "tape"))
def test_layers_by_themselves_decode_what_a_scan_does(name, x64, monkeypatch):
    model = small_model(**FLOAT64, **CASES[name])
    variables = random_variables(model, std=1.0)

    def generated(prompt):
        # One row: the batch is an axis of length 1 too. Larger batches are in tests/generate.
        _, cache = prefill(model, variables, prompt[:, :-1], capacity=CAPACITY)
        return decode(model, variables, cache, prompt[:, -1], 4)

    prompt = jnp.arange(1, 6)[None]
    new, by_layers = jax.jit(generated)(prompt)
    monkeypatch.setattr(by_layer, "MOST_BYTES", 0)
    scanned, expected = jax.jit(lambda prompt: generated(prompt))(prompt)
    chex.assert_trees_all_equal(new, scanned)
    chex.assert_trees_all_equal_shapes_and_dtypes(by_layers, expected)
    for a, b in zip(by_layers.layers, expected.layers, strict=True):
        assert_near(a.k, b.k, 1e-10)
        assert_near(a.v, b.v, 1e-10)
