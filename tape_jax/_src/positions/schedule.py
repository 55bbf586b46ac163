"""A schedule: layers of one model with different encodings."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tape_jax._src.core.checks import positive, require, set_field
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions import creation
from tape_jax._src.positions.combined import Several
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Encoding, OfLayer, Param, State

Array = jax.Array

# Methods that a schedule, which begins at the first layer, lacks.
BEFORE_LAYERS = ("embed", "coordinates", "start_from_embeddings", "locate")


@dataclasses.dataclass(frozen=True)
class Layers(Several):
    """An encoding for each layer: a pattern that repeats until all layers have one.

    >>> Layers(["rope+window", "rope+window", "rope"]).kind
    'rope+window/rope+window/rope'
    >>> Layers("rope", every={4: "none"}).kind
    'rope/rope/rope/none'

    Equal encodings share one position state, whatever windows, biases or decays act beside them:
    ``tape+window`` and ``tape`` share it. Only their layers read and update it. So the last of
    these layers updates nothing, and a layer needs TAPE itself to read the state that TAPE updated.

    Attributes:
      encodings: the pattern: encodings, or arguments of :func:`create` for them.
      every: maps ``n`` to the encoding of every ``n``-th layer, counted from 1; the largest ``n``
        wins.

    Raises:
      ValueError: for an encoding that also acts before the first layer, such as ``sinusoidal``, or
        encodings that take different numbers of coordinates; if ``every`` leaves no layer to one of
        the encodings, or a model is too short to use all of them.
    """

    encodings: Any
    every: dataclasses.InitVar[Mapping[int, Any] | None] = None

    def __post_init__(self, every: Mapping[int, Any] | None):
        given = self.encodings
        one = isinstance(given, str | Mapping | Encoding) or not isinstance(given, Sequence)
        entries = [given] if one else list(given)
        require(bool(entries), f"a schedule needs an encoding; got {given!r}")
        made = [create(entry) for entry in entries]
        require(
            every is None or isinstance(every, Mapping),
            f"every must map numbers of layers to encodings; got {every!r}",
        )
        others = {positive("every", n): create(entry) for n, entry in (every or {}).items()}
        length = math.lcm(len(made), *others)
        pattern = [made[i % len(made)] for i in range(length)]
        for n, other in sorted(others.items(), key=lambda item: item[0]):
            pattern[n - 1 :: n] = [other] * (length // n)
        for entry in made:
            require(entry in pattern, f"every = {every} leaves no layer to {entry.kind!r}")
        set_field(self, "encodings", tuple(pattern))
        require(
            len(self.distinct) > 1,
            f"a schedule is of two encodings or more; got only {self.kind!r}: give it by itself",
        )
        for encoding in self.members:
            for place in BEFORE_LAYERS:
                require(
                    getattr(type(encoding), place) is getattr(Encoding, place),
                    f"{encoding.kind!r} acts before the first layer, which a schedule of layers "
                    f"has no place for; got {self.kind!r}",
                )
        axes = [x.coordinate_axes for x in self.distinct if x.reads_positions]
        require(
            len(set(axes)) < 2,
            f"encodings of one schedule take as many coordinates as each other; got {axes}, of "
            f"{self.kind!r}",
        )
        heads = [x.heads_per_query for x in self.distinct]
        require(
            len(set(heads)) < 2,
            f"in a schedule as many heads attend for each query head in all layers; got {heads}, "
            f"of {self.kind!r}",
        )
        require(
            not any(isinstance(x, Layers) for x in pattern),
            f"a schedule cannot be part of another; got {self.kind!r}",
        )

    @classmethod
    def named(
        cls, name: str, options: Mapping[str, Any], make: Callable[[dict[str, Any]], Encoding]
    ) -> Layers:
        """Makes a schedule from its name, such as ``rope+window/rope``.

        Args:
          name: the names of its encodings.
          options: each encoding gets those that it has.
          make: makes an encoding of a mapping with its name, ``kind``, and its options.

        Raises:
          ValueError: for an option that no encoding has, or that means another one elsewhere.
        """
        each = {kind: creation.option_names(kind) for kind in name.split("/")}
        for option in options:
            _check_option(name, option, each)
        made = {
            kind: make({"kind": kind} | {k: options[k] for k in options if k in known})
            for kind, known in each.items()
        }
        return cls([made[kind] for kind in name.split("/")])

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The kinds of the pattern, joined by ``/``."""
        return "/".join(encoding.kind for encoding in self.encodings)

    @property
    def state_parts(self) -> tuple[Encoding, ...]:
        """The distinct encodings that own states, in the order of the states."""
        return tuple(dict.fromkeys(x.state_part for x in self.encodings))

    def of_layers(self, num_layers: int) -> list[OfLayer]:
        encodings = list(itertools.islice(itertools.cycle(self.encodings), num_layers))
        numbers = [self.state_parts.index(x.state_part) for x in encodings]
        found = []
        for layer, (encoding, n) in enumerate(zip(encodings, numbers, strict=True)):
            before = numbers[:layer].count(n)
            found.append(OfLayer(encoding, n, encoding.updates(before, numbers.count(n))))
        return found

    def updates(self, layer: int, num_layers: int) -> bool:
        return self.of_layers(num_layers)[layer].updates

    @property
    def coordinate_axes(self) -> int:
        return next((x.coordinate_axes for x in self.distinct if x.reads_positions), 1)

    @property
    def counts_text(self) -> bool:  # type: ignore[override]
        return all(x.counts_text for x in self.distinct if x.coordinate_axes > 1)

    @property
    def heads_per_query(self) -> int:  # type: ignore[override]
        return self.distinct[0].heads_per_query

    def check(self, sizes: Sizes) -> None:
        layers = self.of_layers(sizes.num_layers)
        left_out = [x.kind for x in self.distinct if x not in [one.encoding for one in layers]]
        require(
            not left_out,
            f"a schedule of {len(self.encodings)} layers does not fit a model of "
            f"{sizes.num_layers}, which leaves {', '.join(map(repr, left_out))} out; got "
            f"{self.kind!r}",
        )
        numbers = [one.member for one in layers]
        for encoding in self.distinct:
            count = numbers.count(self.state_parts.index(encoding.state_part))
            encoding.check(dataclasses.replace(sizes, num_layers=count))

    def input_params(self, sizes: Sizes) -> dict[str, Param]:
        """Each state's, prefixed with the index of the pattern's first entry that has it."""
        return {
            f"{self._first(encoding)}_{name}": spec
            for encoding in self.state_parts
            for name, spec in encoding.input_params(sizes).items()
        }

    def _first(self, part: Encoding) -> int:
        return [x.state_part for x in self.encodings].index(part)

    def start(
        self,
        positions: Array,
        sizes: Sizes,
        *,
        params: dict[str, Array] | None = None,
        **options: Any,
    ) -> State:
        """The states, in the order of :attr:`state_parts`; some are None."""

        def own(part: Encoding) -> dict[str, Array] | None:
            prefix = f"{self._first(part)}_"
            named = {k: x for k, x in (params or {}).items() if k.startswith(prefix)}
            return {k.removeprefix(prefix): x for k, x in named.items()} or None

        return tuple(
            encoding.start(positions, sizes, params=own(encoding), **options)
            for encoding in self.state_parts
        )

    def layer_params(self, sizes: Sizes, *, updates: bool) -> dict[str, Param]:
        raise self._differs("parameters")

    def layer_terms(self, params: dict[str, Array], layer: Layer) -> Terms:
        raise self._differs("terms")

    def rotation(self, state: State) -> tuple[Array | None, Array | None]:
        raise self._differs("a rotation")

    def _differs(self, what: str) -> NotImplementedError:
        return NotImplementedError(
            f"a schedule has {what} of each layer, not of all (of_layers); got {self.kind!r}"
        )


