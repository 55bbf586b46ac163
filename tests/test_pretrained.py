"""Llama folders: against numbers of transformers, back again byte for byte, and wrong ones refused.

``golden/hf`` holds folders that transformers wrote. ``expected.npz`` is what it computed with them
in float32, and, as ``logits_f64``, with weights in float64 but its norms and angles in float32;
``double.npz`` and ``rope_scalings.npz``, the latter for other configs with the same weights, are
what it computes with all of that in float64.
"""

import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

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
from tape_jax._src.config import RopeScaling
from tape_jax._src.pretrained import folder as folders
from tape_jax._src.pretrained.llama import model_config, to_json
from tape_jax.adapt import add_lora
from tests.models import random_variables, small_model
from tests.selection import mostly_slow

HF = Path(__file__).parent / "golden" / "hf"
MHA, TIED = HF / "llama2_mha", HF / "tied_sharded_headdim"
NAMES = ["linear_scaled", "llama2_mha", "llama3_gqa", "tied_sharded_headdim"]
SCALINGS = np.load(MHA / "rope_scalings.npz")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DOWN = "model.layers.0.mlp.down_proj.weight"


def checkpoint_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix != ".npz"}


@pytest.fixture
def copy(tmp_path):
    """A checkpoint that a test may spoil."""

    def make(source: Path = MHA, **changes) -> Path:
        target = tmp_path / "checkpoint"
        target.mkdir()
        for name, content in checkpoint_files(source).items():
            (target / name).write_bytes(content)
        change_json(target / "config.json", **changes)
        return target

    return make


def change_json(path: Path, **changes) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def change_tensors(path: Path, change, name: str = SINGLE) -> None:
    """Rewrites a file with what ``change`` makes of its tensors."""
    tensors = safetensors.numpy.load_file(path / name)
    change(tensors)
    safetensors.numpy.save_file(tensors, path / name, metadata={"format": "pt"})


def as_type(dtype):
    def change(tensors):
        tensors.update({name: x.astype(dtype) for name, x in tensors.items()})

    return change


class TestAgainstTransformers:
    @pytest.mark.parametrize("name", mostly_slow(NAMES, "tied_sharded_headdim"))
    def test_float32(self, name):
        expected = np.load(HF / name / "expected.npz")
        model, variables = tape.from_pretrained(HF / name)
        tokens = jnp.asarray(expected["input_ids"])
        logits, states = model.apply(variables, tokens, return_states=True)
        np.testing.assert_allclose(logits, expected["logits"], atol=3e-5)
        for i, hidden in enumerate([*states.hidden[:-1], states.final_norm]):
            np.testing.assert_allclose(hidden, expected[f"hidden_{i}"], atol=3e-5)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], tokens[:, 1:, None], -1)
        np.testing.assert_allclose(-chosen.mean(), expected["loss"], atol=3e-5)
        out = tape.generate(model, variables, jnp.asarray(expected["prompt"]), max_new_tokens=16)
        np.testing.assert_array_equal(out[:, 9:], expected["greedy"])

    @pytest.mark.slow
    @pytest.mark.usefixtures("x64")
    @pytest.mark.parametrize("name", mostly_slow(NAMES, "llama3_gqa"))
    def test_float64(self, name):
        expected = np.load(HF / name / "expected.npz")
        model, variables = tape.from_pretrained(HF / name, dtype="float64")
        logits = model.apply(variables, jnp.asarray(expected["input_ids"]))
        assert logits.dtype == jnp.float64
        np.testing.assert_allclose(logits, np.load(HF / name / "double.npz")["logits"], atol=1e-12)
        np.testing.assert_allclose(logits, expected["logits_f64"], atol=1e-5)

    @pytest.mark.usefixtures("x64")
    @pytest.mark.parametrize(
        "case", mostly_slow(sorted({n.split("/")[0] for n in SCALINGS.files}), "both_forms")
    )
    def test_every_form_of_rotary_parameters(self, case, copy):
        path = copy()
        (path / "config.json").write_text(str(SCALINGS[f"{case}/config"]))
        model, variables = tape.from_pretrained(path, dtype="float64")
        logits = model.apply(variables, jnp.asarray(np.load(MHA / "expected.npz")["input_ids"]))
        # Beyond the trained length, torch rounds the dynamic base to float32.
        tolerance = 1e-6 if case == "legacy_dynamic" else 1e-12
        np.testing.assert_allclose(logits[:, -6:], SCALINGS[f"{case}/logits"], atol=tolerance)


