"""Loading: types, lazily, and on a mesh."""

import os
import subprocess
import sys
import weakref

import chex
import jax
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
    def test_parameters_of_unequal_types_keep_them(self, copy):
        path = copy()

        def change(tensors):
            norms = {name: x for name, x in tensors.items() if "norm" in name}
            as_type(ml_dtypes.bfloat16)(tensors)
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
    def test_a_tree_and_fused_tensors_that_are_saved(self, tmp_path):
        def place(path, shape):
            split = "width" if shape[-1] % 4 == 0 else None
            return NamedSharding(self.mesh(), PartitionSpec(*(None,) * (len(shape) - 1), split))

        path = HF / "phi3_tiny"
        _, placed = tape.from_pretrained(path, sharding=place)
        tree = jax.tree.map(lambda x: x.sharding, placed)
        model, variables = tape.from_pretrained(path, sharding=tree)
        assert jax.tree.map(lambda x: x.sharding, variables) == tree
        tape.save_pretrained(tmp_path / "new", model, variables, like=path)
        assert checkpoint_files(tmp_path / "new") == checkpoint_files(path)
        del tree["params"]["embedding"]
        with pytest.raises(ValueError, match=r"it lacks \['embedding'\]"):
            tape.from_pretrained(path, sharding=tree)

    def test_what_does_not_fit(self):
        thirds = NamedSharding(Mesh(np.asarray(jax.devices()[:3]), "x"), PartitionSpec("x"))
        up = lambda path, shape: thirds if "mlp/up" in path else None  # noqa: E731
        for options, words in (
            ({"sharding": up}, r"layers_0/mlp/up/kernel of shape \(2, 64, 128\): "),
            ({"sharding": lambda path, shape: "cpu"}, r"must be a jax\.sharding\.Sharding"),
            ({"sharding": "cpu"}, r"sharding must be a jax\.sharding\.Sharding, a function"),
            ({"num_layers": 2}, "unknown option of from_pretrained 'num_layers'"),
            ({"dtype": "int8"}, "dtype.*'int8'"),
        ):
            with pytest.raises(ValueError, match=words):
                tape.from_pretrained(TIED, **options)
