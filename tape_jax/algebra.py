"""The algebra of position states: what positions and attention both stand on.

A position state has one of two forms.

* **Rotary** ``e[..., T, H, D]``: per head ``D/2`` complex numbers ``c + i s``, stored as one real
  array ``[cos half | sin half]``. Frequency ``j`` acts on the dimensions ``j`` and ``j + D/2``.
* **Tensor** ``E[..., T, H, M, L, R]``: per head ``M = D / L`` blocks of ``L x R`` numbers. Block
  ``m`` sends the ``L`` query dimensions that it owns to the ``R``-vector ``E_m^T q_m``.

Both are acted on from the right by an orthogonal group (:func:`transform`), and the attention
logits ``<rotate(q_i, e_i), rotate(k_j, e_j)>`` do not change under it (TAPE, section 3).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def at_least_float32(dtype) -> jnp.dtype:
    """The type in which angles, states and softmaxes of inputs of ``dtype`` are computed."""
    return jnp.promote_types(dtype, jnp.float32)


def head_dim_of(e: Array, *, tensor: bool) -> int:
    """Head dimension ``D`` that a state belongs to (``M * L`` in tensor form)."""
    return e.shape[-3] * e.shape[-2] if tensor else e.shape[-1]


def is_tensor_form(e: Array, q: Array) -> bool:
    """Whether ``e`` is a tensor-form state for ``q`` ``[..., T, H, D]``.

    A tensor-form state has two axes more than ``q`` once its batch axes are broadcast. One that
    lacks batch axes (``[T, 1, M, L, R]``) is told apart by its blocks, ``M * L == D``.
    """
    if e.ndim > q.ndim:
        return True
    return e.ndim >= 5 and e.shape[-1] != q.shape[-1] and e.shape[-3] * e.shape[-2] == q.shape[-1]


def align_state(e: Array, q: Array) -> Array:
    """Inserts the axes that ``e`` lacks against ``q`` ``[..., T, H, D]``.

    A rotary state with fewer axes than ``q`` has no heads axis: ``[..., T, D]`` becomes
    ``[..., T, 1, D]``. Missing batch axes are left to broadcasting.
    """
    if is_tensor_form(e, q) or e.ndim >= q.ndim:
        return e
    return jnp.expand_dims(e, -2)


def split_blocks(x: Array, size: int) -> Array:
    """``[..., M * size]`` to blocks ``[..., M, size]``.

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
    """Product of two arrays ``[..., D]`` read as ``D/2`` complex numbers ``[real | imaginary]``."""
    half = x.shape[-1] // 2
    xr, xi = x[..., :half], x[..., half:]
    yr, yi = y[..., :half], y[..., half:]
    return jnp.concatenate([xr * yr - xi * yi, xr * yi + xi * yr], axis=-1)


def rotate(q: Array, e: Array) -> Array:
    """Applies position states to queries or keys.

    Rotary form: multiplies the ``D/2`` complex numbers of each head of ``q`` by those of ``e``;
    ``|e|`` need not be 1. Tensor form: ``E_m^T q_m`` for each block (TAPE, equation 5).

    Args:
      q: queries or keys ``[..., T, H, D]``, ``D`` even.
      e: rotary state ``[..., T, H | 1, D]`` or ``[..., T, D]``, or tensor state
        ``[..., T, H | 1, M, L, R]`` with ``M * L == D``. Heads of ``q`` may be a multiple of the
        heads of ``e`` (grouped-query attention).

    Returns:
      ``[..., T, H, D]``, in tensor form ``[..., T, H, M * R]``, in the type of ``q``. The product
      is computed in at least float32.

    Raises:
      ValueError: if the shapes do not fit.
    """
    check_state(e, q, name="e", of="q")
    tensor = is_tensor_form(e, q)
    e = repeat_heads(align_state(e, q), q.shape[-2], tensor=tensor)
    compute = jnp.promote_types(at_least_float32(q.dtype), e.dtype)
    wide = q.astype(compute)
    if tensor:
        blocks = split_blocks(wide, e.shape[-2])
        out = merge_blocks(jnp.einsum("...ml,...mlr->...mr", blocks, e.astype(compute)))
    else:
        out = complex_multiply(wide, e.astype(compute))
    return out.astype(q.dtype)


