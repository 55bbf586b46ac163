"""The fields of a config, read from the source of the classes that have them.

So a misspelt field is answered in a tenth of a second, before jax is imported. This file imports
the standard library only. It sees what is in this checkout; where jax is loaded already, and
somebody may have registered an encoding or a task of his own, :mod:`train.experiment` alone
decides.
"""

from __future__ import annotations

import ast
import difflib
import functools
import json
import runpy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
OURS = ("tape_jax", "train")

# Fields by name: None for a single value, or the fields of a group.
Fields = dict[str, Any]


class Encodings(dict[str, Any]):
    """Fields of encodings; also known, but not listed, under names that begin with their kind's."""

    def __init__(self, fields: Mapping[str, Mapping[str, Any]]):
        """Of each kind its fields."""
        super().__init__({name: x for own in fields.values() for name, x in own.items()})
        self._longer = {f"{kind}_{n}": x for kind, own in fields.items() for n, x in own.items()}

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._longer

    def __missing__(self, name: str) -> Any:
        return self._longer[name]


def check(config: Path | None, run: Path | None, options: Sequence[str]) -> None:
    """Raises ValueError for a field that is misspelt, in a config file or an option.

    Whatever else may be wrong is left for :mod:`train.experiment` to say.

    Args:
      config: the config file, if one is given.
      run: the run folder, whose task it is without one.
      options: ``--config.a.b=value`` each.
    """
    values = _record(run) if config is None else _content(config)
    if values is None or "jax" in sys.modules:
        return
    options = [option for option in options if not option.startswith("--config.scale=")]
    options = spelled_out(options)
    task = _value(options, "task.name") or values.get("task", {}).get("name", "addition")
    fields = config_fields(task)
    if fields is not None:
        check_names(values, fields)
        check_options(options, fields)


def check_names(values: Mapping[str, Any], known: Mapping[str, Any], where: str = "config") -> None:
    """Raises ValueError for a name in nested mappings that ``known`` has not."""
    for name, value in values.items():
        require_known(name, known, where)
        if isinstance(known[name], Mapping):
            if not isinstance(value, Mapping):
                raise ValueError(f"{where}.{name}: expected fields, got {value!r}")
            check_names(value, known[name], f"{where}.{name}")


def spelled_out(options: Iterable[str]) -> list[str]:
    """The options, of which ``--config.model.position=tape+fox`` names encodings in short."""
    short, whole = "--config.model.position=", "--config.model.position.kind="
    return [o.replace(short, whole, 1) if o.startswith(short) else o for o in options]


def check_options(options: Sequence[str], known: Mapping[str, Any]) -> None:
    """Raises ValueError unless each option is ``--config.a.b=value`` of a field that is known."""
    for option in options:
        name, equals, _ = option.removeprefix("--config.").partition("=")
        if not (option.startswith("--config.") and equals):
            raise ValueError(f"unknown option {option!r}: expected --config.field=value")
        node: Any = known
        where = "config"
        for part in name.split("."):
            if not isinstance(node, Mapping):
                raise ValueError(f"{where} is a single value, it has no {part!r}")
            require_known(part, node, where)
            node, where = node[part], f"{where}.{part}"
        if isinstance(node, Mapping):
            raise ValueError(f"{where} is a group; give one of its fields: {', '.join(node)}")


