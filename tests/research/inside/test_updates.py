"""What updates are for."""

import jax
import numpy as np
import pytest

from research.inside.updates import updating, without_layer
from tests.models import encoding, small_model
from train.evaluation.inside import before_training


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [True, False])
def test_one_layer_cut_off(scan_layers):
    model = small_model(encoding("tape"), num_layers=4, scan_layers=scan_layers)
    fresh = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 1), np.int32))
    trained = jax.tree.map(lambda x: x + 1, fresh)
    whole = before_training(model, trained)
    assert updating(model) == [0, 1, 2]
    found = trained
    for layer in updating(model):
        one = without_layer(model, trained, layer, whole)
        changed = sum(
            bool((a != b).any())
            for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(trained), strict=True)
        )
        assert changed == len(model.encoding.layer_params(model.config.sizes, updates=True))
        found = without_layer(model, found, layer, whole)
    jax.tree.map(np.testing.assert_array_equal, found, whole)
