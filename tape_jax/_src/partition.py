"""Makes kernels follow the batch and the heads, under ``vmap`` and in sharded programs.

To XLA a kernel is opaque: it would gather sharded operands on every device. But attention computes
each row of the batch and each key/value head by itself, so every device can run the same kernel on
the rows and heads that it holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

Array = jax.Array
# Arrays, or trees of arrays, by name.
Named = dict[str, Any]


def over_batch_and_heads(
    function: Callable[[Named], Named], args: Named, axes: Mapping[str, str]
) -> Named:
    """Runs ``function(args)`` so that batching and sharding pass through it.

    Sharded batch axes and heads stay sharded, with no collective; other sharded axes are gathered
    first. The shards of query heads must divide the key/value heads.

    Args:
      function: pure; computes any number of batch rows and of key/value heads, each by itself. It
        closes over no arrays.
      args: named arrays. The batch axis, which comes first, is full or 1; heads are full or 1,
        those of queries also as many as the keys'.
      axes: for each name of an argument or a result one letter for each axis: ``b`` batch, ``h``
        query heads, ``k`` key/value heads. Other letters, and axes without one, are never sharded.
        An argument without letters is the same for the whole batch.

    Returns:
      What ``function`` returns: named arrays, their batch and heads full.

    Raises:
      NotImplementedError: where it is differentiated: kernels have derivatives of their own.
    """

    @custom_vmap
    def call(args: Named) -> Named:
        return _partitioned(function, args, axes)

    @call.def_vmap
    def merge(size: int, batched: tuple[Any], args: Named) -> tuple[Named, Named]:
        """A new axis becomes a part of the batch."""
        leaves, tree = jax.tree.flatten(args)
        letters = [letters for letters, _ in _leaves(args, axes)]
        has_axis = jax.tree.leaves(batched[0])
        found = list(zip(letters, leaves, has_axis, strict=True))
        rows = max(x.shape[int(new)] for letters, x, new in found if letters)

        def merged(letters: str, x: Array, new: bool) -> Array:
            if not new and (not letters or x.shape[0] == 1):
                return x
            core = x.shape[1 + new :]
            return jnp.broadcast_to(x, (size, rows, *core)).reshape(size * rows, *core)

        args = jax.tree.unflatten(tree, [merged(*each) for each in found])
        out = over_batch_and_heads(function, args, axes)
        out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda x: True, out)

    return once_differentiated(call)(args)


def once_differentiated(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that must not be differentiated: it is part of a derivative, or has one beside."""
    refusing = jax.custom_jvp(function)

    @refusing.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            "this implementation has no derivatives of second order: name "
            "implementation='reference', which has"
        )

    return refusing


def first_derivative_only(function: Callable[[Named], Array], args: Named) -> Array:
    """``function(args)`` and its derivative in reverse, of which there is none."""

    @jax.custom_vjp
    def call(args: Named) -> Array:
        return function(args)

    pull_back = once_differentiated(lambda pull, d_out: pull(d_out))
    call.defvjp(once_differentiated(functools.partial(jax.vjp, function)), pull_back)
    return call(args)