class TestConfig:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"architectures": ["MistralForCausalLM"]}, r"MistralForCausalLM.*only LlamaForCausal"),
            ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
            ({"architectures": ..., "model_type": ...}, r"\[\] of model_type None"),
            ({"model_type": "mistral"}, "model_type 'mistral'"),
            ({"hidden_act": "gelu"}, "hidden_act must be 'silu'; got 'gelu'"),
            ({"attention_bias": True}, "attention_bias must be False; got True"),
            ({"mlp_bias": True}, "mlp_bias must be False; got True"),
            ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
            ({"vocab_size": ..., "hidden_size": None}, "lacks vocab_size, hidden_size"),
            ({"num_key_value_heads": 3}, "not a multiple of num_kv_heads"),
            ({"hidden_size": "64"}, "hidden_size must be a positive integer; got '64'"),
            ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number; got 'small'"),
            ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope': expected one of"),
            ({"rope_parameters": {"rope_type": "linear"}}, "factor must be a number; got None"),
            ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor.*0.5"),
            ({"rope_parameters": [1]}, r"must be an object; got \[1\]"),
        ],
    )
    def test_what_is_not_known_is_refused(self, changes, message):
        config = json.loads((MHA / "config.json").read_text()) | changes
        config = {name: value for name, value in config.items() if value is not ...}
        with pytest.raises(ValueError, match=message):
            model_config(config)

    def test_what_lacks_is_as_in_transformers(self):
        sizes = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 12}
        sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
        found = model_config({"architectures": ["LlamaForCausalLM"], **sizes})
        assert (found.kv_heads, found.dim, found.norm_eps) == (2, 4, 1e-6)
        assert not found.tie_embeddings
        assert found.position == tape.positions.Rope(base=10_000.0)

    @pytest.mark.parametrize(
        "scaling",
        [
            RopeScaling(),
            RopeScaling("linear", factor=2.5),
            RopeScaling("dynamic", factor=2.0, original_length=512),
            RopeScaling("yarn", factor=4.0, original_length=128, beta_fast=16.0, truncate=False),
            RopeScaling("yarn", factor=4.0, original_length=128, magnitude=1.5),
            RopeScaling("llama3", factor=8.0, original_length=256, low_freq_factor=2.0),
        ],
        ids=lambda scaling: scaling.kind,
    )
    def test_written_and_read_again(self, scaling):
        position = tape.positions.Rope(base=5000.0, scaling=scaling)
        model = small_model(position, num_kv_heads=1, head_dim=6, norm_eps=1e-3)
        assert model_config(json.loads(json.dumps(to_json(model)))) == model.config

    def test_ntk_is_written_as_its_base(self):
        model = small_model(tape.positions.Rope(scaling=RopeScaling("ntk", factor=2.0)))
        found = model_config(to_json(model)).position
        assert found.scaling == RopeScaling()
        ours = tape.rotary_state(jnp.arange(9), 8, 10_000.0, scaling=RopeScaling("ntk", factor=2.0))
        chex.assert_trees_all_close(tape.rotary_state(jnp.arange(9), 8, found.base), ours)


