"""The algebra of position states, on which positions and attention build.

A position state has one of two forms.

* **Rotary** ``e[..., T, H, D]``: per head ``D/2`` complex numbers ``c + i s``, stored as one real
  array ``[cos half | sin half]``. Frequency ``j`` acts on the dimensions ``j`` and ``j + D/2``.
* **Tensor** ``E[..., T, H, M, L, R]``: per head ``M = D / L`` blocks of ``L x R`` numbers. Block
  ``m`` sends the ``L`` query dimensions that it owns to the ``R``-vector ``E_m^T q_m``.

A state of queries or keys ``[batch..., T, H, D]`` has either all their axes, where batch axes and
heads may be 1, or neither batch nor heads: ``[T, D]``, in tensor form
``[T, 1, M, L, R]``. No shape in between is accepted (:func:`check_state`).

An orthogonal group acts on both from the right (:func:`transform`). The attention
logits ``<rotate(q_i, e_i), rotate(k_j, e_j)>`` do not change under it (TAPE, section 3).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from tape_jax._src.core.checks import as_array

Array = jax.Array
Shaped = Array | jax.ShapeDtypeStruct

# By default TPUs and GPUs round the operands of float32 products, and so round positions.
precise_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def float_type(dtype: Any) -> jnp.dtype:
    """Return the type, or jax's default float for None: float64 if 64-bit types are enabled."""
    return jnp.zeros(()).dtype if dtype is None else jnp.dtype(dtype)


def at_least_32_bits(x: Array) -> Array:
    """Widen integers to 32 bits, to hold the size of tables or vocabularies."""
    return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x


def at_least_float32(dtype) -> jnp.dtype:
    """Return the type for computing angles, states and softmaxes of ``dtype`` inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def capped(logits: Array, softcap: float | None) -> Array:
    """Bound logits as ``c tanh(logits / c)``, or return them if ``c`` is None."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def is_tensor_form(state: Array, q: Shaped) -> bool:
    """Return whether a state of ``q [batch..., T, H, D]`` has tensor form, by its axes.

    Five axes may be ``[T, 1, M, L, R]`` or those of ``q``: rotary if the last is ``D``.
    """
    if state.ndim == q.ndim == 5:
        return state.shape[-1] != q.shape[-1]
    return state.ndim in (5, q.ndim + 2)


def with_heads(state: Array) -> Array:
    """Gives batched rotary states ``[batch..., T, D]`` the axis that :func:`check_state` needs.

    They become ``[batch..., T, 1, D]``; ``[T, D]`` has no batch and stays as is.
    """
    return state if state.ndim == 2 else jnp.expand_dims(state, -2)


def align_state(state: Array) -> Array:
    """Give ``[T, D]`` states an axis of heads. Batch axes are left to broadcasting."""
    return jnp.expand_dims(state, -2) if state.ndim == 2 else state


