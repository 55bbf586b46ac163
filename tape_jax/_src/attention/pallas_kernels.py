"""The bodies of the fused attention kernels, in Pallas for its Triton backend.

Each program owns one block of queries (forward, dq) or of keys (dk, dv, de) of one head and walks
over the blocks of the other side. A rotary state, and what it rotates, is read as two tiles, the
real and the imaginary half of each head, because Triton cannot cut a tile that is in registers: a
product of rotated queries and keys is the sum of two products, half as deep each.

Tiles have power-of-two sizes. Rows past the end of an array are read as zeros and never written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from tape_jax._src.attention.pallas_blocks import Tile, Tiles

Array = jax.Array
Refs = Mapping[str, Any]

# Softmax is computed to base 2, which the hardware has.
LOG2_E = math.log2(math.e)
# The interpreter takes no Python integers for indices, nor indices of unlike types.
ZERO: Any = np.int32(0)
HALVES = (np.int32(0), np.int32(1))


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """The static part of a call of the kernels.

    Attributes:
      scale: factor on the logits.
      lowest, highest: key ``j`` is visible to query ``i`` (offset included) only if ``lowest <=
        j - i <= highest``; None: no limit.
      rotate_keys: whether keys are rotated by ``e``.
      attend_state: whether ``e`` is also a value.
      compute: type of the operands of all products.
      precision: of products of float32 operands.
      tiles: block sizes of each kernel.
      interpret: run by XLA operations, on any device.
    """

    scale: float
    lowest: int | None
    highest: int | None
    rotate_keys: bool
    attend_state: bool
    compute: jnp.dtype
    precision: lax.Precision
    tiles: Tiles
    interpret: bool

    def dot(self, x: Array, y: Array, **transposed: bool) -> Array:
        """A product of two tiles in the compute type, summed in float32."""
        x, y = x.astype(self.compute), y.astype(self.compute)
        return plt.dot(x, y, precision=self.precision, **transposed)


class Complex(NamedTuple):
    """Two tiles ``[rows, D/2]``."""

    real: Array
    imag: Array

    def map(self, function: Callable[[Array], Array]) -> Complex:
        return Complex(function(self.real), function(self.imag))

    def plus(self, other: Complex) -> Complex:
        return Complex(self.real + other.real, self.imag + other.imag)


def times(x: Complex, y: Complex) -> Complex:
    """Elementwise product, in float32."""
    x, y = x.map(_float32), y.map(_float32)
    return Complex(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real)


def times_conjugate(x: Complex, y: Complex) -> Complex:
    """Elementwise ``x * conj(y)``: what the gradient of a product passes to its other factor."""
    return times(x, Complex(y.real, -y.imag))


def _float32(x: Array) -> Array:
    return x.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Program:
    """Access to the arrays of one program: ``b`` is its row of the batch, ``tile`` its blocks."""

    call: KernelCall
    refs: Refs
    tile: Tile
    b: Array

    def read(self, name: str, start: Array, size: int, head: Array) -> Any:
        """``size`` rows of a head: a tile ``[size, width]``, or Complex of ``[b, t, h, 2, d]``."""
        ref = self.refs[name]
        if len(ref.shape) == 5:
            return Complex(*(self._read(ref, start, size, head, part) for part in HALVES))
        return self._read(ref, start, size, head)

    def read_vector(
        self, name: str, start: Array, size: int, *head: Array, other: float = 0
    ) -> Array:
        """``size`` numbers of ``[b|1, t]`` or a head of ``[b|1, h, t]``; ``other`` past the end."""
        ref = self.refs[name]
        at = ref.at[(self._row(ref), *head, pl.ds(start, size))]
        if ref.shape[-1] % size == 0:
            return plt.load(at)
        return plt.load(at, mask=start + _iota(size) < ref.shape[-1], other=other)

    def write_vector(self, name: str, start: Array, head: Array, value: Array) -> None:
        """Writes numbers of one head of ``[b, h, t]``."""
        ref, size = self.refs[name], value.shape[0]
        exists = None if ref.shape[2] % size == 0 else start + _iota(size) < ref.shape[2]
        plt.store(ref.at[self.b, head, pl.ds(start, size)], value, mask=exists)

    def write(self, name: str, start: Array, head: Array, value: Any) -> None:
        """Writes what :meth:`read` would read."""
        ref = self.refs[name]
        parts = zip(value, HALVES, strict=True) if isinstance(value, Complex) else [(value,)]
        for x, *part in parts:
            every = pl.ds(ZERO, x.shape[1])
            at = ref.at[(self.b, pl.ds(start, x.shape[0]), head, *part, every)]
            plt.store(at, x.astype(ref.dtype), mask=_rows_exist(ref.shape[1], start, *x.shape))

    def _read(self, ref: Any, start: Array, size: int, head: Array, *part: Any) -> Array:
        at = ref.at[(self._row(ref), pl.ds(start, size), head, *part, slice(None))]
        mask = _rows_exist(ref.shape[1], start, size, ref.shape[-1])
        return plt.load(at) if mask is None else plt.load(at, mask=mask, other=0.0)

    def _row(self, ref: Any) -> Any:
        return ZERO if ref.shape[0] == 1 else self.b

    def query_tile(self, i: Array, head: Array) -> Complex:
        """Queries of block ``i``, rotated, in the compute type."""
        start, size = i * self.tile.queries, self.tile.queries
        q = self.read("q", start, size, head)
        if "query_state" in self.refs:
            q = times(q, self.query_state(i, head))
        return self._narrow(q)

    def _narrow(self, x: Complex) -> Complex:
        return x.map(lambda part: part.astype(self.call.compute))

    def query_state(self, i: Array, head: Array) -> Complex:
        """State of the queries of block ``i``, for a query head."""
        head = _shared_head(self.refs, "q", "query_state", head)
        return self.read("query_state", i * self.tile.queries, self.tile.queries, head)

    def key_tiles(self, j: Array, head: Array) -> tuple[Complex, Any]:
        """Keys of block ``j``, rotated, and their state or None; both in the compute type."""
        k = self.read("k", j * self.tile.keys, self.tile.keys, head)
        state: Any = self.key_state(j, head) if "e" in self.refs else None
        if self.call.rotate_keys:
            k = times(k, state)
        return self._narrow(k), None if state is None else self._narrow(state)

    def key_state(self, j: Array, head: Array) -> Complex:
        """State of the keys of block ``j``, for a key/value head."""
        head = _shared_head(self.refs, "k", "e", head)
        return self.read("e", j * self.tile.keys, self.tile.keys, head)

    def value_tile(self, j: Array, head: Array) -> Array:
        return self.read("v", j * self.tile.keys, self.tile.keys, head)

    def query_decay(self, i: Array, head: Array) -> Array | None:
        """Log decay of the queries of block ``i``, for a query head, or None."""
        # Those past the end see nothing: the decay of a row of zeros could be infinite.
        return self._decay("query_decay", i, self.tile.queries, head, other=-math.inf)

    def key_decay(self, j: Array, head: Array) -> Array | None:
        """Log decay of the keys of block ``j``, for a query head, or None."""
        return self._decay("key_decay", j, self.tile.keys, head)

    def _decay(
        self, name: str, block: Array, size: int, head: Array, other: float = 0
    ) -> Array | None:
        if name not in self.refs:
            return None
        head = ZERO if self.refs[name].shape[1] == 1 else head
        return self.read_vector(name, block * size, size, head, other=other)

    def logits(self, rows: Complex, columns: Complex, decay: Array | None) -> Array:
        """Scaled logits to base 2, with the decay of each pair added, not masked yet."""
        dot = self.call.dot
        products = dot(rows.real, columns.real, trans_b=True)
        products += dot(rows.imag, columns.imag, trans_b=True)
        products *= np.float32(self.call.scale * LOG2_E)
        return products if decay is None else products + decay * np.float32(LOG2_E)

    def query_marks(self, i: Array) -> tuple[Array, Array | None]:
        """Indices of the queries of block ``i``, offset included, and their segment ids."""
        start = i * self.tile.queries
        offset = self.refs["offset"][self._row(self.refs["offset"])]
        return start + _iota(self.tile.queries) + offset, self._ids("query_ids", start)

    def key_marks(self, j: Array) -> tuple[Array, Array | None]:
        """Indices of the keys of block ``j`` and their segment ids."""
        start = j * self.tile.keys
        return start + _iota(self.tile.keys), self._ids("key_ids", start)

    def _ids(self, name: str, start: Array) -> Array | None:
        if name not in self.refs:
            return None
        size = self.tile.queries if name == "query_ids" else self.tile.keys
        return self.read_vector(name, start, size)

    def masked(self, logits: Array, queries: Any, keys: Any, *, keys_first: bool) -> Array:
        """Puts -inf where a key is not visible.

        Args:
          logits: ``[queries, keys]``, or ``[keys, queries]`` if ``keys_first``.
          queries: of :meth:`query_marks`.
          keys: of :meth:`key_marks`.
          keys_first: which of the two are rows.
        """
        (i, query_ids), (j, key_ids) = queries, keys
        across = (None, slice(None)) if keys_first else (slice(None), None)
        i, j = i[across], j[across[::-1]]
        rules = []
        length = self.refs["k"].shape[1]
        if length % self.tile.keys:
            rules.append(j < length)
        if self.call.highest is not None:
            rules.append(j - i <= self.call.highest)
        if self.call.lowest is not None:
            rules.append(j - i >= self.call.lowest)
        if query_ids is not None:
            rules.append(query_ids[across] == key_ids[across[::-1]])
        for rule in rules:
            logits = jnp.where(rule, logits, -jnp.inf)
        return logits

    def bounds(self, i: Array) -> tuple[Array, Array]:
        """First block of the other side that block ``i`` meets, and one past the last."""
        ref = self.refs["bounds"]
        return ref[self._row(ref), i, 0], ref[self._row(ref), i, 1]


def _iota(size: int) -> Array:
    return lax.iota(jnp.int32, size)


def _rows_exist(length: int, start: Array, rows: int, columns: int) -> Array | None:
    """Mask ``[rows, columns]`` of a tile that may reach past the end; None if none can."""
    if length % rows == 0:
        return None
    return jnp.broadcast_to((start + _iota(rows) < length)[:, None], (rows, columns))


def _shared_head(refs: Refs, of: str, name: str, head: Array) -> Any:
    """The head of ``name`` that belongs to a head of ``of``."""
    shared = refs[of].shape[2] // refs[name].shape[2]
    if refs[name].shape[2] == 1:
        return ZERO
    return head if shared == 1 else lax.div(head, np.int32(shared))


def _decays(queries: Array | None, keys: Array | None, *, keys_first: bool = False) -> Any:
    """``F_i - F_j``, ``[queries, keys]`` or ``[keys, queries]``; None without a decay."""
    if queries is None or keys is None:
        return None
    return queries[None, :] - keys[:, None] if keys_first else queries[:, None] - keys[None, :]


def _program() -> tuple[Array, Array, Array]:
    """Block, head and row of the batch. Read outside loops: the interpreter cannot inside."""
    return pl.program_id(0), pl.program_id(1), pl.program_id(2)


def forward(call: KernelCall, inputs: Refs, outputs: Refs) -> None:
    """One block of queries: ``o``, ``a`` and the log-sum-exp (to base 2) of each row."""
    i, head, b = _program()
    program = Program(call, {**inputs, **outputs}, call.tiles.forward, b)
    rows = program.tile.queries
    kv_head = _shared_head(inputs, "q", "k", head)
    q, queries = program.query_tile(i, head), program.query_marks(i)
    decay = program.query_decay(i, head)

    def step(j: Array, carry: Any) -> Any:
        top, total, o, a = carry
        k, state = program.key_tiles(j, kv_head)
        logits = program.logits(q, k, _decays(decay, program.key_decay(j, head)))
        logits = program.masked(logits, queries, program.key_marks(j), keys_first=False)
        new_top = jnp.maximum(top, jnp.max(logits, axis=1))
        weights = jnp.exp2(logits - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=1)
        o = o * shrink[:, None] + call.dot(weights, program.value_tile(j, kv_head))
        if a is not None:
            a = a.map(lambda x: x * shrink[:, None])
            a = a.plus(state.map(lambda x: call.dot(weights, x)))
        return new_top, total, o, a

    nothing = jnp.zeros(q.real.shape, jnp.float32)
    top, total, o, a = lax.fori_loop(
        *program.bounds(i),
        step,
        (
            # Not -inf: the weights of a row that sees no key are then 0 without a special case.
            jnp.full((rows,), jnp.finfo(jnp.float32).min, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows, inputs["v"].shape[-1]), jnp.float32),
            Complex(nothing, nothing) if call.attend_state else None,
        ),
    )
    total = jnp.where(total > 0, total, 1.0)
    start = i * rows
    program.write("o", start, head, o / total[:, None])
    if a is not None:
        program.write("a", start, head, a.map(lambda x: x / total[:, None]))
    program.write_vector("log_sum", start, head, top + jnp.log(total) * np.float32(LOG2_E))


def query_gradients(call: KernelCall, inputs: Refs, outputs: Refs) -> None:
    """One block of queries: ``dq`` and ``d_query_state``."""
    i, head, b = _program()
    program = Program(call, {**inputs, **outputs}, call.tiles.query_gradients, b)
    rows, start = program.tile.queries, i * program.tile.queries
    kv_head = _shared_head(inputs, "q", "k", head)
    q, queries = program.query_tile(i, head), program.query_marks(i)
    d_o = program.read("d_o", start, rows, head)
    d_a = program.read("d_a", start, rows, head) if call.attend_state else None
    log_sum = program.read_vector("log_sum", start, rows, head)[:, None]
    delta = program.read_vector("delta", start, rows, head)[:, None]
    decay = program.query_decay(i, head)

    def step(j: Array, dq: Complex) -> Complex:
        k, state = program.key_tiles(j, kv_head)
        logits = program.logits(q, k, _decays(decay, program.key_decay(j, head)))
        logits = program.masked(logits, queries, program.key_marks(j), keys_first=False)
        weights = jnp.exp2(logits - log_sum)
        d_weights = call.dot(d_o, program.value_tile(j, kv_head), trans_b=True)
        if d_a is not None:
            d_weights += call.dot(d_a.real, state.real, trans_b=True)
            d_weights += call.dot(d_a.imag, state.imag, trans_b=True)
        d_logits = weights * (d_weights - delta)
        return dq.plus(k.map(lambda x: call.dot(d_logits, x)))

    nothing = jnp.zeros(q.real.shape, jnp.float32)
    dq = lax.fori_loop(*program.bounds(i), step, Complex(nothing, nothing))
    dq = dq.map(lambda x: x * np.float32(call.scale))
    if "query_state" in inputs:
        raw = program.read("q", start, rows, head)
        program.write("d_query_state", start, head, times_conjugate(dq, raw))
        dq = times_conjugate(dq, program.query_state(i, head))
    program.write("d_q", start, head, dq)


def key_gradients(call: KernelCall, inputs: Refs, outputs: Refs) -> None:
    """One block of keys: ``dk``, ``dv`` and ``de``, summed over the query heads of its group.

    The gradient of the keys' log decay is written for each of these heads. Products are taken keys
    first, so that no tile of pairs is transposed.
    """
    j, kv_head, b = _program()
    program = Program(call, {**inputs, **outputs}, call.tiles.key_gradients, b)
    groups = inputs["q"].shape[2] // inputs["k"].shape[2]
    columns, start = program.tile.queries, j * program.tile.keys
    (k, state), keys = program.key_tiles(j, kv_head), program.key_marks(j)
    v = program.value_tile(j, kv_head)
    first, last = program.bounds(j)

    def step(i: Array, carry: Any, head: Array, decay: Array | None) -> Any:
        dk, dv, de, d_decay = carry
        q = program.query_tile(i, head)
        d_o = program.read("d_o", i * columns, columns, head)
        log_sum = program.read_vector("log_sum", i * columns, columns, head)[None, :]
        delta = program.read_vector("delta", i * columns, columns, head)[None, :]
        pairs = _decays(program.query_decay(i, head), decay, keys_first=True)
        logits = program.logits(k, q, pairs)
        logits = program.masked(logits, program.query_marks(i), keys, keys_first=True)
        weights = jnp.exp2(logits - log_sum)
        d_weights = call.dot(v, d_o, trans_b=True)
        dv += call.dot(weights, d_o)
        if de is not None:
            d_a = program.read("d_a", i * columns, columns, head)
            d_weights += call.dot(state.real, d_a.real, trans_b=True)
            d_weights += call.dot(state.imag, d_a.imag, trans_b=True)
            de = de.plus(d_a.map(lambda x: call.dot(weights, x)))
        d_logits = weights * (d_weights - delta)
        if d_decay is not None:
            d_decay -= jnp.sum(d_logits, axis=1)
        return dk.plus(q.map(lambda x: call.dot(d_logits, x))), dv, de, d_decay

    def walk(g: Array | int, carry: Any) -> Any:
        head = kv_head * np.int32(groups) + g
        decay = program.key_decay(j, head)
        start_decay = None if decay is None else jnp.zeros(decay.shape, jnp.float32)
        *carry, d_decay = lax.fori_loop(
            first, last, lambda i, carry: step(i, carry, head, decay), (*carry, start_decay)
        )
        if d_decay is not None:
            program.write_vector("d_key_decay", start, head, d_decay)
        return tuple(carry)

    nothing = jnp.zeros(k.real.shape, jnp.float32)
    carry = (
        Complex(nothing, nothing),
        jnp.zeros(v.shape, jnp.float32),
        Complex(nothing, nothing) if call.attend_state else None,
    )
    walked = walk(0, carry) if groups == 1 else lax.fori_loop(0, groups, walk, carry)
    dk, dv, de = walked
    dk = dk.map(lambda x: x * np.float32(call.scale))
    if call.rotate_keys:
        through_keys = times_conjugate(dk, program.read("k", start, program.tile.keys, kv_head))
        de = through_keys if de is None else de.plus(through_keys)
        dk = times_conjugate(dk, program.key_state(j, kv_head))
    program.write("d_k", start, kv_head, dk)
    program.write("d_v", start, kv_head, dv)
    if de is not None:
        program.write("d_e", start, kv_head, de)
