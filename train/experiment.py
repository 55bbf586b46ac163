"""What an experiment is, and how it is made from a config file, the command line, or JSON.

A config file is a Python file whose ``get_config()`` returns an ``ml_collections.ConfigDict``. It
is read once, merged with the ``--config.a.b=value`` options of the command line, and turned into
the frozen dataclass :class:`Experiment`; nothing downstream sees a ConfigDict. A file sets only
what differs from the defaults, yet every field can be given on the command line.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import runpy
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_dict, config_flags

from tape_jax import positions
from tape_jax.config import ModelConfig, choose, nearest, require
from tape_jax.pretrained import pretrained_config
from tape_jax.sharding import ShardingConfig
from train import adaptation, schedules
from train.adaptation import Adaptation
from train.data import TASKS, Task

Report = Callable[[str], None]

FORMAT = "tape-jax run, version 1"
# The scale of a config file as it is; its SCALES name others.
THIS_SCALE = "cpu"
USUALLY_NOT_DECAYED = ("scale", "bias", "embedding", "position_table")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How a model is trained.

    Attributes:
      steps: number of optimiser steps.
      batch_size: examples per optimiser step.
      accumulate: number of equal parts in which a batch is computed, to save memory.
      learning_rate: the largest learning rate.
      schedule: a decay of :mod:`train.schedules`.
      warmup: share of the steps in which the learning rate rises linearly.
      final: the last learning rate as a share of the largest.
      power: exponent of the polynomial schedule.
      beta1, beta2, eps: of AdamW (Loshchilov and Hutter 2019).
      moment_dtype: type in which AdamW's first moment is kept, such as ``bfloat16``; None: that of
        the parameters. The second is always kept in theirs: its running mean changes by too little
        in a step for a shorter type.
      weight_decay: decoupled, multiplied by the learning rate.
      no_decay: parameters that are not decayed: each entry is a whole component of their path, such
        as ``scale`` (norms), ``embedding`` or ``attention_norm``.
      clip: largest global norm of the gradient; None: no clipping.
      skip: how many bad steps in a row are left out, parameters and moments staying as they were,
        before training stops; 0: the first stops it. A step is bad if its loss or its gradient is
        not finite.
      spike: with ``skip`` a step is also bad if its gradient's norm, before clipping, is so many
        times the mean of the steps before; None: however large.
      log_every: steps between two lines of metrics.
      save_every: steps between two checkpoints; the last step is always saved.
      keep: how many of the newest checkpoints are kept.
      initial: a run folder, from whose parameters training starts, the optimiser anew;
        ``{encoding}`` in it stands for the name of the model's encoding. None: random parameters.
    """

    steps: int
    batch_size: int
    learning_rate: float
    accumulate: int = 1
    schedule: str = "cosine"
    warmup: float = 0.0
    final: float = 0.0
    power: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    moment_dtype: str | None = None
    weight_decay: float = 0.01
    no_decay: tuple[str, ...] = USUALLY_NOT_DECAYED
    clip: float | None = 1.0
    skip: int = 0
    spike: float | None = None
    log_every: int = 10
    save_every: int = 1000
    keep: int = 3
    initial: str | None = None

    def __post_init__(self):
        for name in ("steps", "batch_size", "accumulate", "log_every", "save_every", "keep"):
            value = getattr(self, name)
            require(value >= 1, f"train: {name} must be at least 1; got {value}")
        require(
            self.batch_size % self.accumulate == 0,
            f"train: batch_size = {self.batch_size} is not a multiple of accumulate = "
            f"{self.accumulate}",
        )
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"train: {name} must be in [0, 1); got {value}")
        choose("train moment_dtype", self.moment_dtype, (None, "float32", "bfloat16"))
        require(self.eps > 0, f"train: eps must be positive; got {self.eps}")
        require(
            self.weight_decay >= 0,
            f"train: weight_decay must not be negative; got {self.weight_decay}",
        )
        require(
            self.clip is None or self.clip > 0,
            f"train: clip must be positive or None; got {self.clip}",
        )
        require(self.skip >= 0, f"train: skip must not be negative; got {self.skip}")
        require(
            self.spike is None or (self.spike > 1 and self.skip > 0),
            f"train: spike must exceed 1 and needs skip; got spike = {self.spike}, skip = "
            f"{self.skip}",
        )
        _ = self.learning_rates

    @property
    def learning_rates(self) -> Callable[[Any], Any]:
        """The learning rate as a function of the step."""
        return schedules.create(
            self.schedule,
            peak=self.learning_rate,
            steps=self.steps,
            warmup=self.warmup,
            final=self.final,
            power=self.power,
        )


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that decides what a run computes.

    Attributes:
      name: for tables and plots.
      seed: of the parameters, of the data and of encodings that draw.
      model: its ``position`` is always an encoding, its ``vocab_size`` at least the task's.
      task: what is trained and judged.
      train: how it is trained.
      evaluation: how it is judged: an instance of the task's ``Evaluation``.
      adapt: the trained model that is adapted, from which ``model`` follows; None: everything is
        trained, from random parameters or those of ``train.initial``.
      sharding: the mesh, and rules that say what it splits; None: one device.
    """

    name: str
    seed: int
    model: ModelConfig
    task: Task
    train: TrainConfig
    evaluation: Any
    adapt: Adaptation | None = None
    sharding: ShardingConfig | None = None

    def __post_init__(self):
        wanted = type(self.task).Evaluation
        require(
            isinstance(self.evaluation, wanted),
            f"evaluation: the task {task_name(self.task)!r} takes {wanted.__qualname__}; got "
            f"{self.evaluation!r}",
        )
        require(0 <= self.seed < 2**32, f"seed must be in [0, 2**32); got {self.seed}")
        require(
            self.model.vocab_size >= self.task.vocab_size,
            f"model.vocab_size = {self.model.vocab_size} is too small for the task, which has "
            f"{self.task.vocab_size} tokens",
        )
        require(
            self.adapt is None or self.train.initial is None,
            f"adapt.base = {self.adapt and self.adapt.base!r} and train.initial = "
            f"{self.train.initial!r} both say what to start from: give one of them",
        )
        self.model.position.check(self.model)

    @property
    def steps(self) -> int:
        """Optimiser steps in all: ``train.steps``, or none if nothing trains."""
        return self.train.steps if self.adapt is None or self.adapt.trains else 0

    @property
    def label(self) -> str:
        """What it is called beside others: its method of adaptation, or its encoding."""
        return self.model.position.kind if self.adapt is None else self.adapt.method


def from_file(
    path: str | Path, overrides: Sequence[str] = (), report: Report = print
) -> Experiment:
    """The experiment of a config file, as changed by the command line.

    An option that the file sets for one encoding is dropped, and ``report`` is told, if another
    encoding is chosen on the command line and does not have it (or has one of the same name that
    means something else). Given on the command line itself, an option that the encoding lacks is an
    error. Methods of adaptation and their options are treated alike.

    ``--config.scale=NAME`` changes the fields that the file's mapping ``SCALES`` has under that
    name, before anything else that the command line says.

    Args:
      path: a Python file with a function ``get_config()``.
      overrides: ``--config.a.b=value`` each.
      report: called with one line if options were dropped.

    Raises:
      ValueError: for a file that does not load, or an unknown or unfitting field.
    """
    scale, overrides = take_scale(overrides)
    values = {"name": Path(path).stem, **_load_file(Path(path), scale)}
    task = _named(overrides, "task.name") or values["task"].get("name", "addition")
    template = _template(task)
    _check_names(values, template)
    given = _parse(overrides, template)
    if "adapt" in values:
        kind, old, dropped = _choose_method(values, given)
    else:
        kind, old, dropped = _choose_encoding(values, given)
    if dropped:
        what = "method" if "adapt" in values else "encoding"
        report(
            f"set in {path} for the {what} {old!r} and not carried over to {kind!r}: "
            f"{', '.join(dropped)}"
        )
    for name, value in given.items():
        _set(values, name, value)
    return from_mapping(values)


def _choose_encoding(values: dict[str, Any], given: Mapping[str, Any]) -> tuple[str, str, list]:
    """Removes the file's options of another encoding than the one given: new, old, and which."""
    position = _position(values["model"].get("position", {}))
    old, kind = position["kind"], given.get("model.position.kind", position["kind"])
    if kind == old:
        return kind, old, []
    dropped = _foreign_options(position, kind)
    values["model"]["position"] = {k: v for k, v in position.items() if k not in dropped}
    return kind, old, dropped


