"""The interface of a position encoding to the model: a small frozen value with a few methods.

The model never asks which encoding it has. An encoding may act in any of these places, each of
which is absent by default: it adds to the embeddings (:meth:`Encoding.embed`), rotates queries and
keys by a state (:meth:`Encoding.start`, :meth:`Encoding.start_from_embeddings`,
:meth:`Encoding.rotation`) which it may update layer by layer (:meth:`Encoding.update_state`),
biases the logits (:meth:`Encoding.pair_bias`), or makes terms of a layer's attention from its input
(:meth:`Encoding.layer_terms`).
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.core.algebra import at_least_32_bits, at_least_float32
from tape_jax._src.core.checks import as_integers, broadcasts, concrete, require
from tape_jax._src.core.sharding import Sharding
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.layer import Layer, Terms

Array = jax.Array
State = Any

# For each type of option: its description in words, and the check of a value.
OPTION_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("True or False", lambda x: isinstance(x, bool | np.bool_)),
    "int": ("an integer", lambda x: isinstance(x, int | np.integer) and not isinstance(x, bool)),
    "float": (
        "a finite number",
        lambda x: isinstance(x, numbers.Real) and not isinstance(x, bool) and math.isfinite(x),
    ),
}


def _annotation(kind: Any) -> str:
    """Returns a field's annotation as written, whether or not the module postpones annotations."""
    return kind.__name__ if isinstance(kind, type) else str(kind)


class Param(NamedTuple):
    """A parameter that an encoding asks the model to create.

    Attributes:
      shape: its shape.
      init: initialiser ``(key, shape, dtype) -> array``.
      axes: one logical axis name (or None) per dimension, for sharding.
    """

    shape: tuple[int, ...]
    init: Callable[..., Array]
    axes: tuple[str | None, ...]


def check_indices(what: str, index: Array, size: Array | int | None = None) -> None:
    """Raises ValueError unless ``index``, into a table, holds integers in 0 .. size - 1.

    Traced values, which are not known yet, pass: callers have to read NaN where they are out of
    range.

    Args:
      what: name of the indices, for the message.
      index: any shape.
      size: the table's, broadcastable to ``index``; None: any.
    """
    require(
        jnp.issubdtype(index.dtype, jnp.integer),
        f"{what} must be integers, since they index a table; got {index.dtype}",
    )
    values, sizes = (None, None) if size is None else (concrete(index), concrete(size))
    if values is None or sizes is None or not values.size:
        return
    outside = (values < 0) | (values >= sizes)
    if outside.any():
        first = np.unravel_index(np.argmax(outside), outside.shape)
        value, limit = (int(np.broadcast_to(x, outside.shape)[first]) for x in (values, sizes))
        raise ValueError(f"{what} must lie in 0 .. {limit - 1}; got {value}")


def table_rows(what: str, table: Array, index: Array) -> Array:
    """Rows ``[..., N]`` of a table ``[size, N]``, NaN where an index is out of range.

    Raises:
      ValueError: as in :func:`check_indices`, if the index is known.
    """
    table = jnp.asarray(table)
    size = table.shape[0]
    check_indices(what, index, size)
    index = at_least_32_bits(index)
    inside = (index >= 0) & (index < size)
    return jnp.where(inside[..., None], table[jnp.where(inside, index, 0)], jnp.nan)


def as_positions(positions: Any) -> Array:
    """Casts positions to a type for computing their differences: int32, float32 or wider.

    Raises:
      ValueError: if they are neither integers nor floats.
    """
    positions = as_integers("positions", positions)
    if jnp.issubdtype(positions.dtype, jnp.floating):
        return positions.astype(at_least_float32(positions.dtype))
    require(
        jnp.issubdtype(positions.dtype, jnp.integer),
        f"positions must be integers or floats; got {positions.dtype}",
    )
    unsigned = jnp.issubdtype(positions.dtype, jnp.unsignedinteger)
    wide = positions.dtype.itemsize + unsigned > 4
    signed = jax.dtypes.canonicalize_dtype(jnp.int64 if wide else jnp.int32)
    known = concrete(positions) if unsigned and wide else None
    largest = 0 if known is None or not known.size else int(known.max())
    require(
        largest <= jnp.iinfo(signed).max,
        f"positions must fit in {signed}; got {positions.dtype} up to {largest}",
    )
    return positions.astype(signed)


