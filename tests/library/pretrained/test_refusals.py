"""Folders that are damaged, incomplete or of another model: errors that name the file."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import tape_jax as tape
from tests.library.pretrained.folders import (
    DOWN,
    INDEX,
    MHA,
    SINGLE,
    TIED,
    change_json,
    change_tensors,
)


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
            for layer in (0, 1, 2):
                del tensors[f"model.layers.{layer}.input_layernorm.weight"]
            tensors[DOWN] = tensors[DOWN].T.copy()
            tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int32)

        change_tensors(path, spoil)
        with pytest.raises(ValueError, match=r"does not fit its config\.json") as error:
            tape.from_pretrained(path)
        for part in (
            "missing: model.layers.2.mlp.up_proj.weight",
            "missing: model.layers.0-2.input_layernorm.weight",
            "missing: lm_head.weight",
            "unknown: model.layers.9.mlp.up_proj.bias",
            f"{DOWN} has shape (112, 64), expected (64, 112)",
            "model.norm.weight has type I32, expected one of F64, F32, F16, BF16",
        ):
            assert part in [line.strip() for line in str(error.value).splitlines()]

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
