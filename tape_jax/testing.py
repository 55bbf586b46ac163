"""Numerical checks of the symmetries that make position states meaningful.

They are for anyone with an update, an attention, an encoding or a model of their own::

    from tape_jax import testing

    def layer(q, k, v, e, x):
        o, a = tape.attention(q, k, v, state=e)
        return o, my_update(e, a, x)

    inputs = (q, k, v, e, x)
    time_axes = (-3, -3, -3, -3, -2)
    testing.assert_permutation_equivariant(layer, *inputs, in_axes=time_axes, out_axes=-3)
    testing.assert_phase_equivariant(
        layer, *inputs, in_states=(False, False, False, True, False), out_states=(False, True)
    )
    testing.assert_shift_invariant(lambda t: model.apply(variables, tokens, positions=t), places)

Each check calls the function on the inputs and on transformed inputs, takes the transformation back
from the outputs, and raises :class:`SymmetryError` if the two disagree. Functions are compiled, so
they must be traceable; values that they close over are not transformed.

``in_axes``, ``out_axes``, ``in_states`` and ``out_states`` describe arguments and results as
``in_axes`` of :func:`jax.vmap` does: one value for all, or a tree of them (a tuple for several
arguments) that may end early. Fresh parameters make TAPE equal to RoPE: use :func:`random_params`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.core import algebra
from tape_jax._src.core.checks import require, typed
from tape_jax._src.core.draws import (
    generator_of,
    random_orthogonal,
    random_params,
    random_permutation,
    random_phases,
    random_state,
)

__all__ = [
    "TOLERANCE",
    "SymmetryError",
    "assert_causal",
    "assert_orthogonal_equivariant",
    "assert_permutation_equivariant",
    "assert_phase_equivariant",
    "assert_shift_invariant",
    "random_orthogonal",
    "random_params",
    "random_permutation",
    "random_phases",
    "random_state",
]

Array = jax.Array
Tree = Any
Action = Callable[[Any, Any], Any]

# Largest difference allowed by default, relative to the largest value of the result if above 1.
TOLERANCE = {"float64": 1e-10, "float32": 3e-5, "float16": 1e-2, "bfloat16": 5e-2}


class SymmetryError(AssertionError):
    """A symmetry does not hold.

    Attributes:
      symmetry: its name.
      where: the output (for causality also the input) that disagrees the most.
      index: its place there, as indices of the untransformed output.
      difference: the absolute difference; infinite for NaN.
      allowed: the bound.
    """

    def __init__(
        self, symmetry: str, where: str, index: tuple[int, ...], difference: float, allowed: float
    ):
        self.symmetry, self.where, self.index = symmetry, where, index
        self.difference, self.allowed = difference, allowed
        super().__init__(
            f"{symmetry} does not hold: {where} is off by {difference:.3g} at index {index}; "
            f"{allowed:.3g} is allowed"
        )


@typed
def assert_permutation_equivariant(
    fn: Callable[..., Tree],
    *args: Tree,
    in_axes: Tree,
    out_axes: Tree,
    key: Array | None = None,
    tolerance: float | None = None,
) -> None:
    """Asserts that reordering the tokens only reorders the results in the same way.

    Args:
      fn: the function to check.
      *args: its arguments.
      in_axes: the time axis of every argument; a set of axes for an array with several (a mask has
        ``{-2, -1}``); None for what is not reordered.
      out_axes: the same for the results.
      key: random key of the permutation; None: a fixed one.
      tolerance: largest difference allowed, relative to the largest value of the result if above 1;
        None: by type, :data:`TOLERANCE`.

    Raises:
      SymmetryError: if it does not hold.
      ValueError: if an array lacks its axis, or axes differ in length.
    """
    time = _time(args, in_axes)
    permutation = random_permutation(key, time)

    def reorder(order: np.ndarray) -> Action:
        def act(x: Any, axes: Any) -> Any:
            for axis in _as_set(axes):
                x = np.take(np.asarray(x), order, axis=axis)
            return x

        return act

    act, inverse = reorder(permutation), reorder(np.argsort(permutation))

    def undo(out: Tree) -> Tree:
        _check_time(out_axes, out, time)
        return _map(inverse, "out_axes", out_axes, out)

    _assert_symmetric(
        "permutation equivariance",
        fn,
        args,
        _map(act, "in_axes", in_axes, args),
        undo,
        tolerance,
    )


@typed
def assert_phase_equivariant(
    fn: Callable[..., Tree],
    *args: Tree,
    in_states: Tree,
    out_states: Tree,
    key: Array | None = None,
    tolerance: float | None = None,
) -> None:
    """Asserts equivariance of rotary states to one phase per frequency.

    If every state among the arguments is multiplied by ``exp(i phase_j)``, as
    :func:`tape_jax.transform` does, the states among the results must be multiplied alike and all
    else must stay.

    Args:
      fn: the function to check.
      *args: its arguments.
      in_states: whether each argument is a rotary state ``[..., D]``.
      out_states: the same for the results.
      key: random key of the phases; None: fixed ones.
      tolerance: as in :func:`assert_permutation_equivariant`.

    Raises:
      SymmetryError: if it does not hold.
      ValueError: if no argument is a state, one is a number, or their last axes differ.
    """
    phases = random_phases(key, _last_axis(args, in_states) // 2)
    action, inverse = _transforming(phases), _transforming(-phases)
    _assert_symmetric(
        "phase equivariance",
        fn,
        args,
        _map(action, "in_states", in_states, args),
        functools.partial(_map, inverse, "out_states", out_states),
        tolerance,
    )


@typed
def assert_orthogonal_equivariant(
    fn: Callable[..., Tree],
    *args: Tree,
    in_states: Tree,
    out_states: Tree,
    key: Array | None = None,
    tolerance: float | None = None,
) -> None:
    """Asserts equivariance of tensor states to O(R): to a rotation and to a reflection.

    If every state among the arguments is multiplied from the right by one orthogonal matrix
    (:func:`tape_jax.transform`), the states among the results must be multiplied alike and all else
    must stay.

    Args:
      fn: the function to check.
      *args: its arguments.
      in_states: whether each argument is a tensor state ``[..., M, L, R]``.
      out_states: the same for the results.
      key: random key of the matrices; None: fixed ones.
      tolerance: as in :func:`assert_permutation_equivariant`.

    Raises:
      SymmetryError: if it does not hold.
      ValueError: if no argument is a state, one is a number, or their last axes differ.
    """
    size = _last_axis(args, in_states)
    for reflection, name in ((False, "rotations"), (True, "reflections")):
        omega = random_orthogonal(key, size, reflection=reflection)
        inverse = _transforming(omega.T)
        _assert_symmetric(
            f"orthogonal equivariance ({name})",
            fn,
            args,
            _map(_transforming(omega), "in_states", in_states, args),
            functools.partial(_map, inverse, "out_states", out_states),
            tolerance,
        )


@typed
def assert_shift_invariant(
    fn: Callable[..., Tree],
    positions: Array,
    *args: Tree,
    shift: float | Array = 37,
    tolerance: float | None = None,
) -> None:
    """Asserts that moving all positions by a constant changes no result.

    Args:
      fn: the function to check, such as a model's logits; positions are its first argument.
      positions: ``[..., T]``, or coordinates ``[..., T, n]``.
      *args: its other arguments, unchanged.
      shift: the constant; for coordinates it may be one per axis, ``[n]``.
      tolerance: as in :func:`assert_permutation_equivariant`.

    Raises:
      SymmetryError: if it does not hold.
      ValueError: if no position is moved, or there is no result.
    """
    positions = jnp.asarray(positions)
    moved = positions + shift
    require(bool((moved != positions).any()), f"shift = {shift} moves no position")
    _assert_symmetric(
        f"invariance to a shift of positions by {shift}",
        fn,
        (positions, *args),
        (moved, *args),
        lambda out: out,
        tolerance,
    )


@typed
def assert_causal(
    fn: Callable[..., Tree],
    *args: Tree,
    in_axes: Tree,
    out_axes: Tree,
    key: Array | None = None,
    tolerance: float | None = None,
    gradient_tolerance: float = 0.0,
) -> None:
    """Asserts that no result depends on a later token, by value and by gradient.

    By value: at every time in turn, later entries of every argument with a time axis are replaced
    (floats by normal numbers, integers by others of their own values). Earlier results must stay.
    By gradient: the derivative of a random combination of earlier results with respect to later
    entries must be zero for all floating-point arguments.

    Args:
      fn: the function to check; its floating-point results must be differentiable.
      *args: its arguments.
      in_axes: the time axis of every argument; None for one that may affect all times.
      out_axes: the same for the results; None for one that may depend on all times.
      key: random key of the replacements; None: fixed ones.
      tolerance: of values, as in :func:`assert_permutation_equivariant`.
      gradient_tolerance: of gradients, absolute; by default they must be exactly zero.

    Raises:
      SymmetryError: if it does not hold.
      ValueError: if an array lacks its axis, or axes differ in length.
    """
    leaves, structure = jax.tree.flatten(args)
    axes = _specs("in_axes", in_axes, args)
    for what, given in (("in_axes", axes), ("out_axes", jax.tree.leaves(out_axes))):
        if any(isinstance(axis, set | frozenset) for axis in given):
            raise ValueError(f"{what}: causality is checked along one axis of an array, not a set")
    time, generator = _time(args, in_axes), generator_of(key)

    def timed(out: Tree) -> dict[str, tuple[Any, int]]:
        """Returns the results with a time axis, and that axis."""
        entries = zip(_named("output", out).items(), _specs("out_axes", out_axes, out), strict=True)
        return {name: (x, axis) for (name, x), axis in entries if axis is not None}

    def earlier(out: Tree, cut: int) -> dict[str, np.ndarray]:
        return {name: np.take(x, range(cut), axis) for name, (x, axis) in timed(out).items()}

    compiled = jax.jit(fn)
    expected = jax.device_get(compiled(*args))
    _check_time(out_axes, expected, time)
    if not timed(expected):
        raise ValueError(f"out_axes = {out_axes} names no time axis: nothing could be checked")
    other = [
        x if axis is None else _different(x, generator)
        for x, axis in zip(leaves, axes, strict=True)
    ]
    for cut in range(1, time):
        mixed = [
            x if axis is None else np.where(_before(cut, axis, x), x, y)
            for x, y, axis in zip(leaves, other, axes, strict=True)
        ]
        got = jax.device_get(compiled(*jax.tree.unflatten(structure, mixed)))
        symmetry = f"causality (tokens from {cut} on replaced)"
        _compare(symmetry, earlier(got, cut), earlier(expected, cut), tolerance)

    gradients = _later_gradients(
        lambda leaves: timed(fn(*jax.tree.unflatten(structure, leaves))),
        leaves,
        axes,
        time,
        generator,
    )
    for i, slopes in gradients.items():
        name = f"the gradient by {list(_named('argument', args))[i]}"
        for cut, slope in enumerate(slopes, start=1):
            symmetry = f"causality (outputs before token {cut})"
            _compare(symmetry, {name: slope}, {name: np.zeros_like(slope)}, gradient_tolerance)


def _later_gradients(
    outputs: Callable[[list[Array]], dict[str, tuple[Array, int]]],
    leaves: list[Array],
    axes: list[Any],
    time: int,
    generator: np.random.Generator,
) -> dict[int, np.ndarray]:
    """Returns gradients of random combinations of earlier outputs by later inputs.

    Args:
      outputs: maps inputs to outputs with their time axes.
      leaves: the inputs.
      axes: their time axes, or None.
      time: the length of these axes.
      generator: makes the combinations.

    Returns:
      For each floating-point input with a time axis, by its number: ``[T - 1, *shape]``. Entry
      ``c - 1`` is the gradient of outputs before time ``c``; it is set to zero before time ``c``.
    """

    def combination(moving: dict[int, Array], cut: Array) -> Array:
        full = [moving.get(i, x) for i, x in enumerate(leaves)]
        total = jnp.zeros(())
        for x, axis in outputs(full).values():
            for part in _real_parts(x):
                weights = jnp.asarray(generator.standard_normal(x.shape), part.dtype)
                total += jnp.sum(jnp.where(_before(cut, axis, x), weights * part, 0))
        return total

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def gradients(moving: dict[int, Array], cut: Array) -> dict[int, Array]:
        slopes = jax.grad(combination)(moving, cut)
        return {i: jnp.where(_before(cut, axes[i], x), 0, x) for i, x in slopes.items()}

    floats = {
        i: x
        for i, (x, axis) in enumerate(zip(leaves, axes, strict=True))
        if axis is not None and _is_inexact(x)
    }
    return jax.device_get(gradients(floats, jnp.arange(1, time))) if floats else {}


def _assert_symmetric(
    symmetry: str,
    fn: Callable[..., Tree],
    args: tuple[Tree, ...],
    moved: tuple[Tree, ...],
    undo: Callable[[Tree], Tree],
    tolerance: float | None,
) -> None:
    """Asserts that ``undo(fn(*moved))`` is ``fn(*args)``."""
    compiled = jax.jit(fn)
    expected = compiled(*args)
    got = undo(compiled(*moved))
    _compare(symmetry, _named("output", got), _named("output", expected), tolerance)


def _compare(
    symmetry: str, got: dict[str, Any], expected: dict[str, Any], tolerance: float | None
) -> None:
    """Raises SymmetryError at the largest difference, relative to what is allowed."""
    require(
        any(np.size(want) for want in expected.values()),
        f"{symmetry}: the function returns no numbers, so nothing could be compared",
    )
    worst, excess = None, 1.0
    for name, want in expected.items():
        bound = _tolerance(want.dtype) if tolerance is None else tolerance
        wide = np.complex128 if jnp.iscomplexobj(want) or jnp.iscomplexobj(got[name]) else float
        x, y = np.asarray(got[name], wide), np.asarray(want, wide)
        with np.errstate(invalid="ignore"):
            difference = np.where(x == y, 0.0, np.abs(x - y))
        difference = np.where(np.isnan(difference), np.inf, difference)
        largest = float(difference.max(initial=0.0))
        allowed = bound * float(np.abs(y[np.isfinite(y)]).max(initial=1.0))
        ratio = largest / allowed if allowed else largest * np.inf
        if largest > allowed and (worst is None or ratio > excess):
            index = np.unravel_index(difference.argmax(), difference.shape)
            worst, excess = (name, tuple(map(int, index)), largest, allowed), ratio
    if worst is not None:
        raise SymmetryError(symmetry, *worst)


def _tolerance(dtype: Any) -> float:
    """Return the tolerance of a type; of a complex type, that of its parts."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return TOLERANCE.get(jnp.finfo(dtype).dtype.name, 0.0)


