"""Makes a kernel call follow the batch and head axes under ``vmap`` and under sharded ``jit``.

To XLA a kernel is opaque: it would gather sharded operands on every device. But attention computes
each row of the batch and each key/value head by itself, so every device can run the same kernel on
the rows and heads that it holds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Literal
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


def differentiable_over_batch_and_heads(
    function: Callable[[Arrays], Array], args: Arrays, axes: Mapping[str, str]
) -> Array:
    """:func:`over_batch_and_heads` for a function that brings its own derivative.

    Its forward and its backward pass become one call each, which batching and sharding pass
    through. What the function keeps for its backward pass travels between the two, except its
    inputs and constants, which need not.

    Args:
      function: as there, differentiable in reverse, with one result.
      args: as there; the floating-point ones have all heads and get gradients.
      axes: as there, for the arguments; the result has the axes given as ``out``.

    Returns:
      What ``function`` returns.
    """

    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in args.items()}
    passes = functools.cache(lambda: _Passes.of(function, shapes, axes))

    def value(args: Arrays) -> Arrays:
        return {"out": function(_with_full_batch(args))}

    @jax.custom_vjp
    def call(args: Arrays) -> Array:
        return over_batch_and_heads(value, args, axes)["out"]

    def forward(args: Arrays) -> tuple[Array, tuple[Arrays, Arrays]]:
        kept = over_batch_and_heads(passes().forward, args, {**axes, **passes().axes()})
        return kept.pop("out"), (args, kept)

    def backward(saved: tuple[Arrays, Arrays], d_out: Array) -> tuple[dict[str, Any]]:
        args, kept = saved
        letters = {"d_" + name: axes[name] for name in [*args, "out"]}
        letters |= {**axes, **passes().axes()}
        found = over_batch_and_heads(passes().backward, {**args, **kept, "d_out": d_out}, letters)
        return ({name: found.get("d_" + name) for name in args},)

    call.defvjp(forward, backward)
    return call(args)


@dataclasses.dataclass(frozen=True)
class _Passes:
    """The forward and the backward pass of a function, and what travels between them.

    Attributes:
      function: what is differentiated.
      names: of its arguments.
      kept: for each array that the backward pass needs letters for its axes; None if it is an
        argument, a constant or empty, and need not travel.
    """

    function: Callable[[Arrays], Array]
    names: tuple[str, ...]
    kept: tuple[str | None, ...]

    @classmethod
    def of(
        cls,
        function: Callable[[Arrays], Array],
        args: Mapping[str, jax.ShapeDtypeStruct],
        axes: Mapping[str, str],
    ) -> _Passes:
        """Traces the function twice, to see which axes grow with the batch and the heads."""

        def larger(name: str, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            growth = (_GROWTH.get(letter, 1) for letter in axes[name])
            shape = [n * m for n, m in zip(x.shape, growth, strict=True)]
            return jax.ShapeDtypeStruct(shape, x.dtype)

        args = jax.eval_shape(_with_full_batch, args)
        traced = _trace(function, args)
        grown = _trace(function, {name: larger(name, x) for name, x in args.items()})
        letters = {m: letter for letter, m in _GROWTH.items()} | {1: "s"}
        known = traced.known(traced.jaxpr.jaxpr.invars)

        def axes_of(source: Any, shape: Sequence[int], grown: Sequence[int]) -> str | None:
            if id(source) in known:
                return None
            return "".join(letters[m // n] for n, m in zip(shape, grown, strict=True))

        shapes = [[x.shape for x in each.jaxpr.out_avals[1:]] for each in (traced, grown)]
        return cls(function, tuple(args), tuple(map(axes_of, traced.sources(), *shapes)))

    def axes(self) -> dict[str, str]:
        """Letters for the axes of what travels, by name; its batch comes first."""
        return {name: "b" + letters.replace("b", "") for name, letters, _ in self._travelling()}

    def _travelling(self) -> list[tuple[str, str, int]]:
        """Name, letters and place of each array that travels."""
        return [(f"kept{n}", x, n) for n, x in enumerate(self.kept) if x is not None]

    def forward(self, args: Arrays) -> Arrays:
        """``out``, and named what travels. What has no batch axis gets one."""
        args, rows = _with_full_batch(args), batch_size(args)
        jaxpr = _trace(self.function, args).jaxpr
        out, *leaves = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *jax.tree.leaves(args))

        def batch_first(x: Array, letters: str) -> Array:
            if "b" in letters:
                return jnp.moveaxis(x, letters.index("b"), 0)
            return jnp.broadcast_to(x, (rows, *x.shape))

        return {
            "out": out,
            **{name: batch_first(leaves[n], letters) for name, letters, n in self._travelling()},
        }

    def backward(self, given: Arrays) -> Arrays:
        """Gradients of the floating-point arguments, from them, what travels and ``d_out``."""
        given = _with_full_batch(given)
        args = {name: given[name] for name in self.names}
        traced = _trace(self.function, args)
        known = traced.known(jax.tree.leaves(args))
        leaves = [known.get(id(source)) for source in traced.sources()]
        for name, letters, n in self._travelling():
            x = given[name]
            leaves[n] = jnp.moveaxis(x, 0, letters.index("b")) if "b" in letters else x[0]
        (found,) = jax.tree.unflatten(traced.tree, leaves)(given["d_out"])
        return {"d_" + name: x for name, x in found.items()}


class _Traced(NamedTuple):
    """A forward pass for some shapes.

    Attributes:
      jaxpr: computes the result and then what the backward pass needs.
      tree: how what it needs makes up the function that pulls a cotangent back.
    """

    jaxpr: Any
    tree: Any

    def sources(self) -> list[Any]:
        """For each array that the backward pass needs the variable, or literal, that it is."""
        return self.jaxpr.jaxpr.outvars[1:]

    def known(self, args: Sequence[Any]) -> dict[int, Any]:
        """Values of arguments, constants, literals and empty arrays, by their variables' ids."""
        jaxpr = self.jaxpr.jaxpr
        literals = [(x, x.val) for x in jaxpr.outvars if isinstance(x, Literal)]
        empty = [(x, jnp.zeros(x.aval.shape, x.aval.dtype)) for x in jaxpr.outvars
                 if 0 in x.aval.shape]  # fmt: skip
        constants = zip(jaxpr.constvars, self.jaxpr.consts, strict=True)
        given = zip(jaxpr.invars, args, strict=True)
        return {id(x): value for x, value in [*literals, *empty, *constants, *given]}


