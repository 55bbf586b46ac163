"""Folders that are damaged, incomplete or of another model: errors that name the file."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors

import tape_jax as tape
from tests.library.pretrained.folders import (
    DOWN,
    HF,
    INDEX,
    MHA,
    SINGLE,
    TIED,
    change_json,
    change_tensors,
)


def rewritten(change, name=SINGLE):
    """Makes of the bytes of a file what ``change`` makes of them."""

    def spoil(path):
        data = (path / name).read_bytes()
        assert change(data) != data
        (path / name).write_bytes(change(data))

    return spoil


def moved(name, *, link=False):
    """Takes a file out of the folder and perhaps links to it."""

    def spoil(path):
        (path / name).rename(path.parent / name)
        if link:
            (path / name).symlink_to(path.parent / name)

    return spoil


def tensor_twice(data):
    size = int.from_bytes(data[:8], "little")
    entry = re.search(rb'"model.norm.weight":\{[^}]*\}', data[: 8 + size])[0]
    header = data[8 : 8 + size].rstrip().replace(entry, entry + b"," + entry)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def listed_twice(data):
    line = re.search(rb'"model.norm.weight": "[^"]*"', data)[0]
    return data.replace(line, line + b", " + line)


def index_with(**names):
    """An index that names other files for some tensors."""

    def spoil(path):
        listed = json.loads((path / INDEX).read_text())["weight_map"] | names
        change_json(path / INDEX, weight_map={k: v for k, v in listed.items() if v is not ...})

    return spoil


def tensor_in_two_shards(path):
    extra = {"model.norm.weight": np.ones(64, np.float32)}
    change_tensors(path, lambda tensors: tensors.update(extra), "model-00004-of-00009.safetensors")


def rotates_part(path):
    change_json(path / "config.json", rope_parameters={"partial_rotary_factor": 0.6})


CONFIG = "config.json"
DAMAGED, NO_OBJECT = "is no safetensors file, or damaged", "config.json is no JSON object"
SHARD = "model-00003-of-00009.safetensors"


@pytest.mark.parametrize(
    ("source", "spoil", "message"),
    [
        (MHA, moved(CONFIG), "no checkpoint: it has no config.json"),
        (MHA, moved(SINGLE), f"neither {SINGLE} nor {INDEX}"),
        (MHA, lambda path: (path / SINGLE).rename(path / "model.pt"), r"pickles only \(model.pt\)"),
        (MHA, rewritten(lambda data: b"[1]", CONFIG), NO_OBJECT),
        (MHA, rewritten(lambda data: b'{"a": 1, "a": 2}', CONFIG), NO_OBJECT),
        (MHA, rewritten(lambda data: b"[" * 10**5, CONFIG), NO_OBJECT),
        (MHA, lambda path: change_json(path / CONFIG, tie_word_embeddings=True), "two differ"),
        (HF / "phi3_tiny", rotates_part, r"12 numbers; got 0\.6, which rotates 7"),
        (MHA, rewritten(lambda data: b""), DAMAGED),
        (MHA, rewritten(lambda data: data[:100]), DAMAGED),
        (MHA, rewritten(lambda data: data[:-1]), DAMAGED),
        (MHA, rewritten(lambda data: data + b"\0"), DAMAGED),
        (MHA, rewritten(lambda data: b"\xff" * 8 + data[8:]), DAMAGED),
        (MHA, rewritten(lambda data: data[:8] + b"[" + data[9:]), DAMAGED),
        (MHA, rewritten(lambda data: data.replace(b'"F32"', b'"F64"', 1)), DAMAGED),
        (MHA, rewritten(lambda data: data.replace(b"[64,64]", b"[64,63]", 1)), DAMAGED),
        (MHA, rewritten(tensor_twice), "'model.norm.weight' twice"),
        (MHA, moved(SINGLE, link=True), f"{SINGLE} is a link out of it"),
        (MHA, moved(CONFIG, link=True), "config.json is a link out of it"),
        (TIED, moved(SHARD), f"lacks {SHARD}, which"),
        (TIED, rewritten(listed_twice, INDEX), "'model.norm.weight' twice"),
        (TIED, tensor_in_two_shards, "00004.*model.norm.weight, which the index .* in .*00009"),
        (TIED, lambda path: (path / SINGLE).write_bytes(b""), "has both"),
        (TIED, index_with(**{"model.norm.weight": ...}), "index does not list"),
        (TIED, index_with(extra=SHARD), "lacks extra"),
        (TIED, index_with(**{DOWN: 3}), "weight_map must give the file"),
        (TIED, index_with(**{DOWN: "../x.safetensors"}), "must be in its folder; got '../x"),
        (TIED, index_with(**{DOWN: "/etc/x.safetensors"}), "must be in its folder; got '/etc"),
        (TIED, index_with(**{DOWN: "a/x"}), "must be in its folder; got 'a/x'"),
    ],
)
def test_a_spoilt_folder(copy, source, spoil, message):
    path = copy(source)
    spoil(path)
    with pytest.raises(ValueError, match=message):
        tape.from_pretrained(path)


def test_an_index_of_a_single_file(copy, tmp_path):
    path = copy(MHA)
    with safetensors.safe_open(path / SINGLE, "numpy") as file:
        index = {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), SINGLE)}
    (path / INDEX).write_text(json.dumps(index))
    model, variables = tape.from_pretrained(path)
    tape.save_pretrained(tmp_path / "same", model, variables, like=path)
    for name in (SINGLE, INDEX):
        assert (tmp_path / "same" / name).read_bytes() == (path / name).read_bytes()


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