def _choose_method(values: dict[str, Any], given: Mapping[str, Any]) -> tuple[str, str, list]:
    """The same of methods of adaptation: their own options, and TAPE's, which are the model's."""
    section = values["adapt"]
    old = section.get("method", Adaptation.method)
    method = given.get("adapt.method", old)
    choose("adapt method", method, adaptation.METHODS)
    if method == old:
        return method, old, []
    options = section.get("options", {})
    dropped = [name for name in options if name not in adaptation.option_names(method)]
    section["options"] = {k: v for k, v in options.items() if k not in dropped}
    if method != "tape" and "position" in values["model"]:
        dropped += [k for k in values["model"].pop("position") if k != "kind"]
    return method, old, dropped


def change_evaluation(
    experiment: Experiment, overrides: Sequence[str]
) -> tuple[Any, ShardingConfig | None]:
    """How to evaluate, with ``--config.evaluation.name=value`` options applied, and where.

    Returns:
      An instance of the task's ``Evaluation``, and the mesh of ``--config.sharding.name=value``
      options; None if there are none.

    Raises:
      ValueError: for an unknown or unfitting field, or one of another section.
    """
    given = _parse(overrides, _template(task_name(experiment.task)))
    for name in given:
        require(
            name.startswith(("evaluation.", "sharding.")),
            f"config.{name} cannot be changed after training; only config.evaluation.* and "
            "config.sharding.* can",
        )
    options, mesh = (
        {name.removeprefix(prefix): x for name, x in given.items() if name.startswith(prefix)}
        for prefix in ("evaluation.", "sharding.")
    )
    chosen = {**_shallow(experiment.evaluation), **options}
    return (
        _build(type(experiment.evaluation), chosen, "evaluation"),
        _build(ShardingConfig, mesh, "sharding") if mesh else None,
    )


