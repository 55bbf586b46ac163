"""Errors that say what was given and what was expected."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
from collections.abc import Iterable, Mapping
from typing import Any


def require(condition: bool, message: str) -> None:
    """Raises ``ValueError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def choose(what: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raises ValueError unless ``value`` is one of ``allowed``; the error names the nearest."""
    allowed = tuple(allowed)
    if value not in allowed:
        names = ", ".join(map(repr, allowed))
        raise ValueError(
            f"unknown {what} {value!r}: expected one of {names}{nearest(value, allowed)}"
        )


def require_known(name: str, known: Iterable[str], where: str) -> None:
    """Raises ValueError unless the field ``name`` is known; the error names the nearest."""
    known = tuple(known)
    if name not in known:
        raise ValueError(
            f"unknown field {name!r} of {where}{nearest(name, known)}; it has: {', '.join(known)}"
        )


def nearest(name: Any, known: Iterable[Any]) -> str:
    """``" (did you mean 'x'?)"`` for the known name nearest to ``name``, or an empty string.

    Case is ignored.
    """
    called = {str(one).lower(): str(one) for one in known}
    found = difflib.get_close_matches(str(name).lower(), called, n=1, cutoff=0.5)
    return f" (did you mean {called[found[0]]!r}?)" if found else ""


def positive(what: str, value: Any, *, optional: bool = False) -> None:
    """Raises ValueError unless ``value`` is a positive integer, or None if it is ``optional``."""
    if not (optional and value is None) and not _is_integer(value, least=1):
        or_none = " or None" if optional else ""
        raise ValueError(f"{what} must be a positive integer{or_none}; got {value!r}")


def not_negative(what: str, value: Any) -> None:
    """Raises ValueError unless ``value`` is an integer from 0 on."""
    if not _is_integer(value, least=0):
        raise ValueError(f"{what} must be an integer from 0 on; got {value!r}")


def _is_integer(value: Any, least: int) -> bool:
    """Returns whether ``value`` is an int of Python or numpy, not bool, and at least ``least``."""
    integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return integer and value >= least


def from_mapping(cls: type, values: Mapping[str, Any], *, what: str) -> Any:
    """Builds the dataclass ``cls``; an unknown field is an error that names the nearest one."""
    fields = [f.name for f in dataclasses.fields(cls) if f.init]
    for name in values:
        require_known(name, fields, what)
    return cls(**values)
