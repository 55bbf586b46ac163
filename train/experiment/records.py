"""Experiments as nested mappings of JSON types, and their records in run folders."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tape_jax import ModelConfig, Transformer, positions
from tape_jax.adapt import in_place_of, with_scaling
from tape_jax.positions import create, option_names, options_of
from tape_jax.pretrained import pretrained_config
from tape_jax.sharding import ShardingConfig
from train.checks import choose, require, require_known
from train.data import tokenizers
from train.data.tokenizers import Tokenized
from train.experiment import adaptation
from train.experiment.adaptation import Adaptation
from train.experiment.description import Experiment, TrainConfig
from train.experiment.fields import build, build_field, convert, flatten, hints_of
from train.tasks import Task, task_name, task_type

FORMAT = "tape-jax run, version 2"
# In version 1, a window counted a token's own place.
FORMAT_BEFORE = "tape-jax run, version 1"
ABSENT = "(absent)"


def from_mapping(values: Mapping[str, Any]) -> Experiment:
    """Builds an experiment from nested mappings with the fields of :class:`Experiment`.

    ``model.position`` holds the encoding's ``kind`` and its options (or is the kind), ``task`` the
    task's ``name`` and its options. ``model.vocab_size`` is optional. So is ``task.tokenizer`` if
    the adapted base has one.

    Raises:
      ValueError: for an unknown, missing or unfitting field.
    """
    values = {"seed": 0, "evaluation": {}, "adapt": None, "sharding": None, **values}
    for name in values:
        choose("field", name, [f.name for f in dataclasses.fields(Experiment)])
    for name in ("name", "model", "task", "train"):
        require(name in values, f"the config lacks {name!r}")
    adapt = None
    if values["adapt"] is not None:
        adapt = build(Adaptation, values["adapt"], "adapt")
    options = dict(values["task"])
    kind = task_type(options.pop("name", "addition"))
    if adapt and "tokenizer" in hints_of(kind) and "tokenizer" not in options:
        options = base_tokenizer(adapt.base) | options
    if adapt and adapt.method == "drope" and "train_length" in hints_of(kind):
        short = base_length(adapt.base)
        if short and short < options.get("sequence_length", kind.sequence_length):
            options.setdefault("train_length", short)
    task = build(kind, options, "task")
    return Experiment(
        name=convert(values["name"], str, "name"),
        seed=convert(values["seed"], int, "seed"),
        model=_adapted(values["model"], adapt, task) if adapt else _model(values["model"], task),
        task=task,
        train=build(TrainConfig, values["train"], "train"),
        evaluation=build(type(task).Evaluation, values["evaluation"], "evaluation"),
        adapt=adapt,
        sharding=None
        if values["sharding"] is None
        else build(ShardingConfig, values["sharding"], "sharding"),
    )


def to_json(experiment: Experiment) -> dict[str, Any]:
    """Returns nested JSON dicts from which :func:`from_mapping` makes the same experiment."""
    values = dataclasses.asdict(experiment)
    values["model"] = _model_to_json(experiment.model)
    values["task"] = {"name": task_name(experiment.task), **values["task"]}
    return values


def _model_to_json(model: ModelConfig) -> dict[str, Any]:
    return {**dataclasses.asdict(model), "position": options_of(model.position)}


def read_record(folder: Path) -> dict[str, Any] | None:
    """Reads ``experiment.json`` of a run folder; None if the folder is not a run."""
    try:
        record = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("format") not in (FORMAT, FORMAT_BEFORE):
        return None
    return record if record["format"] == FORMAT else _converted(record)


def _converted(record: dict[str, Any]) -> dict[str, Any]:
    """Converts a record of version 1 to today's form, with the same window."""
    found = copy.deepcopy({**record, "format": FORMAT})
    for model in _models(found):
        if model.get("local_window_size") is not None:
            model["local_window_size"] -= 1
    return found


