"""The registry of encodings, and the creation of one from its name and options.

Options are flat. In a combination, options of the encoding with a state keep their names, and so
does an option that only one encoding has. Any other is prefixed with its encoding's name:
``sinusoidal_base`` beside RoPE.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tape_jax._src.core.checks import choose, from_mapping, require, require_field, typed
from tape_jax._src.positions.ablations import (
    MixHeadDim,
    NoEquivariance,
    PlaceWeights,
    RelaxedEquivariance,
    SeparateCosSin,
)
from tape_jax._src.positions.combined import Combined
from tape_jax._src.positions.contextual.cope import Cope
from tape_jax._src.positions.contextual.dape import (
    DapeAlibi,
    DapeFire,
    DapeKerple,
    DapeV2Alibi,
    DapeV2Kerple,
)
from tape_jax._src.positions.contextual.forget import Cable, DdaPerRow, Fox
from tape_jax._src.positions.contextual.grape import GrapeAdditive, GrapeMultiplicative, GrapePath
from tape_jax._src.positions.contextual.inkling import Inkling, InklingLocal
from tape_jax._src.positions.contextual.mapformer import MapFormerEM, MapFormerWM
from tape_jax._src.positions.contextual.path import PathAttention
from tape_jax._src.positions.contextual.repo import Repo
from tape_jax._src.positions.contextual.selective import SelectiveRope
from tape_jax._src.positions.contextual.stickbreaking import StickBreaking
from tape_jax._src.positions.contextual.wall import Wall
from tape_jax._src.positions.fixed.additive import Abacus, Learned, Sinusoidal
from tape_jax._src.positions.fixed.bias import Alibi, Fire, Kerple, T5Bias
from tape_jax._src.positions.fixed.coupling import PositionCoupling
from tape_jax._src.positions.fixed.features import Pope, RopePP
from tape_jax._src.positions.fixed.fourier import Fope
from tape_jax._src.positions.fixed.frequencies import RopeScaling
from tape_jax._src.positions.fixed.rope import LongRope, MRope, PRope, RandomRope, Rope, Xpos, Yarn
from tape_jax._src.positions.fixed.window import Window
from tape_jax._src.positions.protocol import Encoding
from tape_jax._src.positions.tape.encoding import Tape
from tape_jax._src.positions.tape.polar import TapePope

registry: dict[str, type[Encoding]] = {
    cls.kind: cls
    for cls in (
        Encoding,
        Tape,
        TapePope,
        Rope,
        Yarn,
        LongRope,
        PRope,
        MRope,
        Xpos,
        RandomRope,
        Fope,
        RopePP,
        Pope,
        SelectiveRope,
        GrapeMultiplicative,
        Repo,
        MapFormerWM,
        MapFormerEM,
        Window,
        Alibi,
        Kerple,
        Fire,
        T5Bias,
        Fox,
        Cable,
        DdaPerRow,
        PathAttention,
        Wall,
        GrapeAdditive,
        GrapePath,
        Cope,
        DapeKerple,
        DapeAlibi,
        DapeFire,
        DapeV2Kerple,
        DapeV2Alibi,
        Inkling,
        InklingLocal,
        StickBreaking,
        Sinusoidal,
        Learned,
        Abacus,
        PositionCoupling,
        SeparateCosSin,
        MixHeadDim,
        NoEquivariance,
        PlaceWeights,
        RelaxedEquivariance,
    )
}


# Other names. One for several encodings is accepted, others are only hinted at in errors.
ALIASES = {
    "absolute": "learned",
    "mrope_interleaved": "mrope",
    "nope": "none",
    "path_fox": "path+fox",
    "randomized": "random_rope",
    "randrope": "random_rope",
    "relative": "t5",
    "roformer": "rope",
    "rotary": "rope",
    "sincos": "sinusoidal",
    "wall_scalar": "wall+fox",
}


# Class and options of each encoding that acts.
Parts = list[tuple[type[Encoding], dict[str, Any]]]


def kinds(kind: Any) -> list[str]:
    """Returns the names of the encodings in a name, joined by ``+`` and, between layers, ``/``.

    Raises:
      ValueError: for an unknown one; the message names the nearest known one.
    """
    names: list[str] = [] if isinstance(kind, str) else [kind]
    for name in re.split("[+/]", kind) if isinstance(kind, str) else ():
        meant = ALIASES.get(name, name)
        names += meant.split("+") if "+" in meant else [name]
    for name in names:
        choose("position encoding", name, registry, ALIASES)
    return names


def option_names(kind: Any) -> dict[str, tuple[type[Encoding], str]]:
    """Returns the names of the options of one or several encodings, with their classes and fields.

    Raises:
      ValueError: as :func:`kinds` does.
    """
    return _option_names(list(dict.fromkeys(registry[name] for name in kinds(kind))))


def _option_names(types: Sequence[type[Encoding]]) -> dict[str, tuple[type[Encoding], str]]:
    fields = [(cls, f.name) for cls in types for f in dataclasses.fields(cls) if f.init]
    count = collections.Counter(name for _, name in fields)
    short = {
        name: (cls, name) for cls, name in fields if count[name] == 1 or "state" in cls.acts_on
    }
    return short | {f"{cls.kind}_{name}": (cls, name) for cls, name in fields}


def short_names(names: dict[str, Any]) -> dict[str, Any]:
    """Returns the first, short one of the names that an option has."""
    first = {field: name for name, field in reversed(names.items())}
    return {name: field for name, field in names.items() if first[field] == name}


def require_option(name: str, known: dict[str, Any], kind: str) -> None:
    """Raises ValueError unless a name is one of :func:`option_names` of an encoding's kind."""
    require_field(name, known, f"position encoding {kind!r}", shown=short_names(known))


