"""Makes kernels follow the batch and the heads, under ``vmap`` and in sharded programs.

To XLA a kernel is opaque: it would gather sharded operands on every device. But attention computes
each row of the batch and each key/value head separately, so every device can run the same kernel on
its rows and heads.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

Array = jax.Array
# Arrays, or trees of arrays, by name.
Named = dict[str, Any]


def over_batch_and_heads(
    function: Callable[[Named], Named], args: Named, axes: Mapping[str, str], *, full: bool = False
) -> Named:
    """Runs ``function(args)`` so that batching and sharding pass through it.

    Sharded batch axes and heads stay sharded, with no collective where all arrays are split alike;
    other sharded axes are gathered first, and so are heads if their shards do not divide the
    key/value heads.

    Args:
      function: pure; computes any number of batch rows and of key/value heads, each by itself. It
        closes over no arrays.
      args: named arrays. The batch axis, which comes first, is full or 1; heads are full or 1,
        those of queries also as many as the keys'.
      axes: for each name of an argument or a result one letter for each axis: ``b`` batch, ``h``
        query heads, ``k`` key/value heads. Other letters, and axes without one, are never sharded.
        What has no letters is the same for the whole batch.
      full: whether the batch axis stays full under ``vmap``, and is never 1 instead.

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
            if not new and (not letters or (x.shape[0] == 1 and not full)):
                return x
            core = x.shape[1 + new :]
            return jnp.broadcast_to(x, (size, rows, *core)).reshape(size * rows, *core)

        args = jax.tree.unflatten(tree, [merged(*each) for each in found])
        out = over_batch_and_heads(function, args, axes, full=full)
        tree = jax.tree.structure(out)
        of_rows = jax.tree.unflatten(tree, [bool(letters) for letters, _ in _leaves(out, axes)])

        def split(x: Array, has_rows: bool) -> Array:
            return x.reshape(size, -1, *x.shape[1:]) if has_rows else x

        return jax.tree.map(split, out, of_rows), of_rows

    return once_differentiated(call)(args)