def _models(values: Any) -> Iterator[dict[str, Any]]:
    """Yields every description of a model in a record, at any depth."""
    if isinstance(values, dict):
        if "local_window_size" in values:
            yield values
        for value in values.values():
            yield from _models(value)


def differences(first: Experiment, second: Experiment) -> list[str]:
    """Describes the fields in which two experiments differ, with both values."""
    found = changed_fields(first, second)
    return [f"{name}: {there!r} there, {here!r} here" for name, (there, here) in found.items()]


def changed_fields(first: Experiment, second: Experiment) -> dict[str, tuple[Any, Any]]:
    """Finds the fields in which two experiments differ, with both values."""
    a, b = flatten(to_json(first)), flatten(to_json(second))
    pairs = {name: (a.get(name, ABSENT), b.get(name, ABSENT)) for name in [*a, *b]}
    return {name: (there, here) for name, (there, here) in pairs.items() if there != here}


def _model(values: Mapping[str, Any], task: Task) -> ModelConfig:
    """Builds the model of a config; its default vocabulary is the task's."""
    encoding = encoding_of(values.get("position", {}), task)
    fields = {"vocab_size": task.vocab_size, **values, "position": encoding}
    return build(ModelConfig, fields, "model")


def _adapted(values: Mapping[str, Any], adapt: Adaptation, task: Task) -> ModelConfig:
    """Derives the model from the base and the method; fields in the config must agree."""
    hints = hints_of(ModelConfig)
    for name in values:
        require_known(name, hints, "model")
    stated = values.get("position", {})
    stated = {"kind": stated} if isinstance(stated, str) else dict(stated)
    computed = {
        name: convert(values[name], hints[name], f"model.{name}")
        for name in adaptation.COMPUTED
        if name in values
    }
    base = dataclasses.replace(base_model(adapt.base), **computed)
    # A run's record has the encoding of each layer of a schedule.
    wanted = whole = encoding_of(stated, task) if "encodings" in stated else None
    if whole is None and adapt.method == "tape":
        if stated.get("kind") == "tape":
            del stated["kind"]
        wanted = build(positions.Tape, _of_tape(stated), "model.position", "the encoding 'tape'")
    elif whole is None and adapt.method == "encoding":
        wanted = _in_place_of(base, stated, adapt, task)
    model = _described(adapt, base, wanted)
    checked = {name: value for name, value in values.items() if name != "position"}
    found = _model_to_json(model)
    if whole is not None:
        _require_same(adapt, "position", whole, model.position)
    elif adapt.method != "encoding":
        checked["position"] = stated
        found["position"] = _options_in_some_layer(model.position) | {"kind": model.position.kind}
        for name in stated:
            require_known(name, found["position"], f"the encoding {model.position.kind!r}")
    found |= {"num_kv_heads": model.kv_heads, "head_dim": model.dim}
    found |= {"intermediate_size": model.mlp_size}
    derived = flatten(found)
    for name, value in flatten(checked).items():
        if value is not None and name not in adaptation.COMPUTED:
            value = tuple(value) if isinstance(value, list) else value
            _require_same(adapt, name, value, derived.get(name))
    return model


