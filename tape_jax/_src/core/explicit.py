"""Meshes with explicit axes, as ``jax.make_mesh`` makes them: shardings that are part of types.

Functions of this package see only automatic axes: their arguments are cast to them on entry, and
their results get the sharding that the same einsum would give. Inside, the compiler splits the
work, as on a mesh with automatic axes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from tape_jax._src.core.checks import require

P = ParamSpec("P")
R = TypeVar("R")
# The mesh axes that split each axis of an array.
Names = tuple[Any, ...]


def explicit_mesh(tree: Any) -> AbstractMesh | None:
    """The mesh with explicit axes that arrays lie on, or that ``jax.set_mesh`` has set; or None.

    Raises:
      ValueError: if arrays lie on unlike meshes.
    """
    context = jax.sharding.get_abstract_mesh()
    if _is_explicit(context):
        return context
    meshes = {}
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array) and _is_explicit(mesh := jax.typeof(x).sharding.mesh):
            meshes[mesh] = jax.typeof(x)
    require(
        len(meshes) < 2,
        f"arrays must lie on one mesh; got {' and '.join(map(str, meshes.values()))} on "
        f"{' and '.join(str(dict(mesh.shape)) for mesh in meshes)}",
    )
    return next(iter(meshes), None)


def _is_explicit(mesh: AbstractMesh) -> bool:
    return AxisType.Explicit in mesh.axis_types


def automatic(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh with its explicit axes made automatic."""
    if AxisType.Explicit not in mesh.axis_types:
        return mesh
    types = tuple(AxisType.Auto if t == AxisType.Explicit else t for t in mesh.axis_types)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def names_of(x: Any, ndim: int | None = None) -> Names:
    """Return the mesh axes that split each axis of an array by its type; None for a whole one.

    Args:
      x: an array, or None.
      ndim: of the answer: missing axes come first and are whole.
    """
    spec: Names = tuple(jax.typeof(x).sharding.spec) if isinstance(x, jax.Array) else ()
    spec += (None,) * (getattr(x, "ndim", len(spec)) - len(spec))
    return spec if ndim is None else (None,) * (ndim - len(spec)) + spec


def tuple_of(names: Any) -> tuple[str, ...]:
    """Return the mesh axes that split one axis, None, a name or several, as a tuple."""
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def distinct(spec: Names) -> Names:
    """Return what splits each axis, without mesh axes that split an earlier one."""
    taken: set[str] = set()
    found: list[Any] = []
    for names in map(tuple_of, spec):
        own = tuple(name for name in names if name not in taken)
        taken.update(own)
        found.append(own if len(own) > 1 else own[0] if own else None)
    return tuple(found)


def joined(what: str, *candidates: Any) -> Any:
    """Return the mesh axes of a shared axis.

    Raises:
      ValueError: if two disagree.
    """
    found = dict.fromkeys(names for names in candidates if names is not None)
    require(
        len(found) < 2,
        f"{what} must be split alike in all arrays that have it; got "
        f"{' and '.join(map(repr, found))}",
    )
    return next(iter(found), None)


def varying_names(*trees: Any) -> frozenset[str]:
    """Return the manual mesh axes, those of ``jax.shard_map``, along which any array may vary."""
    arrays = (x for x in jax.tree.leaves(trees) if isinstance(x, jax.Array))
    names: frozenset[str] = frozenset()
    return names.union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def varying(tree: Any, *like: Any) -> Any:
    """Return arrays as such that may vary along manual mesh axes.

    The carry of a loop needs it from the start. Gradients of arrays that devices share are summed
    over devices where this is called, once.

    Args:
      tree: of arrays.
      *like: trees of arrays: the result may vary along all :func:`varying_names` of them.
    """
    names = varying_names(like)

    def cast(x: Any) -> Any:
        missing = sorted(names - varying_names(x))
        return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(cast, tree)


def automatic_inside(
    place: Callable[[Mapping[str, Any], Any], Any],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: inside the function no axes of meshes are explicit, but automatic.

    Args:
      place: maps the arguments by name and the results' shapes to a tree of
        :data:`Names` for the results. What splits an axis does not split a later one too.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            mesh = explicit_mesh((args, kwargs))
            if mesh is None:
                return function(*args, **kwargs)
            leaves, tree = jax.tree.flatten((args, kwargs))
            arrays = {n: x for n, x in enumerate(leaves) if isinstance(x, jax.Array)}

            def inside(arrays: dict[int, jax.Array]) -> R:
                filled = [arrays.get(n, x) for n, x in enumerate(leaves)]
                args, kwargs = jax.tree.unflatten(tree, filled)
                return function(*args, **kwargs)

            # Others may be manual: those must stay.
            types = zip(mesh.axis_names, mesh.axis_types, strict=True)
            axes = tuple(name for name, kind in types if kind == AxisType.Explicit)
            cast = functools.partial(jax.sharding.auto_axes, inside, axes=axes)
            whole = NamedSharding(mesh, PartitionSpec())
            shapes = jax.eval_shape(cast(out_sharding=whole), arrays)
            specs = place(signature.bind(*args, **kwargs).arguments, shapes)
            out = jax.tree.map(
                lambda _, names: NamedSharding(mesh, PartitionSpec(*distinct(names))), shapes, specs
            )
            return cast(out_sharding=out)(arrays)

        return call

    return decorate