def from_mapping(values: Mapping[str, Any]) -> Experiment:
    """The experiment of nested mappings with the fields of :class:`Experiment`.

    ``model.position`` holds the encoding's ``kind`` and its options (or is the kind), ``task`` the
    task's ``name`` and its options. ``model.vocab_size`` may be left out.

    Raises:
      ValueError: for an unknown, missing or unfitting field.
    """
    values = {"seed": 0, "evaluation": {}, "adapt": None, "sharding": None, **values}
    for name in values:
        choose("field", name, [f.name for f in dataclasses.fields(Experiment)])
    for name in ("name", "model", "task", "train"):
        require(name in values, f"the config lacks {name!r}")
    options = dict(values["task"])
    task = _build(_task_type(options.pop("name", "addition")), options, "task")
    adapt = None
    if values["adapt"] is not None:
        adapt = _build(Adaptation, values["adapt"], "adapt")
    return Experiment(
        name=_convert(values["name"], str, "name"),
        seed=_convert(values["seed"], int, "seed"),
        model=_adapted(values["model"], adapt) if adapt else _model(values["model"], task),
        task=task,
        train=_build(TrainConfig, values["train"], "train"),
        evaluation=_build(type(task).Evaluation, values["evaluation"], "evaluation"),
        adapt=adapt,
        sharding=None
        if values["sharding"] is None
        else _build(ShardingConfig, values["sharding"], "sharding"),
    )


def _model(values: Mapping[str, Any], task: Task) -> ModelConfig:
    """The model of a config; its vocabulary is the task's if it says nothing of it."""
    encoding = _encoding(values.get("position", {}), task)
    fields = {"vocab_size": task.vocab_size, **values, "position": encoding}
    return _build(ModelConfig, fields, "model")


