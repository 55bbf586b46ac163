"""Config files, and their changes from the command line."""

from __future__ import annotations

import functools
import inspect
import operator
import runpy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_dict, config_flags

from tape_jax import ModelConfig, RopeScaling, positions
from tape_jax.positions import option_names
from tape_jax.sharding import ShardingConfig
from train.checks import choose, require, require_known
from train.data import tokenizers
from train.data.tokenizers import Tokenized
from train.experiment import adaptation
from train.experiment.adaptation import Adaptation
from train.experiment.description import Experiment, TrainConfig
from train.experiment.fields import build, hints_of, inner_dataclass, shallow
from train.experiment.records import (
    base_model,
    base_tokenizer,
    from_mapping,
    position_fields,
    read_record,
    to_json,
)
from train.tasks import task_name, task_type

Report = Callable[[str], None]

# The scale of an unchanged config file; its SCALES name others.
THIS_SCALE = "cpu"


def from_file(
    path: str | Path, overrides: Sequence[str] = (), report: Report = print
) -> Experiment:
    """Reads the experiment of a config file, with the command line's changes.

    The command line may choose another encoding than the file. An option that the file sets is
    then dropped, and ``report`` is called, if the new encoding does not have it (or has one of the
    same name that means something else). On the command line itself, an option that the encoding
    lacks is an error. The same holds for methods of adaptation and their options.

    ``--config.scale=NAME`` changes the fields under that name in the file's mapping ``SCALES``,
    before all other command line options.

    Args:
      path: a Python file with a function ``get_config()``.
      overrides: ``--config.a.b=value`` each.
      report: called with a line if options were dropped, and for each change to a base.

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
    wanted = from_mapping(values)
    for note in _changes_of_base(wanted):
        report(note)
    return wanted


def _changes_of_base(experiment: Experiment) -> list[str]:
    """Describes what a new experiment changes in its base before any training.

    Raises:
      ValueError: if its tokenizer is not the one the base was trained with, or it replaces the
        base's rotary scaling without ``replace_scaling``.
    """
    section, task = experiment.adapt, experiment.task
    if section is None:
        return []
    notes = []
    if isinstance(task, Tokenized):
        theirs = base_tokenizer(section.base)
        if not theirs:
            notes.append(
                f"the base {section.base} has no tokenizer: task.tokenizer = {task.tokenizer!r} is "
                "taken for its own"
            )
        else:
            found = theirs.get("tokenizer_fingerprint") or tokenizers.fingerprint(section.base)
            require(
                found in (None, task.tokenizer_fingerprint)
                or Path(task.tokenizer).parent == Path(section.base),
                f"task.tokenizer = {task.tokenizer!r} is not the tokenizer of the base "
                f"{section.base}, which cannot make sense of its tokens: leave task.tokenizer out",
            )
    encodings = base_model(section.base).position, experiment.model.position
    if section.method in ("drope", "encoding"):
        notes.append("encoding: " + " -> ".join(encoding.kind for encoding in encodings))
    layers = [x.of_layers(experiment.model.num_layers) for x in encodings]
    pairs = zip(*([_scaling(one.encoding) for one in each] for each in layers), strict=True)
    for before, after in dict.fromkeys((old or RopeScaling(), new) for old, new in pairs):
        if after is None or after == before:
            continue
        change = f"scaling: {_spoken(before)} -> {_spoken(after)}"
        require(
            section.replace_scaling or before == RopeScaling(),
            f"{change}: the base {section.base} has a scaling of its own, and what it computes "
            "would be another before the first step. Take a config without adapt.scaling, such as "
            "configs/retrofit.py, or give --config.adapt.replace_scaling=True",
        )
        notes.append(change)
    return notes


def _scaling(encoding: positions.Encoding) -> RopeScaling | None:
    """Returns the rotary scaling of an encoding or of one of its parts, or None."""
    return next((part.scaling for part in encoding.members if hasattr(part, "scaling")), None)


def _spoken(scaling: RopeScaling) -> str:
    return "none" if scaling.kind == "none" else f"{scaling.kind} x {scaling.factor:g}"


def change(experiment: Experiment, overrides: Sequence[str]) -> Experiment:
    """Applies ``--config.a.b=value`` options to an experiment.

    Raises:
      ValueError: for an unknown or unfitting field.
    """
    values = to_json(experiment)
    given = _parse(overrides, _template(task_name(experiment.task)))
    if experiment.adapt is None:
        _choose_encoding(values, given)
    for name, value in given.items():
        _set(values, name, value)
    return from_mapping(values)


def change_evaluation(
    experiment: Experiment, overrides: Sequence[str]
) -> tuple[Any, ShardingConfig | None]:
    """Applies ``--config.evaluation.name=value`` options to an evaluation, and reads its mesh.

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
    chosen = {**shallow(experiment.evaluation), **options}
    return (
        build(type(experiment.evaluation), chosen, "evaluation"),
        build(ShardingConfig, mesh, "sharding") if mesh else None,
    )


