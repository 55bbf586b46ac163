"""The inputs of a model: their checks, and one form for every kind of call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import flax
import jax
import jax.numpy as jnp

from tape_jax._src.attention.zigzag import to_zigzag
from tape_jax._src.core.checks import concrete, require, require_whole
from tape_jax._src.core.segments import (
    PADDING,
    order_by_segment,
    places,
    reordered,
    without_padding,
)
from tape_jax._src.core.sharding import Model, Sharding, splits_sequence
from tape_jax._src.model.cache import Cache, append, check_cache, check_length
from tape_jax._src.model.config import ModelConfig
from tape_jax._src.positions.drawing import drawn_positions
from tape_jax._src.positions.protocol import (
    Encoding,
    State,
    as_length,
    default_positions,
    on_axes,
)
from tape_jax._src.positions.schedule import Layers

Array = jax.Array


@flax.struct.dataclass
class Context:
    """The inputs that all layers of one call share.

    Attributes:
      positions: of the keys, ``[..., S]`` or ``[..., S, n]``.
      segment_ids: integers ``[..., T]``, a pair (queries', keys'), or None.
      mask: booleans that broadcast to ``[..., H, T, S]``, or None.
      index: index of the first query among the keys.
      is_causal: whether queries see earlier keys only.
      counts: integers that measure a window, a pair (queries', keys'); None: indices do.
    """

    positions: Array
    segment_ids: Any
    mask: Array | None
    index: Array | int
    is_causal: bool = flax.struct.field(pytree_node=False)
    counts: tuple[Array, Array] | None = None


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a model, full or with a cache, in one form.

    Attributes:
      tokens: the new tokens ``[..., T]``.
      positions: theirs, ``[..., T]`` or ``[..., T, n]``; drawn, where positions are.
      segment_ids: theirs, ``[..., T]``, or None.
      at: their result of :meth:`Encoding.coordinates`.
      length: number of tokens for which positions are drawn and scaling is fixed.
      key: of draws, or None.
      context: what all layers share.
      cache: with the new tokens in it, or None.
    """

    tokens: Array
    positions: Array
    segment_ids: Array | None
    at: Array
    length: int | Array
    key: Array | None
    context: Context
    cache: Cache | None = None

    @classmethod
    def whole(
        cls,
        config: ModelConfig,
        tokens: Array,
        positions: Array | None,
        segment_ids: Array | None,
        *,
        length: int | Array | None,
        key: Array | None,
        **shared: Any,
    ) -> Self:
        """A full pass; ``shared`` are the mask and whether it is causal."""
        encoding, time = config.position, tokens.shape[-1]
        if length is not None:
            length = as_length(length, tokens.shape[:-1])
        elif segment_ids is None:
            length = time
        else:
            # Draws need at least one token; a row of padding only is not read.
            length = jnp.maximum((segment_ids != PADDING).sum(-1, dtype=jnp.int32), 1)
        if positions is None:
            positions = default_positions(time) if segment_ids is None else places(segment_ids)
            positions = on_axes(positions, encoding.coordinate_axes)
        tokens = without_padding(tokens, segment_ids)
        positions = without_padding(positions, segment_ids, axes=encoding.coordinate_axes)
        positions = _drawn(config, positions, length, key)
        at = _coordinates(encoding, tokens, positions, segment_ids)
        counts = None
        if config.has_window and segment_ids is not None:
            counts = (places(segment_ids),) * 2
        context = Context(positions, segment_ids, index=0, counts=counts, **shared)
        return cls(tokens, positions, segment_ids, at, length, key, context)

    @classmethod
    def continued(
        cls,
        config: ModelConfig,
        tokens: Array,
        positions: Array | None,
        segment_ids: Array | None,
        *,
        cache: Cache,
        **shared: Any,
    ) -> Self:
        """Tokens that follow those of a cache."""
        encoding, time = config.position, tokens.shape[-1]
        cache = append(cache, tokens, positions, segment_ids)
        start = cache.index - time
        length = cache.capacity if cache.length is None else cache.length

        def recent(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, time, axis=1)

        ids = (recent(cache.segment_ids), cache.segment_ids)
        every = _drawn(config, cache.positions, length, cache.key)
        at = recent(_coordinates(encoding, cache.tokens, every, cache.segment_ids))
        counts = None
        if config.has_window:
            every_count = places(cache.segment_ids)
            counts = recent(every_count), every_count
        context = Context(every, ids, index=start, counts=counts, **shared)
        new = (recent(cache.tokens), recent(every), ids[0])
        return cls(*new, at, length, cache.key, context, cache)

    def on_ring(self, ring: Sharding, axes: int) -> Self:
        """The call with its tokens as a mesh that splits sequences holds them.

        Args:
          ring: the mesh.
          axes: coordinates per token.
        """
        return self._moved(lambda x, axis: to_zigzag(ring, x, axis), axes)

    def by_segment(self, axes: int) -> tuple[Self, Array]:
        """Returns the call with each segment's tokens adjacent, so that indices measure a window.

        Its ``segment_ids`` are ``[..., T]`` as its tokens are.

        Args:
          axes: coordinates per token.

        Returns:
          The call, and the order back, a permutation ``[..., T]``.
        """
        shape = self.tokens.shape
        assert self.segment_ids is not None
        order, back = order_by_segment(self.segment_ids)

        def move(x: Array, axis: int) -> Array:
            return reordered(jnp.broadcast_to(x, (*shape, *x.shape[axis + 1 :])), order)

        return self._moved(move, axes), back

    def _moved(self, move: Callable[[Array, int], Array], axes: int) -> Self:
        """The call with its tokens in another order, in which indices measure windows.

        Args:
          move: reorders an array along its axis of time.
          axes: coordinates per token.
        """

        def moved(x: Array | None, more: bool = False) -> Any:
            return None if x is None else move(x, x.ndim - 1 - more)

        positions, ids = moved(self.positions, axes > 1), moved(self.segment_ids)
        return dataclasses.replace(
            self,
            tokens=moved(self.tokens),
            positions=positions,
            segment_ids=ids,
            at=positions if self.at is self.positions else moved(self.at),
            context=self.context.replace(positions=positions, segment_ids=ids, counts=None),  # type: ignore[attr-defined]
        )


