"""Additive biases, taken one block at a time, with gradients for their source arrays.

A blockwise computation with its own derivative cannot differentiate through a closure. A bias is
therefore split in two: a hashable description that knows how to take a block, and the arrays that
blocks are taken from (``source``). These travel as ordinary arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from tape_jax._src.attention.request import BiasFunction, decays

Array = jax.Array


class BlockBias(Protocol):
    """A bias as a blockwise backend needs it. ``i`` and ``j`` number the blocks."""

    def block(self, source: Any, i: Array, j: Array) -> Array:
        """Return the bias of query block ``i`` and key block ``j``, ``[B|1, Hq|1, Q|1, K|1]``."""

    def zero_gradient(self, source: Any) -> Any:
        """Return zeros to which the gradients of all blocks are added, in at least float32."""

    def block_gradient(self, source: Any, i: Array, j: Array, gradient: Array) -> Any:
        """Return one block's share, given the gradient ``[B, Hq, Q, K]`` of its logits."""

    def add(self, total: Any, part: Any, i: Array, j: Array) -> Any:
        """Adds the result of :meth:`block_gradient` to the sum."""

    def finish(self, source: Any, total: Any) -> Any:
        """Return the sum as a cotangent of ``source``."""


@dataclasses.dataclass(frozen=True)
class ArrayBias:
    """A bias, or a mask, given as an array ``[B|1, Hq|1, Tq|1, S|1]``, padded to whole blocks."""

    block_q: int
    block_k: int

    def _window(self, source: Array, i: Array, j: Array) -> tuple[list[Any], tuple[int, ...]]:
        """Return start and size of a block."""
        full_q, full_k = source.shape[2] > 1, source.shape[3] > 1
        zero = jnp.int32(0)
        start = [zero, zero, i * self.block_q if full_q else zero]
        start.append(j * self.block_k if full_k else zero)
        size = (self.block_q if full_q else 1, self.block_k if full_k else 1)
        return start, (*source.shape[:2], *size)

    def block(self, source: Array, i: Array, j: Array) -> Array:
        return lax.dynamic_slice(source, *self._window(source, i, j))

    def zero_gradient(self, source: Array) -> Array:
        return jnp.zeros(source.shape, jnp.promote_types(source.dtype, jnp.float32))

    def block_gradient(self, source: Array, i: Array, j: Array, gradient: Array) -> Array:
        size = self._window(source, i, j)[1]
        axes = [axis for axis in range(4) if size[axis] == 1]
        return jnp.sum(gradient, axis=axes, keepdims=True)

    def add(self, total: Array, part: Array, i: Array, j: Array) -> Array:
        start, size = self._window(total, i, j)
        part = part.astype(total.dtype) + lax.dynamic_slice(total, start, size)
        return lax.dynamic_update_slice(total, part, start)

    def finish(self, source: Array, total: Array) -> Array:
        return total.astype(source.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionBias:
    """A bias given as a function of query and key indices.

    ``source`` holds the floating-point arrays that the function closes over, which get gradients;
    its other arrays; and the offset of query indices.

    Attributes:
      jaxpr: the traced function.
      is_float: whether each array it closes over is floating-point.
      query_length, key_length, block_q, block_k: as in ``chunked.Blocks``.
    """

    jaxpr: Any
    is_float: tuple[bool, ...]
    query_length: int
    key_length: int
    block_q: int
    block_k: int

    @classmethod
    def trace(cls, function: BiasFunction, offset: Array, **sizes: int) -> tuple[FunctionBias, Any]:
        """Splits ``function`` into a description and its source."""
        indices = [jax.ShapeDtypeStruct((sizes[n],), jnp.int32) for n in ("block_q", "block_k")]
        closed = jax.make_jaxpr(function)(*indices)
        is_float = tuple(jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in closed.consts)
        floats = [x for x, f in zip(closed.consts, is_float, strict=True) if f]
        others = [x for x, f in zip(closed.consts, is_float, strict=True) if not f]
        description = cls(closed.jaxpr, is_float, **sizes)
        return description, (floats, others, offset)

    def _value(self, floats: list[Array], others: list[Array], offset: Array, i: Array, j: Array):
        """Evaluates one block. Padding takes the last index: it is masked, but must be finite."""
        query = jnp.minimum(i * self.block_q + jnp.arange(self.block_q), self.query_length - 1)
        key = jnp.minimum(j * self.block_k + jnp.arange(self.block_k), self.key_length - 1)
        query, key = query.astype(jnp.int32) + offset, key.astype(jnp.int32)
        rest = {True: iter(floats), False: iter(others)}
        consts = [next(rest[f]) for f in self.is_float]
        return jax.core.eval_jaxpr(self.jaxpr, consts, query, key)[0]

    def block(self, source: Any, i: Array, j: Array) -> Array:
        floats, others, offset = source
        return self._value(floats, others, offset, i, j)

    def zero_gradient(self, source: Any) -> list[Array]:
        return [jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in source[0]]

    def block_gradient(self, source: Any, i: Array, j: Array, gradient: Array) -> list[Array]:
        floats, others, offset = source
        value, pull = jax.vjp(lambda floats: self._value(floats, others, offset, i, j), floats)
        axes = [axis for axis in range(4) if value.shape[axis] == 1]
        return pull(jnp.sum(gradient, axis=axes, keepdims=True).astype(value.dtype))[0]

    def add(self, total: list[Array], part: list[Array], i: Array, j: Array) -> list[Array]:
        return [t + p for t, p in zip(total, part, strict=True)]

    def finish(self, source: Any, total: list[Array]) -> Any:
        return [t.astype(x.dtype) for t, x in zip(total, source[0], strict=True)], None, None


@dataclasses.dataclass(frozen=True)
class DecayBias:
    """The decay ``F_i - F_j``, of queries ``F [B|1, Tq, Hq|1]`` and keys ``[B|1, S, Hq|1]``.

    ``source`` is both, padded to whole blocks. Queries get no gradient: adding a constant to a
    whole row does not change its probabilities.
    """

    block_q: int
    block_k: int

    def block(self, source: tuple[Array, Array], i: Array, j: Array) -> Array:
        queries, keys = source
        queries = lax.dynamic_slice_in_dim(queries, i * self.block_q, self.block_q, 1)
        return decays(queries, lax.dynamic_slice_in_dim(keys, j * self.block_k, self.block_k, 1))

    def zero_gradient(self, source: tuple[Array, Array]) -> Array:
        return jnp.zeros_like(source[1])

    def block_gradient(
        self, source: tuple[Array, Array], i: Array, j: Array, gradient: Array
    ) -> Array:
        keys = source[1]
        axes = [axis for axis, size in ((0, keys.shape[0]), (1, keys.shape[2])) if size == 1]
        part = -jnp.sum(gradient, axis=2, keepdims=True)
        return jnp.sum(part, axis=axes, keepdims=True)[:, :, 0].swapaxes(1, 2)

    def add(self, total: Array, part: Array, i: Array, j: Array) -> Array:
        size = part.shape[1]
        part = part.astype(total.dtype) + lax.dynamic_slice_in_dim(total, j * size, size, 1)
        return lax.dynamic_update_slice_in_dim(total, part, j * size, 1)

    def finish(self, source: tuple[Array, Array], total: Array) -> tuple[None, Array]:
        return None, total


@dataclasses.dataclass(frozen=True)
class SumOfBiases:
    """Several biases; ``source`` holds theirs, in the same order."""

    biases: tuple[BlockBias, ...]

    def _each(self, method: str, *lists: Any, **rest: Any) -> tuple[Any, ...]:
        each = zip(self.biases, *lists, strict=True)
        return tuple(getattr(bias, method)(*args, **rest) for bias, *args in each)

    def block(self, source: Any, i: Array, j: Array) -> Array:
        return functools.reduce(operator.add, self._each("block", source, i=i, j=j))

    def zero_gradient(self, source: Any) -> Any:
        return self._each("zero_gradient", source)

    def block_gradient(self, source: Any, i: Array, j: Array, gradient: Array) -> Any:
        return self._each("block_gradient", source, i=i, j=j, gradient=gradient)

    def add(self, total: Any, part: Any, i: Array, j: Array) -> Any:
        return self._each("add", total, part, i=i, j=j)

    def finish(self, source: Any, total: Any) -> Any:
        return self._each("finish", source, total)
