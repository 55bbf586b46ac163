"""A layer as a position encoding sees it: its inputs, and operations along time.

Sums and shifts along time start anew in each segment. In cached decoding they continue from the
segment's last earlier token, whatever tokens lie between. For this a layer keeps a few numbers of
every token beside its keys and values.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tape_jax._src.core.algebra import at_least_float32
from tape_jax._src.core.checks import require
from tape_jax._src.core.segments import of_first, running, side_by_side
from tape_jax._src.core.sizes import Sizes

Array = jax.Array


class Terms(NamedTuple):
    """The terms that an encoding adds to the attention of one layer; None: nothing.

    Attributes:
      state: rotary state that rotates the layer's queries and keys, ``[..., T, H, D]``; ``H`` is 1
        or that of the keys.
      bias: as ``bias`` of :func:`tape_jax.attention`.
      log_decay: as ``log_decay`` there, of the queries and of all keys.
      logits_fn, weights_fn: as there.
      features: queries ``[..., T, Hq, F]`` and keys ``[..., T, Hk, F]`` of the new tokens that
        attend in place of the projected ones; decoding keeps the keys. ``Encoding.rotation``
        rotates them too; let it return ``(None, None)`` if nothing should. ``Hq`` is
        ``Encoding.heads_per_query`` times the number of query heads.
      rewritten_keys: maps all keys ``[B, H, S, D]`` to those that decoding keeps after these
        tokens, for encodings with ``Encoding.rewrites_keys``. Without ``logits_fn`` these tokens
        attend to them too.
      kept: arrays to keep of the new tokens, by name, ``[..., T, heads, ...]``; in cached decoding
        :class:`Layer` has those of earlier ones.
    """

    state: Array | None = None
    bias: Callable[[Array, Array], Array] | None = None
    log_decay: tuple[Array, Array] | None = None
    logits_fn: Callable[[Array, Any], Array] | None = None
    weights_fn: Callable[[Array, Any], Array] | None = None
    features: tuple[Array, Array] | None = None
    rewritten_keys: Callable[[Array], Array] | None = None
    kept: dict[str, Array] | None = None

    def keywords(self) -> dict[str, Any]:
        """Returns the terms that are keywords of :func:`tape_jax.attention`."""
        names = ("bias", "log_decay", "logits_fn", "weights_fn")
        return {name: getattr(self, name) for name in names}


class Order(NamedTuple):
    """The order in which devices hold a sequence: functions of an array and its time axis.

    Attributes:
      natural: brings tokens into their natural order.
      held: the inverse.
    """

    natural: Callable[[Array, int], Array]
    held: Callable[[Array, int], Array]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The inputs of a layer's encoding. ``T`` tokens are new, ``S`` are all keys.

    Attributes:
      x: the layer's input after its norm, ``[..., T, hidden]``.
      positions: of all keys, ``[..., S]``, or ``[..., S, n]``.
      segment_ids: integers ``[..., T]``, a pair (of the new tokens, of all keys), or None.
      is_causal: whether tokens see only earlier ones.
      sizes: the model's.
      q, k: projected queries and keys of the new tokens, ``[..., T, heads, D]``, not rotated.
      state: the position state that enters the layer; None while it is made.
      kept: in cached decoding, arrays kept of each token, by name, ``[B, heads, S, ...]``; else
        None.
      cached_keys: in cached decoding ``[B, heads, S, D]``.
      index: of the first new token among the keys.
      order: on a mesh that splits sequences, how its devices hold them.
    """

    x: Array
    positions: Array
    segment_ids: Array | tuple[Array, Array] | None
    is_causal: bool
    sizes: Sizes
    q: Array | None = None
    k: Array | None = None
    state: Any = None
    kept: dict[str, Array] | None = None
    cached_keys: Array | None = None
    index: Array | int = 0
    order: Order | None = None

    @property
    def time(self) -> int:
        """Number of new tokens."""
        return self.x.shape[-2]

    @property
    def axis(self) -> int:
        """The axis of time."""
        return self.x.ndim - 2

    @property
    def dtype(self) -> jnp.dtype:
        """At least float32: the type of angles and of sums along time."""
        return at_least_float32(self.x.dtype)

    @property
    def query_positions(self) -> Array:
        """Positions of the new tokens, ``[..., T]``, or ``[..., T, n]``."""
        return self.of_new_tokens(self.positions)

    def of_new_tokens(self, x: Array) -> Array:
        """Returns the part of ``x [..., S]``, or ``[..., S, n]``, for the new tokens."""
        if self.kept is None:
            return x
        return lax.dynamic_slice_in_dim(x, self.index, self.time, axis=1)

    def ids(self) -> tuple[Array | None, Array | None]:
        """Segment ids of the new tokens ``[B, T]`` and of all keys ``[B, S]``, or Nones.

        ``B`` joins all batch axes.
        """
        if self.segment_ids is None:
            return None, None
        pair = self.segment_ids if isinstance(self.segment_ids, tuple) else (self.segment_ids,) * 2
        batch = self.x.shape[:-2]
        own, every = (
            jnp.broadcast_to(ids, (*batch, ids.shape[-1])).reshape(-1, ids.shape[-1])
            for ids in pair
        )
        return own, every

    def first_positions(self) -> Array:
        """Returns the first position of each key's segment, ``[..., S]``, or one for all.

        Entries of keys that no new token sees mean nothing.
        """
        p, ids = self.positions, self.segment_ids
        if ids is None or self.order is not None:
            return p[..., :1]
        own, every = ids if isinstance(ids, tuple) else (ids, ids)
        if self.kept is None or self.time > 1:
            return of_first(every, p)
        slot = jnp.argmax(every == own, axis=-1, keepdims=True)
        return jnp.take_along_axis(p, slot, axis=-1)

    def require_causal(self, kind: str, why: str) -> None:
        """Raises ValueError unless tokens see earlier ones only."""
        require(self.is_causal, f"the encoding {kind!r} needs is_causal=True: {why}")

    def product(self, kernel: Array, x: Array | None = None) -> Array:
        """``x @ kernel`` over the last axis, in the type of ``x`` with sums in ``dtype``.

        ``x`` defaults to the layer's input.
        """
        flat = self.flat if x is None else x.reshape(-1, x.shape[-1])
        x = self.x if x is None else x
        kernel = kernel.astype(x.dtype)
        out = jnp.matmul(flat, kernel, preferred_element_type=self.dtype)
        return out.reshape(*x.shape[:-1], kernel.shape[-1])

    @functools.cached_property
    def flat(self) -> Array:
        """The layer's input with one axis for batch and time; cached, or each use would keep it."""
        return self.x.reshape(-1, self.x.shape[-1])

    def renamed(self, prefix: str) -> Layer:
        """Returns the layer for one encoding of several, with ``kept`` under its own names."""
        kept = self.kept
        if kept is not None:
            kept = {k.removeprefix(prefix): x for k, x in kept.items() if k.startswith(prefix)}
        return dataclasses.replace(self, kept=kept)

    def of_all_keys(self, name: str, x: Array) -> Array:
        """Returns the kept and the new numbers ``[..., S, heads, ...]`` of all keys.

        Args:
          name: under which they are kept (:attr:`Terms.kept`).
          x: those of the new tokens, ``[..., T, heads, ...]``.
        """
        if self.kept is None:
            return x
        return self._with_new(self.kept[name], x)

    def all_keys(self) -> Array:
        """Keys ``[..., S, heads, D]``: kept ones, and those of the new tokens as they are."""
        assert self.k is not None
        if self.cached_keys is None:
            return self.k
        return self._with_new(self.cached_keys, self.k)

    def _with_new(self, old: Array, new: Array) -> Array:
        """Joins kept arrays ``[B, heads, S, ...]`` and new tokens: ``[B, S, heads, ...]``."""
        new = new.swapaxes(1, 2).astype(old.dtype)
        return lax.dynamic_update_slice_in_dim(old, new, self.index, axis=2).swapaxes(1, 2)

    def running_sum(self, name: str, x: Array) -> Array:
        """Returns cumulative sums of ``x [..., T, heads, ...]`` in each segment, in ``dtype``.

        Args:
          name: under which the encoding keeps the sums.
          x: of the new tokens.
        """
        x = x.astype(self.dtype)
        total = self._ordered(_running_sum, x)
        if self.kept is not None:
            total = total + self._earlier(name, 1)[0]
        return total

    def previous(self, name: str, x: Array, count: int) -> list[Array]:
        """Returns ``x`` of the ``count`` tokens before each in its segment, nearest first; 0: none.

        Args:
          name: under which the encoding keeps ``x``.
          x: ``[..., T, heads, ...]``, of the new tokens.
          count: how many.
        """
        if self.kept is None:
            return self._all_shifted(x, count)
        kept = self.of_all_keys(name, x)
        slots = self._earlier_slots(count, own=True)
        return [_take(kept, slot) for slot in slots]

    def convolution(self, name: str, x: Array, taps: Array) -> Array:
        """Causal convolution of each channel along time: ``sum_n taps[..., -1 - n] x[t - n]``.

        Args:
          name: under which the encoding keeps ``x``.
          x: ``[..., T, *channels]``.
          taps: ``[*channels, taps]``, the last for the token itself.
        """
        count = taps.shape[-1] - 1
        if self.kept is not None:
            return _weighted(taps, [x, *self.previous(name, x, count)])

        def convolve(x: Array, taps: Array) -> Array:
            return _weighted(taps, [x, *self._all_shifted(x, count)])

        # The backward pass keeps x, not a shifted copy for each tap.
        return jax.checkpoint(convolve, prevent_cse=False)(x, taps)

    def _all_shifted(self, x: Array, count: int) -> list[Array]:
        return [self._ordered(_shifted(n), x) for n in range(1, count + 1)]

    def _ordered(self, function: Callable[..., Array], x: Array) -> Array:
        """``function(x, ids, axis)`` of tokens in natural order."""
        ids = self.segment_ids[0] if isinstance(self.segment_ids, tuple) else self.segment_ids
        if ids is not None:
            ids = jnp.broadcast_to(ids, self.x.shape[:-1])
        if self.order is None:
            return function(x, ids, self.axis)
        natural, held = self.order
        ids = None if ids is None else natural(ids, self.axis)
        return held(function(natural(x, self.axis), ids, self.axis), self.axis)

    def _earlier(self, name: str, count: int) -> list[Array]:
        """Returns what earlier calls kept of the last tokens of each new token's segment."""
        assert self.kept is not None
        kept = self.kept[name].swapaxes(1, 2)
        return [_take(kept, slot) for slot in self._earlier_slots(count, own=False)]

    def _earlier_slots(self, count: int, *, own: bool) -> list[Array]:
        """Slots of the last earlier tokens of each new token's segment, -1: none; ``[B, T]``.

        ``own``: new tokens count too; otherwise only those kept before.
        """
        assert isinstance(self.segment_ids, tuple)
        ids, key_ids = self.segment_ids
        slots = jnp.arange(key_ids.shape[-1], dtype=jnp.int32)
        first = jnp.full((self.time,), self.index, jnp.int32)
        before = first + jnp.arange(self.time, dtype=jnp.int32) if own else first
        before = jnp.broadcast_to(before, ids.shape)
        same = ids[..., None] == key_ids[:, None]
        found = []
        for _ in range(count):
            before = jnp.where(same & (slots < before[..., None]), slots, -1).max(-1)
            found.append(before)
        return found