def _of_tape(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of TAPE itself, of a mapping that may have those of others beside it."""
    known = option_names(stated.get("kind", "tape"))
    others = {name for name, (cls, _) in known.items() if cls is not positions.Tape}
    others |= {"kind", *adaptation.OF_THE_BASE}
    return {name: value for name, value in stated.items() if name not in others}


def _require_same(adapt: Adaptation, name: str, stated: Any, follows: Any) -> None:
    """Raises ValueError for a field of the model that is not what follows from the base."""
    require(
        stated == follows,
        f"model.{name} = {stated!r} does not agree with the base {adapt.base} and the method "
        f"{adapt.method!r}, from which {follows!r} follows; it may be left out",
    )


def _options_in_some_layer(position: positions.Encoding) -> dict[str, Any]:
    """Returns the options of an encoding; of a schedule with TAPE, those of a layer with TAPE."""
    layers = position.encodings if isinstance(position, positions.Layers) else (position,)
    tape = (x for x in layers if any(isinstance(one, positions.Tape) for one in x.members))
    return options_of(next(tape, position))


@functools.lru_cache(maxsize=256)
def _described(
    adapt: Adaptation, base: ModelConfig, wanted: positions.Encoding | None
) -> ModelConfig:
    """Caches the derived model, which is slow to compute and needed many times."""
    return adaptation.describe(adapt, base, wanted).model.config


def _in_place_of(
    base: ModelConfig, position: Mapping[str, Any], adapt: Adaptation, task: Task
) -> positions.Encoding:
    """Builds the encoding of a mapping with ``kind``; any rotary start is the base's."""
    require(
        "kind" in position,
        "adapt.method = 'encoding' needs model.position.kind, the encoding to be put in place of "
        "the base's",
    )
    old = Transformer(base)
    if adapt.scaling is not None:
        old = with_scaling(old, adapt.scaling)
    options = position if "/" in str(position["kind"]) else _options(position, task)
    return in_place_of(old.encoding, options)


def base_tokenizer(name: str) -> dict[str, Any]:
    """Returns the base's tokenizer as fields of a task, empty if it has none."""
    if record := read_record(Path(name)):
        task = record["experiment"]["task"]
        fields = [f.name for f in dataclasses.fields(Tokenized)]
        return {field: task[field] for field in fields if field in task}
    return {} if tokenizers.fingerprint(name) is None else {"tokenizer": name}


def base_length(name: str) -> int | None:
    """Returns the base's trained sequence length in tokens; None if it is not recorded."""
    if record := read_record(Path(name)):
        task = record["experiment"]["task"]
        return task.get("train_length") or task.get("sequence_length")
    path = Path(name, "config.json")
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return config.get("original_max_position_embeddings", config.get("max_position_embeddings"))


def base_model(name: str) -> ModelConfig:
    """Returns the description of the base."""
    folder = Path(name)
    if record := read_record(folder):
        config = from_mapping(record["experiment"]).model
        return dataclasses.replace(config, shifted_groups=None)
    require(
        (folder / "config.json").is_file(),
        f"adapt.base: {name} is neither a run nor a Hugging Face Llama folder"
        + ("" if folder.exists() else ": there is nothing there"),
    )
    return pretrained_config(folder)


def encoding_of(values: Any, task: Task | None = None) -> positions.Encoding:
    """Builds the encoding of a mapping with ``kind``; the task knows how numbers are written."""
    values = position_fields(values)
    kind = values["kind"]
    if not (isinstance(kind, str) and "/" in kind):
        return create(_options(values, task))
    if "encodings" in values:
        # A schedule as runs keep it: with the encoding of each layer.
        return create({**values, "encodings": [encoding_of(x, task) for x in values["encodings"]]})
    options = {name: x for name, x in values.items() if name != "kind"}
    return positions.Layers.named(kind, options, lambda entry: encoding_of(entry, task))


def _options(values: Mapping[str, Any], task: Task | None) -> dict[str, Any]:
    """Converts the options of an encoding, and adds how the task writes numbers."""
    values = dict(values)
    kind = values.pop("kind")
    known = option_names(kind)
    for name in values:
        require_known(name, known, f"the encoding {kind!r}")
    writing = {"digits": getattr(task, "digit_ids", None), **getattr(task, "writing", {})}
    given = {known[name] for name in values}
    for name, (cls, field) in known.items():
        if (cls, field) not in given and writing.get(field) is not None:
            values[name] = writing[field]
            given.add((cls, field))
    options = {n: build_field(*known[n], x, f"model.position.{n}") for n, x in values.items()}
    return {"kind": kind, **options}


def position_fields(values: Any) -> dict[str, Any]:
    """Returns ``model.position`` as a new dict with ``kind``."""
    require(
        isinstance(values, str | Mapping),
        f"config.model.position: expected an encoding's name or its fields, got {values!r}",
    )
    return {"kind": "tape", **({"kind": values} if isinstance(values, str) else values)}