def take_scale(overrides: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the scale that the command line chooses, and the other options."""
    start = "--config.scale="
    others = [override for override in overrides if not override.startswith(start)]
    return _named(overrides, "scale") or THIS_SCALE, others


def _named(overrides: Sequence[str], name: str) -> str | None:
    """Finds the value of one field on the command line, without parsing it."""
    start = f"--config.{name}="
    return next((o.removeprefix(start) for o in reversed(overrides) if o.startswith(start)), None)


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
    # If a base decides the encoding, no default is assumed.
    if "position" in values["model"] and not ("adapt" in values and isinstance(position, Mapping)):
        values["model"]["position"] = position_fields(position)
    return values


def _template(task: str) -> dict[str, Any]:
    """Returns every field that the command line accepts, with placeholders for values."""
    encodings = _Encodings(
        {kind: _placeholders(hints_of(cls)) for kind, cls in positions.registry.items()}
    )
    encodings["kind"] = config_dict.placeholder(str)
    return {
        "name": config_dict.placeholder(str),
        "seed": config_dict.placeholder(object),
        "model": {
            **_placeholders(hints_of(ModelConfig)),
            "position": encodings,
        },
        "task": {
            "name": config_dict.placeholder(str),
            **_placeholders(hints_of(task_type(task))),
        },
        "train": _placeholders(hints_of(TrainConfig)),
        "evaluation": _placeholders(hints_of(task_type(task).Evaluation)),
        "adapt": _placeholders(hints_of(Adaptation)),
        "sharding": _placeholders(hints_of(ShardingConfig)),
    }


class _Encodings(dict[str, Any]):
    """Fields of encodings; names that begin with their kind's are accepted but not listed."""

    def __init__(self, fields: Mapping[str, Mapping[str, Any]]):
        """Takes the fields of each kind of encoding."""
        super().__init__({name: x for own in fields.values() for name, x in own.items()})
        self._longer = {f"{kind}_{n}": x for kind, own in fields.items() for n, x in own.items()}

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._longer

    def __missing__(self, name: str) -> Any:
        return self._longer[name]


def _check_names(
    values: Mapping[str, Any], known: Mapping[str, Any], where: str = "config"
) -> None:
    """Raises ValueError for a name in nested mappings that ``known`` lacks."""
    for name, value in values.items():
        if name not in known:
            require_known(name, known, where)
        if isinstance(known[name], Mapping):
            require(isinstance(value, Mapping), f"{where}.{name}: expected fields, got {value!r}")
            _check_names(value, known[name], f"{where}.{name}")


def _spelled_out(options: Sequence[str]) -> list[str]:
    """Expands ``--config.model.position=tape+fox``, which is short for its ``kind``."""
    short, whole = "--config.model.position=", "--config.model.position.kind="
    return [o.replace(short, whole, 1) if o.startswith(short) else o for o in options]


def _check_options(options: Sequence[str], known: Mapping[str, Any]) -> None:
    """Raises ValueError unless each option is ``--config.a.b=value`` of a known field."""
    for option in options:
        name, equals, _ = option.removeprefix("--config.").partition("=")
        require(
            option.startswith("--config.") and bool(equals),
            f"unknown option {option!r}: expected --config.field=value",
        )
        node: Any = known
        where = "config"
        for part in name.split("."):
            require(isinstance(node, Mapping), f"{where} is a single value, it has no {part!r}")
            if part not in node:
                require_known(part, node, where)
            node, where = node[part], f"{where}.{part}"
        if isinstance(node, Mapping):
            raise ValueError(f"{where} is a group; give one of its fields: {', '.join(node)}")


def help_config(
    path: Path | None = None, run: Path | None = None, options: Sequence[str] = ()
) -> str:
    """Lists the fields that ``--config.a.b=value`` can change, one paragraph per section.

    Args:
      path: a config file, whose task's fields are listed.
      run: a run folder whose task is used without a file.
      options: ``--config.task.name=NAME`` among them chooses another task.
    """
    record = read_record(run) if run and path is None else None
    values = _load_file(path) if path else record["experiment"] if record else {}
    task = _named(options, "task.name") or values.get("task", {}).get("name", "addition")
    sections = ["--config.name=TEXT, --config.seed=NUMBER"]
    if not values and _named(options, "task.name") is None:
        sections.insert(0, f"Of the task {task}; --run=RUN or --config=FILE lists its own")
    for name, fields in _template(task).items():
        if isinstance(fields, Mapping):
            of = f" (of the task {task})" if name in ("task", "evaluation") else ""
            sections.append(f"--config.{name}.FIELD=VALUE{of}:\n  " + ", ".join(_dotted(fields)))
    return "\n\n".join(sections)


def _dotted(fields: Mapping[str, Any], before: str = "") -> list[str]:
    """Returns the dotted names of values in nested mappings."""
    return [
        name
        for key, inner in fields.items()
        for name in (
            _dotted(inner, f"{before}{key}.") if isinstance(inner, Mapping) else [before + key]
        )
    ]


def _placeholders(hints: Mapping[str, Any]) -> dict[str, Any]:
    """Makes placeholders: text stays as it is, other values are Python literals or ``None``."""
    result: dict[str, Any] = {}
    for name, hint in hints.items():
        inner = inner_dataclass(hint)
        if inner:
            result[name] = _placeholders(hints_of(inner))
        else:
            result[name] = config_dict.placeholder(str if hint is str else object)
    return result


def _parse(overrides: Sequence[str], template: Mapping[str, Any]) -> dict[str, Any]:
    """Parses ``--config.a.b=value`` options into ``{"a.b": value}``."""
    overrides = _spelled_out(overrides)
    _check_options(overrides, template)
    # Defining a flag takes time in proportion to its config, so it has the given fields only.
    chosen: dict[str, Any] = {}
    for override in overrides:
        name = override.removeprefix("--config.").partition("=")[0]
        _set(chosen, name, functools.reduce(operator.getitem, name.split("."), template))
    config = ConfigDict(chosen)
    arguments = ["", *overrides]
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=arguments)
    values(arguments)
    return config_flags.get_override_values(values["config"])


