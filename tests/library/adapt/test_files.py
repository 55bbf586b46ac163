"""Adapter files: round trips, what they refuse, and what they say of themselves."""

import dataclasses
import hashlib
import json
import os

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from tape_jax import Experts, RandomPositions, RopeScaling, Transformer, adapt, positions
from tape_jax.sharding import Sharding
from tests.library.core.test_explicit import mesh_of
from tests.models import random_variables, small_model
from tests.processes import in_two_processes

safetensors = pytest.importorskip("safetensors")
numpy_files = pytest.importorskip("safetensors.numpy")

KEY = jax.random.key(7)
BASE = small_model("rope", max_length=64)
VARIABLES = random_variables(BASE)


def trained(method, model=BASE, variables=VARIABLES, **options):
    """An adapted model whose trainable parameters have moved."""
    made = adapt.adapt(model, variables, method, key=KEY, **options)
    mask = adapt.trainable_mask(made.model, made.rules)
    generator = np.random.default_rng(3)

    def move(x, trains):
        noise = generator.normal(size=x.shape) * 0.1
        return (x + noise).astype(x.dtype) if trains else x

    params = jax.tree.map(move, made.variables["params"], mask)
    return dataclasses.replace(made, variables={"params": params})


def save(path, made):
    adapt.save_adapter(
        path, made.model, made.variables, made.rules, base=made.base, method=made.method
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = trained("tape", norms=True, embeddings=False, scaling=RopeScaling("linear", 2.0))
    path = tmp_path_factory.mktemp("adapter") / "tape.safetensors"
    save(path, made)
    return path, made


def load(path):
    return adapt.load_adapter(path, BASE, VARIABLES)


def rewritten(source, path, tensors=lambda x: x, metadata=lambda x: x):
    """A copy of an adapter with its tensors or metadata changed."""
    with safetensors.safe_open(source, framework="np") as file:
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = file.metadata()
    numpy_files.save_file(tensors(values), path, metadata(header))
    return path


FOX = small_model("fox", num_layers=1)
FOX_FIRST = small_model(positions.Layers(["fox", "rope"]), num_layers=4)
TAPE = small_model("tape", update_implementation="reference")
# As Gemma 3: layers with windows have another base.
MIXED = small_model(positions.Layers(["rope+window", positions.Rope(base=1e6)]), num_layers=4)
LINEAR = {"scaling": RopeScaling("linear", 2.0)}


@pytest.mark.parametrize(
    ("method", "base", "options"),
    [
        ("tape", BASE, {}),
        ("longlora", BASE, {}),
        ("encoding", FOX, {"position": "rope"}),
        ("encoding", FOX_FIRST, {"position": "rope/rope/rope/fox"}),
        ("drope", TAPE, {}),
        ("encoding", TAPE, {"position": positions.Tape(layers=(1, 2))}),
        ("encoding", TAPE, {"position": "rope"}),
        ("drope", small_model("rope", random_positions=RandomPositions("spaced", range=64)), {}),
        ("tape", small_model("rope", remat="groups"), {}),
        ("tape", MIXED, {}),
        ("lora", MIXED, LINEAR),
    ],
)
def test_round_trip(tmp_path, method, base, options):
    """Also where parameters of the base's own encoding go."""
    variables = random_variables(base)
    made = trained(method, base, variables, **options)
    save(tmp_path / "a.safetensors", made)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    model, loaded = adapt.load_adapter(tmp_path / "a.safetensors", base, variables)
    assert model == made.model
    chex.assert_trees_all_equal_shapes_and_dtypes(loaded, made.variables)
    chex.assert_trees_all_equal(loaded, made.variables)


def test_only_what_was_trained_is_in_the_file(saved):
    path, _ = saved
    with safetensors.safe_open(path, framework="np") as file:
        names = set(file.keys())
    each = [f"layers_{i}" for i in range(3)]
    mixes = {
        f"{layer}/position_{name}" for layer in each[:2] for name in ("mix", "wx", "up", "down")
    }
    norms = {f"{layer}/{name}_norm/scale" for layer in each for name in ("attention", "mlp")}
    assert names == mixes | norms | {"final_norm/scale"}
    loaded = adapt.load_adapter(path, BASE, VARIABLES)[1]["params"]
    assert loaded["embedding"] is VARIABLES["params"]["embedding"]


@pytest.mark.slow
def test_types_and_layouts_of_the_loader(tmp_path):
    """Saved from stacked bfloat16 arrays with a float32 part; loaded layer by layer, in numpy."""
    base = small_model("rope", param_dtype="bfloat16", num_layers=4)
    variables = random_variables(base)
    made = trained("tape", base, variables, dtype="float32", layers=(1, 3), learn_alpha=True)
    save(tmp_path / "a.safetensors", made)
    each = Transformer(dataclasses.replace(base.config, scan_layers=False, dtype="bfloat16"))
    plain = jax.tree.map(np.asarray, adapt.restack(variables["params"], base, each))
    model, loaded = adapt.load_adapter(tmp_path / "a.safetensors", each, {"params": plain})
    assert model.encoding == positions.Tape(layers=(1, 3), learn_alpha=True)
    assert (model.config.scan_layers, model.config.dtype) == (False, "bfloat16")
    expected = adapt.restack(made.variables["params"], made.model, model)
    chex.assert_trees_all_equal_shapes_and_dtypes(loaded["params"], expected)
    chex.assert_trees_all_equal(jax.device_get(loaded["params"]), jax.device_get(expected))
    flat = flatten_dict(loaded["params"], sep="/")
    assert flat["layers_0/mlp/up/kernel"] is flatten_dict(plain, sep="/")["layers_0/mlp/up/kernel"]
    assert flat["layers_0/mlp_norm/scale"].dtype == ml_dtypes.bfloat16


def test_trained_parameters_go_where_the_base_is(saved):
    device = jax.devices()[3]
    variables = jax.device_put(VARIABLES, device)
    _, loaded = adapt.load_adapter(saved[0], BASE, variables)
    for name, x in flatten_dict(loaded["params"], sep="/").items():
        assert "position" in name or x.devices() == {device}, name


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tape", "lora"])
def test_on_a_mesh_with_explicit_axes(tmp_path, method):
    """Fingerprints are those of one device, inside ``jax.set_mesh`` and outside."""
    base = small_model("rope", hidden_size=32, vocab_size=32)
    variables, mesh = random_variables(base), mesh_of()
    moved = jax.device_put(variables, Sharding(mesh).of(base, variables))
    with jax.set_mesh(mesh):
        made = adapt.adapt(base, moved, method, key=KEY)
        save(tmp_path / "a.safetensors", made)
        model, loaded = adapt.load_adapter(tmp_path / "a.safetensors", base, moved)
    assert made.base == adapt.fingerprint(base, moved) == adapt.fingerprint(base, variables)
    assert model == made.model
    chex.assert_trees_all_equal(loaded, made.variables)
    here = adapt.load_adapter(tmp_path / "a.safetensors", base, variables)[1]
    chex.assert_trees_all_equal(jax.device_get(loaded), jax.device_get(here))


SPLIT = """
import os
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tape_jax import adapt
from tests.models import random_variables, small_model

model = small_model("rope")
variables = random_variables(model)
kind = AxisType[os.environ["AXES"]]
mesh = Mesh(np.asarray(jax.devices()), ("x",), axis_types=(kind,))

def split(x):
    axes = [axis for axis, size in enumerate(x.shape) if size % jax.device_count() == 0]
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * axes[-1], "x"))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: np.asarray(x)[index])

sharded = jax.tree.map(split, variables)
made = adapt.adapt(model, sharded, "tape", key=jax.random.key(0))
path = os.environ["ADAPTER"]
adapt.save_adapter(path, made.model, made.variables, made.rules, base=made.base)
print(json.dumps(made.base == adapt.fingerprint(model, variables)))
"""


class TestFingerprint:
    def test_is_the_same_in_every_layout(self):
        each = small_model("rope", scan_layers=False)
        first = adapt.fingerprint(BASE, VARIABLES)
        params = adapt.restack(VARIABLES["params"], BASE, each)
        for variables in ({"params": params}, {"params": jax.tree.map(np.asarray, params)}):
            assert adapt.fingerprint(each, variables) == first

    @pytest.mark.slow
    @pytest.mark.parametrize("axes", ["Auto", "Explicit"])
    def test_of_parameters_that_are_split_over_processes(self, tmp_path, axes):
        """All take the fingerprint and gather what the file holds; the first one writes."""
        paths = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
        environments = [{"XLA_FLAGS": "", "AXES": axes, "ADAPTER": str(path)} for path in paths]
        assert in_two_processes(SPLIT, environments) == [True, True]
        assert [path.exists() for path in paths] == [True, False]
        base = small_model("rope")
        variables = random_variables(base)
        made = adapt.adapt(base, variables, "tape", key=jax.random.key(0))
        loaded = adapt.load_adapter(paths[0], base, variables)[1]
        chex.assert_trees_all_close(loaded, made.variables, atol=1e-6)

    def test_sees_every_parameter_of_every_layer(self):
        first = adapt.fingerprint(BASE, VARIABLES)
        flat = flatten_dict(jax.tree.map(np.asarray, VARIABLES["params"]), sep="/")
        for path, x in flat.items():
            for layer in range(x.shape[0] if path.startswith("layers_0") else 1):
                changed = x.copy()
                changed[layer] += 1e-3
                params = unflatten_dict({**flat, path: changed}, sep="/")
                (found,) = first.differences(adapt.fingerprint(BASE, {"params": params}))
                assert found.startswith(f"{path.replace('layers_0', 'layers')}: float32[")

    def test_from_before_an_encoding_had_got_a_field(self):
        now = adapt.fingerprint(BASE, VARIABLES)
        position = dict(now.architecture["position"])
        del position["partial_rotary_factor"]
        before = dataclasses.replace(now, architecture={**now.architecture, "position": position})
        assert before.differences(now) == now.differences(before) == []
        position["base"] = 5.0
        assert len(before.differences(now)) == 1

    def test_knows_how_tokens_take_experts(self):
        one, two = (
            adapt.fingerprint(small_model("rope", experts=Experts(4, k)), VARIABLES) for k in (2, 3)
        )
        (found,) = one.differences(two)
        assert found.startswith("experts: ")

    def test_needs_values(self):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), VARIABLES)
        with pytest.raises(ValueError, match="needs the values of parameters"):
            adapt.fingerprint(BASE, shapes)