def differentiable_over_batch_and_heads(
    function: Callable[[Named], Array], args: Named, axes: Mapping[str, str]
) -> Array:
    """A function of one row and one key/value head for all of them, by its own derivative.

    Args:
      function: of ``args`` without the axes of batch and heads, differentiable in reverse.
      args: named arrays ``[B, Hk, ...]``, ``[B, ...]`` or the same for all. Those of floating-point
        numbers have both axes, and get gradients.
      axes: ``bk``, ``b`` or an empty string for each.

    Returns:
      The function's results, ``[B, Hk, ...]``.
    """

    def everywhere(function: Callable[[Named], Any]) -> Callable[[Named], Any]:
        for letter in "kb":
            in_axes = {name: 0 if letter in axes[name] else None for name in args}
            function = jax.vmap(function, in_axes=(in_axes,))
        return function

    # Of the function that pulls a cotangent back, whose arrays travel between the two passes. That
    # of one row and head is alike for any number of them.
    tree: Any = None

    def forward(args: Named) -> Named:
        nonlocal tree
        floats = {name: x for name, x in args.items() if axes[name] == "bk"}
        fixed = {name: x for name, x in args.items() if name not in floats}
        out, pull = jax.vjp(lambda floats: function({**floats, **fixed}), floats)
        leaves, tree = jax.tree.flatten(pull)
        return {"out": out, "kept": leaves}

    def backward(args: Named) -> Named:
        return jax.tree.unflatten(tree, args["kept"])(args["d_out"])[0]

    results = dict.fromkeys(("out", "kept", "d_out"), "bk")

    @jax.custom_vjp
    def call(args: Named) -> Array:
        value = everywhere(lambda args: {"out": function(args)})
        return over_batch_and_heads(value, args, {**axes, **results})["out"]

    def keep(args: Named) -> tuple[Array, list[Array]]:
        found = over_batch_and_heads(everywhere(forward), args, {**axes, **results})
        return found["out"], found["kept"]

    def pull_back(kept: list[Array], d_out: Array) -> tuple[Named]:
        every = jax.vmap(jax.vmap(backward))
        given = {"kept": kept, "d_out": d_out}
        found = over_batch_and_heads(every, given, {**axes, **results})
        return ({name: found.get(name) for name in args},)

    call.defvjp(keep, pull_back)
    return call(args)


def batch_size(args: Mapping[str, Any]) -> int:
    """Rows of a batch, of arrays whose first axis is full or 1."""
    return max(x.shape[0] for x in args.values())


def _partitioned(function: Callable[[Named], Named], args: Named, axes: Mapping[str, str]) -> Named:
    """Calls ``function``, and says how it can be split over devices."""
    sizes = {"b": 1, "k": 1, "h": 1}
    for letters, x in _leaves(args, axes):
        for letter, n in zip(letters, x.shape, strict=False):
            sizes[letter] = max(sizes.get(letter, 1), n)
    groups = sizes["h"] // sizes["k"]
    # What an axis, by its letter and its size, is split along.
    shared = {("b", sizes["b"]): "b"}
    if sizes["k"] > 1:
        shared |= {(letter, sizes["k"]): "k" for letter in "kh"} | {("h", sizes["h"]): "k"}

    def factors(letters: str, x: Any) -> list[str | None]:
        return [shared.get(axis) for axis in zip(letters.ljust(x.ndim), x.shape, strict=True)]

    whole: list[str] = []

    def notation(tree: Named) -> str:
        arrays = []
        for letters, x in _leaves(tree, axes):
            words = []
            for n, factor in zip(x.shape, factors(letters, x), strict=True):
                if factor is None:
                    whole.append(f"r{len(whole)}")
                    words.append(whole[-1])
                elif n == sizes[factor]:
                    words.append(factor)
                else:
                    whole.extend([] if "g" in whole else ["g"])
                    words.append("(k g)")
            arrays.append(" ".join(words))
        return ", ".join(arrays)

    def partition(mesh: Any, arg_shapes: tuple[Named], out_shapes: Named) -> tuple[Any, ...]:
        parts: dict[str | None, Any] = {}
        for letters, x in _leaves(arg_shapes[0], axes):
            for factor, part in zip(factors(letters, x), x.sharding.spec, strict=False):
                if factor is not None and part is not None:
                    parts.setdefault(factor, part)

        def place(tree: Named) -> Named:
            specs = [[parts.get(f) for f in factors(*leaf)] for leaf in _leaves(tree, axes)]
            found = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
            return jax.tree.unflatten(jax.tree.structure(tree), found)

        return mesh, function, place(out_shapes), (place(arg_shapes[0]),)

    rule = f"{notation(args)} -> {notation(jax.eval_shape(function, args))}"
    options = {"g": groups} if "g" in whole else {}
    split = custom_partitioning(function)
    split.def_partition(
        partition,
        sharding_rule=rule,
        need_replication_factors=tuple(whole),
        **options,
    )
    return split(args)


def _leaves(tree: Named, axes: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Letters and array of each leaf, in the order of the flattened tree."""
    for name in sorted(tree):
        for x in jax.tree.leaves(tree[name]):
            yield axes[name], x
