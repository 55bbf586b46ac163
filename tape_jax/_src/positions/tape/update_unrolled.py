"""The update with its products over heads written out, and a derivative of its own: for CPUs.

A product over 12 heads is too small for the matrix products of a CPU's libraries: written out, it
becomes one loop over the numbers of the states, into which the sum ``e + alpha Mix(a)`` goes too.
Kept for the backward pass are the arguments alone.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from tape_jax._src.core.algebra import at_least_float32, precise_einsum
from tape_jax._src.core.checks import refuse
from tape_jax._src.positions.tape.mixing import (
    ACTIVATIONS,
    by_rows,
    mix_attended,
    outer_matrix,
    scaled_mix,
)
from tape_jax._src.positions.tape.update_call import UpdateCall

Array = jax.Array

# What is written out grows with their number, and a library's product becomes worth while.
MOST_HEADS = 32


def unrolled(call: UpdateCall) -> Array:
    """The update; NotImplementedError where nothing is gained."""
    params = call.params
    refuse("up" not in params, "without the MLP's mix there is no product over heads")
    refuse(call.splits_heads, "heads are split over devices")
    refuse(call.heads > MOST_HEADS, f"heads are at most {MOST_HEADS}; got {call.heads}")
    refuse(
        call.e.shape[-len(call.block) - 1] < call.heads and "mix" not in params,
        "a state that all heads share is multiplied by one number a head",
    )
    wide = at_least_float32(call.e.dtype)
    gate = ACTIVATIONS[call.activation](call.x @ params["wx"].astype(call.x.dtype)).astype(wide)
    down = (params["down"].astype(wide) * by_rows(call.alpha)).astype(wide)
    mix = a = None
    if "mix" in params:
        mix = scaled_mix(params["mix"].astype(call.e.dtype), call.alpha).astype(wide)
        a = call.flat_attended()
    flat = _update(gate, down, params["up"].astype(wide), mix, call.full_state(), a)
    return call.normalized(flat)


def _updated(
    gate: Array, down: Array, up: Array, mix: Array | None, e: Array, a: Array | None
) -> Array:
    """``(I + A) (e + Mix(a))`` of ``e [..., T, H, N]``; ``down`` and ``mix`` hold step sizes."""
    return _product(_matrix(gate, down, up), _sum(e, mix, a)).astype(e.dtype)


def _forward(*args: Any) -> tuple[Array, tuple[Array | None, ...]]:
    # Not by calling _update, which would have no derivative in forward mode over this one.
    return _updated(*args), args


def _backward(args: tuple[Array | None, ...], d_out: Array) -> tuple[Array | None, ...]:
    gate, down, up, mix, e, a = args
    assert e is not None
    matrix, pull_matrix = jax.vjp(_matrix, gate, down, up)
    total, pull_sum = jax.vjp(_sum, e, mix, a)
    d_out = d_out.astype(total.dtype)
    d_total = _product(jnp.swapaxes(matrix, -1, -2), d_out)
    d_matrix = precise_einsum("...hn,...kn->...hk", d_out, total)
    d_e, d_mix, d_a = pull_sum(d_total)
    return *pull_matrix(d_matrix), d_mix, d_e, d_a


_update = jax.custom_vjp(_updated)
_update.defvjp(_forward, _backward)


def _matrix(gate: Array, down: Array, up: Array) -> Array:
    """``I + A``, ``[..., T, H, H]``."""
    return outer_matrix(gate, down, up) + jnp.eye(up.shape[-1], dtype=gate.dtype)


def _sum(e: Array, mix: Array | None, a: Array | None) -> Array:
    """``e + Mix(a)`` in at least float32."""
    e = e.astype(at_least_float32(e.dtype))
    if mix is None or a is None:
        return e
    return e + mix_attended(a.astype(e.dtype), mix, e.shape[-2])


def _product(matrix: Array, states: Array) -> Array:
    """``matrix @ states``, head by head."""
    columns = (matrix[..., k, None] * states[..., k, None, :] for k in range(matrix.shape[-1]))
    return functools.reduce(jnp.add, columns)