def once_differentiated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function refuse differentiation: it is part of a derivative or has its own."""
    refusing = jax.custom_jvp(function)

    @refusing.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            "this implementation has no derivatives of second order: name "
            "implementation='reference', which has"
        )

    return refusing


def first_derivative_only(function: Callable[[Named], Array], args: Named) -> Array:
    """Runs ``function(args)`` with a reverse-mode derivative, but no second derivative."""

    @jax.custom_vjp
    def call(args: Named) -> Array:
        return function(args)

    pull_back = once_differentiated(lambda pull, d_out: pull(d_out))
    call.defvjp(once_differentiated(functools.partial(jax.vjp, function)), pull_back)
    return call(args)


def differentiable_over_batch_and_heads(
    function: Callable[[Named], Array], args: Named, axes: Mapping[str, str], letters: str
) -> Array:
    """:func:`over_batch_and_heads` of a function that has a derivative in reverse, with it.

    What travels from the forward to the backward pass is the function's own affair, as long as it
    is as many arrays for any number of rows and heads: which axes of it are rows and heads is seen
    from how their sizes follow these numbers.

    Args:
      function: of any number of rows and key/value heads, each by itself. It closes over no arrays.
      args: named arrays, or trees of arrays without letters. Batch and heads are full; what has
        letters and is of floating-point numbers gets gradients.
      axes: as in :func:`over_batch_and_heads`.
      letters: likewise, of the result.

    Returns:
      What ``function`` returns.

    Raises:
      NotImplementedError: where it is differentiated, if what travels does not follow the numbers.
    """
    floats = [name for name in args if axes[name] and jnp.issubdtype(args[name].dtype, np.floating)]
    sizes = _sizes(axes, args)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    every = functools.partial(over_batch_and_heads, full=True)

    def forward(args: Named) -> tuple[Array, Any]:
        fixed = {name: x for name, x in args.items() if name not in floats}
        return jax.vjp(lambda given: function({**given, **fixed}), {n: args[n] for n in floats})

    @functools.cache
    def kept_of(rows: int, heads: int) -> tuple[list[jax.ShapeDtypeStruct], Any]:
        """Returns the shapes kept for so many rows and key/value heads: leaves and tree."""
        factors = {"b": (rows, sizes["b"]), "k": (heads, sizes["k"]), "h": (heads, sizes["k"])}

        def resized(name: str) -> Any:
            if not axes[name]:
                return shapes[name]
            scales = (factors.get(letter, (1, 1)) for letter in axes[name])
            full = zip(shapes[name].shape, scales, strict=True)
            size = tuple(n * times // of for n, (times, of) in full)
            return jax.ShapeDtypeStruct(size, shapes[name].dtype)

        return jax.tree.flatten(jax.eval_shape(forward, {name: resized(name) for name in args})[1])

    @functools.cache
    def kept_axes() -> dict[str, str]:
        """Letters of what is kept, by name."""
        rows, heads = sizes["b"], sizes["k"]
        kept, taller, wider = (
            kept_of(*at)[0] for at in ((rows, heads), (2 * rows, heads), (rows, 2 * heads))
        )
        for other in (taller, wider):
            _check_alike(kept, other)
        leaves = zip(kept, taller, wider, strict=True)
        return _numbered(_letters(x, more, wide, sizes) for x, more, wide in leaves)

    def keep(args: Named) -> Named:
        out, pull = forward(args)
        return {"out": out, **_numbered(jax.tree.leaves(pull))}

    def pull_back(args: Named) -> Named:
        d_out = args["d_out"]
        heads = d_out.shape[letters.index("h")] * sizes["k"] // sizes["h"]
        expected, tree = kept_of(d_out.shape[0], heads)
        kept = [args[name] for name in kept_axes()]
        _check_alike(kept, expected)
        return jax.tree.unflatten(tree, kept)(d_out)[0]

    @jax.custom_vjp
    def call(args: Named) -> Array:
        value = lambda args: {"out": function(args)}  # noqa: E731
        return every(value, args, {**axes, "out": letters})["out"]

    # Gradients are to be split as what they are of, whatever is kept: so one number of each row and
    # head is kept as well.
    like = {f"like {name}": axes[name] for name in floats}

    def one_each(name: str, x: Array) -> Array:
        letters = axes[name].ljust(x.ndim)
        return x[tuple(slice(None if letter in "bhk" else 1) for letter in letters)]

    def call_forward(args: Named) -> tuple[Array, Named]:
        found = every(keep, args, {**axes, "out": letters, **kept_axes()})
        return found.pop("out"), found | {f"like {n}": one_each(n, args[n]) for n in floats}

    def call_backward(kept: Named, d_out: Array) -> tuple[Named]:
        given = {**kept, "d_out": d_out}
        found = every(pull_back, given, {**axes, **like, "d_out": letters, **kept_axes()})
        return ({name: found.get(name) for name in args},)

    call.defvjp(call_forward, call_backward)
    return call(args)


def _check_alike(kept: list[Any], other: list[Any]) -> None:
    """Raises NotImplementedError unless two lists hold as many arrays, of like axes and types."""
    kinds = [[(x.ndim, x.dtype) for x in arrays] for arrays in (kept, other)]
    if kinds[0] != kinds[1]:
        raise NotImplementedError(
            "what the kernel keeps for its backward pass depends on how many rows and heads there "
            f"are: {len(kept)} arrays or {len(other)}, or such of other axes"
        )


def _numbered(values: Iterable[Any]) -> Named:
    """Values under names that sort as they are given."""
    return {f"kept{n:03}": x for n, x in enumerate(values)}


def _letters(x: Any, of_more_rows: Any, of_more_heads: Any, sizes: Mapping[str, int]) -> str:
    """Returns which axes are rows and heads, given an array's shapes with twice as many of either.

    Raises:
      NotImplementedError: unless rows come first, and heads, if any, have an axis to themselves.
    """
    letters = ""
    for n, more_rows, more_heads in zip(
        x.shape, of_more_rows.shape, of_more_heads.shape, strict=True
    ):
        by_heads = next((letter for letter in "kh" if n == sizes[letter]), "?")
        changed = "b" * (more_rows != n) + by_heads * (more_heads != n)
        letters += changed if len(changed) < 2 else "?"
        letters += "." * (not changed)
    fixed = not letters.strip(".")
    if not fixed and ("?" in letters or letters.rfind("b") != 0 or x.shape[0] != sizes["b"]):
        raise NotImplementedError(
            f"what the kernel keeps for its backward pass, {x.shape}, mixes rows and heads with "
            "other axes"
        )
    return "" if fixed else letters


def batch_size(args: Mapping[str, Any]) -> int:
    """Rows of a batch of arrays whose first axis is full or 1."""
    return max(x.shape[0] for x in args.values())


def _partitioned(function: Callable[[Named], Named], args: Named, axes: Mapping[str, str]) -> Named:
    """Calls ``function``, and says how it can be split over devices."""
    results = jax.eval_shape(function, args)
    sizes = _sizes(axes, args, results)
    # The factor that splits an axis, by letter and size.
    split = {("b", sizes["b"]): "b"}
    if sizes["k"] > 1:
        split |= {("h", sizes["h"]): "h"} | {(letter, sizes["k"]): "k" for letter in "kh"}
    whole: list[str] = []

    def factors(letters: str, x: Any) -> list[str | None]:
        return [split.get(axis) for axis in zip(letters.ljust(x.ndim), x.shape, strict=True)]

    def unsplit() -> str:
        whole.append(f"r{len(whole)}")
        return whole[-1]

    def notation(tree: Named) -> str:
        arrays = (factors(*leaf) for leaf in _leaves(tree, axes))
        return ", ".join(" ".join(factor or unsplit() for factor in each) for each in arrays)

    def partition(mesh: Any, arg_shapes: tuple[Named], out_shapes: Named) -> tuple[Any, ...]:
        # Query heads and key/value heads are split alike, or not at all.
        parts: dict[str | None, Any] = {}
        split_by: dict[str, str] = {}
        for letters, x in _leaves(arg_shapes[0], axes):
            for factor, part in zip(factors(letters, x), x.sharding.spec, strict=False):
                if factor is None or part is None:
                    continue
                factor = "b" if factor == "b" else "k"
                names = part if isinstance(part, tuple) else (part,)
                shards = math.prod(mesh.shape[name] for name in names)
                # An axis of the mesh may split heads of one array and rows of another.
                free = all(split_by.get(name, factor) == factor for name in names)
                if factor not in parts and sizes[factor] % shards == 0 and free:
                    parts[factor] = part
                    split_by |= dict.fromkeys(names, factor)
        parts["h"] = parts.get("k")

        def place(tree: Named) -> Named:
            specs = [[parts.get(f) for f in factors(*leaf)] for leaf in _leaves(tree, axes)]
            found = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
            return jax.tree.unflatten(jax.tree.structure(tree), found)

        return mesh, on_one_device, place(out_shapes), (place(arg_shapes[0]),)

    def on_one_device(args: Named) -> Named:
        # A mesh that ``jax.set_mesh`` has set is still seen where this is traced.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return function(args)

    rule = f"{notation(args)} -> {notation(results)}"
    partitioned = custom_partitioning(function)
    partitioned.def_partition(partition, sharding_rule=rule, need_replication_factors=tuple(whole))
    return partitioned(args)


def _sizes(axes: Mapping[str, str], *trees: Named) -> dict[str, int]:
    """Rows, key/value heads and query heads, by letter, as far as arrays have them."""
    sizes = {"b": 1, "k": 1, "h": 1}
    for letters, x in itertools.chain(*(_leaves(tree, axes) for tree in trees)):
        for letter, n in zip(letters, x.shape, strict=False):
            if letter in sizes:
                sizes[letter] = max(sizes[letter], n)
    return sizes


def _leaves(tree: Named, axes: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Letters and array of each leaf, in the order of the flattened tree."""
    for name in sorted(tree):
        for x in jax.tree.leaves(tree[name]):
            yield axes[name], x
