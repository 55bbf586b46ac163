"""The bodies of the fused attention kernels, for the Pallas backends that run them.

Queries and keys are already rotated. Each program owns one block of queries (forward, dq) or of
keys (dk, dv, de) of one head and walks over the blocks of the other side. A state is a second
value.

A body sees its arrays through a :class:`Program`. A backend completes it: how a block is read,
multiplied and written, and how the blocks of the other side arrive.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tape_jax._src.attention.pallas_blocks import Tile, Tiles

Array = jax.Array
Refs = Mapping[str, Any]

# Softmax uses base 2, which the hardware has.
LOG2_E = math.log2(math.e)
# The interpreter takes neither Python integers as indices nor indices of different types.
ZERO: Any = np.int32(0)


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """The static part of a call of the kernels.

    Attributes:
      launch: runs a body on the backend; see :data:`pallas_attention.Launch`.
      scale: factor on the logits.
      lowest, highest: key ``j`` is visible to query ``i`` (offset included) only if ``lowest <=
        j - i <= highest``; None: no limit.
      compute: type of the operands of all products.
      precision: of products of float32 operands.
      tiles: block sizes of each kernel.
      interpret: run on any device.
      is_split: whether it runs on each device's rows and heads.
      value_types: of the values and, if there is one, the state; also of ``o`` and ``a``.
    """

    launch: Callable[..., Any]
    scale: float
    lowest: int | None
    highest: int | None
    compute: jnp.dtype
    precision: lax.Precision
    tiles: Tiles
    interpret: bool
    is_split: bool
    value_types: tuple[jnp.dtype, ...]

    @property
    def types(self) -> Mapping[str, jnp.dtype]:
        """Types of ``v`` and ``e``, by their names."""
        return dict(zip("ve", self.value_types, strict=False))


@dataclasses.dataclass(frozen=True)
class Program(abc.ABC):
    """One program of a kernel and its arrays.

    Attributes:
      call: the call's static part.
      refs: the arrays, by name.
      tile: sizes of its blocks.
      block: index of the block that it owns.
      head: query head (forward, dq) or key/value head.
      b: row of the batch.
      key_length: number of keys, without padding.
    """

    call: KernelCall
    refs: Refs
    tile: Tile
    block: Any
    head: Any
    b: Any
    key_length: int

    @abc.abstractmethod
    def read(self, name: str, block: Array, size: int, head: Array) -> Any:
        """Reads a block of a head of ``[b|1, t, h, d]``: a tile ``[size, d]`` for products."""

    @abc.abstractmethod
    def read_vector(
        self, name: str, block: Array, size: int, *head: Array, other: float = 0
    ) -> Array:
        """Reads a block of ``[b|1, t]`` or of a head of ``[b|1, h, t]``; ``other`` past the end."""

    @abc.abstractmethod
    def write(self, name: str, block: Array, head: Array, value: Array) -> None:
        """Writes what :meth:`read` would read."""

    @abc.abstractmethod
    def write_vector(self, name: str, block: Array, head: Array, value: Array) -> None:
        """Writes a block of a head of ``[b, h, t]``."""

    @abc.abstractmethod
    def dot(self, x: Any, y: Any, *, trans_b: bool = False) -> Array:
        """Multiplies two tiles in the compute type and sums in float32."""

    def add_dot(self, total: Array, x: Any, y: Any, *, trans_b: bool = False) -> Array:
        """Adds a product to a float32 tile."""
        return total + self.dot(x, y, trans_b=trans_b)

    def loop(
        self, begin: Array, end: Array, step: Callable[..., Any], carry: Any, head: Array
    ) -> Any:
        """Runs ``step(j, carry)`` for blocks ``begin <= j < end`` of the other side of a head."""
        return lax.fori_loop(begin, end, step, carry)

    def bounds(self) -> tuple[Array, ...]:
        """Returns four marks of the blocks that this one meets; see ``pallas_attention``."""
        ref = self.refs["bounds"]
        return tuple(ref[self.row(ref), self.block, n] for n in range(4))

    def row(self, ref: Any) -> Any:
        """Returns the batch row of an array: 0 if it has one row."""
        return ZERO if ref.shape[0] == 1 else self.b

    def query_tile(self, i: Array, head: Array) -> Array:
        """Reads the queries of block ``i``."""
        return self.read("q", i, self.tile.queries, head)

    def key_tile(self, j: Array, head: Array) -> Array:
        """Reads the keys of block ``j``."""
        return self.read("k", j, self.tile.keys, head)

    def values(self, j: Array, head: Array) -> list[Array]:
        """Reads the values of key block ``j`` and, if it is attended, their state."""
        found = [self.read("v", j, self.tile.keys, head)]
        if "e" in self.refs:
            found.append(self.read("e", j, self.tile.keys, _shared_head(self.refs, "k", "e", head)))
        return found

    def cotangents(self, i: Array, head: Array) -> list[Array]:
        """Reads the output gradients of query block ``i``, for each of :meth:`values`."""
        names = [name for name in ("d_o", "d_a") if name in self.refs]
        return [self.read(name, i, self.tile.queries, head) for name in names]

    def query_decay(self, i: Array, head: Array) -> Array | None:
        """Reads the log decay of query block ``i``, for a query head, or None."""
        # Queries past the end see nothing: the decay of a row of zeros could be infinite.
        return self._decay("query_decay", i, self.tile.queries, head, other=-math.inf)

    def key_decay(self, j: Array, head: Array) -> Array | None:
        """Reads the log decay of key block ``j``, for a query head, or None."""
        return self._decay("key_decay", j, self.tile.keys, head)

    def _decay(
        self, name: str, block: Array, size: int, head: Array, other: float = 0
    ) -> Array | None:
        if name not in self.refs:
            return None
        head = ZERO if self.refs[name].shape[1] == 1 else head
        return self.read_vector(name, block, size, head, other=other)

    def logits(self, rows: Any, columns: Any) -> Array:
        """Returns scaled logits to base 2, before masking."""
        return self.dot(rows, columns, trans_b=True) * np.float32(self.call.scale * LOG2_E)

    def decayed(
        self, logits: Array, queries: Array | None, keys: Array | None, *, keys_first: bool
    ) -> Array:
        """Adds ``F_i - F_j`` to logits ``[queries, keys]`` or ``[keys, queries]``."""
        assert queries is not None
        assert keys is not None
        of_queries, of_keys = (1, 0) if keys_first else (0, 1)
        decay = spread(queries, logits.shape, of_queries) - spread(keys, logits.shape, of_keys)
        return logits + decay * np.float32(LOG2_E)

    def ids(self, name: str, block: Array) -> Array | None:
        """Reads segment ids of a block of queries or keys, or None."""
        if name not in self.refs:
            return None
        size = self.tile.queries if name == "query_ids" else self.tile.keys
        return self.read_vector(name, block, size)

    def masked(
        self, logits: Array, i: Array, j: Array, ids: tuple[Any, Any], *, keys_first: bool
    ) -> Array:
        """Sets logits to -inf where a key is not visible.

        Args:
          logits: ``[queries, keys]``, or ``[keys, queries]`` if ``keys_first``.
          i: block of queries.
          j: block of keys.
          ids: from :meth:`ids`, of the queries and of the keys.
          keys_first: whether keys are the rows.
        """
        of_queries, of_keys = (1, 0) if keys_first else (0, 1)
        place = lax.broadcasted_iota(jnp.int32, logits.shape, of_keys)
        rules = []
        if self.key_length % self.tile.keys:
            rules.append(place < self.key_length - j * self.tile.keys)
        lowest, highest = self.call.lowest, self.call.highest
        if (lowest, highest) != (None, None):
            offset = self.refs["offset"][self.row(self.refs["offset"])]
            shift = i * self.tile.queries + offset - j * self.tile.keys
            distance = place - lax.broadcasted_iota(jnp.int32, logits.shape, of_queries)
            if highest is not None:
                rules.append(distance <= shift + highest)
            if lowest is not None:
                rules.append(distance >= shift + lowest)
        if ids[0] is not None:
            rules.append(
                spread(ids[0], logits.shape, of_queries) == spread(ids[1], logits.shape, of_keys)
            )
        for rule in rules:
            logits = jnp.where(rule, logits, -jnp.inf)
        return logits

    def walk(self, step: Callable[..., Any], carry: Any, *, own: str, head: Array) -> Any:
        """Walks over the blocks of the other side that this one meets.

        Blocks with hidden pairs lie at both ends; those between need no mask.

        Args:
          step: function of a block's index, the carry, and whether to mask.
          carry: its initial value.
          own: ``q`` or ``k``, this side.
          head: query head.
        """
        hidden = (self.call.lowest, self.call.highest)
        begin, full, last, end = self.bounds()
        at_begin, at_end = (x is not None for x in (hidden if own == "q" else hidden[::-1]))
        at_end = at_end or (own == "q" and self.key_length % self.tile.keys > 0)
        if "query_ids" in self.refs:
            return self.loop(begin, end, functools.partial(step, masked=True), carry, head)
        if at_begin:
            carry = self.loop(begin, full, functools.partial(step, masked=True), carry, head)
        carry = self.loop(full, last, functools.partial(step, masked=False), carry, head)
        if at_end:
            carry = self.loop(last, end, functools.partial(step, masked=True), carry, head)
        return carry


def spread(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Broadcasts a vector along ``axis`` to a tile."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def _shared_head(refs: Refs, of: str, name: str, head: Array) -> Any:
    """Returns the head of ``name`` that belongs to a head of ``of``."""
    shared = refs[of].shape[2] // refs[name].shape[2]
    if refs[name].shape[2] == 1:
        return ZERO
    return head if shared == 1 else lax.div(head, np.int32(shared))


def forward(program: Program) -> None:
    """Computes ``o``, ``a`` and each row's log-sum-exp (to base 2) for a block of queries."""
    i, head, rows = program.block, program.head, program.tile.queries
    kv_head = _shared_head(program.refs, "q", "k", head)
    q, ids = program.query_tile(i, head), program.ids("query_ids", i)
    decay = program.query_decay(i, head)

    def step(j: Array, carry: Any, masked: bool) -> Any:
        top, total, sums = carry
        logits = program.logits(q, program.key_tile(j, kv_head))
        if decay is not None:
            logits = program.decayed(logits, decay, program.key_decay(j, head), keys_first=False)
        if masked:
            marks = ids, program.ids("key_ids", j)
            logits = program.masked(logits, i, j, marks, keys_first=False)
        new_top = jnp.maximum(top, jnp.max(logits, axis=1))
        weights = jnp.exp2(logits - spread(new_top, logits.shape, 0))
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=1)
        values = program.values(j, kv_head)
        sums = [
            program.add_dot(x * spread(shrink, x.shape, 0), weights, value)
            for x, value in zip(sums, values, strict=True)
        ]
        return new_top, total, sums

    names = [name for name in ("o", "a") if name in program.refs]
    top, total, sums = program.walk(
        step,
        (
            # Not -inf, so that the weights of a row that sees no key are 0 without a special case.
            jnp.full((rows,), jnp.finfo(jnp.float32).min, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            [jnp.zeros((rows, program.refs[name].shape[-1]), jnp.float32) for name in names],
        ),
        own="q",
        head=head,
    )
    total = jnp.where(total > 0, total, jnp.ones_like(total))
    for name, x in zip(names, sums, strict=True):
        program.write(name, i, head, x / spread(total, x.shape, 0))
    program.write_vector("log_sum", i, head, top + jnp.log(total) * np.float32(LOG2_E))


def query_gradients(program: Program) -> None:
    """Computes ``dq`` for a block of queries."""
    i, head, rows = program.block, program.head, program.tile.queries
    kv_head = _shared_head(program.refs, "q", "k", head)
    q, ids = program.query_tile(i, head), program.ids("query_ids", i)
    cotangents = program.cotangents(i, head)
    log_sum = program.read_vector("log_sum", i, rows, head)
    delta = program.read_vector("delta", i, rows, head)
    decay = program.query_decay(i, head)

    def step(j: Array, dq: Array, masked: bool) -> Array:
        k = program.key_tile(j, kv_head)
        logits = program.logits(q, k)
        if decay is not None:
            logits = program.decayed(logits, decay, program.key_decay(j, head), keys_first=False)
        if masked:
            marks = ids, program.ids("key_ids", j)
            logits = program.masked(logits, i, j, marks, keys_first=False)
        weights = jnp.exp2(logits - spread(log_sum, logits.shape, 0))
        d_weights = -spread(delta, logits.shape, 0)
        for cotangent, value in zip(cotangents, program.values(j, kv_head), strict=True):
            d_weights = program.add_dot(d_weights, cotangent, value, trans_b=True)
        return program.add_dot(dq, weights * d_weights, k)

    start = jnp.zeros((rows, program.refs["q"].shape[-1]), jnp.float32)
    dq = program.walk(step, start, own="q", head=head)
    program.write("d_q", i, head, dq * np.float32(program.call.scale))


def key_gradients(program: Program) -> None:
    """Computes ``dk``, ``dv`` and ``de`` for a block of keys, summed over its group's query heads.

    Outputs that ``refs`` lacks are not computed. The gradient of the keys' log decay is written for
    each of these heads. Products take keys first, so that no tile of pairs is transposed.
    """
    j, kv_head, refs = program.block, program.head, program.refs
    of_keys, names = "d_k" in refs, [name for name in ("d_v", "d_e") if name in refs]
    groups = refs["q"].shape[2] // refs["k"].shape[2]
    rows, columns = program.tile.keys, program.tile.queries
    k, ids = program.key_tile(j, kv_head), program.ids("key_ids", j)
    values = program.values(j, kv_head) if of_keys else []

    def step(i: Array, carry: Any, masked: bool, *, head: Array, decay: Array | None) -> Any:
        dk, d_values, d_decay = carry
        q, cotangents = program.query_tile(i, head), program.cotangents(i, head)
        log_sum = program.read_vector("log_sum", i, columns, head)
        logits = program.logits(k, q)
        if decay is not None:
            logits = program.decayed(logits, program.query_decay(i, head), decay, keys_first=True)
        if masked:
            marks = program.ids("query_ids", i), ids
            logits = program.masked(logits, i, j, marks, keys_first=True)
        weights = jnp.exp2(logits - spread(log_sum, logits.shape, 1))
        if names:
            d_values = [
                program.add_dot(x, weights, cotangent)
                for x, cotangent in zip(d_values, cotangents, strict=True)
            ]
        if not of_keys:
            return dk, d_values, d_decay
        delta = program.read_vector("delta", i, columns, head)
        d_weights = -spread(delta, logits.shape, 1)
        for cotangent, value in zip(cotangents, values, strict=True):
            d_weights = program.add_dot(d_weights, value, cotangent, trans_b=True)
        d_logits = weights * d_weights
        if d_decay is not None:
            d_decay -= jnp.sum(d_logits, axis=1)
        return program.add_dot(dk, d_logits, q), d_values, d_decay

    def walk(g: Array | int, carry: Any) -> Any:
        head = kv_head * np.int32(groups) + g
        decay = program.key_decay(j, head)
        start_decay = None
        if decay is not None and "d_key_decay" in refs:
            start_decay = jnp.zeros((rows,), jnp.float32)
        of_head = functools.partial(step, head=head, decay=decay)
        *carry, d_decay = program.walk(of_head, (*carry, start_decay), own="k", head=head)
        if d_decay is not None:
            program.write_vector("d_key_decay", j, head, d_decay)
        return tuple(carry)

    carry = (
        jnp.zeros((rows, refs["k"].shape[-1]), jnp.float32) if of_keys else None,
        [jnp.zeros((rows, refs[name].shape[-1]), jnp.float32) for name in names],
    )
    dk, d_values = walk(0, carry) if groups == 1 else lax.fori_loop(0, groups, walk, carry)
    if of_keys:
        program.write("d_k", j, kv_head, dk * np.float32(program.call.scale))
    for name, x in zip(names, d_values, strict=True):
        program.write(name, j, kv_head, x)


def value_gradients(program: Program) -> None:
    """Computes ``dv`` and ``de`` for a block of keys, if ``dk`` has its own kernel."""
    key_gradients(program)