@typed
def options_of(encoding: Encoding) -> dict[str, Any]:
    """Returns ``kind`` and all options, from which :func:`create` makes the encoding again."""
    members = encoding.members
    names = _option_names([type(member) for member in members])
    called = {field: name for name, field in short_names(names).items()}
    values = {
        called[type(member), field]: value
        for member in members
        for field, value in dataclasses.asdict(member).items()
        if field != "kind"
    }
    return {"kind": encoding.kind, **values}


def create(position: Any, **options: Any) -> Encoding:
    """Creates the encoding of one layer; see ``schedule.create``."""
    encoding = position
    if options or not isinstance(position, Encoding):
        made = [_build(cls, values) for cls, values in with_options(_parts(position), options)]
        encoding = made[0] if len(made) == 1 else Combined(tuple(made))
    try:
        hash(encoding)
    except TypeError as error:
        raise ValueError(f"an encoding must be hashable; {encoding!r} is not ({error})") from None
    return encoding


def _parts(position: Any) -> Parts:
    """Returns the classes of encodings and the options given with them."""
    name = position if isinstance(position, str) else getattr(position, "kind", "")
    require(
        not (isinstance(name, str) and "/" in name),
        f"a schedule cannot be combined, only the encodings in it; got {name!r}",
    )
    if isinstance(position, Combined):
        return _parts(position.encodings)
    if isinstance(position, Encoding):
        fields = [field.name for field in dataclasses.fields(position) if field.init]
        return [(type(position), {name: getattr(position, name) for name in fields})]
    if isinstance(position, Mapping):
        return _parts_of_mapping(dict(position))
    if isinstance(position, Sequence) and not isinstance(position, str):
        return [part for each in position for part in _parts(each)]
    return [(registry[name], {}) for name in kinds(position)]


def _parts_of_mapping(options: dict[str, Any]) -> Parts:
    """The :func:`_parts` of a mapping; ``dataclasses.asdict`` nests those of several encodings."""
    require(
        "kind" in options,
        "a position encoding as a mapping needs its name, 'kind'; got only "
        f"{', '.join(map(repr, options)) or 'an empty one'}",
    )
    kind = options.pop("kind")
    return with_options(_parts(options.pop("encodings", kind)), options)


def with_options(parts: Parts, options: Mapping[str, Any]) -> Parts:
    """Gives every option to the encoding that has it.

    Raises:
      ValueError: for an unknown option; the message names the nearest known one.
    """
    known = _option_names([cls for cls, _ in parts])
    what = "+".join(cls.kind for cls, _ in parts)
    found = {cls: dict(values) for cls, values in parts}
    require(
        len({known.get(name, name) for name in options}) == len(options),
        f"each option of {what!r} is given once; got {', '.join(options)}",
    )
    for name, value in options.items():
        require_option(name, known, what)
        cls, field = known[name]
        found[cls][field] = value
    return [(cls, found[cls]) for cls, _ in parts]


def _build(cls: type[Encoding], options: Mapping[str, Any]) -> Encoding:
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    if isinstance(options.get("scaling"), Mapping):
        own = {}
        if getattr(cls, "scaling_kind", None) is not None:
            default: Any = cls.__dataclass_fields__["scaling"].default
            own = {"kind": default.kind, "factor": default.factor}
        options["scaling"] = from_mapping(
            RopeScaling, own | dict(options["scaling"]), what=f"position.scaling of {cls.kind!r}"
        )
    return from_mapping(cls, options, what=f"position encoding {cls.kind!r}")
