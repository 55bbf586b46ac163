"""Position encodings: one protocol, one registry.

A new encoding is one file with a subclass of :class:`Encoding` and one line in ``registry``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tape_jax.config import RopeScaling, choose, from_mapping
from tape_jax.positions.ablations import (
    MixHeadDim,
    NoEquivariance,
    PlaceWeights,
    RelaxedEquivariance,
    SeparateCosSin,
)
from tape_jax.positions.additive import Abacus, Learned, Sinusoidal
from tape_jax.positions.bias import Alibi, Fire, T5Bias
from tape_jax.positions.protocol import Encoding, Param
from tape_jax.positions.rotary import RandomRope, Rope, Xpos, Yarn, rotary_state
from tape_jax.positions.tape import Tape, init_update, tensor_state, update

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


def create(position: Any, **options: Any) -> Encoding:
    """An encoding from its name (with options), from a mapping with ``kind``, or itself.

    Raises:
      ValueError: for an unknown name or option; the message names the nearest known one.
    """
    if isinstance(position, Encoding):
        if not options:
            return position
        cls, options = type(position), {**vars(position), **options}
    else:
        if isinstance(position, Mapping):
            options = {**position, **options}
            position = options.pop("kind", "tape")
        choose("position encoding", position, registry)
        cls = registry[position]
    if isinstance(options.get("scaling"), Mapping):
        options["scaling"] = from_mapping(
            RopeScaling, dict(options["scaling"]), what=f"position.scaling of {cls.kind!r}"
        )
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    return from_mapping(cls, options, what=f"position encoding {cls.kind!r}")


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
    "update",
]
