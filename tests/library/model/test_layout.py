"""Parameters moved between layouts: values, types, shardings, and what is not copied."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tape_jax import positions
from tape_jax._src.model.layout import layer_params
from tape_jax.adapt import restack
from tests.models import random_variables, small_model

# Runs of 5 layers; then one run each; then every layer on its own.
LAYOUTS = {
    "0-5": small_model("rope", num_layers=5),
    "0-4, 4-5": small_model("tape", num_layers=5),
    "0-1, 1-3, 3-5": small_model(positions.Tape(layers=(1, 3)), num_layers=5),
    "each": small_model("rope", num_layers=5, scan_layers=False),
}


def parameters():
    """One array per layer, whose values tell the layer, and one outside of the layers."""
    x = np.arange(5, dtype=np.float32)[:, None] * 10 + np.arange(3, dtype=np.float32)
    return {"layers_0": {"mlp": {"kernel": x}}, "head": {"kernel": np.ones((2, 2))}}


STARTS = {"0-5": {0}, "0-4, 4-5": {0, 4}, "0-1, 1-3, 3-5": {0, 1, 3}, "each": set(range(5))}


@pytest.mark.parametrize("name", LAYOUTS)
def test_there_and_back(name):
    """By way of every other layout; shapes alone move like arrays."""
    rope = LAYOUTS["0-5"]
    there = restack(parameters(), rope, LAYOUTS[name])
    assert set(there) == {"head", *(f"layers_{i}" for i in STARTS[name])}
    for start in STARTS[name]:
        rows = np.atleast_2d(there[f"layers_{start}"]["mlp"]["kernel"])
        np.testing.assert_array_equal(rows[:, 0], np.arange(start, start + len(rows)) * 10)
    for back in LAYOUTS.values():
        again = restack(restack(there, LAYOUTS[name], back), back, rope)
        chex.assert_trees_all_equal(again, parameters())

    def shapes(params):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "bfloat16"), params)

    assert restack(shapes(parameters()), rope, LAYOUTS[name]) == shapes(there)


def test_parameters_of_the_encoding_are_told_from_the_others():
    """Those of the layers, as it names them."""
    model = small_model(positions.Tape(layers=(1, 3)), num_layers=5)
    params = random_variables(model)["params"]
    (own,) = layer_params(model, params).values()
    assert [sorted(layer) for layer in own] == [[], ["down", "mix", "up", "wx"], []]
    assert own[1]["up"] is params["layers_1"]["position_up"]


def test_what_stays_is_not_copied_and_what_is_donated_is_deleted():
    rope, tape = LAYOUTS["0-5"], LAYOUTS["0-4, 4-5"]
    params = parameters()
    moved = restack(params, rope, tape)
    assert moved["head"]["kernel"] is params["head"]["kernel"]
    for block in ("layers_0", "layers_4"):
        views = moved[block]["mlp"]["kernel"], params["layers_0"]["mlp"]["kernel"]
        assert np.shares_memory(*views)
    on_device = jax.tree.map(jnp.array, params)
    same = restack(on_device, rope, rope, donate=True)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (on_device, same)), strict=True))
    moved = restack(on_device, rope, tape, donate=True)
    assert on_device["layers_0"]["mlp"]["kernel"].is_deleted()
    chex.assert_trees_all_equal(restack(moved, tape, rope, donate=True), parameters())


@pytest.mark.parametrize("abstract", [False, True])
def test_shardings_are_kept(abstract):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("layers", "model"))

    def split(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes))

    old, new = (small_model(p, num_layers=6) for p in ("rope", positions.Tape(layers=(0, 2))))
    uneven, each = small_model("tape", num_layers=6), small_model(num_layers=6, scan_layers=False)
    x = jax.device_put(np.arange(6.0 * 3 * 8).reshape(6, 3, 8), split("layers", None, "model"))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    params = {"layers_0": {"kernel": shape if abstract else x}}
    found = restack(params, old, new)
    assert all(found[name]["kernel"].sharding == x.sharding for name in ("layers_0", "layers_2"))
    # 5 layers do not divide between 2 devices.
    found = restack(params, old, uneven)["layers_0"]["kernel"]
    assert found.sharding == split(None, None, "model")
    own = restack(params, old, each)
    assert own["layers_3"]["kernel"].sharding == split(None, "model")
    together = restack(own, each, old)["layers_0"]["kernel"]
    assert together.sharding == split(None, None, "model")
    if not abstract:
        np.testing.assert_array_equal(together, x)


def test_layouts_that_do_not_fit():
    rope = LAYOUTS["0-5"]
    with pytest.raises(ValueError, match="equal numbers of layers; got 5 and 3"):
        restack(parameters(), rope, small_model("rope"))
    with pytest.raises(ValueError, match="have layers_3, the model has layers_0, layers_4"):
        restack({"layers_3": {"x": np.ones(2)}}, LAYOUTS["0-4, 4-5"], rope)
    for count in (3, 6):
        with pytest.raises(ValueError, match=rf"layers_0/x must hold 5 layers .* \({count}, 2\)"):
            restack({"layers_0": {"x": np.ones((count, 2))}}, rope, LAYOUTS["each"])
    tape = random_variables(LAYOUTS["0-4, 4-5"])["params"]
    with pytest.raises(ValueError, match=r"position_down: 4 of the layers 0, 1, 2, 3, 4 have this"):
        restack(tape, LAYOUTS["0-4, 4-5"], rope)
