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


def lacks_config(path):
    (path / "config.json").unlink()


def lacks_tensors(path):
    (path / SINGLE).unlink()


def has_pickles_alone(path):
    (path / SINGLE).rename(path / "pytorch_model.bin")


def links_out(name):
    def spoil(path):
        (path / name).rename(path.parent / name)
        (path / name).symlink_to(path.parent / name)

    return spoil


def has_config(text):
    return lambda path: (path / "config.json").write_text(text)


def changed(change):
    """Bytes of the tensors' file that ``change`` has made of them."""

    def spoil(path):
        data = (path / SINGLE).read_bytes()
        assert change(data) != data
        (path / SINGLE).write_bytes(change(data))

    return spoil


def tensor_twice(data):
    size = int.from_bytes(data[:8], "little")
    entry = re.search(rb'"model.norm.weight":\{[^}]*\}', data[: 8 + size])[0]
    header = data[8 : 8 + size].rstrip().replace(entry, entry + b"," + entry)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


DAMAGED = "is no safetensors file, or damaged"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lacks_config, "no checkpoint: it has no config.json"),
        (lacks_tensors, f"neither {SINGLE} nor {INDEX}"),
        (has_pickles_alone, r"pickles only \(pytorch_model.bin\)"),
        (has_config(""), "config.json is no JSON object"),
        (has_config("[1]"), "config.json is no JSON object"),
        (has_config('{"a": 1, "a": 2}'), "config.json is no JSON object"),
        (has_config("[" * 10**5), "config.json is no JSON object"),
        (changed(lambda data: b""), DAMAGED),
        (changed(lambda data: data[:100]), DAMAGED),
        (changed(lambda data: data[:-1]), DAMAGED),
        (changed(lambda data: data + b"\0"), DAMAGED),
        (changed(lambda data: b"\xff" * 8 + data[8:]), DAMAGED),
        (changed(lambda data: data[:8] + b"[" + data[9:]), DAMAGED),
        (changed(lambda data: data.replace(b'"F32"', b'"F64"', 1)), DAMAGED),
        (changed(lambda data: data.replace(b"[64,64]", b"[64,63]", 1)), DAMAGED),
        (changed(tensor_twice), "'model.norm.weight' twice"),
        (links_out(SINGLE), f"{SINGLE} is a link out of it"),
        (links_out("config.json"), "config.json is a link out of it"),
        (lambda path: change_json(path / "config.json", tie_word_embeddings=True), "two differ"),
    ],
)
def test_a_spoilt_folder(copy, spoil, message):
    path = copy()
    spoil(path)
    with pytest.raises(ValueError, match=message):
        tape.from_pretrained(path)


def index_with(change):
    """An index whose ``weight_map`` was changed."""

    def spoil(path):
        names = json.loads((path / INDEX).read_text())["weight_map"]
        change(names)
        change_json(path / INDEX, weight_map=names)

    return spoil


def lists_twice(path):
    text = (path / INDEX).read_text()
    line = re.search(r'"model.norm.weight": "[^"]*"', text)[0]
    (path / INDEX).write_text(text.replace(line, f"{line}, {line}"))


def lacks_shards(path):
    for shard in sorted(path.glob("*.safetensors"))[2:4]:
        shard.unlink()


def has_it_in_two_shards(path):
    extra = {"model.norm.weight": np.ones(64, np.float32)}
    change_tensors(path, lambda tensors: tensors.update(extra), "model-00004-of-00009.safetensors")


def has_both(path):
    (path / SINGLE).write_bytes((MHA / SINGLE).read_bytes())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lacks_shards, "lacks model-00003-of-00009.safetensors, model-00004-of.*, which"),
        (lists_twice, "'model.norm.weight' twice"),
        (has_it_in_two_shards, "00004.*has model.norm.weight, which the index .* in .*00009"),
        (has_both, "has both"),
        (index_with(lambda names: names.pop("model.norm.weight")), "index does not list"),
        (index_with(lambda names: names.update(extra=names[DOWN])), "lacks extra"),
        (index_with(lambda names: names.clear()), "weight_map must give the file"),
        (index_with(lambda names: names.update({DOWN: 3})), "weight_map must give the file"),
        (index_with(lambda names: names.update({DOWN: "../x.safetensors"})), "in its folder; got"),
        (index_with(lambda names: names.update({DOWN: "/etc/x.safetensors"})), "in its folder"),
        (index_with(lambda names: names.update({DOWN: "a/x"})), "must be in its folder; got"),
    ],
)
def test_shards_that_do_not_fit(copy, spoil, message):
    path = copy(TIED)
    (path.parent / "x.safetensors").write_bytes((MHA / SINGLE).read_bytes())
    spoil(path)
    with pytest.raises(ValueError, match=message):
        tape.from_pretrained(path)


def test_no_folder():
    with pytest.raises(ValueError, match="is no folder"):
        tape.from_pretrained("meta-llama/Llama-2-7b")


def test_everything_wrong_with_tensors_is_named(copy):
    path = copy()

    def spoil(tensors):
        tensors["model.layers.9.mlp.up_proj.bias"] = tensors.pop("lm_head.weight")
        for layer in (0, 1, 2):
            del tensors[f"model.layers.{layer}.input_layernorm.weight"]
        tensors[DOWN] = tensors[DOWN].T.copy()
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int32)

    change_tensors(path, spoil)
    with pytest.raises(ValueError, match=r"does not fit its config\.json") as error:
        tape.from_pretrained(path)
    for part in (
        "missing: model.layers.0-2.input_layernorm.weight",
        "missing: lm_head.weight",
        "unknown: model.layers.9.mlp.up_proj.bias",
        f"{DOWN} has shape (112, 64), expected (64, 112)",
        "model.norm.weight has type I32, expected one of F64, F32, F16, BF16",
    ):
        assert part in [line.strip() for line in str(error.value).splitlines()]


def test_links_of_the_download_cache_are_followed(copy, tmp_path):
    """And pickles beside the tensors are not opened."""
    path = copy()
    (path / "pytorch_model.bin").write_bytes(b"no pickle")
    cache, snapshot = tmp_path / "models", tmp_path / "models" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    path.rename(cache / "blobs")
    for file in (cache / "blobs").iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert tape.from_pretrained(snapshot)[0].config.hidden_size == 64