def _trace(function: Callable[[Arrays], Array], args: Mapping[str, Any]) -> _Traced:
    trees = []

    def forward(args: Mapping[str, Any]) -> list[Array]:
        fixed = {name: x for name, x in args.items() if not _is_float(x)}
        floats = {name: x for name, x in args.items() if _is_float(x)}
        out, pull = jax.vjp(lambda floats: function({**floats, **fixed}), floats)
        leaves, tree = jax.tree.flatten(pull)
        trees.append(tree)
        return [out, *leaves]

    return _Traced(jax.make_jaxpr(forward)(args), trees[0])


# By how much batch and heads are larger in the second look at what is kept.
_GROWTH = {"b": 2, "k": 3, "h": 3}


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _with_full_batch(args: Arrays) -> Arrays:
    """Gives all arrays every row of the batch, so that gradients have them too."""
    rows = batch_size(args)
    return {name: jnp.broadcast_to(x, (rows, *x.shape[1:])) for name, x in args.items()}


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
    # A partitioned function must not close over arrays: its constants come in as arguments.
    traced, out = jax.make_jaxpr(function, return_shape=True)(args)
    constants = {f"constant{n}": jnp.asarray(x)[None] for n, x in enumerate(traced.consts)}
    axes = {**axes, **{name: "s" * x.ndim for name, x in constants.items()}}

    def run(args: Arrays) -> Arrays:
        if not constants:
            return function(args)
        own = {name: x for name, x in args.items() if name not in constants}
        given = [args[name][0] for name in constants]
        jaxpr = jax.make_jaxpr(function)(own).jaxpr
        leaves = jax.core.eval_jaxpr(jaxpr, given, *jax.tree.leaves(own))
        return jax.tree.unflatten(jax.tree.structure(out), leaves)

    def partition(mesh: Any, arg_shapes: tuple[Any], out_shapes: Any) -> tuple[Any, ...]:
        place = _placement(arg_shapes[0], axes)
        return mesh, run, place(out_shapes), (place(arg_shapes[0]),)

    def infer(mesh: Any, arg_shapes: tuple[Any], out_shapes: Any) -> Any:
        del mesh
        return _placement(arg_shapes[0], axes)(out_shapes)

    sharded = custom_partitioning(run)
    args = {**args, **constants}
    rule, details = _sharding_rule(args, out, axes)
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