def require_known(name: str, known: Iterable[str], where: str) -> None:
    """Raises ValueError unless ``name`` is known; the message names the nearest that is."""
    known = known if isinstance(known, Mapping) else list(known)
    if name not in known:
        hint = nearest(name, known)
        raise ValueError(f"unknown field {name!r} of {where}{hint}; it has: {', '.join(known)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """As :func:`tape_jax._src.core.checks.nearest`, which is not to be had without jax."""
    called = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), called, n=1, cutoff=0.5)
    return f" (did you mean {called[found[0]]!r}?)" if found else ""


def config_fields(task: str) -> Fields | None:
    """Every field that a config may have; None for a task that is not in this checkout."""
    asked = _task(task)
    if asked is None:
        return None
    encodings = Encodings({each.kind(): each.fields() for each in _encodings()})
    encodings["kind"] = None
    model = _find("tape_jax._src.model.config", "ModelConfig").fields()
    return {
        "name": None,
        "seed": None,
        "model": {**model, "position": encodings},
        "task": {"name": None, **asked.fields()},
        "train": _find("train.experiment.description", "TrainConfig").fields(),
        "evaluation": asked.named("Evaluation").fields(),
        "adapt": _find("train.experiment.adaptation", "Adaptation").fields(),
        "sharding": _find("tape_jax._src.core.sharding", "ShardingConfig").fields(),
    }


class _Class(NamedTuple):
    """A class in the source of a module."""

    module: str
    node: ast.ClassDef

    def fields(self) -> Fields:
        """The fields with which the dataclass is made, those of its bases first."""
        found: Fields = {}
        for parent in self._parents():
            found |= parent.fields()
        for item in self.node.body:
            if isinstance(item, ast.AnnAssign) and _is_field(item):
                inner = next(self._groups(item.annotation), None)
                found[ast.unparse(item.target)] = inner and inner.fields()
        return found

    def kind(self) -> str:
        """What an encoding is called."""
        for item in self.node.body:
            if isinstance(item, ast.AnnAssign) and ast.unparse(item.target) == "kind":
                assert item.value is not None, f"the kind of {self.node.name} has no value"
                return ast.literal_eval(item.value)
        return next(self._parents()).kind()

    def named(self, attribute: str) -> _Class:
        """The class that an attribute of this one, or of its bases, names."""
        for item in self.node.body:
            if isinstance(item, ast.ClassDef) and item.name == attribute:
                return _Class(self.module, item)
            if isinstance(item, ast.AnnAssign) and ast.unparse(item.target) == attribute:
                assert item.value is not None, f"{attribute} of {self.node.name} has no value"
                return _find(self.module, ast.unparse(item.value))
        return next(found for p in self._parents() if (found := p.named(attribute)))

    def _parents(self) -> Iterator[_Class]:
        found = (_look_up(self.module, ast.unparse(base)) for base in self.node.bases)
        return (parent for parent in found if parent)

    def _groups(self, annotation: ast.expr) -> Iterator[_Class]:
        """The dataclasses in an annotation such as ``RopeScaling | None``."""
        if isinstance(annotation, ast.BinOp):
            yield from self._groups(annotation.left)
            yield from self._groups(annotation.right)
        else:
            found = _look_up(self.module, ast.unparse(annotation))
            if found and any("dataclass" in ast.unparse(d) for d in found.node.decorator_list):
                yield found


def _is_field(item: ast.AnnAssign) -> bool:
    left_out = item.value is not None and "init=False" in ast.unparse(item.value)
    return "ClassVar" not in ast.unparse(item.annotation) and not left_out


def _task(name: str) -> _Class | None:
    """The class of a task, from the mapping ``TASKS``."""
    tasks = ast.literal_eval(_assigned("train.tasks", "TASKS"))
    module, _, attribute = tasks.get(name, "").partition(":")
    return _find(module, attribute) if module else None


def _encodings() -> Iterator[_Class]:
    """The classes in the registry of encodings."""
    module = "tape_jax._src.positions.creation"
    names = [n.id for n in ast.walk(_assigned(module, "registry")) if isinstance(n, ast.Name)]
    return (found for name in names if (found := _look_up(module, name)))


def _assigned(module: str, name: str) -> ast.expr:
    """What a module assigns to a name, with its type."""
    return next(
        node.value
        for node in _source(module).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value
    )


def _find(module: str, name: str) -> _Class:
    found = _look_up(module, name)
    assert found is not None, f"{module} has no class {name}"
    return found


def _look_up(module: str, name: str) -> _Class | None:
    """The class that a name such as ``a`` or ``a.b`` stands for in one of our modules, if any."""
    head, _, rest = name.partition(".")
    for node in _source(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _Class(module, node)
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in OURS:
            for alias in node.names:
                if head == (alias.asname or alias.name):
                    if rest:
                        return _look_up(f"{node.module}.{alias.name}", rest)
                    return _look_up(str(node.module), alias.name)
    return None


@functools.cache
def _source(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _content(path: Path) -> dict[str, Any] | None:
    """What a config file says; None if it does not load."""
    if not path.is_file():
        raise ValueError(f"there is no config file {path}")
    try:
        values = runpy.run_path(str(path))["get_config"]().to_dict()
        model = values.get("model", {})
        if isinstance(model.get("position"), str):
            values["model"] = {**model, "position": {"kind": model["position"]}}
        return values
    except Exception:
        return None


def _record(run: Path | None) -> dict[str, Any] | None:
    """What the task of a run is; None if that is not a run."""
    try:
        text = ((run or Path()) / "experiment.json").read_text(encoding="utf-8")
        return {"task": {"name": json.loads(text)["experiment"]["task"]["name"]}}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _value(options: Sequence[str], name: str) -> str | None:
    """What the options say of a field."""
    start = f"--config.{name}="
    return next((o.removeprefix(start) for o in reversed(options) if o.startswith(start)), None)