def repeat_heads(x: Array, heads: int, *, tensor: bool = False) -> Array:
    """Repeats the heads axis of a state or of keys to ``heads`` entries, unless it has just one."""
    axis = x.ndim - (4 if tensor else 2)
    have = x.shape[axis]
    return x if have in (1, heads) else jnp.repeat(x, heads // have, axis=axis)


def transform(e: Array, omega: Array) -> Array:
    """Right action of the symmetry group on a state.

    Args:
      e: rotary ``[..., D]`` or tensor ``[..., M, L, R]`` state.
      omega: for the tensor form an ``[R, R]`` matrix of O(R), reflections included; for the rotary
        form one phase (radians) per frequency ``[D/2]``, or a scalar phase for all.

    Returns:
      The state in which every block is ``E_m @ omega``, or ``e_j * exp(i omega_j)``.

    Raises:
      ValueError: if ``omega`` fits neither form.
    """
    omega = jnp.asarray(omega)
    if omega.ndim >= 2:
        if e.ndim < 3 or omega.shape[-2:] != (e.shape[-1], e.shape[-1]):
            raise ValueError(
                f"transform: a matrix omega of shape {omega.shape} acts on a tensor state "
                f"[..., M, L, R] with R = {omega.shape[-1]}; the state has shape {e.shape}"
            )
        return jnp.einsum("...lr,rs->...ls", e, omega.astype(e.dtype))
    half = e.shape[-1] // 2
    if e.shape[-1] % 2:
        raise ValueError(
            f"transform: phases act on a rotary state [..., D] with D even; got {e.shape}"
        )
    if omega.ndim == 1 and omega.shape[0] not in (1, half):
        raise ValueError(
            f"transform: expected one phase per frequency, shape ({half},), for a rotary state of "
            f"shape {e.shape}; got omega of shape {omega.shape}"
        )
    phase = jnp.broadcast_to(omega, (half,)).astype(e.dtype)
    return complex_multiply(e, jnp.concatenate([jnp.cos(phase), jnp.sin(phase)]))


def check_state(e: Array, q: Array, *, name: str = "e", of: str = "q") -> None:
    """Raises ValueError unless ``e`` is a state that fits ``q`` ``[..., T, H, D]``."""
    if q.ndim < 3:
        raise ValueError(f"{of} must have shape [..., T, H, D]; got {q.shape}")
    *batch, time, heads, dim = q.shape
    if dim % 2:
        raise ValueError(
            f"the head dimension must be even, so that dimensions pair up; {of} has shape "
            f"{q.shape}, head dimension {dim}"
        )
    tensor = is_tensor_form(e, q)
    aligned = align_state(e, q)
    tail = 5 if tensor else 3
    want = (
        f"[..., {time}, {heads} (or a divisor), M, L, R] with M * L = {dim}"
        if tensor
        else f"[..., {time}, {dim}] or [..., {time}, {heads} (or a divisor), {dim}]"
    )
    problem = f"{name} of shape {e.shape} does not fit {of} of shape {q.shape}: expected {want}"
    if aligned.ndim < tail or aligned.shape[-tail] != time:
        raise ValueError(problem)
    if head_dim_of(aligned, tensor=tensor) != dim or heads % aligned.shape[1 - tail]:
        raise ValueError(problem)
    lead = aligned.shape[:-tail]
    if len(lead) > len(batch) or any(
        a not in (1, b) for a, b in zip(lead[::-1], batch[::-1], strict=False)
    ):
        raise ValueError(problem)
    if not jnp.issubdtype(e.dtype, jnp.floating):
        raise ValueError(f"{name} must be a floating-point array; got {e.dtype}")