def _named(prefix: str, tree: Tree) -> dict[str, Array]:
    """Returns the arrays of a tree by their paths, such as ``output[1]``."""
    return {
        prefix + jax.tree_util.keystr(path): x
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def _specs(what: str, specs: Tree, tree: Tree) -> list[Any]:
    """Return the entry of every array of ``tree`` in the tree prefix ``specs``."""
    flat: list[Any] = []

    def repeat(spec: Any, part: Tree) -> None:
        flat.extend([spec] * len(jax.tree.leaves(part)))

    try:
        jax.tree.map(repeat, specs, tree, is_leaf=lambda x: x is None)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{what} = {specs} does not describe {jax.tree.structure(tree)}: expected one value, "
            f"or a tree of them that may end early ({error})"
        ) from error
    return flat


def _map(action: Action, what: str, specs: Tree, tree: Tree) -> Tree:
    """Applies ``action(array, spec)`` to every array of a tree."""
    leaves, structure = jax.tree.flatten(tree)
    flat = _specs(what, specs, tree)
    acted = [action(x, spec) for x, spec in zip(leaves, flat, strict=True)]
    return jax.tree.unflatten(structure, acted)


_transform = jax.jit(algebra.transform)


def _transforming(omega: Array) -> Action:
    """Returns the action of a group element on marked states."""
    return lambda x, is_state: _transform(x, omega) if is_state else x


