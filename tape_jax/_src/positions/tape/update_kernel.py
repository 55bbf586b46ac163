"""The position update as one kernel each way: Pallas for its Triton backend, on NVIDIA GPUs.

One warp owns one token. XLA makes the token's matrix ``I + alpha G(x)``; the kernel multiplies the
sum ``e + alpha W a`` by it. Both are products over heads of tiles of 16 or 32 rows, which tensor
cores do, and the gradient of ``W`` stays in registers while a program walks over its tokens.
Nothing but ``e``, ``a`` and the new state passes through memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from tape_jax._src.core.devices import tile_size
from tape_jax._src.core.partition import Named, batch_size, over_batch_and_heads
from tape_jax._src.positions.tape.norms import TINY

Array = jax.Array
Refs = Mapping[str, Any]
# Types of states that the kernel reads and writes.
TYPES = ("float32", "bfloat16", "float16")
ZERO: Any = np.int32(0)

# Axes of all arrays: b batch, which is full or 1; nothing else is split over devices.
NAMES = ("e", "a", "matrix", "out", "d_out", "d_e", "d_a", "d_matrix", "d_mix")
AXES = dict.fromkeys(NAMES, "b...") | {"mix": "b.."}


@dataclasses.dataclass(frozen=True)
class UpdateKernel:
    """The static part of a call of the kernels.

    Attributes:
      square: what the sum of a head's squared numbers is multiplied by to get its squared norm, for
        the norm ``rms``; None: no norm.
      magnitude: the norm of the new state.
      narrow: whether states have 16 bits.
      tokens: that a program walks over.
      warps, stages: of a program, as Triton counts them.
      interpret: run by XLA operations, on any device.
    """

    square: float | None = None
    magnitude: float = 1.0
    narrow: bool = False
    tokens: int = 8
    warps: int = 1
    stages: int = 2
    interpret: bool = False

    def update(self, matrix: Array, mix: Array | None, e: Array, a: Array | None) -> Array:
        """``matrix (e + mix a)``, normalized, ``[B, T, H, N]`` in the type of ``e``.

        Args:
          matrix: ``I + alpha G(x)``, ``[B, T, H, H]`` in float32.
          mix: ``[H, H_q]``, or None.
          e, a: ``[B, T, H, N]`` and ``[B, T, H_q, N]`` or None.
        """
        return self._over_batch(_forward, matrix, mix, e, a)["out"]

    def gradients(
        self, d_out: Array, matrix: Array, mix: Array | None, e: Array, a: Array | None
    ) -> tuple[Array, Array | None, Array, Array | None]:
        """Gradients of the arguments of :meth:`update`, in their order."""
        got = self._over_batch(_backward, matrix, mix, e, a, d_out=d_out)
        d_mix = got["d_mix"].sum((0, 1)) if mix is not None else None
        return got["d_matrix"], d_mix, got["d_e"], got.get("d_a")

    def _over_batch(
        self,
        launch: Callable[[UpdateKernel, Named], Named],
        matrix: Array,
        mix: Array | None,
        e: Array,
        a: Array | None,
        **more: Array,
    ) -> Named:
        inputs: Named = {"e": e, "matrix": matrix, **more}
        if mix is not None:
            inputs |= {"a": a, "mix": mix[None]}
        return over_batch_and_heads(functools.partial(launch, self), inputs, AXES)

    def dot(self, x: Array, y: Array, *, rows: tuple[int, int] = (1, 0)) -> Array:
        """A product over axis ``rows[0]`` of ``x`` and ``rows[1]`` of ``y``, in float32.

        Three products in TensorFloat-32 are as good as one in float32; one is better than states
        of 16 bits.
        """
        presets = lax.DotAlgorithmPreset
        preset: Any = presets.TF32_TF32_F32 if self.narrow else presets.TF32_TF32_F32_X3
        return lax.dot_general(
            x,
            y,
            ((rows[:1], rows[1:]), ((), ())),
            precision=lax.Precision.HIGHEST if self.interpret else preset,
            preferred_element_type=jnp.float32,
        )

    def scale(self, y: Array) -> Array:
        """``magnitude / norm`` of each row ``[rows, 1]``."""
        assert self.square is not None
        square = jnp.sum(y * y, axis=1)[:, None] * np.float32(self.square)
        return np.float32(self.magnitude) * lax.rsqrt(jnp.maximum(square, np.float32(TINY)))

    def through_norm(self, d_out: Array, y: Array) -> Array:
        """The gradient of ``y`` from that of ``y`` normalized."""
        if self.square is None:
            return d_out
        scale = self.scale(y)
        along = jnp.sum(d_out * y, axis=1)[:, None] * np.float32(self.square)
        unit = scale * scale * np.float32(self.magnitude**-2)
        # A norm below the least counts as the least, whatever y is.
        along = jnp.where(unit < np.float32(0.5 / TINY), along, 0.0)
        return scale * (d_out - y * along * unit)


def _forward(kernel: UpdateKernel, inputs: Named) -> Named:
    out = {"out": _like(inputs, "e")}
    return _launch(kernel, _forward_body, inputs, out)


def _backward(kernel: UpdateKernel, inputs: Named) -> Named:
    out = {f"d_{name}": _like(inputs, name) for name in ("e", "a", "matrix") if name in inputs}
    if "mix" in inputs:
        programs = pl.cdiv(inputs["e"].shape[1], kernel.tokens)
        shape = (batch_size(inputs), programs, *inputs["mix"].shape[1:])
        out["d_mix"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return _launch(kernel, _backward_body, inputs, out)


def _like(inputs: Named, name: str) -> jax.ShapeDtypeStruct:
    x = inputs[name]
    return jax.ShapeDtypeStruct((batch_size(inputs), *x.shape[1:]), x.dtype)


def _launch(
    kernel: UpdateKernel, body: Callable[..., None], inputs: Named, out: Named
) -> dict[str, Array]:
    return pl.pallas_call(
        functools.partial(body, kernel),
        out_shape=out,
        grid=(pl.cdiv(inputs["e"].shape[1], kernel.tokens), batch_size(inputs)),
        compiler_params=plt.CompilerParams(num_warps=kernel.warps, num_stages=kernel.stages),
        interpret=kernel.interpret,
        name=f"tape_update{body.__name__.removesuffix('_body')}",
    )(inputs)


def _forward_body(kernel: UpdateKernel, inputs: Refs, outputs: Refs) -> None:
    program, b = pl.program_id(0), pl.program_id(1)
    mix = _read(inputs["mix"], b) if "mix" in inputs else None

    def step(t: Array, _: None) -> None:
        y = kernel.dot(_read(inputs["matrix"], b, t), _total(kernel, mix, inputs, b, t))
        if kernel.square is not None:
            y = y * kernel.scale(y)
        _write(outputs["out"], y, b, t)

    lax.fori_loop(*_tokens(kernel, program, inputs), step, None)


def _backward_body(kernel: UpdateKernel, inputs: Refs, outputs: Refs) -> None:
    program, b = pl.program_id(0), pl.program_id(1)
    mix = _read(inputs["mix"], b) if "mix" in inputs else None

    def step(t: Array, d_mix: Array | None) -> Array | None:
        matrix, total = _read(inputs["matrix"], b, t), _total(kernel, mix, inputs, b, t)
        d_y = _read(inputs["d_out"], b, t)
        if kernel.square is not None:
            d_y = kernel.through_norm(d_y, kernel.dot(matrix, total))
        _write(outputs["d_matrix"], kernel.dot(d_y, total, rows=(1, 1)), b, t)
        d_total = kernel.dot(matrix, d_y, rows=(0, 0))
        _write(outputs["d_e"], d_total, b, t)
        if mix is None or d_mix is None:
            return None
        _write(outputs["d_a"], kernel.dot(mix, d_total, rows=(0, 0)), b, t)
        return d_mix + kernel.dot(d_total, _read(inputs["a"], b, t), rows=(1, 1))

    zeros = None if mix is None else jnp.zeros(mix.shape, jnp.float32)
    d_mix = lax.fori_loop(*_tokens(kernel, program, inputs), step, zeros)
    if d_mix is not None:
        _write(outputs["d_mix"], d_mix, b, program)


def _tokens(kernel: UpdateKernel, program: Array, inputs: Refs) -> tuple[Array, Array]:
    """First token of a program, and one past its last."""
    first = program * np.int32(kernel.tokens)
    return first, jnp.minimum(first + np.int32(kernel.tokens), np.int32(inputs["e"].shape[1]))


def _total(kernel: UpdateKernel, mix: Array | None, inputs: Refs, b: Array, t: Array) -> Array:
    """``e + mix a`` of a token."""
    e = _read(inputs["e"], b, t)
    return e if mix is None else e + kernel.dot(mix, _read(inputs["a"], b, t))


def _read(ref: Any, b: Array, *at: Array) -> Array:
    """A matrix of ``[b|1, ..., rows, columns]`` in float32, padded to a tile with zeros."""
    b = ZERO if ref.shape[0] == 1 else b
    index, mask = _tile(ref, (b, *at), tile_size(ref.shape[-2]), tile_size(ref.shape[-1]))
    x = plt.load(index) if mask is None else plt.load(index, mask=mask, other=0.0)
    return x.astype(jnp.float32)


def _write(ref: Any, x: Array, b: Array, t: Array) -> None:
    """Writes what :func:`_read` would read."""
    index, mask = _tile(ref, (b, t), *x.shape)
    plt.store(index, x.astype(ref.dtype), mask=mask)


def _tile(ref: Any, at: tuple[Any, ...], rows: int, columns: int) -> tuple[Any, Array | None]:
    """Where a tile lies, and which of its numbers exist; None if all do."""
    index = ref.at[(*at, pl.ds(ZERO, rows), pl.ds(ZERO, columns))]
    if ref.shape[-2:] == (rows, columns):
        return index, None
    exists = lax.iota(jnp.int32, rows)[:, None] < ref.shape[-2]
    return index, exists & (lax.iota(jnp.int32, columns)[None, :] < ref.shape[-1])
