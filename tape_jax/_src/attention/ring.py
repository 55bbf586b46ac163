"""Attention over sequences that are split over devices: keys, values and states go round a ring.

Every device keeps its queries and passes keys, values and position states on to its neighbour,
until each device has seen them all (ring attention; Liu et al., 2023). ``chunked`` computes
attention over each visiting part, which is merged with the earlier parts by the maximum and sum of
each row. The backward pass recomputes probabilities. The gradients of keys, values and states
travel along with them, in the accumulator type. So do the log decay of keys and its gradient.
Memory is O(T / devices), and the only collectives are permutations.

Under the causal rule, a device with early tokens would have little to do. Tokens are therefore held
in zigzag order (``zigzag``). At every step, two of the four pairs of chunks that meet on a device
are visible, on all devices alike.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from tape_jax._src.attention import chunked
from tape_jax._src.attention.block_bias import DecayBias
from tape_jax._src.attention.request import Request, from_rows, refuse, refuse_rows, to_rows
from tape_jax._src.attention.visibility import Band, Visibility
from tape_jax._src.attention.zigzag import CHUNKS, check_chunks, exchange, on_devices
from tape_jax._src.core.checks import choose, positive, require
from tape_jax._src.core.padding import pad_to_multiple
from tape_jax._src.core.sharding import Axes, Sharding

Array = jax.Array

ORDERS = ("natural", "zigzag")


def check(request: Request) -> None:
    """Raises NotImplementedError for calls without a mesh, and for those that need all pairs."""
    found = _sharding(request)
    if found is None or not found.mesh_axes("sequence"):
        raise NotImplementedError(
            "needs a mesh that splits sequences: give sharding=, or call it under jax.set_mesh "
            "with a mesh that has an axis 'sequence'"
        )
    refuse_rows(request)
    refuse(request.visibility.counts is not None, "window_positions= is not sent around the ring")
    for name, given in (("mask", request.visibility.mask), ("bias", request.bias)):
        refuse(
            given is not None,
            f"{name}= speaks of pairs of tokens on different devices; segment_ids= hides padding",
        )
    offset = request.visibility.query_offset
    own_offset = isinstance(offset, int) and offset == 0
    if not own_offset or request.query_length != request.key_length or request.keys_rotated:
        raise NotImplementedError(
            "takes queries and keys of the same tokens; got "
            f"{request.query_length} queries, {request.key_length} keys, query_offset = "
            f"{offset}, keys_rotated = {request.keys_rotated}"
        )


def attend(
    request: Request,
    *,
    order: str = "natural",
    block_q: int | None = None,
    block_k: int | None = None,
) -> tuple[Array, Array | None]:
    """Computes attention around the ring.

    Args:
      request: the call.
      order: order of tokens in the inputs and the result: ``natural``, or ``zigzag`` as
        ``zigzag.to_zigzag`` makes it, which saves exchanging all arrays.
      block_q, block_k: as in ``chunked.attend``, within a chunk.

    Returns:
      ``o [B, T, Hq, Dv]`` and ``a [B, T, Hq, De]`` (None if no state is attended), in the
      accumulator type.

    Raises:
      ValueError: if the mesh does not divide batch, heads, or the length into two chunks for each
        device, or splits query heads and key/value heads differently.
      NotImplementedError: if there is no mesh, or :func:`check` refuses the call.
    """
    check(request)
    choose("order of ring attention", order, ORDERS)
    sharding = _sharding(request)
    assert sharding is not None
    names = sharding.mesh_axes("sequence")
    count = sharding.shards("sequence")
    batch, length = request.q.shape[:2]
    check_chunks(length, count, names)
    q, k = request.rotated()
    state = request.attended_state()
    if state is not None:
        state = jnp.broadcast_to(state, (batch, *state.shape[1:]))
    v = request.v.astype(request.compute_dtype)
    inputs = _Inputs(q, k, v, state, request.visibility.segments, request.log_decay)
    specs = _specs(sharding, inputs)
    shared = request.kv_heads == 1
    require(
        shared or specs.q[2] == specs.k[2],
        "ring attention needs query heads and key/value heads split alike; the mesh axes that "
        f"split {request.query_heads} heads are {specs.q[2]}, {request.kv_heads} kv_heads "
        f"{specs.k[2]}",
    )
    rows, _, heads, _ = NamedSharding(sharding.mesh, specs.q).shard_shape(q.shape)
    chunk = length // (CHUNKS * count)
    block_q = positive("block_q", block_q, optional=True)
    block_k = positive("block_k", block_k, optional=True)
    default = chunked.block_length(chunk, max(rows * heads, 1))
    band = request.visibility.band
    ring = _Ring(
        names=names,
        count=count,
        # If nothing depends on the order, any will do.
        zigzag=order == "zigzag" or band.hides,
        exchange=order == "natural" and band.hides,
        band=band,
        blocks=chunked.Blocks(
            query_length=chunk,
            key_length=chunk,
            block_q=min(block_q or default, chunk),
            block_k=min(block_k or default, chunk),
            groups=heads if shared else request.groups,
            scale=request.scale,
            softcap=request.softcap,
        ),
    )
    out = _attend_compiled(ring, sharding, specs, inputs)
    width = request.v.shape[-1]
    return out[..., :width], None if state is None else out[..., width:]


def _sharding(request: Request) -> Sharding | None:
    """Returns the call's mesh and rules, or those of jax's context."""
    if request.sharding is not None:
        return request.sharding
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else Sharding(mesh)


class _Inputs(NamedTuple):
    """Arrays of a call, for all devices or for one.

    Attributes:
      q: rotated queries ``[B, T, Hq, D']``.
      k: rotated keys ``[B, T, Hk, D']``.
      v: values ``[B, T, Hk, Dv]``.
      e: states as values ``[B, T, Hk|1, De]``, or None.
      segments: ids of queries and of keys, ``[B|1, T]`` each, or None.
      log_decay: of queries and of keys, ``[B|1, T, Hq|1]`` each, or None.
    """

    q: Array
    k: Array
    v: Array
    e: Array | None
    segments: tuple[Array, ...] | None
    log_decay: tuple[Array, ...] | None


class _Visitor(NamedTuple):
    """The arrays that travel, cut into chunks of ``C'`` keys, padded to whole blocks.

    Attributes:
      k: rotated keys ``[2, B, Hk, C', D']``.
      v: values ``[2, B, Hk, C', Dv]``.
      e: states ``[2, B, Hk|1, C', De]``, or None.
      ids: segment ids ``[2, B|1, C']``, or None.
      decay: log decay ``[2, B|1, C', Hq|1]``, or None.
    """

    k: Array
    v: Array
    e: Array | None
    ids: Array | None
    decay: Array | None

    def values(self) -> Array:
        """Return ``[v | e]`` of one chunk."""
        if self.e is None:
            return self.v
        e = jnp.broadcast_to(self.e, (*self.v.shape[:-1], self.e.shape[-1]))
        return jnp.concatenate([self.v, e], axis=-1)


class _Host(NamedTuple):
    """The arrays that stay: queries ``[2, B, Hk, G * C', D']``; ids and decay as a visitor's."""

    q: Array
    ids: Array | None
    decay: Array | None


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The static part of a call.

    Attributes:
      names: axes of the mesh that split the sequence.
      count: number of devices along them.
      zigzag: whether device ``d`` holds chunks ``d`` and ``2n - 1 - d``, or ``2d`` and ``2d + 1``.
      exchange: whether to exchange the inputs from natural order, and the result back.
      band: the causal rule and the window.
      blocks: sizes for one chunk against another.
    """

    names: tuple[str, ...]
    count: int
    zigzag: bool
    exchange: bool
    band: Band
    blocks: chunked.Blocks

    def chunk(self, device: Array, slot: Array) -> Array:
        """Returns the number of a device's chunk in slot 0 or 1."""
        if self.zigzag:
            return jnp.where(slot == 0, device, CHUNKS * self.count - 1 - device)
        return CHUNKS * device + slot

    def pairs(self) -> Array:
        """Returns the slots ``[pairs, 2]`` of queries and of keys they may see."""
        every = [(1, 0), (0, 0), (1, 1), (0, 1)]
        # Chunks of a sequence's first half do not see those of the second.
        return jnp.array(every[:3] if self.band.is_causal and self.zigzag else every, jnp.int32)

    def passed_on(self, x: Any) -> Any:
        """Return the arrays that the neighbour has sent."""
        hops = [(d, (d + 1) % self.count) for d in range(self.count)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.names, hops), x)

    def go_round(
        self,
        visit: Callable[[Any, _Visitor, Array], Any],
        carry: Any,
        visitor: _Visitor,
        after: Callable[[Any], Any] = lambda carry: carry,
    ) -> Any:
        """Calls ``carry = visit(carry, visitor, device)`` for all devices' visitors, own first.

        ``after`` is applied to the carry after each call, so that parts of it can travel too.
        """
        here = lax.axis_index(self.names)

        def step(hop: Array, carry: tuple[Any, _Visitor]) -> tuple[Any, _Visitor]:
            carry, visitor = carry
            # Sent before use, so that the two can overlap.
            upcoming = self.passed_on(visitor)
            return after(visit(carry, visitor, (here - hop) % self.count)), upcoming

        last = self.count - 1
        carry, visitor = lax.fori_loop(0, last, step, (carry, visitor))
        return after(visit(carry, visitor, (here - last) % self.count))


def _specs(sharding: Sharding, inputs: _Inputs) -> Any:
    """Return the PartitionSpecs of the inputs, as :class:`_Inputs`."""

    def spec(x: Array | None, *axes: str) -> Any:
        if x is None:
            return None
        named: Axes = tuple(axis if n > 1 else None for n, axis in zip(x.shape, axes, strict=False))
        named = (*named, *[None] * (x.ndim - len(named)))
        return sharding.spec(named, x.shape, "an input of ring attention")

    tokens, heads = ("batch", "sequence"), ("batch", "sequence", "kv_heads")
    ids, decay = inputs.segments, inputs.log_decay
    return _Inputs(
        q=spec(inputs.q, *tokens, "heads"),
        k=spec(inputs.k, *heads),
        v=spec(inputs.v, *heads),
        e=spec(inputs.e, *heads),
        segments=None if ids is None else tuple(spec(x, *tokens) for x in ids),
        log_decay=None if decay is None else tuple(spec(x, *tokens, "heads") for x in decay),
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _attend_compiled(ring: _Ring, sharding: Sharding, specs: Any, inputs: _Inputs) -> Array:
    """Computes ``[o | a]`` ``[B, T, Hq, Dv + De]`` of all devices."""
    run = functools.partial(_on_device, ring)
    return on_devices(run, sharding, (specs,), specs.q)(inputs)


def _on_device(ring: _Ring, inputs: _Inputs) -> Array:
    """Computes ``[o | a]`` for one device's queries."""
    if ring.exchange:
        swap = functools.partial(exchange, names=ring.names, count=ring.count, axis=1)
        inputs = jax.tree.map(swap, inputs)
    kv_heads, query_heads = inputs.k.shape[2], inputs.q.shape[2]
    block_q, block_k = ring.blocks.block_q, ring.blocks.block_k

    def chunks(x: Array, block: int, mode: str = "constant") -> Array:
        """Reshapes ``[B, 2C, ...]`` to ``[2, B, C', ...]``."""
        x = jnp.moveaxis(x.reshape(x.shape[0], CHUNKS, -1, *x.shape[2:]), 1, 0)
        return pad_to_multiple(x, block, 2, mode=mode)

    def heads_first(x: Array) -> Array:
        return chunks(x, block_k).swapaxes(2, 3)

    query_ids, key_ids = inputs.segments or (None, None)
    query_decay, key_decay = inputs.log_decay or (None, None)
    host = _Host(
        q=jax.vmap(lambda x: to_rows(x, kv_heads, block_q))(chunks(inputs.q, block_q)),
        ids=None if query_ids is None else chunks(query_ids, block_q, "edge"),
        decay=None if query_decay is None else chunks(query_decay, block_q, "edge"),
    )
    visitor = _Visitor(
        k=heads_first(inputs.k),
        v=heads_first(inputs.v),
        e=None if inputs.e is None else heads_first(inputs.e),
        ids=None if key_ids is None else chunks(key_ids, block_k, "edge"),
        decay=None if key_decay is None else chunks(key_decay, block_k, "edge"),
    )
    out = _attend(ring, host, visitor)
    out = jax.vmap(lambda x: from_rows(x, query_heads, block_q))(out)
    out = out[:, :, : ring.blocks.query_length]
    out = jnp.moveaxis(out, 0, 1).reshape(out.shape[1], -1, *out.shape[3:])
    if ring.exchange:
        out = swap(out, back=True)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, host: _Host, visitor: _Visitor) -> Array:
    """Computes attention on one device, ``[2, B, Hk, G * C', Dv + De]`` in the accumulator type."""
    return _forward(ring, host, visitor)[0]


class _Attended(NamedTuple):
    """Output, largest logit and sum of each row, as in ``chunked.Saved``."""

    out: Array
    top: Array
    total: Array


class _Saved(NamedTuple):
    """Residuals of the backward pass: inputs, and each row's result over all keys."""

    host: _Host
    visitor: _Visitor
    rows: _Attended


def _forward(ring: _Ring, host: _Host, visitor: _Visitor) -> tuple[Array, _Saved]:
    here, bias = lax.axis_index(ring.names), _bias(ring, host)

    def visit(carry: _Attended, visitor: _Visitor, device: Array) -> _Attended:
        def one(carry: _Attended, pair: Array) -> tuple[_Attended, None]:
            arrays = _arrays(ring, host, visitor, pair, here, device)
            _, part = chunked.forward(ring.blocks, bias, arrays)
            old = jax.tree.map(lambda x: x[pair[0]], carry)
            merged = _merge(old, _Attended(part.out, part.top, part.total))
            return jax.tree.map(lambda all, x: all.at[pair[0]].set(x), carry, merged), None

        return lax.scan(one, carry, ring.pairs())[0]

    shape = jax.eval_shape(
        functools.partial(chunked.forward, ring.blocks, bias),
        _arrays(ring, host, visitor, jnp.zeros(2, jnp.int32), here, here),
    )[1]
    acc = shape.out.dtype
    start = _Attended(
        out=jnp.zeros((CHUNKS, *shape.out.shape), acc),
        top=jnp.full((CHUNKS, *shape.top.shape), jnp.finfo(acc).min, acc),
        total=jnp.zeros((CHUNKS, *shape.total.shape), acc),
    )
    rows = ring.go_round(visit, start, visitor)
    return rows.out, _Saved(host, visitor, rows)


def _backward(ring: _Ring, saved: _Saved, d_out: Array) -> tuple[_Host, _Visitor]:
    host, here, acc = saved.host, lax.axis_index(ring.names), saved.rows.out.dtype
    bias, floats = _bias(ring, host), saved.visitor._replace(ids=None)

    def visit(carry: tuple[Array, _Visitor], visitor: _Visitor, device: Array) -> Any:
        def one(carry: tuple[Array, _Visitor], pair: Array) -> tuple[tuple[Array, _Visitor], None]:
            query, key = pair
            arrays = _arrays(ring, host, visitor, pair, here, device)
            part = chunked.Saved(arrays, *(x[query] for x in saved.rows))
            found = chunked.gradients(ring.blocks, bias, part, d_out[query])
            dq, sums = carry
            d_visitor = _split_gradients(floats, found)
            sums = jax.tree.map(lambda all, x: all.at[key].add(x), sums, d_visitor)
            return (dq.at[query].add(found.q), sums), None

        return lax.scan(one, carry, ring.pairs())[0]

    # After as many hops as there are devices, the sums are back where their keys are.
    wide = functools.partial(jnp.promote_types, acc)
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, wide(x.dtype)), (host.q, floats))
    dq, sums = ring.go_round(
        visit, start, saved.visitor, lambda carry: (carry[0], ring.passed_on(carry[1]))
    )
    like = jax.tree.map(lambda total, x: total.astype(x.dtype), sums, floats)
    return _Host(dq.astype(host.q.dtype), None, None), like


_attend.defvjp(_forward, _backward)


def _bias(ring: _Ring, host: _Host) -> DecayBias | None:
    return None if host.decay is None else DecayBias(ring.blocks.block_q, ring.blocks.block_k)


def _arrays(
    ring: _Ring, host: _Host, visitor: _Visitor, pair: Array, here: Array, device: Array
) -> chunked.Arrays:
    """Combines queries of slot ``pair[0]`` here with keys of slot ``pair[1]`` from ``device``."""
    query, key = pair
    chunk = jax.tree.map(lambda x: x[key], visitor)
    ids = None if host.ids is None else (host.ids[query], chunk.ids)
    offset = (ring.chunk(here, query) - ring.chunk(device, key)) * ring.blocks.key_length
    return chunked.Arrays(
        q=host.q[query],
        k=chunk.k,
        values=chunk.values(),
        bias=None if host.decay is None else (host.decay[query], chunk.decay),
        visibility=Visibility(ring.band, offset.astype(jnp.int32), ids),
    )


def _split_gradients(visitor: _Visitor, found: chunked.Arrays) -> _Visitor:
    """Returns the gradients of one chunk as a visitor."""
    width = visitor.v.shape[-1]
    d_e = None
    if visitor.e is not None:
        d_e = found.values[..., width:]
        if visitor.e.shape[2] == 1:
            d_e = d_e.sum(1, keepdims=True)
    d_decay = None if visitor.decay is None else found.bias[1]
    return _Visitor(found.k, found.values[..., :width], d_e, None, d_decay)


def _merge(x: _Attended, y: _Attended) -> _Attended:
    """Merges attention over two sets of keys."""
    top = jnp.maximum(x.top, y.top)
    x_total, y_total = x.total * jnp.exp(x.top - top), y.total * jnp.exp(y.top - top)
    total = x_total + y_total
    return _Attended(x.out * (x_total / total) + y.out * (y_total / total), top, total)
