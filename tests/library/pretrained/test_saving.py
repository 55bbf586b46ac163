"""Saving: whole or not at all, in shards."""

import json
import os

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import tape_jax as tape
from tape_jax import RopeScaling
from tape_jax._src.model.config import Lora
from tape_jax._src.pretrained import folder
from tests.library.pretrained.folders import (
    INDEX,
    MHA,
    SINGLE,
    TIED,
    as_dict,
    as_type,
    change_tensors,
    checkpoint_files,
)
from tests.models import random_variables, small_model


def test_without_a_model_to_follow(tmp_path):
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


def test_shards_of_limited_size(tmp_path):
    model = small_model("rope")
    variables = random_variables(model)
    tape.save_pretrained(tmp_path / "new", model, variables, max_shard_size=3000)
    shards = sorted((tmp_path / "new").glob("*.safetensors"))
    assert [shard.name for shard in shards][:1] == [f"model-00001-of-{len(shards):05d}.safetensors"]
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


@pytest.mark.slow
def test_numpy_and_float64(tmp_path):
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


def test_a_lossy_type_must_be_asked_for(copy, tmp_path):
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


def test_shards_in_another_type(tmp_path):
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


def test_values_that_are_too_large_for_a_type(tmp_path):
    variables = random_variables(ROPE)
    params = variables["params"] | {"embedding": variables["params"]["embedding"].at[0, 0].set(1e6)}
    with pytest.raises(ValueError, match=r"embed_tokens.* are too large for float16: .*float32"):
        tape.save_pretrained(tmp_path / "new", ROPE, {"params": params}, dtype="float16")
    assert not [*tmp_path.iterdir()]


ROPE = small_model("rope", num_layers=1)
OTHER = tape.positions.Rope(base=1e6)
PART = tape.positions.Rope(partial_rotary_factor=0.5)


def layers(*encodings):
    """A model with norms of Gemma, and one of these encodings in each layer."""
    gemma = {"norms": "both", "zero_centered_norms": True, "qk_norm": "head"}
    return small_model(tape.positions.Layers(encodings), num_layers=2, **gemma)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (small_model("tape", num_layers=2), {}, r"no place for .*tape_jax\.adapt\.save_adapter"),
        (small_model("rope", lora=Lora()), {}, r"no place for .*tape_jax\.adapt\.save_adapter"),
        (small_model("rope", shifted_groups=2), {}, "shifted_groups"),
        (small_model("rope", experts=tape.Experts(4)), {}, "no place for a mixture of experts"),
        (small_model("rope", biases=("q",), qk_norm="head"), {}, r"has biases = \('q',\)"),
        (
            small_model(tape.positions.Rope(scaling=RopeScaling("proportional", 4.0))),
            {},
            "no place for the rope scaling proportional",
        ),
        (layers([PART, tape.positions.Window(3)], OTHER), {}, "no family .* 'rope.window/rope'"),
        (ROPE, {"like": MHA}, r"embed_tokens\.weight has shape"),
        (ROPE, {"config": {"rope_theta": 5.0}}, "contradicts the model"),
        (ROPE, {"config": {"torch_dtype": "float16"}}, "contradicts the model"),
        (ROPE, {"max_shard_size": 0}, "max_shard_size must be a positive number"),
    ],
)
def test_what_is_refused(model, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tape.save_pretrained(tmp_path / "new", model, random_variables(model), **options)
    assert not [*tmp_path.iterdir()]


def test_wrong_variables_are_refused(tmp_path):
    variables = random_variables(ROPE)
    params = dict(variables["params"], extra=jnp.ones(3), embedding=jnp.ones((2, 2)))
    del params["head"]
    with pytest.raises(ValueError, match="not the model's") as error:
        tape.save_pretrained(tmp_path / "new", ROPE, {"params": params})
    for part in ("missing: head/kernel", "unknown: extra", "embedding has shape (2, 2)"):
        assert part in str(error.value)


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_nothing_is_overwritten(tmp_path, kind):
    target = tmp_path / "new"
    if kind == "file":
        target.write_text("kept")
    elif kind == "link":
        target.symlink_to(tmp_path)
    else:
        target.mkdir()
        (target / "a").write_text("kept")
    with pytest.raises(ValueError, match="exists and is no empty folder"):
        tape.save_pretrained(target, ROPE, random_variables(ROPE))
    assert (target / "a" if kind == "folder" else target).exists()
    assert sorted(tmp_path.iterdir()) == [target]


def test_what_a_killed_process_left_is_not_in_the_way(tmp_path, monkeypatch):
    """A process of the same number, as in a container that was started again."""
    variables = random_variables(ROPE)
    with monkeypatch.context() as patch:
        patch.setattr(folder.shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(folder, "sync", lambda path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tape.save_pretrained(tmp_path / "new", ROPE, variables)
    assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
    tape.save_pretrained(tmp_path / "new", ROPE, variables)
    assert (tmp_path / "new" / SINGLE).exists()


def test_an_error_leaves_nothing_behind(tmp_path, monkeypatch):
    variables = random_variables(ROPE)
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
        tape.save_pretrained(tmp_path / "new", ROPE, variables)
    assert [*tmp_path.iterdir()] == [tmp_path / "new"]
    assert not [*(tmp_path / "new").iterdir()]
    tape.save_pretrained(tmp_path / "new", ROPE, variables)
    assert (tmp_path / "new" / SINGLE).exists()
