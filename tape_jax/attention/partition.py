"""Makes a kernel call follow the batch and head axes under ``vmap`` and under sharded ``jit``.

To XLA a kernel is opaque: it would gather sharded operands on every device. Kernels of attention
compute each row of the batch and each key/value head by itself, so that a device can run the same
kernel on the rows and heads that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

Array = jax.Array
Arrays = dict[str, Array]


def over_batch_and_heads(
    function: Callable[[Arrays], Arrays], args: Arrays, axes: Mapping[str, str]
) -> Arrays:
    """Runs ``function(args)`` so that batching and sharding pass through it.

    Args:
      function: pure; works on any number of batch rows and key/value heads.
      args: named arrays, ``q`` and ``k`` among them. A batch axis, which comes first, is full or
        1; a head axis is full, 1, or (of queries) as long as that of the keys.
      axes: for each name of an argument or a result one letter for each axis: ``b`` batch, ``h``
        query heads, ``k`` key/value heads; other letters are never sharded.

    Returns:
      What ``function`` returns: named arrays, batch and heads full.
    """

    @custom_vmap
    def call(args: Arrays) -> Arrays:
        return _partitioned(function, args, axes)

    @call.def_vmap
    def fold(axis_size: int, batched: tuple[dict[str, bool]], args: Arrays):  # noqa: ANN202
        args = _fold(axis_size, batched[0] if isinstance(batched, tuple) else batched, args)
        out = over_batch_and_heads(function, args, axes)
        out = {name: x.reshape(axis_size, -1, *x.shape[1:]) for name, x in out.items()}
        return out, dict.fromkeys(out, True)

    return call(args)


def batch_size(args: Mapping[str, Any]) -> int:
    """The number of rows of a batch whose arrays have a first axis of full length or 1."""
    return max(x.shape[0] for x in args.values())


def _fold(axis_size: int, batched: Mapping[str, bool], args: Arrays) -> Arrays:
    """Merges a new first axis, where an array has it, with the batch axis."""
    batch = max(x.shape[1 if batched[name] else 0] for name, x in args.items())

    def merge(x: Array, has_axis: bool) -> Array:
        if not has_axis:
            if x.shape[0] == 1:
                return x
            x = jnp.broadcast_to(x, (axis_size, *x.shape))
        x = jnp.broadcast_to(x, (axis_size, batch, *x.shape[2:]))
        return x.reshape(axis_size * batch, *x.shape[2:])

    return {name: merge(x, batched[name]) for name, x in args.items()}


def _partitioned(
    function: Callable[[Arrays], Arrays], args: Arrays, axes: Mapping[str, str]
) -> Arrays:
    """Calls ``function`` with a sharding rule: batch and key/value heads may be sharded."""
    query_heads, kv_heads = args["q"].shape[2], args["k"].shape[2]
    batch = batch_size(args)
    out_shapes = jax.eval_shape(function, args)
    replicated: list[str] = []

    def factors(name: str, shape: tuple[int, ...]) -> str:
        """The factors of the axes of one array; an axis that is not sharded has its own."""
        named = {("b", batch): "b", ("h", query_heads): "(k g)"}
        # After the line above: without groups the heads of queries are those of the keys.
        named |= {("h", kv_heads): "k", ("k", kv_heads): "k"}
        out = []
        for letter, size in zip(axes[name], shape, strict=True):
            factor = named.get((letter, size)) if size > 1 or letter in "bhk" else None
            if factor is None:
                factor = f"r{len(replicated)}"
                replicated.append(factor)
            out.append(factor)
        return " ".join(out)

    sides = [
        ", ".join(factors(name, side[name].shape) for name in sorted(side))
        for side in (args, out_shapes)
    ]
    rule = " -> ".join(sides)
    sizes: dict[str, Any] = {}
    if "(k g)" in rule:
        sizes = {"k": kv_heads, "g": query_heads // kv_heads}
        replicated.append("g")

    def partition(mesh: Any, arg_shapes: tuple[Any], out: Any) -> tuple[Any, ...]:
        shardings = _Shardings(arg_shapes[0], axes)
        return mesh, run, shardings.of(out), (shardings.of(arg_shapes[0]),)

    def run(args: Arrays) -> Arrays:
        return function(args)

    sharded = custom_partitioning(run)
    sharded.def_partition(
        partition, sharding_rule=rule, need_replication_factors=tuple(replicated), **sizes
    )
    return sharded(args)
