import dataclasses
import json
import re

import pytest

from tape_jax import Experts, ModelConfig, RandomPositions, RopeScaling, positions
from tape_jax.sharding import ShardingConfig
from train import experiment
from train.experiment import TrainConfig, change, from_file, from_mapping, to_json
from train.tasks.arithmetic import AdditionEvaluation

FILE = """
from ml_collections import ConfigDict

def get_config():
    return ConfigDict({
        "seed": 3,
        "task": {"name": "addition", "max_digits": 4},
        "model": {
            "hidden_size": 16, "num_heads": 2, "tie_embeddings": True,
            "position": {"kind": "tape", "base": 500.0, "width": 8, "norm": "rms"},
        },
        "train": {"steps": 10, "batch_size": 8, "learning_rate": 1e-3, "clip": None},
        "evaluation": {"longest": 6},
    })
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(FILE)
    return path


def written(tmp_path, text):
    path = tmp_path / "other.py"
    path.write_text(text)
    return path


def test_from_a_file(file):
    e = from_file(file)
    assert (e.name, e.seed) == ("small", 3)
    assert (e.task.max_digits, e.evaluation.longest) == (4, 6)
    assert e.model.vocab_size == e.task.vocab_size
    assert e.model == ModelConfig(
        vocab_size=e.task.vocab_size,
        hidden_size=16,
        num_heads=2,
        tie_embeddings=True,
        position=positions.create("tape", base=500.0, width=8, norm="rms"),
    )
    assert e.train == TrainConfig(steps=10, batch_size=8, learning_rate=1e-3, clip=None)
    hash(e)


def test_scales(file, tmp_path):
    """Fields of another scale come after the file's and before the command line's."""
    scales = 'SCALES = {"gpu": {"train.steps": 99, "model.hidden_size": 32}}\n'
    path = written(tmp_path, FILE + scales)
    assert from_file(path) == from_file(path, ["--config.scale=cpu"])
    large = from_file(path, ["--config.train.steps=7", "--config.scale=gpu"])
    assert (large.train.steps, large.model.hidden_size, large.task.max_digits) == (7, 32, 4)
    with pytest.raises(ValueError, match=r"unknown scale of .*other\.py 'gpus'.*mean 'gpu'"):
        from_file(path, ["--config.scale=gpus"])
    with pytest.raises(ValueError, match=r"unknown scale of .*small\.py 'gpu'.*one of 'cpu'"):
        from_file(file, ["--config.scale=gpu"])
    path = written(tmp_path, FILE + 'SCALES = {"gpu": {"train.step": 1}}\n')
    with pytest.raises(ValueError, match="unknown field 'step'"):
        from_file(path, ["--config.scale=gpu"])


@pytest.mark.parametrize(
    ("option", "field", "value"),
    [
        ("name=7", "name", "7"),
        ("model.tie_embeddings=false", "model.tie_embeddings", False),
        ("model.position.base=100", "model.position.base", 100.0),
        ("model.position.layers=(1, 3)", "model.position.layers", (1, 3)),
        ("model.position.layers=all", "model.position.layers", "all"),
        ("model.position.scaling.beta_fast=3", "model.position.scaling.beta_fast", 3.0),
        ("train.steps=1e4", "train.steps", 10_000),
        ("train.no_decay=('scale',)", "train.no_decay", ("scale",)),
        ("train.no_decay=scale,bias", "train.no_decay", ("scale", "bias")),
        ("evaluation.longest=None", "evaluation.longest", None),
    ],
)
def test_overrides(file, option, field, value):
    found = from_file(file, [f"--config.{option}"])
    for name in field.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_every_field_of_every_group_can_be_given(file):
    e = from_file(file)
    groups = {"model": e.model, "task": e.task, "train": e.train, "evaluation": e.evaluation}
    given = [
        f"--config.{group}.{field.name}={getattr(values, field.name)}"
        for group, values in groups.items()
        for field in dataclasses.fields(values)
        # But for groups of fields.
        if field.name not in ("position", "lora", "experts", "random_positions")
    ]
    assert from_file(file, given) == e


@pytest.mark.parametrize("kind", positions.registry)
def test_every_option_of_every_encoding_can_be_given(file, kind):
    needed = {
        "abacus": {"digits": (4, 5)},
        "position_coupling": {"digits": (4, 5), "plus": 6, "equals": 7},
    }
    encoding = positions.create(kind, **needed.get(kind, {}))
    given = [f"--config.model.position.kind={kind}"]
    for field in dataclasses.fields(encoding):
        value = getattr(encoding, field.name)
        if isinstance(value, RopeScaling):
            given += [
                f"--config.model.position.{field.name}.{inner.name}={getattr(value, inner.name)}"
                for inner in dataclasses.fields(value)
            ]
        else:
            given.append(f"--config.model.position.{field.name}={value}")
    e = from_file(file, given, report=lambda _: None)
    assert e.model.position == encoding
    assert from_mapping(json.loads(json.dumps(to_json(e)))) == e


@pytest.mark.parametrize(
    ("kind", "kept", "lost"),
    [
        ("tape", {"base": 500.0, "width": 8, "norm": "rms"}, None),
        ("rope", {"base": 500.0}, "norm, width"),
        # `width` is the number of mixing units in TAPE and of hidden units in FIRE.
        ("fire", {}, "base, norm, width"),
    ],
)
def test_another_encoding_keeps_shared_options_and_no_namesakes(file, kind, kept, lost):
    notes = []
    e = from_file(file, [f"--config.model.position.kind={kind}"], notes.append)
    assert e.model.position == positions.create(kind, **kept)
    said = f"set in {file} for the encoding 'tape' and not carried over to '{kind}': {lost}"
    assert notes == ([said] if lost else [])


def test_groups_of_a_position(file):
    """Random positions, which old runs lack, and a scaling, which starts from its own default."""
    given = ["random_positions.kind=stretched", "position.kind=yarn", "position.scaling.factor=4"]
    e = from_file(file, [f"--config.model.{x}" for x in given], report=lambda _: None)
    assert e.model.random_positions == RandomPositions("stretched")
    assert e.model.position.scaling == RopeScaling(kind="yarn", factor=4.0)
    assert from_mapping(json.loads(json.dumps(to_json(e)))) == e
    old = to_json(e)
    del old["model"]["random_positions"]
    assert from_mapping(old).model.random_positions is None


def test_a_schedule_is_kept_layer_by_layer(file):
    kind = "rope+window/tape+alibi"
    given = [f"--config.model.position.{x}" for x in (f"kind={kind}", "size=7", "norm=rms")]
    e = from_file(file, [*given, "--config.model.num_layers=2"])
    first, second = e.model.position.encodings
    assert (first.members[1].size, second.members[0].norm) == (7, "rms")
    kept = json.loads(json.dumps(to_json(e)))
    assert from_mapping(kept) == e
    kept["model"]["position"]["kind"] = "rope/rope"
    with pytest.raises(ValueError, match=r"contradict its kind: 'rope\+window/tape\+alibi', not"):
        from_mapping(kept)
    kept["model"]["position"] |= {"kind": kind, "norm": "rms"}
    with pytest.raises(ValueError, match="options of a schedule stand with its encodings"):
        from_mapping(kept)


@pytest.mark.parametrize(
    ("kind", "options", "fields"),
    [
        ("fox/cable", ["bias=2"], [{"bias": 2.0}, {"bias": 2.0}]),
        ("inkling/inkling_local", ["reach=7"], [{"reach": 7}, {"reach": 7}]),
        ("yarn/none", ["scaling.factor=8"], [{"scaling": RopeScaling("yarn", 8.0)}, {}]),
    ],
)
def test_every_encoding_of_a_schedule_gets_the_options_that_it_has(file, kind, options, fields):
    given = [f"--config.model.position.{x}" for x in (f"kind={kind}", *options)]
    e = from_file(file, [*given, "--config.model.num_layers=2"], report=lambda _: None)
    for encoding, wanted in zip(e.model.position.encodings, fields, strict=True):
        assert {name: getattr(encoding, name) for name in wanted} == wanted


def test_a_scaling_of_one_kind_is_not_anothers(file):
    given = ["kind=rope+window/yarn", "scaling.factor=8.0"]
    with pytest.raises(ValueError, match=r"factor = 8.0 needs a kind"):
        from_file(file, [f"--config.model.position.{x}" for x in given], report=lambda _: None)


def test_experts_are_a_group_of_their_own(file, tmp_path):
    """From the command line, a file and a record; one of before there were any has none."""
    given = ["--config.model.experts.count=8", "--config.model.experts.balance=1"]
    e = from_file(file, given)
    assert e.model.experts == Experts(8, balance=1.0)
    text = FILE.replace('"hidden_size"', '"experts": {"count": 4, "per_token": 3}, "hidden_size"')
    found = from_file(written(tmp_path, text), ["--config.model.experts.z=0.1"])
    assert found.model.experts == Experts(4, per_token=3, z=0.1)
    old = to_json(from_file(file))
    assert old["model"].pop("experts") is None
    assert from_mapping(old) == from_file(file)
    with pytest.raises(ValueError, match=r"model\.experts lacks count"):
        from_file(file, ["--config.model.experts.per_token=2"])
    with pytest.raises(ValueError, match="did you mean 'per_token'"):
        from_file(file, ["--config.model.experts.per_tokens=2"])


def test_digits_come_from_the_task(file):
    e = from_file(file, ["--config.model.position.kind=abacus"], report=lambda _: None)
    assert e.model.position.digits == e.task.digit_ids
    coupled = ["--config.model.position.kind=position_coupling"]
    position = from_file(file, coupled, report=lambda _: None).model.position
    assert e.task.decode([*position.digits, position.plus, position.equals]) == "0123456789+="
    assert position.reverse_operands


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--config.trian.steps=3", "unknown field 'trian' of config (did you mean 'train'?)"),
        ("--config.train.stesp=3", "unknown field 'stesp' of config.train (did you mean 'steps'?)"),
        ("--config.model.position.scaling.factr=2", "did you mean 'factor'?"),
        (
            "--config.model.position.kind=alibi --config.model.position.norm=rms",
            "unknown field 'norm' of the encoding 'alibi'",
        ),
        ("--config.model=rope", "config.model is a group"),
        ("--config.train.steps.more=3", "config.train.steps is a single value"),
        ("--config.train.steps=abc", "train.steps: expected int, got 'abc'"),
        ("--config.train.steps=1.5", "train.steps: expected int, got 1.5"),
        ("--config.train.steps=None", "train.steps: expected int, got None"),
        ("--config.train.steps=True", "train.steps: expected int, got True"),
        ("--config.train.steps=0", "steps must be at least 1; got 0"),
        ("--config.train.no_decay=3", "train.no_decay: expected tuple[str, ...], got 3"),
        ("--config.train.accumulate=3", "batch_size = 8 is not a multiple of accumulate = 3"),
        ("--config.train.clip=0", "clip must be positive or None"),
        ("--config.train.beta2=1", "beta2 must be in [0, 1)"),
        ("--config.train.eps=0", "eps must be positive"),
        ("--config.train.weight_decay=-1", "weight_decay must not be negative"),
        ("--config.train.weight_decay=1e400", "weight_decay must not be negative or infinite"),
        ("--config.train.learning_rate=1e400", "learning rate must be a positive number; got inf"),
        ("--config.model.vocab_size=5", "vocab_size = 5 is too small for the task"),
        ("--config.task.name=adition", "did you mean 'addition'?"),
        ("--config.seed=-1", "seed must be in [0, 2**32); got -1"),
        ("--config.seed", "expected --config.field=value"),
        ("--confg.seed=3", "unknown option '--confg.seed=3'"),
    ],
)
def test_bad_options(file, option, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_file(file, option.split(), report=lambda _: None)


def test_options_of_one_encoding_do_not_stay_with_another(file):
    """Of a run that is there, too: what is wrong is that the encoding changes, not its options."""
    begun = from_file(file, report=lambda _: None)
    changed = change(begun, ["--config.model.position.kind=rope"])
    assert changed.model.position.kind == "rope"
    assert begun.model.position.kind != "rope"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_of_this_name", "does not load: ModuleNotFoundError: No module named"),
        ("x = 1", "does not load: KeyError: 'get_config'"),
        ("def get_config(): return {}", "must return an ml_collections.ConfigDict"),
        (FILE.replace('"width"', '"widht"'), "unknown field 'widht' of config.model.position"),
        (FILE.replace('"steps": 10,', ""), "train lacks steps"),
        (FILE.replace('{"name": "addition", "max_digits": 4}', "'addition'"), "config.task: expec"),
        (FILE.replace('{"longest": 6}', "6"), "config.evaluation: expected fields, got 6"),
        (FILE.replace('"small"', "7").replace('"seed": 3', '"seed": "3"'), "seed: expected int"),
    ],
)
def test_bad_files(tmp_path, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_file(written(tmp_path, text))


def test_a_position_may_be_a_name(file, tmp_path):
    text = FILE.replace(
        '{"kind": "tape", "base": 500.0, "width": 8, "norm": "rms"}', '"random_rope"'
    )
    assert from_file(written(tmp_path, text)).model.position == positions.create("random_rope")
    with pytest.raises(ValueError, match="expected an encoding's name or its fields, got 5"):
        from_file(written(tmp_path, text.replace('"random_rope"', "5")))
    short, whole = (
        from_file(file, [f"--config.model.position{field}=tape+fox"], report=lambda _: None)
        for field in ("", ".kind")
    )
    assert short == whole
    assert from_mapping(json.loads(json.dumps(to_json(short)))) == short
    with pytest.raises(ValueError, match=r"unknown position encoding 'foxx'.*mean 'fox'"):
        from_file(file, ["--config.model.position=tape+foxx"])


def test_differences_name_the_fields(file):
    changed = ["--config.train.steps=20", "--config.model.position.kind=rope"]
    found = experiment.differences(from_file(file), from_file(file, changed, lambda _: None))
    assert "train.steps: 10 there, 20 here" in found
    assert "model.position.kind: 'tape' there, 'rope' here" in found
    assert "model.position.norm: 'rms' there, '(absent)' here" in found
    assert not any("learning_rate" in difference for difference in found)
    assert experiment.differences(from_file(file), from_file(file)) == []


def test_only_the_evaluation_can_change_afterwards(file):
    e = from_file(file)
    given = ["--config.evaluation.samples_per_pair=7", "--config.sharding.fsdp=-1"]
    changed, mesh = experiment.change_evaluation(e, given)
    assert changed == AdditionEvaluation(longest=6, samples_per_pair=7)
    assert mesh == ShardingConfig(fsdp=-1)
    assert experiment.change_evaluation(e, []) == (e.evaluation, None)
    with pytest.raises(ValueError, match=r"config.train.steps cannot be changed after training"):
        experiment.change_evaluation(e, ["--config.train.steps=7"])
