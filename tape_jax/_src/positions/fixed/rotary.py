"""Rotary angles of positions, and the states made of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tape_jax._src.core import algebra
from tape_jax._src.core.checks import (
    FLOATS,
    as_array,
    concrete,
    instance,
    positive,
    real,
    require,
    require_x64,
    type_name,
    typed,
)
from tape_jax._src.positions.fixed.frequencies import (
    RopeScaling,
    dynamic_stretch,
    frequencies,
    rotating_dims,
    which_rotate,
)
from tape_jax._src.positions.protocol import as_length, as_positions

Array = jax.Array

# Angles of integers below this are plain products: in float32 they are off by 3e-4 at most.
NEAR = 2**12


def angles(
    positions: Array,
    head_dim: int,
    base: float = 10_000.0,
    *,
    scaling: RopeScaling | None = None,
    axes: int = 1,
    length: int | Array | None = None,
    partial_rotary_factor: float = 1.0,
    log_stretch: Array | None = None,
    dtype: Any = None,
) -> Array:
    """Angles ``[..., T, D/2]`` in radians, at least float32.

    With ``axes = n > 1`` the frequencies are shared out among the coordinates as evenly as
    ``D/2`` allows, and each coordinate has a whole range of them (axial RoPE). Arguments are those
    of :func:`rotary_state`.
    """
    positions, head_dim = _checked(positions, head_dim, axes)
    tokens = positions.shape[:-1] if axes > 1 else positions.shape
    if length is None:
        length = tokens[-1]
    length = as_length(length, np.broadcast_shapes(tokens[:-1], np.shape(length)))
    require_x64(dtype=dtype)
    wanted = algebra.float_type(dtype)
    compute = algebra.at_least_float32(
        jnp.promote_types(wanted, positions.dtype)
        if jnp.issubdtype(positions.dtype, jnp.floating)
        else wanted
    )
    stretch, beyond, lengths = _by_length(scaling, length, compute)
    counts = [len(part) for part in np.array_split(np.arange(head_dim // 2), axes)]
    parts = []
    for axis, count in enumerate(counts):
        omegas = [frequencies(2 * count, base, scaling, n, partial_rotary_factor) for n in lengths]
        t = positions[..., axis] if axes > 1 else positions
        # Logarithm of the factor on the base, [...].
        change = None if log_stretch is None else _log_stretch(log_stretch).astype(compute)
        if stretch is not None:
            turning = rotating_dims(2 * count, partial_rotary_factor)
            power = turning / (turning - 2) if turning > 2 else 0.0
            change = power * jnp.log(stretch) + (0 if change is None else change)
        if change is None:
            found = [turned(t, omega, compute) for omega in omegas]
        else:
            powers = _powers(2 * count, scaling, partial_rotary_factor)
            bases = jnp.exp(change[..., None] * jnp.asarray(powers, compute))
            each = _told_apart(t, compute)[..., None]
            found = [each * (jnp.asarray(omega, compute) * bases) for omega in omegas]
        parts.append(found[0] if beyond is None else jnp.where(beyond, found[1], found[0]))
    return jnp.concatenate(parts, axis=-1)


def _checked(positions: Any, head_dim: Any, axes: int) -> tuple[Array, int]:
    """Checks and converts positions and the head dimension; ValueError if they do not fit."""
    head_dim = positive("the head dimension", head_dim)
    require(head_dim % 2 == 0, f"the head dimension must be even; got {head_dim}")
    positions = as_positions(positions)
    require(
        axes >= 1 and 2 * axes <= head_dim,
        f"axes must lie in 1..{head_dim // 2} (half the head dimension); got {axes}",
    )
    require(
        axes == 1 or (positions.ndim > 1 and positions.shape[-1] == axes),
        f"axes={axes} expects coordinates of shape [..., T, {axes}]; got {positions.shape}",
    )
    require(positions.ndim > 0, "positions must have shape [..., T]; got a scalar")
    return positions, head_dim


def _by_length(
    scaling: RopeScaling | None, length: int | Array, compute: Any
) -> tuple[Array | None, Array | None, tuple[int | None, ...]]:
    """Returns how frequencies depend on a length that may not be known yet.

    Returns:
      The stretch of dynamic NTK ``[..., 1]``, or None; for longrope, whether the length exceeds the
      trained one ``[..., 1, 1]``, or None; and the lengths of the frequencies: the known one, or
      one up to the trained length and one beyond it.
    """
    if isinstance(length, int | np.integer):
        return None, None, (length,)
    if scaling is not None and scaling.kind == "dynamic":
        return dynamic_stretch(scaling, jnp.asarray(length, compute)[..., None]), None, (None,)
    if scaling is not None and scaling.kind == "longrope":
        trained = scaling.original_length
        return None, (jnp.asarray(length) > trained)[..., None, None], (trained, trained + 1)
    return None, None, (None,)


def _log_stretch(given: Any) -> Array:
    x = as_array("log_stretch", given)
    require(
        x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.floating),
        f"log_stretch must be a scalar floating-point array; got {x.dtype} of shape {x.shape}",
    )
    return x


def _powers(dim: int, scaling: RopeScaling | None, partial_rotary_factor: float) -> np.ndarray:
    """Exponents of the base that give the frequencies, ``[dim / 2]``; 0 where nothing turns."""
    plain = scaling if scaling is not None and scaling.kind == "proportional" else None
    plain = plain and dataclasses.replace(plain, factor=1.0)
    unit = frequencies(dim, math.e, plain, None, partial_rotary_factor)
    return np.log(unit, out=np.zeros_like(unit), where=unit > 0)


def turned(positions: Array, omega: np.ndarray, compute: Any) -> Array:
    """Angles ``[..., n]`` of positions, in radians, without whole turns of positions far away.

    In float32 the product of a large integer and a frequency loses the remainder after whole turns.
    There turns are counted in integers: the angle is right to 2e-7, up to 2^31.

    Args:
      positions: integers or floats of any shape.
      omega: frequencies in radians per token, float64 ``[n]``.
      compute: type of the angles, float32 or float64.
    """
    plain = positions.astype(compute)[..., None] * jnp.asarray(omega, compute)
    if jnp.issubdtype(positions.dtype, jnp.floating) or compute == jnp.float64:
        return plain
    known = concrete(positions)
    if known is not None and _nearer(known, NEAR).all():
        return plain
    if positions.dtype.itemsize > 4:
        wide = positions.astype(jnp.float64)[..., None] * jnp.asarray(omega)
        exact = jnp.fmod(wide, 2 * math.pi).astype(compute)
    else:
        exact = _fixed_point(positions, omega).astype(compute)
    return jnp.where(_nearer(positions, NEAR)[..., None], plain, exact)


def _nearer(positions: Any, limit: int) -> Any:
    """Returns where ``|positions| < limit``; the least integer has no positive counterpart."""
    return (positions > -limit) & (positions < limit)


def _fixed_point(positions: Array, omega: np.ndarray) -> Array:
    """Angles from ``-pi`` to ``pi`` of int32 positions: 64 bits of a turn, of which 32 are kept."""
    turns = [int(x / (2 * math.pi) % 1.0 * 2.0**64) for x in omega]
    high, low = (jnp.asarray([n >> s & 0xFFFFFFFF for n in turns], jnp.uint32) for s in (32, 0))
    p = jnp.abs(positions).astype(jnp.uint32)[..., None]
    # The upper half of the 64 bits of p * low, from products of 16 bits.
    a, b, c, d = p >> 16, p & 0xFFFF, low >> 16, low & 0xFFFF
    first = a * d + (b * d >> 16)
    second = b * c + (first & 0xFFFF)
    phase = p * high + a * c + (first >> 16) + (second >> 16)
    signed = lax.bitcast_convert_type(phase, jnp.int32).astype(jnp.float32)
    return jnp.sign(positions)[..., None] * signed * np.float32(2 * math.pi / 2**32)


def _told_apart(positions: Array, compute: Any) -> Array:
    """Positions as floats; NaN for integers that float32 cannot tell from their neighbours."""
    x = positions.astype(compute)
    if jnp.issubdtype(positions.dtype, jnp.floating) or compute == jnp.float64:
        return x
    return jnp.where(_nearer(positions, 2**24), x, jnp.nan)


def state_at(angles: Array) -> Array:
    """The rotary state ``[..., D]`` of angles ``[..., D/2]``."""
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


@jax.custom_jvp
def content_state(angles: Array) -> Array:
    """:func:`state_at` of angles that every layer computes, and that have gradients.

    It is computed once: otherwise XLA repeats sines and cosines in each program that rotates by
    them, five per layer on a CPU.
    """
    return lax.optimization_barrier(state_at(angles))


@content_state.defjvp
def _content_state_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    state, (change,) = content_state(*primals), tangents
    return state, jax.checkpoint(_turned, prevent_cse=False)(state, change)


def _turned(state: Array, change: Array) -> Array:
    cos, sin = jnp.split(state, 2, axis=-1)
    return jnp.concatenate([-sin * change, cos * change], axis=-1)


def magnitudes(
    head_dim: int, scaling: RopeScaling | None, axes: int, partial_rotary_factor: float
) -> float | np.ndarray:
    """Factors on the states: one, or one for each frequency ``[D/2]``, 1 where nothing rotates."""
    scaling = scaling or RopeScaling()
    if partial_rotary_factor == 1:
        return scaling.state_magnitude
    turns = which_rotate(head_dim, axes, partial_rotary_factor)
    return np.where(turns, scaling.state_magnitude, 1.0)


def check_start(
    what: str, base: float, scaling: RopeScaling | None, axes: int, partial_rotary_factor: float
) -> None:
    """Raises ValueError for options of a rotary start that are out of range."""
    require(
        real(f"{what}: the rotary base", base) > 1,
        f"{what}: the rotary base must exceed 1; got {base}",
    )
    positive(f"{what}: axes", axes)
    require(
        0 <= real(f"{what}: partial_rotary_factor", partial_rotary_factor) <= 1,
        f"{what}: partial_rotary_factor is a share from 0 to 1; got {partial_rotary_factor}",
    )
    instance(f"{what}: scaling", scaling, RopeScaling, optional=True)


@typed
def rotary_state(
    positions: Array,
    head_dim: int,
    base: float = 10_000.0,
    *,
    scaling: RopeScaling | None = None,
    axes: int = 1,
    length: int | Array | None = None,
    partial_rotary_factor: float = 1.0,
    log_stretch: Array | None = None,
    dtype: Any = None,
) -> Array:
    """Returns the rotary start state, RoPE's table (TAPE, section 3.2; RoFormer, equation 15).

    Args:
      positions: ``[..., T]`` integers or floats; with ``axes=n > 1`` coordinates ``[..., T, n]``.
      head_dim: ``D``, even.
      base: the rotary base.
      scaling: a :class:`tape_jax.RopeScaling`, or None.
      axes: coordinates per token.
      length: sequence length in tokens, for dynamic scaling and longrope, an integer or integers
        that broadcast to ``[...]``; None: ``T``.
      partial_rotary_factor: share of the dimensions of a head that rotate.
      log_stretch: a scalar array ``s``, which may be learned: the base is multiplied by ``exp(s)``,
        after scaling; None: as 0.
      dtype: type of the result, a floating one; None: jax's default float. Angles are computed in
        at least float32, those of integers up to 2^31 exactly; with ``log_stretch``, or a
        ``length`` that is not known yet, integers from 2^24 on give NaN.

    Returns:
      ``[..., T, D]``: ``[cos half | sin half]``.

    Raises:
      ValueError: if the head dimension is odd, the shapes do not fit, or an option is out of range.
    """
    check_start("rotary_state", base, scaling, axes, partial_rotary_factor)
    type_name("rotary_state: dtype", dtype, (None, *FLOATS))
    theta = angles(
        positions,
        head_dim,
        base,
        scaling=scaling,
        axes=axes,
        length=length,
        partial_rotary_factor=partial_rotary_factor,
        log_stretch=log_stretch,
        dtype=dtype,
    )
    scale = magnitudes(head_dim, scaling, axes, partial_rotary_factor)
    if isinstance(scale, np.ndarray):
        scale = np.tile(scale, 2).astype(theta.dtype)
    e = state_at(theta) * scale
    return e.astype(algebra.float_type(dtype))
