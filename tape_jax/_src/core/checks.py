"""Errors that say what was given and what was expected."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import operator
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

# Types of what is computed.
FLOATS = ("float32", "bfloat16", "float16", "float64")


def nearest(name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> str:
    """``" (did you mean 'x'?)"`` for the known name nearest to ``name``, or an empty string.

    Args:
      name: what was given.
      known: names to choose from; capital letters do not count.
      aliases: known names by what else people call them, in small letters.
    """
    given = str(name).lower()
    called = {str(k).lower(): str(k) for k in known} | dict(aliases or {})
    near = difflib.get_close_matches(given, called, n=1, cutoff=0.5)
    return f" (did you mean {called[near[0]]!r}?)" if near else ""


def choose(
    what: str, value: Any, allowed: Iterable[Any], aliases: Mapping[str, str] | None = None
) -> Any:
    """Returns ``value``, which must be in ``allowed``; ``aliases``: see :func:`nearest`."""
    allowed = tuple(allowed)
    if value not in allowed:
        names = ", ".join(repr(a) for a in allowed)
        hint = nearest(value, allowed, aliases)
        raise ValueError(f"unknown {what} {value!r}: expected one of {names}{hint}")
    return value


def require(condition: bool, message: str) -> None:
    """Raises ``ValueError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def refuse(when: bool, reason: str) -> None:
    """Raises ``NotImplementedError(reason)`` if ``when`` holds."""
    if when:
        raise NotImplementedError(reason)


def positive(what: str, value: Any, *, optional: bool = False) -> Any:
    """A positive integer as Python's ``int``, with ``optional`` also None; ValueError if not."""
    if optional and value is None:
        return None
    number = _integer(value)
    if number is None or number < 1:
        or_none = " or None" if optional else ""
        raise ValueError(f"{what} must be a positive integer{or_none}; got {value!r}")
    return number


def not_negative(what: str, value: Any) -> int:
    """An integer from 0 on as Python's ``int``; ValueError if not."""
    number = _integer(value)
    if number is None or number < 0:
        raise ValueError(f"{what} must be an integer from 0 on; got {value!r}")
    return number


def window(what: str, value: Any) -> int | tuple[int, int] | None:
    """An integer from 0 on, a pair of them, or None; ValueError if it is none of these."""
    if isinstance(value, tuple | list) and len(value) == 2:
        left, right = (not_negative(what, size) for size in value)
        return left, right
    return None if value is None else not_negative(what, value)


def truth(what: str, value: Any) -> bool:
    """A truth value of Python or numpy as ``bool``; ValueError if not."""
    require(isinstance(value, bool | np.bool_), f"{what} must be True or False; got {value!r}")
    return bool(value)


def number(what: str, value: Any, *, optional: bool = False) -> float | None:
    """A finite number from 0 on as Python's ``float``; ValueError if not."""
    if optional and value is None:
        return None
    found = _real(value)
    or_none = " or None" if optional else ""
    require(
        found is not None and found >= 0,
        f"{what} must be a number from 0 on{or_none}; got {value!r}",
    )
    return found


def real(what: str, value: Any, *, optional: bool = False) -> Any:
    """A finite number as Python's ``float``, with ``optional`` also None; ValueError if not."""
    if optional and value is None:
        return None
    found = _real(value)
    if found is None:
        or_none = " or None" if optional else ""
        raise ValueError(f"{what} must be a finite number{or_none}; got {value!r}")
    return found


def _real(value: Any) -> float | None:
    """A finite number of any library as ``float``; None if it is none, or a truth value."""
    try:
        found = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def _integer(value: Any) -> int | None:
    """An integer of Python, numpy or jax as ``int``; None if it is none, or a truth value."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _is_key(value: Any) -> bool:
    """Returns whether a value is a random key, of either style."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return False
    return jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == np.uint32 and value.ndim > 0)


def _is_dtype(value: Any) -> bool:
    """Returns whether a value names a type of numbers, as jax takes them; None is the default."""
    try:
        return jnp.issubdtype(np.dtype(value), jnp.number)
    except TypeError:
        return False


# What arguments of each type have to be: in words, and whether a value is that.
ARGUMENT_TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    type(None): ("None", lambda x: x is None),
    bool: ("True or False", lambda x: isinstance(x, bool | np.bool_)),
    int: ("an integer", lambda x: _integer(x) is not None),
    float: ("a finite number", lambda x: _real(x) is not None),
    str: ("a string", lambda x: isinstance(x, str)),
    # Lists and numbers too, where the function makes an array of them.
    jax.Array: (
        "an array",
        lambda x: (
            hasattr(x, "shape") or isinstance(x, int | float | complex | list | tuple | range)
        ),
    ),
}
KEY = ("a random key", _is_key)
DTYPE = ("a type of numbers", _is_dtype)


def _words_and_test(name: str, kind: Any) -> tuple[str, Callable[[Any], bool]]:
    if kind in ARGUMENT_TYPES:
        return KEY if (name, kind) == ("key", jax.Array) else ARGUMENT_TYPES[kind]
    kind = typing.get_origin(kind) or kind
    words = "callable" if kind is Callable else f"of the type {kind.__name__}"
    return words, lambda x: isinstance(x, kind)