def _coordinates(
    encoding: Encoding, tokens: Array, positions: Array, segment_ids: Array | None
) -> Array:
    """Return the encoding's coordinates of tokens: their positions, or ids ``[..., T]``."""
    at = encoding.coordinates(tokens, positions, segment_ids)
    return at if at is positions else without_padding(at, segment_ids)


def _drawn(config: ModelConfig, positions: Array, length: Any, key: Array | None) -> Array:
    """Draw positions, if the config says so and there is a key."""
    draw = config.random_positions
    if draw is None or key is None:
        return positions
    # Not the key itself, which encodings use for draws.
    return drawn_positions(draw, positions, length, jax.random.fold_in(key, 0))


def check_call(
    model: Model,
    tokens: Array,
    positions: Array | None,
    segment_ids: Array | None,
    *,
    initial_state: State,
    cache: Cache | None,
    length: int | Array | None,
    draws: bool,
    sharding: Sharding | None,
) -> None:
    """Raises ValueError unless a model can be called like this; ``draws``: with a random stream."""
    check_inputs(model, tokens, positions, segment_ids, cache)
    check_initial_state(model.config.position, initial_state)
    if cache is not None:
        check_cache(model, cache)
        require(
            length is None,
            f"with a cache, length is the cache's: give init_cache length={length}",
        )
        require(
            not draws,
            "with a cache, the key of a draw is the cache's: give init_cache key=, in place of "
            "the random stream 'positions'",
        )
    if sharding is not None:
        check_sharded(sharding, model.config, tokens, initial_state, cache)


def check_variables(variables: Any) -> None:
    """Raises ValueError unless these are a model's variables, ``{"params": ...}``."""
    mapping = isinstance(variables, Mapping)
    given = f"keys {sorted(map(str, variables))}" if mapping else type(variables).__name__
    require(
        mapping and "params" in variables,
        f"variables must be {{'params': ...}}, as init makes them; got {given}",
    )


