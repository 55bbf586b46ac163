"""Position encodings: one protocol, one registry.

A new encoding is one file with a subclass of :class:`Encoding` and one line in ``registry``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tape_jax._src.checks import choose, from_mapping, nearest, require
from tape_jax._src.config import RopeScaling
from tape_jax._src.positions.ablations import (
    MixHeadDim,
    NoEquivariance,
    PlaceWeights,
    RelaxedEquivariance,
    SeparateCosSin,
)
from tape_jax._src.positions.additive import Abacus, Learned, Sinusoidal
from tape_jax._src.positions.bias import Alibi, Fire, T5Bias
from tape_jax._src.positions.combined import Combined
from tape_jax._src.positions.forget import Fox
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.path import Path
from tape_jax._src.positions.protocol import Encoding, Param
from tape_jax._src.positions.rotary import RandomRope, Rope, Xpos, Yarn, rotary_state
from tape_jax._src.positions.tape import Tape, init_update, tensor_state, update_state

registry: dict[str, type[Encoding]] = {
    cls.kind: cls
    for cls in (
        Encoding,
        Tape,
        Rope,
        Yarn,
        Xpos,
        RandomRope,
        Alibi,
        Fire,
        T5Bias,
        Fox,
        Path,
        Sinusoidal,
        Learned,
        Abacus,
        SeparateCosSin,
        MixHeadDim,
        NoEquivariance,
        PlaceWeights,
        RelaxedEquivariance,
    )
}


# What else encodings are called. The name of several is taken as it is.
ALIASES = {
    "absolute": "learned",
    "nope": "none",
    "path_fox": "path+fox",
    "randomized": "random_rope",
    "randrope": "random_rope",
    "relative": "t5",
    "roformer": "rope",
    "rotary": "rope",
    "sincos": "sinusoidal",
}


def _names(kind: Any) -> list[Any]:
    """The names that ones joined by ``+`` are made of."""
    if not isinstance(kind, str):
        return [kind]
    found = []
    for name in kind.split("+"):
        meant = ALIASES.get(name, name)
        found += meant.split("+") if "+" in meant else [name]
    return found


def encoding_type(kind: Any) -> type[Encoding]:
    """The class of an encoding, or :class:`Combined` for names joined by ``+``.

    Raises:
      ValueError: for an unknown name; the message names the nearest known one.
    """
    if len(names := _names(kind)) > 1:
        for name in names:
            encoding_type(name)
        return Combined
    choose("position encoding", kind, registry, ALIASES)
    return registry[kind]


def option_names(kind: str) -> dict[str, list[str]]:
    """The options of an encoding, or of several joined by ``+``, each with whose it is."""
    found: dict[str, list[str]] = {}
    for name in _names(kind):
        for field in dataclasses.fields(encoding_type(name)):
            if field.init:
                found.setdefault(field.name, []).append(name)
    return found


def create(position: Any, **options: Any) -> Encoding:
    """An encoding.

    Args:
      position: an encoding; its name; a mapping with the name, ``kind``, and options; or several of
        these, or names joined by ``+``, for encodings that act together.
      **options: further ones. Of several encodings each option must belong to one alone.

    Raises:
      ValueError: for an unknown name or option; the message names the nearest known one. For
        encodings that do not go together. For an encoding that cannot be hashed: a model, which is
        a key of compiled programs, could not be.
    """
    if isinstance(position, Mapping):
        options = {**position, **options}
        position = options.pop("kind", "tape")
    if len(names := _names(position)) > 1:
        position = names
    if isinstance(position, Combined):
        position = position.encodings
    if isinstance(position, Sequence) and not isinstance(position, str):
        encodings = _with_options([create(each) for each in position], options)
        return encodings[0] if len(encodings) == 1 else Combined(tuple(encodings))
    if isinstance(position, Encoding):
        if not options:
            _require_hashable(position)
            return position
        cls, options = type(position), {**vars(position), **options}
    else:
        cls = encoding_type(position)
    if isinstance(options.get("scaling"), Mapping):
        options["scaling"] = from_mapping(
            RopeScaling, dict(options["scaling"]), what=f"position.scaling of {cls.kind!r}"
        )
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    encoding = from_mapping(cls, options, what=f"position encoding {cls.kind!r}")
    _require_hashable(encoding)
    return encoding


def _with_options(encodings: Sequence[Encoding], options: Mapping[str, Any]) -> list[Encoding]:
    """Each option given to the one encoding that has it."""
    kinds = [encoding.kind for encoding in encodings]
    owners: dict[str, list[str]] = {}
    for encoding in encodings:
        for name in vars(encoding):
            owners.setdefault(name, []).append(encoding.kind)
    own: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        of = owners.get(name, [])
        require(
            len(of) > 0,
            f"unknown field {name!r} of position encodings {kinds}{nearest(name, list(owners))}; "
            f"fields: {', '.join(owners)}",
        )
        require(
            len(of) == 1,
            f"{name!r} is an option of {' and of '.join(map(repr, of))}: give each encoding its "
            "own, as a sequence of mappings",
        )
        own.setdefault(of[0], {})[name] = value
    return [create(encoding, **own.get(encoding.kind, {})) for encoding in encodings]


def _require_hashable(encoding: Encoding) -> None:
    try:
        hash(encoding)
    except TypeError as error:
        raise ValueError(f"an encoding must be hashable; {encoding!r} is not ({error})") from None


__all__ = [
    "Abacus",
    "Alibi",
    "Combined",
    "Encoding",
    "Fire",
    "Fox",
    "Layer",
    "Learned",
    "MixHeadDim",
    "NoEquivariance",
    "Param",
    "Path",
    "PlaceWeights",
    "RandomRope",
    "RelaxedEquivariance",
    "Rope",
    "SeparateCosSin",
    "Sinusoidal",
    "T5Bias",
    "Tape",
    "Terms",
    "Xpos",
    "Yarn",
    "create",
    "init_update",
    "registry",
    "rotary_state",
    "tensor_state",
    "update_state",
]