def _take(kept: Array, slot: Array) -> Array:
    """``kept [B, S, ...]`` at slots ``[B, T]``; 0 where a slot is -1."""
    tail = (1,) * (kept.ndim - 2)
    found = jnp.take_along_axis(kept, jnp.maximum(slot, 0).reshape(*slot.shape, *tail), axis=1)
    return jnp.where((slot >= 0).reshape(*slot.shape, *tail), found, 0)


def _weighted(taps: Array, values: list[Array]) -> Array:
    """Returns the sum of taps times values of a token and of those before it, nearest first."""
    products = [taps[..., -1 - n] * x for n, x in enumerate(values)]
    return functools.reduce(operator.add, products)


def _running_sum(x: Array, ids: Array | None, axis: int) -> Array:
    if ids is None:
        return jnp.cumsum(x, axis=axis)

    def within(ids: Array, x: Array) -> Array:
        begins = jnp.diff(ids, axis=axis, prepend=ids[..., :1] - 1) != 0

        begins = begins.reshape(*begins.shape, *(1,) * (x.ndim - begins.ndim))
        return running(operator.add, begins, x, axis)

    return side_by_side(within, ids, x)


def _shifted(steps: int) -> Callable[..., Array]:
    """Values of the token ``steps`` places before, of the same segment; 0 where there is none."""

    def back(x: Array, axis: int) -> Array:
        pads = [(steps if n == axis else 0, 0) for n in range(x.ndim)]
        return lax.slice_in_dim(jnp.pad(x, pads), 0, x.shape[axis], axis=axis)

    def shift(x: Array, ids: Array | None, axis: int) -> Array:
        if ids is None:
            return back(x, axis)

        def within(ids: Array, x: Array) -> Array:
            same = (back(ids, axis) == ids) & (jnp.arange(ids.shape[axis]) >= steps)
            return jnp.where(
                same.reshape(*same.shape, *(1,) * (x.ndim - ids.ndim)), back(x, axis), 0
            )

        return side_by_side(within, ids, x)

    return shift