def split_blocks(x: Array, size: int) -> Array:
    """Split ``[..., M * size]`` into ``[..., M, size]``.

    An even ``size`` keeps the rotary pairing: row ``2p`` of block ``m`` is dimension
    ``j = m * size/2 + p`` and row ``2p + 1`` is dimension ``j + D/2``. An odd ``size`` cuts
    consecutive dimensions.
    """
    *lead, d = x.shape
    if size % 2:
        return x.reshape(*lead, d // size, size)
    x = x.reshape(*lead, 2, d // size, size // 2)
    return jnp.moveaxis(x, -3, -1).reshape(*lead, d // size, size)


def merge_blocks(x: Array) -> Array:
    """Inverse of :func:`split_blocks`: ``[..., M, size]`` to ``[..., M * size]``."""
    *lead, m, size = x.shape
    if size % 2:
        return x.reshape(*lead, m * size)
    x = x.reshape(*lead, m, size // 2, 2)
    return jnp.moveaxis(x, -1, -3).reshape(*lead, m * size)


def complex_multiply(x: Array, y: Array) -> Array:
    """Multiply arrays ``[..., D]`` read as ``D/2`` complex numbers ``[real | imaginary]``."""
    (xr, xi), (yr, yi) = jnp.split(x, 2, axis=-1), jnp.split(y, 2, axis=-1)
    return jnp.concatenate([xr * yr - xi * yi, xr * yi + xi * yr], axis=-1)


# The backward pass keeps both factors as given, not their halves.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _multiply(x: Array, y: Array, compute: jnp.dtype) -> Array:
    """Computes :func:`complex_multiply` in the type ``compute``; the result has that of ``x``."""
    return complex_multiply(x.astype(compute), y.astype(compute)).astype(x.dtype)


def rotate(q: Array, state: Array) -> Array:
    """Applies position states to queries or keys.

    Rotary form: multiplies the ``D/2`` complex numbers of each head of ``q`` by those of the state
    ``e``; ``|e|`` need not be 1. Tensor form: ``E_m^T q_m`` for each block (TAPE, equation 5).

    Args:
      q: queries or keys ``[batch..., T, H, D]``, ``D`` even.
      state: rotary ``[T, D]`` or ``[batch..., T, h, D]``, or tensor ``[T, 1, M, L, R]`` or
        ``[batch..., T, h, M, L, R]`` with ``M * L == D``. Its batch axes may be 1; ``H`` is a
        multiple of ``h`` (grouped-query attention).

    Returns:
      ``[batch..., T, H, D]``, in tensor form ``[batch..., T, H, M * R]``, in the type of ``q``. The
      product is computed in at least float32.

    Raises:
      ValueError: if the shapes do not fit, or either is not floating-point.
    """
    q, state = as_array("q", q), as_array("state", state)
    _check_floating("q", q)
    tensor = check_state(state, q, name="state", of="q") == 3
    state = repeat_heads(align_state(state), q.shape[-2], tensor=tensor)
    compute = jnp.promote_types(at_least_float32(q.dtype), state.dtype)
    if not tensor:
        return _multiply(q, state, compute)
    blocks = split_blocks(q.astype(compute), state.shape[-2])
    out = precise_einsum("...ml,...mlr->...mr", blocks, state.astype(compute))
    return merge_blocks(out).astype(q.dtype)


def repeat_heads(x: Array, heads: int, *, tensor: bool = False) -> Array:
    """Repeats the heads axis of a state or of keys to ``heads`` entries, unless it has just one."""
    axis = x.ndim - (4 if tensor else 2)
    have = x.shape[axis]
    return x if have in (1, heads) else jnp.repeat(x, heads // have, axis=axis)


def rotated_width(width: int, state: Array | None) -> int:
    """Width of rotated vectors: as given, or ``M * R`` by a state ``[B, T, H, M, L, R]``."""
    return width if state is None or state.ndim < 6 else state.shape[3] * state.shape[5]


def transform(state: Array, omega: Array) -> Array:
    """Applies the symmetry group to a state from the right.

    Args:
      state: rotary ``[..., D]`` or tensor ``[..., M, L, R]``.
      omega: for the tensor form an ``[R, R]`` matrix of O(R), reflections included; for the rotary
        form one phase (radians) per frequency ``[D/2]``, or a scalar phase for all.

    Returns:
      The state with blocks ``E_m @ omega``, or ``e_j * exp(i omega_j)``, in its own type. Products
      and angles are computed in at least float32.

    Raises:
      ValueError: if ``omega`` does not fit the state or is not real, or the state is not
        floating-point.
    """
    state, omega = as_array("state", state), as_array("omega", omega)
    _check_floating("state", state)
    wide = at_least_float32(state.dtype)
    if omega.ndim > 2 or jnp.issubdtype(omega.dtype, jnp.complexfloating):
        raise ValueError(
            "transform: omega must be a real matrix, phases or a phase; got "
            f"{omega.dtype} of shape {omega.shape}"
        )
    if omega.ndim == 2:
        if state.ndim < 3 or omega.shape[-2:] != (state.shape[-1], state.shape[-1]):
            raise ValueError(
                f"transform: a matrix omega of shape {omega.shape} acts on a tensor state "
                f"[..., M, L, R] with R = {omega.shape[-1]}; the state has shape {state.shape}"
            )
        turned = precise_einsum("...lr,rs->...ls", state.astype(wide), omega.astype(wide))
        return turned.astype(state.dtype)
    half = state.shape[-1] // 2
    if state.shape[-1] % 2:
        raise ValueError(
            f"transform: phases act on a rotary state [..., D] with D even; got {state.shape}"
        )
    if omega.ndim == 1 and omega.shape[0] not in (1, half):
        raise ValueError(
            f"transform: expected one phase per frequency, shape ({half},), for a rotary state of "
            f"shape {state.shape}; got omega of shape {omega.shape}"
        )
    phase = jnp.broadcast_to(omega, (half,)).astype(wide)
    return _multiply(state, jnp.concatenate([jnp.cos(phase), jnp.sin(phase)]), wide)


def check_state(
    state: Array, q: Shaped, *, name: str, of: str, heads: tuple[int, ...] | None = None
) -> int:
    """Return how many axes hold the numbers of a head: 1, ``[D]``, or 3, ``[M, L, R]``.

    A state of ``q [batch..., T, H, D]`` has one of two shapes, where ``h`` is a number of heads:

    * ``[T, D]``, in tensor form ``[T, 1, M, L, R]``: the same for the whole batch and all heads;
    * all axes of ``q``, ``[batch..., T, h, D]``, in tensor form ``[batch..., T, h, M, L, R]``; a
      batch axis may be 1.

    Args:
      state: the state.
      q: the queries or keys, or anything with their shape.
      name, of: names of both in messages.
      heads: values that ``h`` may have; None: the divisors of ``H``.

    Raises:
      ValueError: if ``state`` does not fit ``q``.
    """
    if q.ndim < 3:
        raise ValueError(f"{of} must have shape [..., T, H, D]; got {q.shape}")
    *batch, time, own_heads, dim = q.shape
    if dim % 2:
        raise ValueError(
            f"the head dimension must be even, so that dimensions pair up; {of} has shape "
            f"{q.shape}, head dimension {dim}"
        )
    if heads is None:
        heads = tuple(n for n in range(1, own_heads + 1) if own_heads % n == 0)
    tensor = is_tensor_form(state, q)
    tail = 3 if tensor else 1
    lead, block = state.shape[:-tail], state.shape[-tail:]
    bare = (time, 1) if tensor else (time,)
    has_all_axes = (
        len(lead) == q.ndim - 1
        and all(n in (1, full) for n, full in zip(lead, batch, strict=False))
        and lead[-2] == time
        and lead[-1] in heads
    )
    fits_head = math.prod(block[:2]) == dim if tensor else block == (dim,)
    if not fits_head or not (lead == bare or has_all_axes):
        letters = ("M", "L", "R") if tensor else (dim,)
        hint = _misfit(name, state, lead, q, heads)
        raise ValueError(
            f"{name} of shape {state.shape} does not fit {of} of shape {q.shape}: expected "
            f"{_shape(*bare, *letters)} or {_shape(*batch, time, 'h', *letters)}, batch axes full "
            f"or 1, h = {', '.join(map(str, heads))}{f', M * L = {dim}' if tensor else ''}{hint}"
        )
    _check_floating(name, state)
    return tail


def _misfit(
    name: str, state: Array, lead: tuple[int, ...], q: Shaped, heads: tuple[int, ...]
) -> str:
    """Return a hint why a state with axes ``lead`` before its block does not fit."""
    time, own_heads, dim = q.shape[-3:]
    if state.ndim == q.ndim - 1 and state.shape[-2:] == (time, dim):
        return f"; {name}[..., None, :] has an axis of heads"
    if time != own_heads and (lead == (own_heads,) or lead[-2:] == (own_heads, time)):
        return " (arrays are [batch, time, heads, D])"
    more = len(lead) == q.ndim - 1 and lead[-2] == time and lead[-1] > own_heads == heads[-1]
    if more and lead[-1] % own_heads == 0:
        return f"; give num_kv_heads={own_heads} to init_update or UpdateState"
    return ""


def _check_floating(name: str, x: Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be a floating-point array; got {x.dtype}")


def _shape(*sizes: int | str) -> str:
    return f"({', '.join(map(str, sizes))})"