class TestRefusals:
    """Folders that are no checkpoint, or a spoilt one."""

    def refused(self, path, message):
        with pytest.raises(ValueError, match=message):
            tape.from_pretrained(path)

    def test_no_folder(self):
        self.refused("meta-llama/Llama-2-7b", "is no folder")

    def test_no_config(self, tmp_path):
        self.refused(tmp_path, "no checkpoint: it has no config.json")

    def test_no_tensors(self, copy):
        path = copy()
        (path / SINGLE).unlink()
        self.refused(path, f"neither {SINGLE} nor {INDEX}")

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
    def test_pickles(self, copy, name):
        path = copy()
        (path / SINGLE).rename(path / name)
        self.refused(path, rf"pickles only \({name}\)")

    def test_pickles_beside_safetensors_are_not_opened(self, copy):
        path = copy()
        (path / "pytorch_model.bin").write_bytes(b"no pickle")
        tape.from_pretrained(path)

    @pytest.mark.parametrize("text", ["", "[1]", '{"a": 1, "a": 2}', "[" * 10**5])
    def test_config_that_is_no_object(self, copy, text):
        path = copy()
        (path / "config.json").write_text(text)
        self.refused(path, "config.json is no JSON object")

    def test_lacking_shards_are_all_named(self, copy):
        path = copy(TIED)
        shards = sorted(path.glob("*.safetensors"))[2:4]
        for shard in shards:
            shard.unlink()
        self.refused(path, f"lacks {shards[0].name}, {shards[1].name}, which")

    def test_everything_wrong_with_tensors_is_named(self, copy):
        path = copy()

        def spoil(tensors):
            tensors["model.layers.9.mlp.up_proj.bias"] = tensors.pop("lm_head.weight")
            del tensors["model.layers.2.mlp.up_proj.weight"]
            tensors[DOWN] = tensors[DOWN].T.copy()
            tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int32)

        change_tensors(path, spoil)
        with pytest.raises(ValueError, match=r"does not fit its config\.json") as error:
            tape.from_pretrained(path)
        for part in (
            "missing: model.layers.2.mlp.up_proj.weight, lm_head.weight",
            "unknown: model.layers.9.mlp.up_proj.bias",
            f"{DOWN} has shape (112, 64), expected (64, 112)",
            "model.norm.weight has type I32, expected one of F64, F32, F16, BF16",
        ):
            assert part in str(error.value)

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda data: b"",
            lambda data: data[:4],
            lambda data: data[:100],
            lambda data: data[:-1],
            lambda data: data + b"\0",
            lambda data: b"\xff" * 8 + data[8:],
            lambda data: data[:8] + b"[" + data[9:],
            lambda data: data.replace(b'"F32"', b'"F64"', 1),
            lambda data: data.replace(b"[64,64]", b"[64,63]", 1),
        ],
    )
    def test_damaged_files(self, copy, spoil):
        path = copy()
        data = (path / SINGLE).read_bytes()
        assert spoil(data) != data
        (path / SINGLE).write_bytes(spoil(data))
        self.refused(path, "is no safetensors file, or damaged")

    def test_tensor_twice_in_a_header(self, copy):
        path = copy()
        data = (path / SINGLE).read_bytes()
        size = int.from_bytes(data[:8], "little")
        entry = re.search(rb'"model.norm.weight":\{[^}]*\}', data[: 8 + size])[0]
        header = data[8 : 8 + size].rstrip().replace(entry, entry + b"," + entry)
        (path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
        self.refused(path, "'model.norm.weight' twice")

    def test_tensor_twice_in_the_index(self, copy):
        path = copy(TIED)
        text = (path / INDEX).read_text()
        line = re.search(r'"model.norm.weight": "[^"]*"', text)[0]
        (path / INDEX).write_text(text.replace(line, f"{line}, {line}"))
        self.refused(path, "'model.norm.weight' twice")

    def test_tensor_in_two_shards(self, copy):
        path = copy(TIED)
        extra = {"model.norm.weight": np.ones(64, np.float32)}
        change_tensors(
            path, lambda tensors: tensors.update(extra), "model-00004-of-00009.safetensors"
        )
        self.refused(path, "00004.*has model.norm.weight, which the index says to be in .*00009")

    def test_single_file_beside_an_index(self, copy):
        path = copy(TIED)
        (path / SINGLE).write_bytes((MHA / SINGLE).read_bytes())
        self.refused(path, "has both")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda names: names.pop("model.norm.weight"), "which the index does not list"),
            (lambda names: names.update(extra=names[DOWN]), "lacks extra"),
            (lambda names: names.clear(), "weight_map must give the file"),
            (lambda names: names.update({DOWN: 3}), "weight_map must give the file"),
        ],
    )
    def test_index_that_disagrees(self, copy, change, message):
        path = copy(TIED)
        names = json.loads((path / INDEX).read_text())["weight_map"]
        change(names)
        change_json(path / INDEX, weight_map=names)
        self.refused(path, message)

    @pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a/x", "..", ""])
    def test_index_that_climbs_out(self, copy, name):
        path = copy(TIED)
        (path.parent / "x.safetensors").write_bytes((MHA / SINGLE).read_bytes())
        names = json.loads((path / INDEX).read_text())["weight_map"]
        change_json(path / INDEX, weight_map=names | {DOWN: name})
        self.refused(path, f"must be in its folder; got {name!r}")

    @pytest.mark.parametrize("name", [SINGLE, "config.json"])
    def test_link_out_of_the_folder(self, copy, name):
        path = copy()
        (path / name).rename(path.parent / name)
        (path / name).symlink_to(path.parent / name)
        self.refused(path, f"{name} is a link out of it")

    def test_links_of_the_download_cache_are_followed(self, copy, tmp_path):
        path = copy()
        cache, snapshot = tmp_path / "models", tmp_path / "models" / "snapshots" / "0123"
        snapshot.mkdir(parents=True)
        path.rename(cache / "blobs")
        for file in (cache / "blobs").iterdir():
            (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
        assert tape.from_pretrained(snapshot)[0].config.hidden_size == 64

    def test_tied_head_that_differs(self, copy):
        path = copy(MHA, tie_word_embeddings=True)
        self.refused(path, "ties lm_head.weight to model.embed_tokens.weight, but the two differ")


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
            with pytest.raises(ValueError, match=f"unknown dtype '{dtype}'"):
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
            cwd=Path(__file__).parents[1],
            env={**os.environ, "XLA_FLAGS": ""},
        )
        ratios = {line.split()[0]: float(line.split()[-1]) for line in done.stdout.splitlines()[2:]}
        assert 1.0 <= ratios["load"] <= 1.2
        assert ratios["save"] <= 0.2


