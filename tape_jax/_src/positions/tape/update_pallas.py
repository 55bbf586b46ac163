"""The update as one kernel forward and one backward, for NVIDIA GPUs from Ampere on.

The bodies are in ``update_kernels``. Here the arguments are made ready (the gate by XLA, for ``x
W_x`` is a matrix product like others), split over devices by rows of the batch, and what the
programs found for their tokens is added up. Kept for the backward pass are the arguments alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from tape_jax._src.core import devices
from tape_jax._src.core.checks import refuse
from tape_jax._src.core.partition import Named, over_batch_and_heads
from tape_jax._src.positions.tape import update_kernels as kernels
from tape_jax._src.positions.tape.mixing import ACTIVATIONS, by_rows, scaled_mix
from tape_jax._src.positions.tape.update_call import UpdateCall
from tape_jax._src.positions.tape.update_kernels import UpdateKernel

Array = jax.Array

TYPES = ("float32", "bfloat16", "float16")
# Numbers of the states of a program's tokens, filled up to powers of two, that its registers hold:
# with 8 warps nothing spills at 12 heads of 64 and at 8 of 128. One token has at most so many that
# what a program finds for the parameters stays small beside its states.
NUMBERS = 8192
MOST_NUMBERS = 2048
# Elements of an array whose places are 32-bit integers.
MOST_ELEMENTS = 2**31

# Rows of the batch come first everywhere; nothing else is split over devices.
AXES = dict.fromkeys(
    (
        *("e", "a", "gate", "up", "down", "mix", "out"),
        *("d_out", "d_e", "d_a", "d_gate", "d_up", "d_down", "d_mix"),
    ),
    "b",
)


def fused(call: UpdateCall) -> Array:
    """The update; NotImplementedError for what the kernels cannot do."""
    params, x, dtype = call.params, call.x, call.e.dtype
    if not call.interpret:
        devices.check_triton(devices.compute_capability())
    _check(call)
    wide = jnp.float32
    gate = ACTIVATIONS[call.activation](x @ params["wx"].astype(x.dtype))
    time, width = gate.shape[-2:]
    dim = call.block[0]

    def halves(states: Array) -> Array:
        return states.reshape(-1, time, states.shape[-2], 2, dim // 2)

    arrays = {
        "e": halves(call.full_state()),
        "gate": gate.reshape(-1, time, width),
        "up": params["up"].astype(wide)[None],
        "down": (params["down"].astype(wide) * by_rows(call.alpha)).astype(wide)[None],
    }
    groups = 1
    if call.a is not None:
        mix = scaled_mix(params["mix"].astype(dtype), call.alpha).astype(wide)
        arrays |= {"a": halves(call.flat_attended()), "mix": mix[None]}
        groups = call.a.shape[-2] // call.heads
    kernel = UpdateKernel(
        heads=call.heads,
        groups=groups,
        dim=dim,
        norm=call.norm,
        magnitude=call.magnitude,
        # Backward, "rms" has a sum to hold for every head.
        tokens=NUMBERS // _numbers(call) // (2 if call.norm == "rms" else 1),
        interpret=call.interpret,
    )
    out = _update_compiled(kernel, arrays)
    return out.reshape(*x.shape[:-1], call.heads, dim)


def _check(call: UpdateCall) -> None:
    refuse(call.tensor, "only the rotary form of the state is in the kernels")
    refuse("up" not in call.params, "without the MLP's mix there is no matrix to leave unwritten")
    refuse(call.splits_heads, "heads are split over devices: a program needs those of its tokens")
    split = call.sharding is not None and call.sharding.shards("sequence") > 1
    refuse(split, "sequences are split over devices")
    for name, x in (("state", call.e), ("x", call.x)):
        refuse(x.dtype.name not in TYPES, f"types are {', '.join(TYPES)}; {name} has {x.dtype}")
    numbers = _numbers(call)
    refuse(
        numbers > MOST_NUMBERS,
        f"a token's states, {call.heads} heads of {call.block[0]}, are filled up to {numbers} "
        f"numbers; registers hold {MOST_NUMBERS}",
    )
    sizes = [x.size for x in (call.full_state(), call.a) if x is not None]
    refuse(max(sizes) >= MOST_ELEMENTS, f"arrays have at most 2^31 numbers; got {max(sizes)}")


def _numbers(call: UpdateCall) -> int:
    """Of a token's states, filled up."""
    return kernels.power(call.heads) * 2 * kernels.power(call.block[0] // 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _update(kernel: UpdateKernel, arrays: Named) -> Array:
    """The new state ``[B, T, H, 2, D/2]``."""
    return _over_batch(functools.partial(_forward_kernel, kernel), arrays)["out"]


def _forward(kernel: UpdateKernel, arrays: Named) -> tuple[Array, Named]:
    return _update(kernel, arrays), arrays


def _backward(kernel: UpdateKernel, arrays: Named, d_out: Array) -> tuple[Named]:
    given = {**arrays, "d_out": d_out}
    found = _over_batch(functools.partial(_backward_kernel, kernel), given)
    summed = ("up", "down", "mix")
    return (
        {
            name: jnp.sum(found[f"d_{name}"], axis=(0, 1))[None]
            if name in summed
            else found[f"d_{name}"]
            for name in arrays
        },
    )


_update.defvjp(_forward, _backward)
_update_compiled = jax.jit(_update, static_argnums=0)


def _over_batch(function: Callable[[Named], Named], arrays: Named) -> Named:
    return over_batch_and_heads(function, arrays, AXES)


def _forward_kernel(kernel: UpdateKernel, inputs: Named) -> Named:
    out = {"out": jax.ShapeDtypeStruct(inputs["e"].shape, inputs["e"].dtype)}
    return _launch(kernels.forward, kernel, inputs, out)


def _backward_kernel(kernel: UpdateKernel, inputs: Named) -> Named:
    rows, tiles = inputs["e"].shape[0], _tiles(kernel, inputs)
    whole = {name: x for name, x in inputs.items() if name in ("e", "a", "gate")}
    out = {f"d_{name}": jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in whole.items()}
    for name in ("up", "down", "mix"):
        if name in inputs:
            shape = (rows, tiles, *inputs[name].shape[1:])
            out[f"d_{name}"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return _launch(kernels.backward, kernel, inputs, out)


def _tiles(kernel: UpdateKernel, inputs: Named) -> int:
    return pl.cdiv(inputs["e"].shape[1], kernel.tokens)


def _launch(
    body: Callable[..., None],
    kernel: UpdateKernel,
    inputs: Named,
    out: dict[str, jax.ShapeDtypeStruct],
) -> Named:
    """Runs a kernel with one program for each tile of tokens of each row."""
    return pl.pallas_call(
        functools.partial(body, kernel),
        out_shape=out,
        grid=(_tiles(kernel, inputs), inputs["e"].shape[0]),
        compiler_params=plt.CompilerParams(num_warps=kernel.warps, num_stages=1),
        interpret=kernel.interpret,
        name=f"tape_update_{body.__name__}",
    )(inputs)