def _as_set(axes: Any) -> tuple[Any, ...]:
    """Return axes, given as None, one or a set, as a tuple."""
    if axes is None:
        return ()
    return tuple(axes) if isinstance(axes, set | frozenset) else (axes,)


def _lengths(what: str, specs: Tree, prefix: str, tree: Tree) -> dict[str, set[int]]:
    """Return the lengths of the axes that ``specs`` names, for each array of ``tree``.

    Raises:
      ValueError: if an axis is not an integer, or an array lacks it.
    """
    lengths: dict[str, set[int]] = {}
    for (name, x), axes in zip(
        _named(prefix, tree).items(), _specs(what, specs, tree), strict=True
    ):
        shape = np.shape(x)
        for axis in _as_set(axes):
            if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
                raise ValueError(f"{what}: an axis of {name} is an integer; got {axis!r}")
            if not -len(shape) <= axis < len(shape):
                raise ValueError(f"{what}: {name} of shape {shape} has no axis {axis}")
            lengths.setdefault(name, set()).add(shape[axis])
    return lengths


def _check_time(out_axes: Tree, out: Tree, time: int) -> None:
    """Raises ValueError unless all axes that ``out_axes`` names have the length ``time``."""
    for name, lengths in _lengths("out_axes", out_axes, "output", out).items():
        if lengths != {time}:
            raise ValueError(
                f"out_axes: the time axis of {name} has length {sorted(lengths)}, but the "
                f"arguments have {time} tokens"
            )