class TestSharding:
    def mesh(self):
        return Mesh(np.asarray(jax.devices()).reshape(2, 4), ("layers", "width"))

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
    def test_sharded_parameters_are_saved(self, tmp_path):
        halves = NamedSharding(self.mesh(), PartitionSpec("layers"))
        model, variables = tape.from_pretrained(HF / "linear_scaled", sharding=halves)
        tape.save_pretrained(tmp_path / "new", model, variables, like=HF / "linear_scaled")
        assert checkpoint_files(tmp_path / "new") == checkpoint_files(HF / "linear_scaled")


class TestRoundTrip:
    @pytest.mark.parametrize("name", NAMES)
    def test_golden_folders(self, name, tmp_path):
        model, variables = tape.from_pretrained(HF / name)
        tape.save_pretrained(tmp_path / "new", model, variables, like=HF / name)
        assert checkpoint_files(tmp_path / "new") == checkpoint_files(HF / name)

    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
    def test_every_value_of_narrow_types(self, copy, tmp_path, dtype):
        """Subnormal numbers, infinities and NaNs among them; also by way of float32."""
        path = copy(MHA, pad_token_id=7, a_field_of_tomorrow=[1])
        (path / "tokenizer.model").write_bytes(b"\0\1")
        (path / "notes.txt").write_text("not taken along")

        def change(tensors):
            as_type(dtype)(tensors)
            bits = np.arange(160 * 64, dtype=np.uint16) * 7
            tensors["model.embed_tokens.weight"] = bits.view(dtype).reshape(160, 64)

        change_tensors(path, change)
        model, variables = tape.from_pretrained(path)
        tape.save_pretrained(tmp_path / "new", model, variables, like=path)
        wanted = checkpoint_files(path)
        del wanted["notes.txt"]
        assert checkpoint_files(tmp_path / "new") == wanted

        def finite(tensors):
            table = tensors["model.embed_tokens.weight"]
            table[~np.isfinite(table.astype(np.float32))] = 0

        change_tensors(path, finite)
        model, variables = tape.from_pretrained(path, dtype="float32")
        tape.save_pretrained(tmp_path / "wide", model, variables, like=path)
        assert (tmp_path / "wide" / SINGLE).read_bytes() == (path / SINGLE).read_bytes()

    def test_foreign_order_metadata_and_old_buffers(self, copy, tmp_path):
        """A file that the safetensors package would write otherwise."""
        path = copy()
        tensors = safetensors.numpy.load_file(path / SINGLE)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
        ordered = dict(sorted(tensors.items(), reverse=True))
        specs = {name: folders.Tensor("F32", x.shape) for name, x in ordered.items()}
        header = folders.make_header(specs, {"z": "1", "format": "pt", "a": "é"})
        header = (len(header)).to_bytes(8, "little") + header[8:] + b" " * 8
        (path / SINGLE).write_bytes(header + b"".join(x.tobytes() for x in ordered.values()))
        model, variables = tape.from_pretrained(path)
        tape.save_pretrained(tmp_path / "new", model, variables, like=path)
        assert checkpoint_files(tmp_path / "new") == checkpoint_files(path)

    def test_head_beside_tied_embeddings(self, copy, tmp_path):
        path = copy(MHA, tie_word_embeddings=True)
        table = "model.embed_tokens.weight"
        change_tensors(path, lambda tensors: tensors.update({"lm_head.weight": tensors[table]}))
        model, variables = tape.from_pretrained(path)
        assert "head" not in variables["params"]
        tape.save_pretrained(tmp_path / "new", model, variables, like=path)
        assert checkpoint_files(tmp_path / "new") == checkpoint_files(path)

    def test_without_scan(self, tmp_path):
        model, variables = tape.from_pretrained(TIED, scan_layers=False)
        tape.save_pretrained(tmp_path / "new", model, variables, like=TIED)
        assert checkpoint_files(tmp_path / "new") == checkpoint_files(TIED)