def _adapted(values: Mapping[str, Any], adapt: Adaptation) -> ModelConfig:
    """The model that follows from the base and the method; what a config states must agree."""
    hints = _hints(ModelConfig)
    for name in values:
        _require_known(name, hints, "model")
    position = values.get("position", {})
    position = {"kind": position} if isinstance(position, str) else dict(position)
    tape = None
    if adapt.method == "tape":
        own = {k: v for k, v in position.items() if k not in ("kind", *adaptation.OF_THE_BASE)}
        tape = _build(positions.Tape, own, "model.position", "the encoding 'tape'")
    computed = {
        name: _convert(values[name], hints[name], f"model.{name}")
        for name in adaptation.COMPUTED
        if name in values
    }
    base = dataclasses.replace(_base(adapt.base), **computed)
    model = adaptation.describe(adapt, base, tape).model.config
    for name in position:
        known = ("kind", *_hints(type(model.position)))
        _require_known(name, known, f"the encoding {model.position.kind!r}")
    found = _flatten(_model_to_json(model))
    found |= {"num_kv_heads": model.kv_heads, "head_dim": model.dim}
    found |= {"intermediate_size": model.mlp_size}
    for name, value in _flatten({**values, "position": position}).items():
        value = tuple(value) if isinstance(value, list) else value
        require(
            value is None or name in adaptation.COMPUTED or value == found.get(name),
            f"model.{name} = {value!r} does not agree with the base {adapt.base} and the method "
            f"{adapt.method!r}, from which {found.get(name)!r} follows; it may be left out",
        )
    return model


def _base(name: str) -> ModelConfig:
    """The description of what is adapted."""
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


def read_record(folder: Path) -> dict[str, Any] | None:
    """What ``experiment.json`` of a run folder holds; None if the folder is no run."""
    try:
        record = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("format") == FORMAT else None


def to_json(experiment: Experiment) -> dict[str, Any]:
    """Nested dicts of JSON types from which :func:`from_mapping` makes the same experiment."""
    values = dataclasses.asdict(experiment)
    values["model"] = _model_to_json(experiment.model)
    values["task"] = {"name": task_name(experiment.task), **values["task"]}
    return values


def _model_to_json(model: ModelConfig) -> dict[str, Any]:
    values = dataclasses.asdict(model)
    return {**values, "position": {"kind": model.position.kind, **values["position"]}}


def differences(first: Experiment, second: Experiment) -> list[str]:
    """The fields in which two experiments differ, with both values."""
    a, b = _flatten(to_json(first)), _flatten(to_json(second))
    absent = "(absent)"
    return [
        f"{name}: {a.get(name, absent)!r} there, {b.get(name, absent)!r} here"
        for name in dict.fromkeys([*a, *b])
        if a.get(name, absent) != b.get(name, absent)
    ]


def task_name(task: Task) -> str:
    """The name under which a task is registered."""
    return next(name for name in TASKS if _task_type(name) is type(task))


def _task_type(name: str) -> Any:
    choose("task", name, TASKS)
    module, _, cls = TASKS[name].partition(":")
    return getattr(importlib.import_module(module), cls)


def _encoding(values: Any, task: Task | None = None) -> positions.Encoding:
    """The encoding of a mapping with ``kind``; the task knows which tokens are digits."""
    values = _position(values)
    kind = values.pop("kind")
    choose("position encoding", kind, positions.registry)
    cls = positions.registry[kind]
    if "digits" in _hints(cls) and (digits := getattr(task, "digit_ids", None)):
        values.setdefault("digits", digits)
    return _build(cls, values, "model.position", f"the encoding {kind!r}")


def _position(values: Any) -> dict[str, Any]:
    """``model.position`` as a new dict with ``kind``."""
    require(
        isinstance(values, str | Mapping),
        f"config.model.position: expected an encoding's name or its fields, got {values!r}",
    )
    return {"kind": "tape", **({"kind": values} if isinstance(values, str) else values)}


