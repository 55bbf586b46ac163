"""The bodies of the fused attention kernels, in Pallas for its Triton backend.

Queries and keys come rotated. Each program owns one block of queries (forward, dq) or of keys (dk,
dv, de) of one head and walks over the blocks of the other side. A state is a second value.

Tiles have power-of-two sizes. Rows past the end of an array are read as zeros and never written.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """The static part of a call of the kernels.

    Attributes:
      scale: factor on the logits.
      lowest, highest: key ``j`` is visible to query ``i`` (offset included) only if ``lowest <=
        j - i <= highest``; None: no limit.
      compute: type of the operands of all products.
      precision: of products of float32 operands.
      tiles: block sizes of each kernel.
      interpret: run by XLA operations, on any device.
      value_types: of the values, and of the state if there is one: also of ``o`` and ``a``.
    """

    scale: float
    lowest: int | None
    highest: int | None
    compute: jnp.dtype
    precision: lax.Precision
    tiles: Tiles
    interpret: bool
    value_types: tuple[jnp.dtype, ...]

    @property
    def types(self) -> Mapping[str, jnp.dtype]:
        """Types of ``v`` and ``e``, by their names."""
        return dict(zip("ve", self.value_types, strict=False))

    def dot(self, x: Array, y: Array, **transposed: bool) -> Array:
        """A product of two tiles in the compute type, summed in float32."""
        x, y = x.astype(self.compute), y.astype(self.compute)
        return plt.dot(x, y, precision=self.precision, **transposed)


@dataclasses.dataclass(frozen=True)
class Program:
    """Access to the arrays of one program: ``b`` is its row of the batch, ``tile`` its blocks."""

    call: KernelCall
    refs: Refs
    tile: Tile
    b: Array

    def read(self, name: str, start: Array, size: int, head: Array) -> Array:
        """``size`` rows of a head of ``[b|1, t, h, d]``: a tile ``[size, d]``."""
        ref = self.refs[name]
        at = ref.at[(self._row(ref), pl.ds(start, size), head, slice(None))]
        mask = _rows_exist(ref.shape[1], start, size, ref.shape[-1])
        return plt.load(at) if mask is None else plt.load(at, mask=mask, other=0.0)

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

    def write(self, name: str, start: Array, head: Array, value: Array) -> None:
        """Writes what :meth:`read` would read."""
        ref = self.refs[name]
        at = ref.at[(self.b, pl.ds(start, value.shape[0]), head, pl.ds(ZERO, value.shape[1]))]
        plt.store(at, value.astype(ref.dtype), mask=_rows_exist(ref.shape[1], start, *value.shape))

    def _row(self, ref: Any) -> Any:
        return ZERO if ref.shape[0] == 1 else self.b

    def query_tile(self, i: Array, head: Array) -> Array:
        """Queries of block ``i``."""
        return self.read("q", i * self.tile.queries, self.tile.queries, head)

    def key_tile(self, j: Array, head: Array) -> Array:
        """Keys of block ``j``."""
        return self.read("k", j * self.tile.keys, self.tile.keys, head)

    def values(self, j: Array, head: Array) -> list[Array]:
        """Values of the keys of block ``j`` and, if it is attended, their state."""
        start, size = j * self.tile.keys, self.tile.keys
        found = [self.read("v", start, size, head)]
        if "e" in self.refs:
            found.append(self.read("e", start, size, _shared_head(self.refs, "k", "e", head)))
        return found

    def cotangents(self, i: Array, head: Array) -> list[Array]:
        """Gradients of what the queries of block ``i`` got of each of :meth:`values`."""
        start, size = i * self.tile.queries, self.tile.queries
        names = [name for name in ("d_o", "d_a") if name in self.refs]
        return [self.read(name, start, size, head) for name in names]

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

    def logits(self, rows: Array, columns: Array, decay: Array | None) -> Array:
        """Scaled logits to base 2, with the decay of each pair added, not masked yet."""
        products = self.call.dot(rows, columns, trans_b=True)
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

    def walk(self, i: Array, step: Callable[..., Any], carry: Any, *, own: str) -> Any:
        """Walks over the blocks of the other side that block ``i`` meets.

        Blocks with pairs that are to be hidden lie at both ends; those between take no mask.

        Args:
          i: block of this side.
          step: of a block's index and the carry, and whether to mask.
          carry: what it starts from.
          own: ``q`` or ``k``, this side.
        """
        ref, hidden = self.refs["bounds"], (self.call.lowest, self.call.highest)
        begin, full, last, end = (ref[self._row(ref), i, n] for n in range(4))
        at_begin, at_end = (x is not None for x in (hidden if own == "q" else hidden[::-1]))
        at_end = at_end or (own == "q" and self.refs["k"].shape[1] % self.tile.keys > 0)
        if "query_ids" in self.refs:
            return lax.fori_loop(begin, end, functools.partial(step, masked=True), carry)
        if at_begin:
            carry = lax.fori_loop(begin, full, functools.partial(step, masked=True), carry)
        carry = lax.fori_loop(full, last, functools.partial(step, masked=False), carry)
        if at_end:
            carry = lax.fori_loop(last, end, functools.partial(step, masked=True), carry)
        return carry


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

    def step(j: Array, carry: Any, masked: bool) -> Any:
        top, total, sums = carry
        k = program.key_tile(j, kv_head)
        logits = program.logits(q, k, _decays(decay, program.key_decay(j, head)))
        if masked:
            logits = program.masked(logits, queries, program.key_marks(j), keys_first=False)
        new_top = jnp.maximum(top, jnp.max(logits, axis=1))
        weights = jnp.exp2(logits - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=1)
        values = program.values(j, kv_head)
        sums = [
            x * shrink[:, None] + call.dot(weights, value)
            for x, value in zip(sums, values, strict=True)
        ]
        return new_top, total, sums

    names = [name for name in ("o", "a") if name in outputs]
    top, total, sums = program.walk(
        i,
        step,
        (
            # Not -inf: the weights of a row that sees no key are then 0 without a special case.
            jnp.full((rows,), jnp.finfo(jnp.float32).min, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            [jnp.zeros((rows, outputs[name].shape[-1]), jnp.float32) for name in names],
        ),
        own="q",
    )
    total = jnp.where(total > 0, total, 1.0)
    for name, x in zip(names, sums, strict=True):
        program.write(name, i * rows, head, x / total[:, None])
    program.write_vector("log_sum", i * rows, head, top + jnp.log(total) * np.float32(LOG2_E))


def query_gradients(call: KernelCall, inputs: Refs, outputs: Refs) -> None:
    """One block of queries: ``dq``."""
    i, head, b = _program()
    program = Program(call, {**inputs, **outputs}, call.tiles.query_gradients, b)
    rows, start = program.tile.queries, i * program.tile.queries
    kv_head = _shared_head(inputs, "q", "k", head)
    q, queries = program.query_tile(i, head), program.query_marks(i)
    cotangents = program.cotangents(i, head)
    log_sum = program.read_vector("log_sum", start, rows, head)[:, None]
    delta = program.read_vector("delta", start, rows, head)[:, None]
    decay = program.query_decay(i, head)

    def step(j: Array, dq: Array, masked: bool) -> Array:
        k = program.key_tile(j, kv_head)
        logits = program.logits(q, k, _decays(decay, program.key_decay(j, head)))
        if masked:
            logits = program.masked(logits, queries, program.key_marks(j), keys_first=False)
        weights = jnp.exp2(logits - log_sum)
        d_weights = -delta
        for cotangent, value in zip(cotangents, program.values(j, kv_head), strict=True):
            d_weights += call.dot(cotangent, value, trans_b=True)
        return dq + call.dot(weights * d_weights, k)

    dq = program.walk(i, step, jnp.zeros(q.shape, jnp.float32), own="q")
    program.write("d_q", start, head, dq * np.float32(call.scale))


def key_gradients(call: KernelCall, inputs: Refs, outputs: Refs) -> None:
    """One block of keys: ``dk``, ``dv`` and ``de``, summed over the query heads of its group.

    What ``outputs`` lacks is not computed. The gradient of the keys' log decay is written for each
    of these heads. Products are taken keys first, so that no tile of pairs is transposed.
    """
    j, kv_head, b = _program()
    of_keys, names = "d_k" in outputs, [name for name in ("d_v", "d_e") if name in outputs]
    tile = call.tiles.key_gradients if of_keys else call.tiles.value_gradients
    assert tile is not None
    program = Program(call, {**inputs, **outputs}, tile, b)
    groups = inputs["q"].shape[2] // inputs["k"].shape[2]
    columns, start = program.tile.queries, j * program.tile.keys
    k, keys = program.key_tile(j, kv_head), program.key_marks(j)
    values = program.values(j, kv_head) if of_keys else []

    def step(i: Array, carry: Any, masked: bool, *, head: Array, decay: Array | None) -> Any:
        dk, d_values, d_decay = carry
        q, cotangents = program.query_tile(i, head), program.cotangents(i, head)
        log_sum = program.read_vector("log_sum", i * columns, columns, head)[None, :]
        pairs = _decays(program.query_decay(i, head), decay, keys_first=True)
        logits = program.logits(k, q, pairs)
        if masked:
            logits = program.masked(logits, program.query_marks(i), keys, keys_first=True)
        weights = jnp.exp2(logits - log_sum)
        if names:
            d_values = [
                x + call.dot(weights, cotangent)
                for x, cotangent in zip(d_values, cotangents, strict=True)
            ]
        if not of_keys:
            return dk, d_values, d_decay
        d_weights = -program.read_vector("delta", i * columns, columns, head)[None, :]
        for cotangent, value in zip(cotangents, values, strict=True):
            d_weights += call.dot(value, cotangent, trans_b=True)
        d_logits = weights * d_weights
        if d_decay is not None:
            d_decay -= jnp.sum(d_logits, axis=1)
        return dk + call.dot(d_logits, q), d_values, d_decay

    def walk(g: Array | int, carry: Any) -> Any:
        head = kv_head * np.int32(groups) + g
        decay = program.key_decay(j, head)
        start_decay = None
        if decay is not None and "d_key_decay" in outputs:
            start_decay = jnp.zeros(decay.shape, jnp.float32)
        of_head = functools.partial(step, head=head, decay=decay)
        *carry, d_decay = program.walk(j, of_head, (*carry, start_decay), own="k")
        if d_decay is not None:
            program.write_vector("d_key_decay", start, head, d_decay)
        return tuple(carry)

    rows = program.tile.keys
    carry = (
        jnp.zeros(k.shape, jnp.float32) if of_keys else None,
        [jnp.zeros((rows, outputs[name].shape[-1]), jnp.float32) for name in names],
    )
    dk, d_values = walk(0, carry) if groups == 1 else lax.fori_loop(0, groups, walk, carry)
    if of_keys:
        program.write("d_k", start, kv_head, dk * np.float32(call.scale))
    for name, x in zip(names, d_values, strict=True):
        program.write(name, start, kv_head, x)


def value_gradients(call: KernelCall, inputs: Refs, outputs: Refs) -> None:
    """One block of keys: ``dv`` and ``de``, where ``dk`` is a kernel by itself."""
    key_gradients(call, inputs, outputs)