def _choose_encoding(values: dict[str, Any], given: Mapping[str, Any]) -> tuple[str, str, list]:
    """Removes the file's options of another encoding; returns new kind, old kind, option names."""
    position = position_fields(values["model"].get("position", {}))
    old, kind = position["kind"], given.get("model.position.kind", position["kind"])
    if kind == old:
        return kind, old, []
    dropped = _foreign_options(position, kind)
    values["model"]["position"] = {k: v for k, v in position.items() if k not in dropped}
    return kind, old, dropped


def _foreign_options(position: Mapping[str, Any], kind: str) -> list[str]:
    """Finds the options of ``position`` that its encoding does not share with ``kind``.

    They share what both inherit from one class: the ``width`` of TAPE is not that of FIRE.
    """
    old, new = option_names(position["kind"]), option_names(kind)

    def shared(name: str) -> bool:
        if name not in old or name not in new:
            return False
        cls, field = old[name]
        origin = next(c for c in reversed(cls.__mro__) if field in inspect.get_annotations(c))
        return new[name][1] == field and issubclass(new[name][0], origin)

    return [name for name in position if name != "kind" and not shared(name)]


def _choose_method(values: dict[str, Any], given: Mapping[str, Any]) -> tuple[str, str, list]:
    """Removes the file's options of another method, and TAPE's in ``model.position``."""
    section = values["adapt"]
    old = section.get("method", Adaptation.method)
    method = given.get("adapt.method", old)
    choose("adapt method", method, adaptation.METHODS)
    if method == old:
        return method, old, []
    options = section.get("options", {})
    dropped = [name for name in options if name not in adaptation.option_names(method)]
    section["options"] = {k: v for k, v in options.items() if k not in dropped}
    if (method != "tape" or old == "encoding") and "position" in values["model"]:
        dropped += [k for k in values["model"].pop("position") if k != "kind"]
    return method, old, dropped


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    *groups, name = path.split(".")
    for group in groups:
        if values.get(group) is None:
            values[group] = {}
        values = values[group]
    values[name] = value