def _time(args: tuple[Tree, ...], in_axes: Tree) -> int:
    """Returns the one length of the time axes, which must agree."""
    lengths = set[int]().union(*_lengths("in_axes", in_axes, "argument", args).values())
    if len(lengths) != 1:
        raise ValueError(
            "in_axes must name time axes of one length; those named have lengths "
            f"{sorted(lengths) or 'none at all'}"
        )
    (time,) = lengths
    if time < 2:
        raise ValueError(f"at least two tokens are needed; got {time}")
    return time


def _last_axis(args: tuple[Tree, ...], in_states: Tree) -> int:
    """Returns the length of the states' last axes, which must agree."""
    flags = _specs("in_states", in_states, args)
    sizes = set()
    for (name, x), is_state in zip(_named("argument", args).items(), flags, strict=True):
        if is_state:
            require(
                np.ndim(x) > 0,
                f"in_states marks {name}, which must be an array with the axes of a state; got "
                f"{x!r}",
            )
            sizes.add(np.shape(x)[-1])
    if len(sizes) != 1:
        raise ValueError(
            "in_states must mark states with last axes of one length; those marked have lengths "
            f"{sorted(sizes) or 'none at all'}"
        )
    return sizes.pop()


def _is_inexact(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _real_parts(x: Array) -> list[Array]:
    """Return the real arrays that ``x`` consists of; none for integers."""
    if not _is_inexact(x):
        return []
    return [x.real, x.imag] if jnp.iscomplexobj(x) else [x]


def _before(cut: Any, axis: int, x: Any) -> Any:
    """Return whether entries lie before ``cut`` along an axis of ``x``; broadcasts to ``x``."""
    shape = [1] * x.ndim
    shape[axis] = -1
    return (np.arange(x.shape[axis]) < cut).reshape(shape)


def _different(x: Array, generator: np.random.Generator) -> np.ndarray:
    """Returns normal numbers or, for integers and booleans, the next value that ``x`` has."""
    if jnp.iscomplexobj(x):
        real, imaginary = generator.standard_normal((2, *x.shape))
        return (real + 1j * imaginary).astype(x.dtype)
    if _is_inexact(x):
        return generator.standard_normal(x.shape).astype(x.dtype)
    values, place = np.unique(np.asarray(x), return_inverse=True)
    if len(values) < 2:
        raise ValueError(f"an integer argument needs two values to exchange; all are {values}")
    return values[(place.reshape(x.shape) + 1) % len(values)]