def another(**changes):
    model = small_model("rope", max_length=64, **changes)
    return model, random_variables(model)


@pytest.mark.parametrize(
    ("base", "words"),
    [
        (another(num_heads=4), r"num_heads: 2 and 4; num_kv_heads: 2 and 4; head_dim: 8 and 4"),
        (
            another(hidden_size=20),
            r"hidden_size: 16 and 20; .*layers/mlp/up/kernel: float32\[3x16x24\] with .* and "
            r"float32\[3x20x24\]",
        ),
        ((BASE, random_variables(BASE, seed=1)), r"embedding: float32\[13x16\] with values"),
    ],
)
def test_another_base_is_refused(saved, base, words):
    with pytest.raises(ValueError, match=rf"belongs to another base.*differ in .*{words}"):
        adapt.load_adapter(saved[0], *base)


class TestDamage:
    def test_every_truncation_is_noticed(self, saved, tmp_path):
        content = saved[0].read_bytes()
        path = tmp_path / "cut.safetensors"
        for length in (0, 100, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:length])
            with pytest.raises(ValueError, match="no safetensors file, or damaged"):
                load(path)
        with pytest.raises(ValueError, match="no adapter at"):
            load(tmp_path / "absent.safetensors")

    def test_every_changed_value_is_noticed(self, saved, tmp_path):
        content = bytearray(saved[0].read_bytes())
        path = tmp_path / "changed.safetensors"
        start = 8 + int.from_bytes(content[:8], "little")
        for place in (start, (start + len(content)) // 2, len(content) - 1):
            changed = content.copy()
            changed[place] ^= 1
            path.write_bytes(changed)
            with pytest.raises(ValueError, match=r"is damaged: the values of .* checksum"):
                load(path)

    def test_lost_and_added_tensors(self, saved, tmp_path):
        path = tmp_path / "other.safetensors"

        name = "final_norm/scale"
        for change, words in (
            (lambda tensors: {n: x for n, x in tensors.items() if n != name}, name),
            (lambda tensors: {**tensors, "extra": np.zeros(2)}, "extra"),
        ):
            rewritten(saved[0], path, tensors=change)
            with pytest.raises(ValueError, match=rf"is damaged: it lacks, or .*'{words}'"):
                load(path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda h: {**h, "version": "2"}, "has version 2 of the format; this code reads 1"),
            (lambda h: {}, "is no adapter"),
            (
                lambda h: {**h, "adapter": h["adapter"].replace("10000", "10001")},
                "is damaged: its metadata do not have their checksum",
            ),
        ],
    )
    def test_metadata(self, saved, tmp_path, change, message):
        path = rewritten(saved[0], tmp_path / "other.safetensors", metadata=change)
        with pytest.raises(ValueError, match=message):
            load(path)


