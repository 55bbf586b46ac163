"""Position encodings: one protocol, one registry.

A new encoding is one file with a subclass of :class:`Encoding` and one line in ``registry``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tape_jax._src.checks import choose, from_mapping
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


# What else encodings are called.
ALIASES = {
    "absolute": "learned",
    "nope": "none",
    "randomized": "random_rope",
    "randrope": "random_rope",
    "relative": "t5",
    "roformer": "rope",
    "rotary": "rope",
    "sincos": "sinusoidal",
}


def encoding_type(kind: Any) -> type[Encoding]:
    """The class of an encoding.

    Raises:
      ValueError: for an unknown name; the message names the nearest known one.
    """
    choose("position encoding", kind, registry, ALIASES)
    return registry[kind]


def create(position: Any, **options: Any) -> Encoding:
    """An encoding from its name (with options), from a mapping with ``kind``, or itself.

    Raises:
      ValueError: for an unknown name or option; the message names the nearest known one. For an
        encoding that cannot be hashed: a model, which is a key of compiled programs, could not be.
    """
    if isinstance(position, Encoding):
        if not options:
            _require_hashable(position)
            return position
        cls, options = type(position), {**vars(position), **options}
    else:
        if isinstance(position, Mapping):
            options = {**position, **options}
            position = options.pop("kind", "tape")
        cls = encoding_type(position)
    if isinstance(options.get("scaling"), Mapping):
        options["scaling"] = from_mapping(
            RopeScaling, dict(options["scaling"]), what=f"position.scaling of {cls.kind!r}"
        )
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    encoding = from_mapping(cls, options, what=f"position encoding {cls.kind!r}")
    _require_hashable(encoding)
    return encoding


def _require_hashable(encoding: Encoding) -> None:
    try:
        hash(encoding)
    except TypeError as error:
        raise ValueError(f"an encoding must be hashable; {encoding!r} is not ({error})") from None


__all__ = [
    "Abacus",
    "Alibi",
    "Encoding",
    "Fire",
    "Learned",
    "MixHeadDim",
    "NoEquivariance",
    "Param",
    "PlaceWeights",
    "RandomRope",
    "RelaxedEquivariance",
    "Rope",
    "SeparateCosSin",
    "Sinusoidal",
    "T5Bias",
    "Tape",
    "Xpos",
    "Yarn",
    "create",
    "init_update",
    "registry",
    "rotary_state",
    "tensor_state",
    "update_state",
]