def as_length(length: Any, batch: tuple[int, ...]) -> int | Array:
    """Returns a checked length in tokens, or one per sequence of a batch of this shape.

    Raises:
      ValueError: if it is neither a positive integer nor integers that fit the batch.
    """
    try:
        number = operator.index(length)
    except TypeError:
        array = as_integers("length", length)
        require(
            jnp.issubdtype(array.dtype, jnp.integer) and broadcasts(array.shape, batch),
            f"length must be an integer or integers that broadcast to the batch {batch}; got "
            f"{array.dtype} of shape {array.shape}",
        )
        known = concrete(array)
        require(
            known is None or bool((known > 0).all()),
            f"length must be positive; got {None if known is None else known.tolist()}",
        )
        array = array.astype(jnp.int32)
        return array if array.ndim == 0 else jnp.broadcast_to(array, batch)
    require(not isinstance(length, bool) and number > 0, f"length must be positive; got {length}")
    return number


def default_positions(length: int) -> Array:
    """``0 .. length - 1``."""
    return jnp.asarray(np.arange(length, dtype=np.int32))


class OfLayer(NamedTuple):
    """The part of an encoding that one layer has.

    Attributes:
      encoding: the layer's.
      member: index of its position state among a schedule's; None: there is one state.
      updates: whether the layer updates it.
    """

    encoding: Encoding
    member: int | None
    updates: bool

    def own(self, states: State) -> State:
        """The layer's state."""
        return states if self.member is None else states[self.member]

    def with_own(self, states: State, new: State) -> State:
        """Returns the state, or those of a schedule, with the layer's own replaced."""
        if self.member is None:
            return new
        return (*states[: self.member], new, *states[self.member + 1 :])


def on_axes(positions: Array, axes: int) -> Array:
    """Positions ``[..., T]`` as coordinates ``[..., T, n]`` if there are ``n > 1`` axes."""
    if axes == 1:
        return positions
    return jnp.broadcast_to(positions[..., None], (*positions.shape, axes))


