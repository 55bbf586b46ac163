"""Makes a kernel call follow the batch and head axes under ``vmap`` and under sharded ``jit``.

To XLA a kernel is opaque: it would gather sharded operands on every device. But attention computes
each row of the batch and each key/value head by itself, so every device can run the same kernel on
the rows and heads that it holds.
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

    Sharded batch axes and heads stay sharded, with no collective, as long as the heads' shards
    divide the key/value heads; other sharded axes are gathered first.

    Args:
      function: pure; computes any number of batch rows and of key/value heads, each by itself.
      args: named arrays, ``q`` and ``k`` among them. The batch axis, which comes first, is full or
        1; heads are full or 1, those of queries also as many as the keys'.
      axes: for each name of an argument or a result one letter for each axis: ``b`` batch, ``h``
        query heads, ``k`` key/value heads; other letters stand for axes that are never sharded.

    Returns:
      What ``function`` returns: named arrays, their batch and heads full.
    """

    @custom_vmap
    def call(args: Arrays) -> Arrays:
        return _partitioned(function, args, axes)

    @call.def_vmap
    def batch_rule(axis_size: int, batched: list[dict[str, bool]], args: Arrays) -> Any:
        out = over_batch_and_heads(function, _merge_axis(axis_size, batched[0], args), axes)
        out = {name: x.reshape(axis_size, -1, *x.shape[1:]) for name, x in out.items()}
        return out, dict.fromkeys(out, True)

    return call(args)


def batch_size(args: Mapping[str, Any]) -> int:
    """Rows of a batch, of arrays whose first axis is full or 1."""
    return max(x.shape[0] for x in args.values())


def _merge_axis(axis_size: int, batched: Mapping[str, bool], args: Arrays) -> Arrays:
    """Merges a new first axis, where an array has it, with the batch axis."""
    batch = max(x.shape[1 if batched[name] else 0] for name, x in args.items())

    def merge(x: Array, has_axis: bool) -> Array:
        if not has_axis and x.shape[0] == 1:
            return x
        core = x.shape[2:] if has_axis else x.shape[1:]
        x = jnp.broadcast_to(x, (axis_size, batch, *core))
        return x.reshape(axis_size * batch, *core)

    return {name: merge(x, batched[name]) for name, x in args.items()}


def _partitioned(
    function: Callable[[Arrays], Arrays], args: Arrays, axes: Mapping[str, str]
) -> Arrays:
    """Calls ``function`` with rules for Shardy and for GSPMD (``infer``), its predecessor."""

    def run(args: Arrays) -> Arrays:
        return function(args)

    def partition(mesh: Any, arg_shapes: tuple[Any], out_shapes: Any) -> tuple[Any, ...]:
        place = _placement(arg_shapes[0], axes)
        return mesh, run, place(out_shapes), (place(arg_shapes[0]),)

    def infer(mesh: Any, arg_shapes: tuple[Any], out_shapes: Any) -> Any:
        del mesh
        return _placement(arg_shapes[0], axes)(out_shapes)

    sharded = custom_partitioning(run)
    rule, details = _sharding_rule(args, jax.eval_shape(function, args), axes)
    sharded.def_partition(
        partition, infer_sharding_from_operands=infer, sharding_rule=rule, **details
    )
    return sharded(args)


def _sharding_rule(
    args: Arrays, out: Mapping[str, Any], axes: Mapping[str, str]
) -> tuple[str, dict[str, Any]]:
    """A rule in Shardy's notation: which axes are one factor, and which must not be sharded."""
    query_heads, kv_heads = args["q"].shape[2], args["k"].shape[2]
    shared = {("b", batch_size(args)): "b"}
    replicated: list[str] = []
    sizes: dict[str, int] = {}
    if kv_heads > 1:
        shared |= {("h", query_heads): "(k g)", ("h", kv_heads): "k", ("k", kv_heads): "k"}
    if 1 < kv_heads < query_heads:
        sizes = {"g": query_heads // kv_heads}

    def factor(letter: str, size: int) -> str:
        name = shared.get((letter, size), f"r{len(replicated)}")
        if name == "(k g)" and "g" not in replicated:
            replicated.append("g")
        if name.startswith("r"):
            replicated.append(name)
        return name

    def side(arrays: Mapping[str, Any]) -> str:
        return ", ".join(
            " ".join(map(factor, axes[name], arrays[name].shape)) for name in sorted(arrays)
        )

    rule = f"{side(args)} -> {side(out)}"
    return rule, {"need_replication_factors": tuple(replicated), **sizes}


def _placement(args: Mapping[str, Any], axes: Mapping[str, str]) -> Callable[[Any], Any]:
    """Where arrays of given names and shapes go, given the shardings proposed for ``args``."""
    proposed = args["q"].sharding
    if not isinstance(proposed, NamedSharding):
        return lambda arrays: {name: x.sharding for name, x in arrays.items()}
    mesh, batch, kv_heads = proposed.mesh, batch_size(args), args["k"].shape[2]
    query_heads = args["q"].shape[2]

    def shards(part: Any) -> int:
        names = part if isinstance(part, tuple) else (part,)
        return math.prod(mesh.shape[name] for name in names if name is not None)

    rows = next(x.sharding.spec[0] for x in args.values() if x.shape[0] == batch)
    heads = proposed.spec[2]
    parts = {("b", batch): rows}
    if kv_heads % shards(heads) == 0:
        parts |= {("h", query_heads): heads, ("h", kv_heads): heads, ("k", kv_heads): heads}

    def place(arrays: Mapping[str, Any]) -> dict[str, NamedSharding]:
        specs = {n: map(lambda *axis: parts.get(axis), axes[n], x.shape) for n, x in arrays.items()}
        return {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, spec in specs.items()}

    return place