def _foreign_options(position: Mapping[str, Any], kind: str) -> list[str]:
    """The options of ``position`` that its encoding does not share with the encoding ``kind``.

    Shared is what both inherit from one class: the ``width`` of TAPE is not the ``width`` of FIRE.
    """
    old = type(_encoding(position))
    choose("position encoding", kind, positions.registry)

    def origin(name: str) -> type:
        return next(cls for cls in reversed(old.__mro__) if name in inspect.get_annotations(cls))

    options = [name for name in position if name != "kind"]
    return [name for name in options if not issubclass(positions.registry[kind], origin(name))]


def _hints(cls: type) -> dict[str, Any]:
    """The type of each field with which a dataclass is made."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def _inner_dataclass(hint: Any) -> type | None:
    """The dataclass in a hint such as ``RopeScaling`` or ``RopeScaling | None``."""
    members = typing.get_args(hint) if _is_union(hint) else (hint,)
    return next((m for m in members if dataclasses.is_dataclass(m)), None)  # type: ignore[return-value]


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _build(cls: type, values: Mapping[str, Any], path: str, what: str | None = None) -> Any:
    """``cls`` from a mapping, every value converted to the type of its field."""
    require(isinstance(values, Mapping), f"{path}: expected fields, got {values!r}")
    hints = _hints(cls)
    for name in values:
        _require_known(name, hints, what or path)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    required = [
        name
        for name in hints
        if fields[name].default is dataclasses.MISSING
        and fields[name].default_factory is dataclasses.MISSING
    ]
    missing = [name for name in required if name not in values]
    require(not missing, f"{path} lacks {', '.join(missing)}")
    converted = {}
    for name, value in values.items():
        inner = _inner_dataclass(hints[name])
        if inner and isinstance(value, Mapping):
            default = fields[name].default
            start = _shallow(default) if dataclasses.is_dataclass(default) else {}
            converted[name] = _build(inner, {**start, **value}, f"{path}.{name}")
        else:
            converted[name] = _convert(value, hints[name], f"{path}.{name}")
    return cls(**converted)


def _convert(value: Any, hint: Any, path: str) -> Any:
    """``value`` as the type ``hint``: lists become tuples, whole numbers int or float as wanted."""
    value = _tuples(value)
    if _matches(value, hint):
        return value
    if type(value) is int and _matches(float(value), hint):
        return float(value)
    if type(value) is float and value.is_integer() and _matches(int(value), hint):
        return int(value)
    wanted = hint.__name__ if isinstance(hint, type) else str(hint)
    raise ValueError(f"{path}: expected {wanted}, got {value!r}")


def _tuples(value: Any) -> Any:
    """Lists, and lists in them, as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _matches(value: Any, hint: Any) -> bool:
    """Whether ``value`` is of a type such as ``int``, ``str | None`` or ``tuple[int, ...]``."""
    if hint is Any:
        return True
    if _is_union(hint):
        return any(_matches(value, member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        members = typing.get_args(hint)
        if not isinstance(value, tuple):
            return False
        if members[-1] is Ellipsis:
            members = members[:1] * len(value)
        return len(members) == len(value) and all(map(_matches, value, members))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, hint)


def _template(task: str) -> ConfigDict:
    """Every field that may be given on the command line, with placeholders for values."""
    encodings = {
        name: hint for cls in positions.registry.values() for name, hint in _hints(cls).items()
    }
    return ConfigDict(
        {
            "name": config_dict.placeholder(str),
            "seed": config_dict.placeholder(object),
            "model": {
                **_placeholders(_hints(ModelConfig)),
                "position": {"kind": config_dict.placeholder(str), **_placeholders(encodings)},
            },
            "task": {
                "name": config_dict.placeholder(str),
                **_placeholders(_hints(_task_type(task))),
            },
            "train": _placeholders(_hints(TrainConfig)),
            "evaluation": _placeholders(_hints(_task_type(task).Evaluation)),
            "adapt": _placeholders(_hints(Adaptation)),
            "sharding": _placeholders(_hints(ShardingConfig)),
        }
    )


def _placeholders(hints: Mapping[str, Any]) -> dict[str, Any]:
    """Text is taken as it is; everything else is read as a Python literal, ``None`` included."""
    result: dict[str, Any] = {}
    for name, hint in hints.items():
        inner = _inner_dataclass(hint)
        if inner:
            result[name] = _placeholders(_hints(inner))
        else:
            result[name] = config_dict.placeholder(str if hint is str else object)
    return result


def _parse(overrides: Sequence[str], template: ConfigDict) -> dict[str, Any]:
    """``--config.a.b=value`` options as ``{"a.b": value}``."""
    for override in overrides:
        name, equals, _ = override.removeprefix("--config.").partition("=")
        require(
            override.startswith("--config.") and bool(equals),
            f"unknown option {override!r}: expected --config.field=value",
        )
        node: Any = template
        for i, part in enumerate(name.split(".")):
            where = ".".join(["config", *name.split(".")[:i]])
            require(isinstance(node, ConfigDict), f"{where} is a single value, it has no {part!r}")
            _require_known(part, node, where)
            node = node[part]
        require(
            not isinstance(node, ConfigDict),
            f"config.{name} is a group; give one of its fields: {', '.join(node)}"
            if isinstance(node, ConfigDict)
            else "",
        )
    arguments = ["", *overrides]
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", template, flag_values=values, sys_argv=arguments)
    values(arguments)
    return config_flags.get_override_values(values["config"])


def _named(overrides: Sequence[str], name: str) -> str | None:
    """The value that the command line gives to one field, before anything is parsed."""
    start = f"--config.{name}="
    return next((o.removeprefix(start) for o in reversed(overrides) if o.startswith(start)), None)


def take_scale(overrides: Sequence[str]) -> tuple[str, list[str]]:
    """The scale that the command line asks for, and what else it says."""
    start = "--config.scale="
    others = [override for override in overrides if not override.startswith(start)]
    return _named(overrides, "scale") or THIS_SCALE, others


def _load_file(path: Path, scale: str = THIS_SCALE) -> dict[str, Any]:
    require(path.is_file(), f"there is no config file {path}")
    try:
        module = runpy.run_path(str(path))
        config = module["get_config"]()
    except Exception as error:
        raise ValueError(
            f"the config file {path} does not load: {type(error).__name__}: {error}"
        ) from error
    require(
        isinstance(config, ConfigDict),
        f"get_config() of {path} must return an ml_collections.ConfigDict; got {type(config)}",
    )
    values = config.to_dict()
    scales = {THIS_SCALE: {}, **module.get("SCALES", {})}
    choose(f"scale of {path}", scale, scales)
    for name, value in scales[scale].items():
        _set(values, name, value)
    for group in ("model", "task", "train", "evaluation"):
        fields = values.setdefault(group, {})
        require(isinstance(fields, Mapping), f"config.{group}: expected fields, got {fields!r}")
    fields = values.get("adapt", {})
    require(isinstance(fields, Mapping), f"config.adapt: expected fields, got {fields!r}")
    position = values["model"].get("position")
    # Where a base decides which encoding it is, none is taken for granted.
    if "position" in values["model"] and not ("adapt" in values and isinstance(position, Mapping)):
        values["model"]["position"] = _position(position)
    return values


def _check_names(values: Mapping[str, Any], template: ConfigDict, where: str = "config") -> None:
    for name, value in values.items():
        _require_known(name, template, where)
        if isinstance(template[name], ConfigDict):
            require(isinstance(value, Mapping), f"{where}.{name}: expected fields, got {value!r}")
            _check_names(value, template[name], f"{where}.{name}")


def _require_known(name: str, known: Iterable[str], where: str) -> None:
    known = list(known)
    if name not in known:
        hint = nearest(name, known)
        raise ValueError(f"unknown field {name!r} of {where}{hint}; it has: {', '.join(known)}")


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    *groups, name = path.split(".")
    for group in groups:
        values = values.setdefault(group, {})
    values[name] = value


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _shallow(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