@dataclasses.dataclass(frozen=True)
class Encoding:
    """No position encoding; the base class of all others.

    Shapes: ``positions`` are ``[..., T]`` (``[..., T, n]`` for n-dimensional coordinates), token
    ids ``[..., T]``. A state is any pytree of arrays.
    """

    if TYPE_CHECKING:
        kind: ClassVar[str] = "none"
    else:
        # A field, so that dataclasses.asdict gives what create() reads.
        kind: str = dataclasses.field(default="none", init=False, repr=False, compare=False)
    # Where it acts: "embedding", "state", "scale", "logits", "weights", "window", of which one
    # encoding of a combination may act on each, "bias" and "decay".
    acts_on: ClassVar[tuple[str, ...]] = ()
    # Whether layer_terms rewrites what decoding keeps of earlier keys.
    rewrites_keys: ClassVar[bool] = False
    # Number of heads that attend for each query head, if layer_terms makes features.
    heads_per_query: ClassVar[int] = 1
    # Whether tokens without given positions have their index on each of several axes.
    counts_text: ClassVar[bool] = False
    # Kinds of RandomPositions that it accepts: a table has no rows for stretched ones.
    takes_drawn: ClassVar[tuple[str, ...]] = ("spaced", "stretched", "shifted")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # A subclass that annotates it, as ClassVar, would remove the field.
        vars(cls).get("__annotations__", {}).pop("kind", None)

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Raises ValueError for an option of a wrong type or not finite, before other checks."""
        fields = {field.name: field.type for field in dataclasses.fields(cls) if field.init}
        in_order = [f.name for f in dataclasses.fields(cls) if f.init and not f.kw_only]
        for name, value in (dict(zip(in_order, args, strict=False)) | options).items():
            kind, optional, _ = _annotation(fields.get(name)).partition(" | None")
            if kind in OPTION_TYPES and not (optional and value is None):
                words, fits = OPTION_TYPES[kind]
                require(fits(value), f"{cls.kind}: {name} must be {words}; got {value!r}")
        return super().__new__(cls)

    @property
    def members(self) -> tuple[Encoding, ...]:
        """The encodings that this one is made of."""
        return (self,)

    @property
    def state_part(self) -> Encoding:
        """The encoding that owns the position state; layers of a schedule share it if equal."""
        return self

    def of_layers(self, num_layers: int) -> list[OfLayer]:
        """Returns the part of the encoding that each layer of a model has."""
        return [OfLayer(self, None, self.updates(i, num_layers)) for i in range(num_layers)]

    @property
    def local_window_size(self) -> int | tuple[int, int] | None:
        """The window, as in ``ModelConfig``, of an encoding that sets one; None: the model's."""
        return None

    @property
    def coordinate_axes(self) -> int:
        """Coordinates per token."""
        return 1

    @property
    def attends_state(self) -> bool:
        """True if :meth:`update_state` wants the attended state ``a = A e``."""
        return False

    @property
    def starts_by_head(self) -> bool:
        """True if :meth:`start` makes a state for each head; positions then have all batch axes."""
        return False

    @property
    def reads_positions(self) -> bool:
        """True if the encoding depends on positions; override this if yours does not."""
        return type(self) is not Encoding

    @property
    def reads_start(self) -> bool:
        """True if the state entering the first layer is read; by default, if one is ever made."""
        own, makers = type(self), ("start", "start_from_embeddings", "rotation")
        return any(getattr(own, name) is not getattr(Encoding, name) for name in makers)

    def check(self, sizes: Sizes) -> None:
        """Raises ValueError if the encoding does not fit the model."""

    def max_length(self) -> int | None:
        """Longest sequence that the encoding can address, in tokens; None: any."""
        return None

    def input_params(self, sizes: Sizes) -> dict[str, Param]:
        """Parameters used once, at the embeddings or for the start state."""
        return {}

    def layer_params(self, sizes: Sizes, *, updates: bool) -> dict[str, Param]:
        """Parameters of one layer; ``updates`` says whether it updates the state."""
        return {}

    def coordinates(
        self, tokens: Array, positions: Array, segment_ids: Array | None = None
    ) -> Array:
        """Index ``[..., T]`` of each token that :meth:`embed` reads; the positions by default.

        The model passes all tokens from the start of the sequence, in cached decoding too, and
        their segment ids ``[..., T]``, if any.
        """
        return positions

    def embed(
        self, params: dict[str, Array], coordinates: Array, sizes: Sizes, key: Array | None
    ) -> Array | None:
        """Vectors ``[..., T, hidden]`` added to the token embeddings, or None."""
        return None

    def start(
        self,
        positions: Array,
        sizes: Sizes,
        *,
        key: Array | None = None,
        length: int | Array | None = None,
        dtype: Any = jnp.float32,
        params: dict[str, Array] | None = None,
    ) -> State:
        """Returns the state entering the first layer, or None.

        Args:
          positions: ``[..., T]`` or ``[..., T, n]``.
          sizes: the model's.
          key: random key for encodings that draw; None: their fixed draw.
          length: the sequence length, in tokens, for a draw or a dynamic scaling: an integer, or
            one for each sequence ``[...]``; None: that of ``positions``.
          dtype: type of the state.
          params: of :meth:`input_params`; None: those of an untrained model.
        """
        return None

    def start_from_embeddings(
        self, params: dict[str, Array], layer: Layer
    ) -> tuple[State | None, dict[str, Array]]:
        """Returns the state entering the first layer, from the embeddings, not :meth:`start`.

        Args:
          params: of :meth:`input_params`.
          layer: a layer whose input is the embeddings; without queries and keys.

        Returns:
          The state, None for that of :meth:`start`; and the arrays to keep of the new tokens, as
          :attr:`Terms.kept`.
        """
        return None, {}

    def locate(self, state: State, coordinates: Array) -> State:
        """Returns the state entering the first layer, with its tokens' :meth:`coordinates`."""
        return state

    def carry(self, state: State, shape: tuple[int, ...], sizes: Sizes) -> State:
        """Returns the start state with all axes of an updated one, for tokens of this ``shape``."""
        return state

    def rotation(self, state: State) -> tuple[Array | None, Array | None]:
        """The states ``e`` by which queries and keys are rotated; ``(None, None)``: not at all."""
        return None, None

    def logits_scale(self, sizes: Sizes) -> float | None:
        """The factor on ``q . k`` of an encoding that acts on "scale"; None: ``1 / sqrt(D)``."""
        return None

    def pair_bias(self, params: dict[str, Array], query: Array, key: Array, sizes: Sizes) -> Array:
        """Returns the bias ``[..., H, Q, K]`` of the logits.

        Args:
          params: this layer's, as :meth:`layer_params` describes them.
          query: positions of queries, ``[..., Q]``, or ``[..., Q, n]`` for ``n > 1`` coordinates
            per token.
          key: positions of keys, ``[..., K]`` or ``[..., K, n]``.
          sizes: the model's.

        Raises:
          NotImplementedError: if the encoding has no such bias.
        """
        raise NotImplementedError(f"the encoding {self.kind!r} does not bias the logits")

    def layer_terms(self, params: dict[str, Array], layer: Layer) -> Terms:
        """Returns the terms added to the attention of one layer; by default :meth:`pair_bias`.

        Args:
          params: this layer's, as :meth:`layer_params` describes them.
          layer: what enters it.
        """
        if type(self).pair_bias is Encoding.pair_bias:
            return Terms()

        def positions(index: Array) -> Array:
            p = layer.positions
            return p[..., index] if self.coordinate_axes == 1 else p[..., index, :]

        return Terms(
            bias=lambda i, j: self.pair_bias(params, positions(i), positions(j), layer.sizes),
        )

    def updates(self, layer: int, num_layers: int) -> bool:
        """Returns whether layer ``layer`` (from 0) of ``num_layers`` updates the state."""
        return False

    @property
    def update_implementations(self) -> tuple[str, ...]:
        """The names that ``ModelConfig.update_implementation`` may take."""
        return ()

    def update_state(
        self,
        params: dict[str, Array],
        state: State,
        attended: Array | None,
        x: Array,
        *,
        sharding: Sharding | None = None,
        implementation: str | Sequence[str] | None = None,
    ) -> State:
        """Returns the state leaving a layer.

        Args:
          params: this layer's, as :meth:`layer_params` describes them.
          state: the state entering the layer.
          attended: ``a = A e`` of this layer, or None unless ``attends_state``.
          x: the MLP's output before its residual addition, ``[..., T, hidden]``.
          sharding: on a mesh, how arrays are split over it, for an encoding that places its own
            sums. The result's arrays ``[B, T, H_kv, ...]`` are split by heads.
          implementation: one of :attr:`update_implementations`, if the model names one.
        """
        return state

    def loss(self, params: Sequence[Mapping[str, Array]], progress: Array | float) -> Array | None:
        """Returns the term that a training step adds to its loss, or None.

        Args:
          params: those of :meth:`layer_params`, one mapping per layer or, if layers are scanned,
            per run of like layers, with a leading axis of layers.
          progress: share of the training done, in [0, 1].
        """
        return None