def create(position: Any, **options: Any) -> Encoding:
    """Creates an encoding, or a schedule of them.

    Args:
      position: an encoding; its name; a mapping with the name, ``kind``, and options; several of
        these, or names joined by ``+``, for encodings that act together; or names joined by ``/``,
        for a pattern of layers (:class:`Layers`).
      **options: further options. If several encodings have an option, its name is that of the
        encoding with a state; prefix the others: ``sinusoidal_base`` beside RoPE. In a schedule
        every encoding gets the options that it has.

    Raises:
      ValueError: for an unknown name or option; the message names the nearest known one. For an
        option whose name means an encoding in one entry of a schedule, and not in another. For
        encodings that do not go together. For an encoding that cannot be hashed, since models are
        keys of compiled programs.
    """
    if isinstance(position, Mapping) and "/" in str(position.get("kind", "")):
        options = {name: x for name, x in position.items() if name != "kind"} | options
        kind = position["kind"]
        position = options.pop("encodings", kind)
        position = position if isinstance(position, str) else Layers(position)
        found = getattr(position, "kind", position)
        require(
            found == kind,
            f"the encodings of a schedule contradict its kind: {found!r}, not {kind!r}",
        )
    if isinstance(position, Layers):
        require(
            not options,
            f"options of a schedule stand with its encodings; got {', '.join(options)} beside "
            f"{position.kind!r}",
        )
        return position
    if not (isinstance(position, str) and "/" in position):
        return creation.create(position, **options)
    return Layers.named(position, options, creation.create)


def _check_option(
    position: str, name: str, each: Mapping[str, Mapping[str, tuple[type[Encoding], str]]]
) -> None:
    """Raises ValueError unless an option of a schedule reaches all encodings that it means.

    Args:
      position: the schedule.
      name: the option.
      each: the names of all options of each entry, with what they mean.
    """
    meant = dict.fromkeys(known[name] for known in each.values() if name in known)
    if not meant:
        creation.require_option(name, creation.option_names(position), position)
    for kind, known in each.items():
        for cls, field in meant:
            require(
                (cls, field) not in known.values() or known.get(name) == (cls, field),
                f"{name!r} means an option of {cls.kind!r} in one entry of {position!r}, but not "
                f"in {kind!r}: give {cls.kind}_{field}",
            )


def options_of(encoding: Encoding) -> dict[str, Any]:
    """Returns ``kind`` and all options, from which :func:`create` makes the encoding again."""
    if isinstance(encoding, Layers):
        return {"kind": encoding.kind, "encodings": [options_of(x) for x in encoding.encodings]}
    return creation.options_of(encoding)
