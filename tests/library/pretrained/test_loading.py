"""Loading: types, lazily, and on a mesh."""

import os
import subprocess
import sys
import weakref

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tape_jax as tape
from tape_jax._src.pretrained import folder as folders
from tests.library.pretrained.folders import (
    HF,
    MHA,
    SINGLE,
    TIED,
    as_type,
    change_tensors,
    checkpoint_files,
)
from tests.paths import ROOT


class TestLoading:
    @pytest.mark.parametrize("scan", [True, False])
    def test_variables_are_those_of_init(self, scan):
        model, variables = tape.from_pretrained(HF / "llama3_gqa", scan_layers=scan)
        tokens = jnp.zeros((1, 2), jnp.int32)
        wanted = jax.eval_shape(model.init, jax.random.key(0), tokens)
        chex.assert_trees_all_equal_shapes_and_dtypes(variables, wanted)
        up = safetensors.numpy.load_file(HF / "llama3_gqa" / SINGLE)
        block = variables["params"]["layers_0" if scan else "layers_1"]["mlp"]["up"]["kernel"]
        np.testing.assert_array_equal(
            block[1] if scan else block, up["model.layers.1.mlp.up_proj.weight"].T
        )

    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
    def test_the_stored_type_is_kept(self, copy, dtype):
        path = copy()
        change_tensors(path, as_type(dtype))
        model, variables = tape.from_pretrained(path)
        assert model.config.dtype == model.config.param_dtype == np.dtype(dtype).name
        stored = safetensors.numpy.load_file(path / SINGLE)
        table = variables["params"]["embedding"]
        assert table.dtype == dtype
        np.testing.assert_array_equal(table, stored["model.embed_tokens.weight"])
        wide, values = tape.from_pretrained(path, dtype=jnp.float32)
        assert wide.config.dtype == "float32"
        np.testing.assert_array_equal(values["params"]["embedding"], np.asarray(table, np.float32))

    def test_parameters_of_unequal_types_keep_them(self, copy):
        path = copy()
        narrow = as_type(ml_dtypes.bfloat16)

        def change(tensors):
            norms = {name: x for name, x in tensors.items() if "norm" in name}
            narrow(tensors)
            tensors.update(norms)

        change_tensors(path, change)
        model, variables = tape.from_pretrained(path)
        types = {name: x.dtype.name for name, x in flatten_dict(variables["params"]).items()}
        assert model.config.dtype == "bfloat16"
        assert {name[-1] for name, dtype in types.items() if dtype == "float32"} == {"scale"}

    def test_float64_needs_64_bit_types(self, copy):
        path = copy()
        change_tensors(path, as_type(np.float64))
        with pytest.raises(ValueError, match=r"needs 64-bit types.* or give dtype='float32'"):
            tape.from_pretrained(path)
        table = tape.from_pretrained(path, dtype="float32")[1]["params"]["embedding"]
        original = safetensors.numpy.load_file(MHA / SINGLE)["model.embed_tokens.weight"]
        np.testing.assert_array_equal(table, original)

    def test_options_say_how_to_compute(self):
        model, _ = tape.from_pretrained(
            MHA, attention_implementation="reference", remat="full", max_length=99
        )
        assert (model.config.attention_implementation, model.config.max_length) == ("reference", 99)
        with pytest.raises(ValueError, match="unknown option of from_pretrained 'num_layers'"):
            tape.from_pretrained(MHA, num_layers=2)
        for dtype in ("int8", "float31"):
            with pytest.raises(ValueError, match=f"dtype.*'{dtype}'"):
                tape.from_pretrained(MHA, dtype=dtype)

    def test_tensors_are_read_one_by_one(self, monkeypatch):
        """While one is read, none is on the host any more, and no more than its stack elsewhere."""
        before = {id(x) for x in jax.live_arrays()}
        total = sum(x.nbytes for x in safetensors.numpy.load_file(MHA / SINGLE).values())
        read, kept, host, device = folders.File.read, [], [], []

        def watched(file, name):
            host.append(sum(x() is not None for x in kept))
            device.append(sum(x.nbytes for x in jax.live_arrays() if id(x) not in before))
            # Unaligned, so that jax cannot take the array over as it is.
            values = read(file, name)
            odd = np.empty(values.nbytes + 4, np.uint8)[4:].view(values.dtype)
            odd[...] = values.reshape(-1)
            kept.append(weakref.ref(odd))
            return odd.reshape(values.shape)

        monkeypatch.setattr(folders.File, "read", watched)
        tape.from_pretrained(MHA)
        assert len(host) == 30
        assert max(host) <= 1
        assert max(device) <= total

    @pytest.mark.slow
    def test_peak_memory_of_a_large_checkpoint(self):
        """Resident memory, loading and saving, at most 1.2 times the parameters."""
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.load", "--megabytes=1000"],
            check=True,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "XLA_FLAGS": ""},
        )
        ratios = {line.split()[0]: float(line.split()[-1]) for line in done.stdout.splitlines()[2:]}
        assert 1.0 <= ratios["load"] <= 1.2
        assert ratios["save"] <= 0.2