class TestSaving:
    def test_without_a_model_to_follow(self, tmp_path):
        """Files that the safetensors package reads, and the same model when loaded."""
        position = tape.positions.Rope(base=777.0, scaling=RopeScaling("linear", factor=2.0))
        types = {"param_dtype": "bfloat16", "dtype": "bfloat16"}
        model = small_model(position, num_kv_heads=1, head_dim=8, **types)
        variables = random_variables(model)
        fields = {"eos_token_id": 5, "max_position_embeddings": 64}
        tape.save_pretrained(tmp_path / "one", model, variables, config=fields)
        tensors = safetensors.numpy.load_file(tmp_path / "one" / SINGLE)
        assert len(tensors) == 3 + 9 * 3
        np.testing.assert_array_equal(
            tensors["model.layers.2.self_attn.k_proj.weight"],
            variables["params"]["layers_0"]["attention"]["k"]["kernel"][2].T,
        )
        config = json.loads((tmp_path / "one" / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["rope_theta"] == 777.0
        assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
        assert config["torch_dtype"] == "bfloat16"
        assert (config["eos_token_id"], config["max_position_embeddings"]) == (5, 64)
        loaded, values = tape.from_pretrained(tmp_path / "one")
        assert loaded.config == model.config
        chex.assert_trees_all_equal(values, variables)

    def test_shards_of_limited_size(self, tmp_path):
        model = small_model("rope")
        variables = random_variables(model)
        tape.save_pretrained(tmp_path / "new", model, variables, max_shard_size=3000)
        shards = sorted((tmp_path / "new").glob("*.safetensors"))
        assert [shard.name for shard in shards][:1] == [
            f"model-00001-of-{len(shards):05d}.safetensors"
        ]
        assert len(shards) > 3
        index = json.loads((tmp_path / "new" / INDEX).read_text())
        sizes = []
        for shard in shards:
            tensors = safetensors.numpy.load_file(shard)
            sizes.append(sum(x.nbytes for x in tensors.values()))
            assert all(index["weight_map"][name] == shard.name for name in tensors)
        assert max(sizes) <= 3000
        assert index["metadata"]["total_size"] == sum(sizes)
        chex.assert_trees_all_equal(tape.from_pretrained(tmp_path / "new")[1], variables)

    def test_numpy_and_float64(self, tmp_path):
        """The types of arrays count, whether 64-bit types are enabled or not."""
        with jax.enable_x64(True):
            model, variables = tape.from_pretrained(MHA, dtype="float64")
        tape.save_pretrained(tmp_path / "a", model, variables)
        tape.save_pretrained(tmp_path / "b", model, jax.tree.map(np.asarray, variables))
        assert checkpoint_files(tmp_path / "a") == checkpoint_files(tmp_path / "b")
        original = safetensors.numpy.load_file(MHA / SINGLE)
        saved = safetensors.numpy.load_file(tmp_path / "a" / SINGLE)
        assert {x.dtype.name for x in saved.values()} == {"float64"}
        chex.assert_trees_all_equal(as_dict(saved), as_dict(original))

    def test_a_lossy_type_must_be_asked_for(self, copy, tmp_path):
        path = copy()
        change_tensors(path, as_type(ml_dtypes.bfloat16))
        model, variables = tape.from_pretrained(MHA)
        with pytest.raises(ValueError, match=r"are lost in bfloat16.*give dtype="):
            tape.save_pretrained(tmp_path / "new", model, variables, like=path)
        assert not list(tmp_path.glob("*new*"))
        tape.save_pretrained(tmp_path / "new", model, variables, like=path, dtype="bfloat16")
        tape.save_pretrained(tmp_path / "wide", model, variables, like=path, dtype="float32")
        assert (tmp_path / "new" / SINGLE).read_bytes() == (path / SINGLE).read_bytes()
        assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
        chex.assert_trees_all_equal(tape.from_pretrained(tmp_path / "wide")[1], variables)

    def test_shards_in_another_type(self, tmp_path):
        model, variables = tape.from_pretrained(TIED)
        tape.save_pretrained(tmp_path / "new", model, variables, like=TIED, dtype="float16")
        index = json.loads((tmp_path / "new" / INDEX).read_text())
        original = json.loads((TIED / INDEX).read_text())
        assert index["weight_map"] == original["weight_map"]
        assert index["metadata"]["total_size"] == original["metadata"]["total_size"] // 2
        loaded, values = tape.from_pretrained(tmp_path / "new")
        assert loaded.config.dtype == "float16"
        half = jax.tree.map(lambda x: x.astype(jnp.float16), variables)
        chex.assert_trees_all_equal(values, half)

    def test_changed_model_changes_the_config(self, tmp_path):
        model, variables = tape.from_pretrained(MHA)
        scaled = tape.adapt.with_scaling(model, RopeScaling("linear", factor=4.0))
        tape.save_pretrained(tmp_path / "new", scaled, variables, like=MHA)
        found = json.loads((tmp_path / "new" / "config.json").read_text())
        assert "rope_parameters" not in found
        assert found["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
        assert found["initializer_range"] == 0.02
        assert tape.from_pretrained(tmp_path / "new")[0].config == scaled.config

    @pytest.mark.parametrize("method", ["tape", "lora"])
    def test_what_llama_does_not_have_is_refused(self, method, tmp_path):
        model, variables = tape.from_pretrained(MHA)
        add = tape.add_tape if method == "tape" else add_lora
        model, variables = add(model, variables, key=jax.random.key(0))
        with pytest.raises(ValueError, match=r"has no place for .*tape_jax\.adapt\.save_adapter"):
            tape.save_pretrained(tmp_path / "new", model, variables)

    @pytest.mark.parametrize("option", [{"local_window_size": 8}, {"shifted_groups": 2}])
    def test_other_attention_is_refused(self, option, tmp_path):
        model = small_model("rope", **option)
        with pytest.raises(ValueError, match=next(iter(option))):
            tape.save_pretrained(tmp_path / "new", model, random_variables(model))

    def test_experts_are_refused(self, tmp_path):
        model = small_model("rope", experts=tape.Experts(4))
        with pytest.raises(
            ValueError, match=r"no place for a mixture of experts, Experts\(count=4"
        ):
            tape.save_pretrained(tmp_path / "new", model, random_variables(model))

    def test_wrong_variables_are_refused(self, tmp_path):
        model = small_model("rope")
        variables = random_variables(model)
        params = dict(variables["params"], extra=jnp.ones(3), embedding=jnp.ones((2, 2)))
        del params["head"]
        with pytest.raises(ValueError, match="not the model's") as error:
            tape.save_pretrained(tmp_path / "new", model, {"params": params})
        for part in ("missing: head/kernel", "unknown: extra", "embedding has shape (2, 2)"):
            assert part in str(error.value)
        with pytest.raises(ValueError, match=r"variables must be \{'params'"):
            tape.save_pretrained(tmp_path / "new", model, params)

    def test_like_a_checkpoint_of_another_model(self, tmp_path):
        model = small_model("rope")
        with pytest.raises(ValueError, match=r"embed_tokens\.weight has shape"):
            tape.save_pretrained(tmp_path / "new", model, random_variables(model), like=MHA)

    def test_fields_that_contradict_are_refused(self, tmp_path):
        model = small_model("rope")
        for fields in ({"rope_theta": 5.0}, {"torch_dtype": "float16"}):
            with pytest.raises(ValueError, match="contradicts the model"):
                tape.save_pretrained(tmp_path / "a", model, random_variables(model), config=fields)

    @pytest.mark.parametrize("kind", ["file", "folder", "link"])
    def test_nothing_is_overwritten(self, tmp_path, kind):
        model = small_model("rope")
        target = tmp_path / "new"
        if kind == "file":
            target.write_text("kept")
        elif kind == "link":
            target.symlink_to(tmp_path)
        else:
            target.mkdir()
            (target / "a").write_text("kept")
        with pytest.raises(ValueError, match="exists and is no empty folder"):
            tape.save_pretrained(target, model, random_variables(model))
        assert (target / "a" if kind == "folder" else target).exists()
        assert sorted(tmp_path.iterdir()) == [target]

    def test_an_error_leaves_nothing_behind(self, tmp_path, monkeypatch):
        model = small_model("rope")
        sync = os.fsync
        calls = []

        def fails(descriptor):
            calls.append(descriptor)
            if len(calls) == 2:
                raise OSError("disk full")
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", fails)
        (tmp_path / "new").mkdir()
        with pytest.raises(OSError, match="disk full"):
            tape.save_pretrained(tmp_path / "new", model, random_variables(model))
        assert [*tmp_path.iterdir()] == [tmp_path / "new"]
        assert not [*(tmp_path / "new").iterdir()]
        tape.save_pretrained(tmp_path / "new", model, random_variables(model))
        assert (tmp_path / "new" / SINGLE).exists()

    def test_max_shard_size_must_be_positive(self, tmp_path):
        model = small_model("rope")
        with pytest.raises(ValueError, match="max_shard_size must be a positive number"):
            tape.save_pretrained(tmp_path / "a", model, random_variables(model), max_shard_size=0)


def as_dict(tensors):
    return {name: np.asarray(x, np.float64) for name, x in tensors.items()}


def test_safetensors_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(NotImplementedError, match=r"pip install 'tape-jax\[pretrained\]'"):
        tape.from_pretrained(MHA)
