"""Several encodings at once: at most one state, any number of biases and decays."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tape_jax._src.core.checks import instance, require, set_field
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Encoding, Param, State

Array = jax.Array

# What only one encoding of a combination may do.
ALONE = {
    "embedding": "adds to the embeddings",
    "state": "has a position state",
    "scale": "scales the logits by a factor of its own",
    "logits": "rewrites the logits",
    "weights": "replaces the softmax",
    "window": "bounds what is seen",
}
PLACES = (*ALONE, "bias", "decay")

# The place of a method: a combination calls only that of the encoding that acts there.
PLACE_OF = {
    "coordinates": "embedding",
    "embed": "embedding",
    "start": "state",
    "start_from_embeddings": "state",
    "rotation": "state",
    "update_state": "state",
    "logits_scale": "scale",
    "local_window_size": "window",
}

# Terms that at most one encoding of a combination has.
ONE_OF = ("state", "logits_fn", "weights_fn", "rewritten_keys", "features")


# What somebody may have meant who combines what cannot be combined.
SCHEDULE = "For encodings of different layers give positions.Layers, or names joined by '/'"


class Several(Encoding):
    """Encodings that act together or in different layers: what is true of all or of one of them."""

    encodings: Any

    @property
    def distinct(self) -> tuple[Encoding, ...]:
        """The distinct encodings, in their order."""
        return tuple(dict.fromkeys(self.encodings))

    @property
    def members(self) -> tuple[Encoding, ...]:
        return tuple(dict.fromkeys(x for one in self.distinct for x in one.members))

    @property
    def acts_on(self) -> tuple[str, ...]:  # type: ignore[override]
        """Everything that one of the encodings acts on."""
        return tuple(dict.fromkeys(x for one in self.distinct for x in one.acts_on))

    @property
    def takes_drawn(self) -> tuple[str, ...]:  # type: ignore[override]
        """The kinds of drawn positions that all encodings take that read positions."""
        takes = [x.takes_drawn for x in self.distinct if x.reads_positions]
        return tuple(x for x in Encoding.takes_drawn if all(x in kinds for kinds in takes))

    @property
    def rewrites_keys(self) -> bool:  # type: ignore[override]
        """True if one of the encodings rewrites keys."""
        return any(x.rewrites_keys for x in self.distinct)

    @property
    def attends_state(self) -> bool:
        return any(x.attends_state for x in self.distinct)

    @property
    def starts_by_head(self) -> bool:
        return any(x.starts_by_head for x in self.distinct)

    @property
    def reads_positions(self) -> bool:
        return any(x.reads_positions for x in self.distinct)

    @property
    def reads_start(self) -> bool:
        return any(x.reads_start for x in self.distinct)

    def max_length(self) -> int | None:
        limits = [x.max_length() for x in self.distinct]
        return min((n for n in limits if n is not None), default=None)

    @property
    def update_implementations(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(x for one in self.distinct for x in one.update_implementations))


@dataclasses.dataclass(frozen=True)
class Combined(Several):
    """Encodings that act together, such as TAPE with ALiBi's bias.

    Parameters of the encoding with a state keep their names; those of the others are prefixed with
    their encoding's name.

    Attributes:
      encodings: two or more, of different kinds.

    Raises:
      ValueError: for fewer than two, two of a kind, or one that cannot be combined; for an unknown
        place in ``acts_on``, or a method without its place there; if two have a state, scale or
        rewrite the logits, replace the softmax, or add to the embeddings, or if they read
        different numbers of coordinates; also as each of them does.
    """

    encodings: tuple[Encoding, ...]

    def __post_init__(self):
        set_field(self, "encodings", tuple(self.encodings))
        kinds = [instance("each of encodings", x, Encoding).kind for x in self.encodings]
        require(len(kinds) > 1, f"a combination is of two encodings or more; got {kinds}")
        require(
            len(set(kinds)) == len(kinds),
            f"each encoding is taken once; got {self.kind!r}. {SCHEDULE}",
        )
        for encoding in self.encodings:
            require(
                bool(encoding.acts_on),
                f"the encoding {encoding.kind!r} cannot be combined; got {self.kind!r}. {SCHEDULE}",
            )
        for encoding in self.members:
            self._check_places(encoding)
        for place, does in ALONE.items():
            found = [x.kind for x in self.encodings if place in x.acts_on]
            require(
                len(found) < 2,
                f"{' and '.join(map(repr, found))} do not go together: each {does}; got "
                f"{self.kind!r}",
            )
        axes = {one.kind: one.coordinate_axes for one in self._readers}
        require(
            len(set(axes.values())) < 2,
            "encodings of a combination read as many coordinates a token as each other; got "
            f"{axes}, of {self.kind!r}",
        )

    def _check_places(self, encoding: Encoding) -> None:
        """Raises ValueError if the combination would leave out a part of ``encoding``."""
        kind, acts_on = encoding.kind, encoding.acts_on
        for place in acts_on:
            require(
                place in PLACES,
                f"{kind!r} acts on an unknown place, {place!r}: expected some of "
                f"{', '.join(map(repr, PLACES))}; got {self.kind!r}",
            )
        for name, place in PLACE_OF.items():
            require(
                place in acts_on or getattr(type(encoding), name) is getattr(Encoding, name),
                f"{kind!r} overrides {name}, so {place!r} must be in its acts_on; got {acts_on} in "
                f"{self.kind!r}",
            )

    @property
    def distinct(self) -> tuple[Encoding, ...]:
        return self.encodings

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The kinds, joined by ``+``."""
        return "+".join(encoding.kind for encoding in self.encodings)

    @property
    def state_part(self) -> Encoding:
        return self._state

    @property
    def local_window_size(self) -> int | tuple[int, int] | None:
        return self._of("window").local_window_size

    @property
    def heads_per_query(self) -> int:  # type: ignore[override]
        """The ``heads_per_query`` of the encoding with a state."""
        return self._state.heads_per_query

    @property
    def counts_text(self) -> bool:  # type: ignore[override]
        """The ``counts_text`` of the encoding with a state."""
        return self._state.counts_text

    def _of(self, place: str) -> Encoding:
        """Returns the encoding that acts on ``place``, or an empty one if none does."""
        return next((x for x in self.encodings if place in x.acts_on), Encoding())

    @property
    def _state(self) -> Encoding:
        return self._of("state")

    @property
    def _embedding(self) -> Encoding:
        return self._of("embedding")

    def _prefix(self, encoding: Encoding) -> str:
        return "" if encoding is self._state else f"{encoding.kind}_"

    def _gathered(self, params: Callable[[Encoding], Mapping[str, Param]]) -> dict[str, Param]:
        return {
            self._prefix(one) + name: spec
            for one in self.encodings
            for name, spec in params(one).items()
        }

    def _own(self, encoding: Encoding, params: Mapping[str, Any], names: Any) -> dict[str, Any]:
        """Returns the values of one encoding among ``params``, by its own names for them."""
        prefix = self._prefix(encoding)
        return {name: params[prefix + name] for name in names if prefix + name in params}

    def _prefixed(self, encoding: Encoding, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what :meth:`_own` does where the names are not known: by the longest prefix."""
        own, prefixes = self._prefix(encoding), [self._prefix(one) for one in self.encodings]
        found = {}
        for name, value in params.items():
            # "inkling_" begins names of "inkling_local" too.
            longest = max((p for p in prefixes if name.startswith(p)), key=len, default=None)
            if longest == own:
                found[name.removeprefix(own)] = value
        return found

    @property
    def _readers(self) -> list[Encoding]:
        """The encodings that read positions, and the one with a state."""
        state, places = self._state, {"bias", "embedding", "logits"}
        return [
            x
            for x in self.encodings
            if x is state or (x.reads_positions and places & set(x.acts_on))
        ]

    @property
    def coordinate_axes(self) -> int:
        return next((one.coordinate_axes for one in self._readers), 1)

    def _sizes(self, encoding: Encoding, sizes: Sizes) -> Sizes:
        """Returns the sizes for ``encoding``; all but the state's count the heads that it adds."""
        if encoding is self._state or self.heads_per_query == 1:
            return sizes
        return dataclasses.replace(sizes, num_heads=sizes.num_heads * self.heads_per_query)

    def check(self, sizes: Sizes) -> None:
        for encoding in self.encodings:
            encoding.check(self._sizes(encoding, sizes))

    def input_params(self, sizes: Sizes) -> dict[str, Param]:
        return self._gathered(lambda one: one.input_params(sizes))

    def layer_params(self, sizes: Sizes, *, updates: bool) -> dict[str, Param]:
        return self._gathered(
            lambda one: one.layer_params(
                self._sizes(one, sizes), updates=updates and one is self._state
            )
        )

    def coordinates(
        self, tokens: Array, positions: Array, segment_ids: Array | None = None
    ) -> Array:
        return self._embedding.coordinates(tokens, positions, segment_ids)

    def embed(
        self, params: dict[str, Array], coordinates: Array, sizes: Sizes, key: Array | None
    ) -> Array | None:
        own = self._own(self._embedding, params, self._embedding.input_params(sizes))
        return self._embedding.embed(own, coordinates, sizes, key)

    def start(self, positions: Array, sizes: Sizes, **options: Any) -> State:
        # Names of the one with a state have no prefix.
        return self._state.start(positions, sizes, **options)

    def start_from_embeddings(
        self, params: dict[str, Array], layer: Layer
    ) -> tuple[State | None, dict[str, Array]]:
        return self._state.start_from_embeddings(params, layer)

    def locate(self, state: State, coordinates: Array) -> State:
        return self._state.locate(state, coordinates)

    def carry(self, state: State, shape: tuple[int, ...], sizes: Sizes) -> State:
        return self._state.carry(state, shape, sizes)

    def rotation(self, state: State) -> tuple[Array | None, Array | None]:
        return self._state.rotation(state)

    def logits_scale(self, sizes: Sizes) -> float | None:
        return self._of("scale").logits_scale(sizes)

    def updates(self, layer: int, num_layers: int) -> bool:
        return self._state.updates(layer, num_layers)

    def update_state(self, params: dict[str, Array], state: State, *args: Any, **options: Any):
        return self._state.update_state(params, state, *args, **options)

    def loss(self, params: Sequence[Mapping[str, Array]], progress: Array | float) -> Array | None:
        """The sum of what the encodings add, each given its own parameters."""
        found = [
            one.loss([self._prefixed(one, layer) for layer in params], progress)
            for one in self.encodings
        ]
        added = [loss for loss in found if loss is not None]
        return functools.reduce(operator.add, added) if added else None

    def layer_terms(self, params: dict[str, Array], layer: Layer) -> Terms:
        found = [self._terms_of(encoding, params, layer) for encoding in self.encodings]

        def only(name: str) -> Any:
            return next((x for x in (getattr(t, name) for t in found) if x is not None), None)

        return Terms(
            bias=_sum_of([t.bias for t in found if t.bias is not None]),
            log_decay=_sums([t.log_decay for t in found if t.log_decay is not None]),
            kept={name: x for terms in found for name, x in (terms.kept or {}).items()},
            **{name: only(name) for name in ONE_OF},
        )

    def _terms_of(self, encoding: Encoding, params: dict[str, Array], layer: Layer) -> Terms:
        prefix, sizes = self._prefix(encoding), self._sizes(encoding, layer.sizes)
        if sizes is not layer.sizes:
            q = None if layer.q is None else jnp.repeat(layer.q, self.heads_per_query, axis=-2)
            layer = dataclasses.replace(layer, sizes=sizes, q=q)
        own = self._own(encoding, params, encoding.layer_params(sizes, updates=True))
        terms = encoding.layer_terms(own, layer.renamed(prefix))
        kept = terms.kept or {}
        return terms._replace(kept={prefix + name: x for name, x in kept.items()})


def _sum_of(biases: Sequence[Callable[[Array, Array], Array]]) -> Any:
    """Sums several functions of pairs."""
    if len(biases) < 2:
        return biases[0] if biases else None
    return lambda i, j: functools.reduce(operator.add, (bias(i, j) for bias in biases))


def _sums(decays: Sequence[tuple[Array, Array]]) -> Any:
    """Sums the decays of queries and keys, ``[T, H]`` or with batch axes."""
    return functools.reduce(lambda a, b: (a[0] + b[0], a[1] + b[1]), decays) if decays else None
