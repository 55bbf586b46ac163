"""Builds dataclasses from nested mappings, checking and converting every value."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

from train.checks import require, require_known


def build(cls: type, values: Mapping[str, Any], path: str, what: str | None = None) -> Any:
    """Builds ``cls`` from a mapping, converting every value to its field's type."""
    require(isinstance(values, Mapping), f"{path}: expected fields, got {values!r}")
    hints = hints_of(cls)
    for name in values:
        require_known(name, hints, what or path)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    required = [
        name
        for name in hints
        if fields[name].default is dataclasses.MISSING
        and fields[name].default_factory is dataclasses.MISSING
    ]
    missing = [name for name in required if name not in values]
    require(not missing, f"{path} lacks {', '.join(missing)}")
    return cls(**{n: build_field(cls, n, x, f"{path}.{n}") for n, x in values.items()})


def build_field(cls: type, name: str, value: Any, path: str) -> Any:
    """Converts the value of one field of ``cls`` to its type."""
    hint = hints_of(cls)[name]
    inner = inner_dataclass(hint)
    if inner is None or not isinstance(value, Mapping):
        return convert(value, hint, path)
    default = next(f.default for f in dataclasses.fields(cls) if f.name == name)
    start = shallow(default) if dataclasses.is_dataclass(default) else {}
    return build(inner, {**start, **value}, path)


def convert(value: Any, hint: Any, path: str) -> Any:
    """Converts ``value`` to the type ``hint``.

    Lists become tuples, and whole numbers become int or float as the hint requires. If it is a
    tuple, a single value becomes one; text splits at commas.
    """
    value = _tuples(value)
    if _matches(value, hint):
        return value
    if type(value) is int and _matches(float(value), hint):
        return float(value)
    if type(value) is float and value.is_integer() and _matches(int(value), hint):
        return int(value)
    several = tuple(value.split(",")) if isinstance(value, str) else (value,)
    if _matches(several, hint):
        return several
    wanted = hint.__name__ if isinstance(hint, type) else str(hint)
    raise ValueError(f"{path}: expected {wanted}, got {value!r}")


def _tuples(value: Any) -> Any:
    """Turns nested lists into tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _matches(value: Any, hint: Any) -> bool:
    """Returns whether ``value`` has a type such as ``str | None`` or ``tuple[int, ...]``."""
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


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def hints_of(cls: Any) -> dict[str, Any]:
    """Returns the types of a dataclass's init fields; do not change the result."""
    return _hints_of(cls)


@functools.cache
def _hints_of(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def inner_dataclass(hint: Any) -> type | None:
    """Finds the dataclass in a hint such as ``RopeScaling`` or ``RopeScaling | None``."""
    members = typing.get_args(hint) if _is_union(hint) else (hint,)
    return next((m for m in members if dataclasses.is_dataclass(m)), None)  # type: ignore[return-value]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def shallow(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