def _check_types(given: Mapping[str, Any], hints: Mapping[str, Any], prefix: str = "") -> None:
    """Raises ValueError for a value that is of none of the types in its annotation.

    Elements of containers are not checked. An argument named ``key`` is a random key; one
    named ``dtype`` is a type of numbers.
    """
    for name, value in given.items():
        hint = hints.get(name, Any)
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = typing.get_args(hint) if union else (hint,)
        if Any in kinds and name != "dtype":
            continue
        allowed = [DTYPE] if Any in kinds else [_words_and_test(name, kind) for kind in kinds]
        if not any(fits(value) for _, fits in allowed):
            expected = " or ".join(words for words, _ in allowed)
            raise ValueError(f"{prefix}{name} must be {expected}; got {reprlib.repr(value)}")


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: raises ValueError for an argument that is not of its annotated type."""
    signature = inspect.signature(function)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    single = {name for name, p in signature.parameters.items() if p.kind not in several}
    hints = {name: x for name, x in typing.get_type_hints(function).items() if name in single}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # The call itself reports missing arguments.
        _check_types(signature.bind_partial(*args, **kwargs).arguments, hints)
        return function(*args, **kwargs)

    return call


@functools.cache
def _hints_of(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def check_fields(value: Any, prefix: str = "") -> None:
    """Raises ValueError for a field of a dataclass that is not of its annotated type."""
    cls: Any = type(value)
    given = {name: getattr(value, name) for name in inspect.get_annotations(cls)}
    _check_types(given, _hints_of(typing.cast(typing.Hashable, cls)), prefix)


def type_name(what: str, value: Any, allowed: Iterable[Any]) -> Any:
    """The name of a type, given as ``"bfloat16"``, ``jnp.bfloat16`` or a numpy dtype.

    Raises:
      ValueError: if it is not one of ``allowed``, names and perhaps None.
    """
    try:
        name = None if value is None else np.dtype(value).name
    except TypeError:
        name = value
    return choose(what, name, allowed)


def set_field(value: Any, name: str, to: Any) -> None:
    """Sets a field of a frozen dataclass while it is made."""
    object.__setattr__(value, name, to)


def concrete(x: Any) -> np.ndarray | None:
    """The values of an array; None if they are traced or on other processes."""
    if isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    return np.asarray(x)


def require_in_one_process(name: str, x: Any) -> None:
    """Raises NotImplementedError if other processes hold parts of an array."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise NotImplementedError(
            f"{name} is spread over several processes: gather the parameters in one first"
        )


def require_whole(what: str, value: Any) -> None:
    """Raises ValueError if ``jnp.asarray(value)`` would cut integers to fewer bits.

    It does so to arrays of numpy's 64-bit integers while 64-bit types are disabled.
    """
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "iu" and value.size:
        limits = np.iinfo(jax.dtypes.canonicalize_dtype(value.dtype))
        low, high = int(value.min()), int(value.max())
        require(
            limits.min <= low and high <= limits.max,
            f"{what} must fit in {limits.dtype}, as 64-bit types are disabled; got values from "
            f"{low} to {high}",
        )


def as_integers(what: str, value: Any) -> jax.Array:
    """``jnp.asarray(value)``; ValueError if it would cut integers to fewer bits."""
    require_whole(what, value)
    return as_array(what, value)


def as_array(what: str, value: Any) -> jax.Array:
    """``jnp.asarray(value)``; ValueError if it is no array, and none can be made of it."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} must be an array of numbers; got {value!r}") from error
    except OverflowError as error:
        raise ValueError(f"{what} must fit in 32 bits: {error}") from error


def broadcasts(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Returns whether ``shape`` broadcasts to ``full`` and has at most as many axes."""
    return len(shape) <= len(full) and all(
        a in (1, b) for a, b in zip(shape[::-1], full[::-1], strict=False)
    )


def instance(what: str, value: Any, cls: type | tuple[type, ...], *, optional: bool = False) -> Any:
    """The value; ValueError unless it is an instance of a class, with ``optional`` also None."""
    names = " or ".join(x.__name__ for x in (cls if isinstance(cls, tuple) else (cls,)))
    require(
        isinstance(value, cls) or (optional and value is None),
        f"{what} must be of the type {names}{' or None' if optional else ''}; got {value!r}",
    )
    return value


def require_x64(hint: str = "", **types: Any) -> None:
    """Raises ValueError if one of these named types has 64 bits while those are disabled.

    Without this jax would compute in 32 bits. ``hint`` ends the message.
    """
    for name, dtype in types.items():
        wanted = None if dtype is None else np.dtype(dtype)
        require(
            wanted is None or jax.dtypes.canonicalize_dtype(wanted) == wanted,
            f"{name} = {wanted} needs 64-bit types, which are disabled: set JAX_ENABLE_X64=1 or "
            f"jax.config.update('jax_enable_x64', True){hint}",
        )


def from_mapping(cls: type, values: dict[str, Any], *, what: str) -> Any:
    """Builds the dataclass ``cls``.

    Raises:
      ValueError: for an unknown field, naming the nearest one; if a field without a default is
        missing.
    """
    fields = {f.name: (f.default, f.default_factory) for f in dataclasses.fields(cls) if f.init}
    for name in values:
        require_field(name, fields, what)
    needed = [name for name, both in fields.items() if both == (dataclasses.MISSING,) * 2]
    missing = [name for name in needed if name not in values]
    require(not missing, f"{what} lacks {', '.join(missing)}; got {values}")
    return cls(**values)


def require_field(
    name: str, fields: Collection[str], what: str, *, shown: Iterable[str] | None = None
) -> None:
    """Raises ValueError unless ``name`` is a field of ``what``; the error names the nearest one.

    Args:
      name: the field.
      fields: all names of fields.
      what: has the fields.
      shown: those that the error lists; None: all.
    """
    if name not in fields:
        raise ValueError(
            f"unknown field {name!r} of {what}{nearest(name, fields)}; fields: "
            f"{', '.join(fields if shown is None else shown)}"
        )