def test_a_schedule_of_an_earlier_version(tmp_path):
    """It had one set of options for layers with unlike ones."""
    path = tmp_path / "new" / "a.safetensors"
    variables = random_variables(MIXED)
    save(path, trained("lora", MIXED, variables))

    flat = {"kind": "rope+window/rope", "base": 1e6}

    def as_before(header, changes):
        content = json.loads(header["adapter"])
        content["base"]["architecture"]["position"] = flat
        content["changes"]["position"] = changes
        text = json.dumps(content)
        return {**header, "adapter": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}

    rewritten(path, path, metadata=lambda x: as_before(x, flat))
    assert adapt.load_adapter(path, MIXED, variables)[0].encoding == MIXED.encoding
    other = {"kind": "tape+window/tape", "base": 1e6}
    rewritten(path, path, metadata=lambda x: as_before(x, other))
    with pytest.raises(ValueError, match=r"schedule 'tape\+window/tape', .* save the adapter"):
        adapt.load_adapter(path, MIXED, variables)


def test_a_failed_write_leaves_the_old_file(saved, tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    save(path, saved[1])
    before = path.read_bytes()

    def fail(tensors, filename, metadata):
        with open(filename, "wb") as file:
            file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(numpy_files, "save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        save(path, trained("lora"))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_change_that_no_rule_chooses_is_not_lost_silently(tmp_path):
    made = trained("tape", embeddings=False)
    made.variables["params"]["embedding"] += 1
    with pytest.raises(ValueError, match=r"these differ from the base: embedding$"):
        save(tmp_path / "a.safetensors", made)
    made = trained("tape")
    model = Transformer(dataclasses.replace(made.model.config, norm_eps=1e-6))
    with pytest.raises(ValueError, match=r"these differ from the base: norm_eps$"):
        save(tmp_path / "a.safetensors", dataclasses.replace(made, model=model))
    model = Transformer(dataclasses.replace(made.model.config, final_logit_softcap=3.0))
    with pytest.raises(ValueError, match=r"these differ from the base: final_logit_softcap$"):
        save(tmp_path / "a.safetensors", dataclasses.replace(made, model=model))
    capped = Transformer(dataclasses.replace(BASE.config, final_logit_softcap=3.0))
    base = adapt.fingerprint(capped, VARIABLES)
    with pytest.raises(ValueError, match="these differ from the base: final_logit_softcap"):
        save(tmp_path / "a.safetensors", dataclasses.replace(made, base=base))
    assert not os.listdir(tmp_path)


def test_a_rule_for_one_layer_loses_no_other(tmp_path):
    """The file has all layers of what changed, for any layout of the base."""
    each = small_model("rope", scan_layers=False, max_length=64)
    variables = {"params": adapt.restack(VARIABLES["params"], BASE, each)}
    made = adapt.adapt(each, variables, "full")
    made = dataclasses.replace(made, rules=("path:layers_0/attention/q/kernel",))
    moved = jax.tree.map(lambda x: x, variables["params"])
    for layer in ("layers_0", "layers_1"):
        moved[layer]["attention"]["q"]["kernel"] += 1
    path = tmp_path / "a.safetensors"
    save(path, dataclasses.replace(made, variables={"params": moved}))
    for base, given in ((each, variables), (BASE, VARIABLES)):
        model, loaded = adapt.load_adapter(path, base, given)
        chex.assert_trees_all_equal(adapt.restack(loaded["params"], model, each), moved)


def test_layers_that_a_file_lacks_are_the_bases(saved, tmp_path):
    lacking = "layers_1/mlp_norm/scale"

    def fewer(tensors):
        return {name: x for name, x in tensors.items() if name != lacking}

    def described(metadata):
        adapter = json.loads(metadata["adapter"])
        del adapter["sha256"][lacking]
        text = json.dumps(adapter)
        return metadata | {"adapter": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}

    path, made = saved
    _, loaded = load(rewritten(path, tmp_path / "b.safetensors", fewer, described))
    each = Transformer(dataclasses.replace(made.model.config, scan_layers=False))
    got, expected = (
        flatten_dict(adapt.restack(x["params"], made.model, each), sep="/")
        for x in (loaded, made.variables)
    )
    expected[lacking] = VARIABLES["params"]["layers_0"]["mlp_norm"]["scale"][1]
    chex.assert_trees_all_equal(got, expected)


def test_what_the_base_lacks_is_saved_even_untrained(tmp_path):
    made = trained("tape")
    made = dataclasses.replace(made, rules=(adapt.Norms(), adapt.Embeddings()))
    save(tmp_path / "a.safetensors", made)
    _, variables = load(tmp_path / "a.safetensors")
    chex.assert_trees_all_equal(variables, made.variables)


def test_without_safetensors(saved, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(NotImplementedError, match="need the package safetensors"):
        load(saved[0])


def test_the_table(saved):
    path, made = saved
    lines = adapt.describe_adapter(path).splitlines()
    assert lines[0] == "method tape, rules position, norms"
    assert lines[1:] == adapt.describe_trainable(made.model, made.rules).splitlines()