def check_inputs(
    model: Model,
    tokens: Array,
    positions: Array | None,
    segment_ids: Array | None,
    cache: Cache | None,
) -> None:
    """Raises ValueError unless these fit each other and the model; the message gives both sides."""
    encoding = model.config.position
    for name, x in (("tokens", tokens), ("positions", positions), ("segment_ids", segment_ids)):
        require(
            x is None or hasattr(x, "dtype"),
            f"{name} must be an array; got {type(x).__name__}",
        )
        if x is not None:
            require_whole(name, x)
    if not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.ndim < 1:
        raise ValueError(
            f"tokens must be integers [..., T]; got {tokens.dtype} of shape {tokens.shape}"
        )
    time = tokens.shape[-1]
    if not tokens.size:
        raise ValueError(f"tokens must hold at least one token; got shape {tokens.shape}")
    check_length(model, time if cache is None else cache.capacity)
    if positions is None and encoding.coordinate_axes > 1 and not encoding.counts_text:
        raise ValueError(
            f"the encoding {encoding.kind!r} has axes={encoding.coordinate_axes}: give "
            f"positions= of shape {(*tokens.shape, encoding.coordinate_axes)}"
        )
    tail = () if encoding.coordinate_axes == 1 else (encoding.coordinate_axes,)
    _fits("positions", positions, tokens, tail)
    _fits("segment_ids", segment_ids, tokens, ())
    if segment_ids is None:
        return
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"segment_ids must be integers; got {segment_ids.dtype}")
    ids = concrete(segment_ids)
    if cache is None and ids is not None and (ids == PADDING).all():
        raise ValueError(
            f"all segment_ids are {PADDING}, which is padding: real tokens have other ids"
        )


def check_initial_state(encoding: Encoding, initial_state: State) -> None:
    """Raises ValueError if a state is given that the encoding does not read."""
    require(
        initial_state is None or encoding.reads_start,
        f"the encoding {encoding.kind!r} reads no state that enters the first layer: expected "
        f"initial_state=None; got {jax.tree.map(jnp.shape, initial_state)}, by shapes",
    )
    if initial_state is not None and isinstance(encoding, Layers):
        count = len(encoding.state_parts)
        require(
            isinstance(initial_state, tuple) and len(initial_state) == count,
            f"initial_state of a schedule is a tuple of {count} states, of {encoding.kind!r}; got "
            f"{jax.tree.map(jnp.shape, initial_state)}, by shapes",
        )


def check_sharded(
    sharding: Sharding, config: ModelConfig, tokens: Array, initial_state: State, cache: Any
) -> None:
    """Raises ValueError unless the mesh can take a call."""
    require(tokens.ndim == 2, f"on a mesh, tokens must have shape [B, T]; got shape {tokens.shape}")
    require(
        not splits_sequence(sharding) or (cache is None and initial_state is None),
        "a mesh that splits sequences takes neither a cache nor an initial_state",
    )
    sharding.check_activations(config, *tokens.shape)


def _fits(name: str, x: Array | None, tokens: Array, tail: tuple[int, ...]) -> None:
    """Raises ValueError unless ``x`` is None or ``[..., T, *tail]`` for ``tokens [..., T]``."""
    if x is None:
        return
    lead = x.shape[: x.ndim - len(tail)]
    batch = zip(lead[-2::-1], tokens.shape[-2::-1], strict=False)
    if (
        x.shape[x.ndim - len(tail) :] != tail
        or not 1 <= len(lead) <= tokens.ndim
        or lead[-1] != tokens.shape[-1]
        or any(a not in (1, b) for a, b in batch)
    ):
        turned = "; ids [n, ..., T] are jnp.moveaxis(ids, 0, -1)" if x.shape[:1] == tail else ""
        raise ValueError(
            f"{name} of shape {x.shape} does not fit tokens of shape {tokens.shape}: expected "
            f"{(*tokens.shape, *tail)}, leading axes may be missing{turned}"
        )