class TestSharding:
    def mesh(self):
        return Mesh(np.asarray(jax.devices()).reshape(2, 4), ("layers", "width"))

    @pytest.mark.slow
    def test_by_a_function(self):
        """Every axis sharded somewhere; two layers, of which each device has one."""
        mesh = self.mesh()
        seen = {}

        def place(path, shape):
            seen[path] = shape
            if path.endswith("scale"):
                return None
            lead = ("layers",) if path.startswith("layers_0/") else ()
            spec = (*lead, "width") if "down" in path or not lead else (*lead, None, "width")
            return NamedSharding(mesh, PartitionSpec(*spec))

        path = HF / "llama3_gqa"
        _, variables = tape.from_pretrained(path, sharding=place)
        _, plain = tape.from_pretrained(path)
        chex.assert_trees_all_equal(jax.device_get(variables), jax.device_get(plain))
        flat = flatten_dict(variables["params"], sep="/")
        assert seen == {name: x.shape for name, x in flat.items()}
        for name, x in flat.items():
            if not name.endswith("scale"):
                assert x.sharding == place(name, x.shape)
        assert flat["layers_0/mlp/up/kernel"].addressable_shards[0].data.shape == (1, 96, 40)

    @pytest.mark.slow
    def test_one_for_all_and_a_tree(self):
        everywhere = NamedSharding(self.mesh(), PartitionSpec())
        _, plain = tape.from_pretrained(TIED)
        _, variables = tape.from_pretrained(TIED, sharding=everywhere)
        assert all(x.sharding == everywhere for x in jax.tree.leaves(variables))
        chex.assert_trees_all_equal(jax.device_get(variables), jax.device_get(plain))
        tree = jax.tree.map(lambda x: x.sharding, variables)
        _, again = tape.from_pretrained(TIED, sharding=tree)
        assert all(x.sharding == everywhere for x in jax.tree.leaves(again))
        del tree["params"]["embedding"]
        with pytest.raises(ValueError, match=r"it lacks \['embedding'\]"):
            tape.from_pretrained(TIED, sharding=tree)

    def test_that_does_not_fit(self):
        thirds = NamedSharding(Mesh(np.asarray(jax.devices()[:3]), "x"), PartitionSpec("x"))
        with pytest.raises(ValueError, match=r"layers_0/mlp/up/kernel of shape \(2, 64, 128\): "):
            tape.from_pretrained(
                TIED, sharding=lambda path, shape: thirds if "mlp/up" in path else None
            )
        with pytest.raises(ValueError, match=r"embedding must be a jax\.sharding\.Sharding"):
            tape.from_pretrained(TIED, sharding=lambda path, shape: "cpu")
        with pytest.raises(
            ValueError, match=r"sharding must be a jax\.sharding\.Sharding, a function"
        ):
            tape.from_pretrained(TIED, sharding="cpu")

    @pytest.mark.slow
    def test_fused_tensors_sharded_and_saved(self, tmp_path):
        def place(path, shape):
            split = "width" if shape[-1] % 4 == 0 else None
            return NamedSharding(self.mesh(), PartitionSpec(*(None,) * (len(shape) - 1), split))

        path = HF / "phi3_tiny"
        model, variables = tape.from_pretrained(path, sharding=place)
        _, plain = tape.from_pretrained(path)
        chex.assert_trees_all_equal(jax.device_get(variables), jax.device_get(plain))
        tape.save_pretrained(tmp_path / "new", model, variables, like=path)
        assert checkpoint_files(tmp_path / "new") == checkpoint_files(path)
