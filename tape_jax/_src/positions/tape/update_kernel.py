"""The position update as one kernel each way: Pallas for its Triton backend, on NVIDIA GPUs.

One warp owns one token. XLA makes the token's matrix ``I + alpha G(x)``; the kernel multiplies the
sum ``e + alpha W a`` by it. Both are products over heads of tiles of 16 or 32 rows, which tensor
cores do, and the gradient of ``W`` stays in registers while a program walks over its tokens.
Only ``e``, ``a`` and the new state pass through memory. States of more numbers than the registers
of a warp hold are cut into parts, whose columns are independent except for the norm and the
gradients of matrices, which are sums over parts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
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
# Maximum numbers of a tile, by whether states have 16 bits; above, kernels spill.
MOST_NUMBERS = {False: 1024, True: 2048}

# Axes of all arrays: b batch, which is full or 1; nothing else is split over devices.
NAMES = ("e", "a", "matrix", "out", "d_out", "d_e", "d_a", "d_matrix", "d_mix")
AXES = dict.fromkeys(NAMES, "b...") | {"mix": "b.."}


@dataclasses.dataclass(frozen=True)
class UpdateKernel:
    """The static part of a call of the kernels.

    Attributes:
      square: factor from the sum of a head's squared numbers to its squared norm, for the norm
        ``rms``; None: no norm.
      magnitude: the norm of the new state.
      narrow: whether states have 16 bits.
      tokens: tokens per program.
      warps, stages: of a program, as Triton counts them; None: one warp,
        or two for more than 16 rows or several parts.
      interpret: run by XLA operations, on any device.
    """

    square: float | None = None
    magnitude: float = 1.0
    narrow: bool = False
    tokens: int = 8
    warps: int | None = None
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

    def parts(self, inputs: Refs) -> list[slice]:
        """Columns of each part of the states ``[..., H, N]``, own and attended."""
        rows = max(tile_size(inputs[name].shape[-2]) for name in ("e", "a") if name in inputs)
        width = inputs["e"].shape[-1]
        size = min(tile_size(width), MOST_NUMBERS[self.narrow] // rows)
        return [slice(n, n + size) for n in range(0, width, size)]

    def along(self, x: Sequence[Array], y: Sequence[Array]) -> Array:
        """The sum of ``x y`` over the columns of all parts, ``[rows, 1]``, as the norm takes it."""
        assert self.square is not None
        total = sum(jnp.sum(a * b, axis=1) for a, b in zip(x, y, strict=True))
        return jnp.asarray(total)[:, None] * np.float32(self.square)

    def scale(self, square: Array) -> Array:
        """``magnitude / norm`` of rows from the squares of their norms."""
        return np.float32(self.magnitude) * lax.rsqrt(jnp.maximum(square, np.float32(TINY)))

    def through_norm(self, y: Sequence[Array], d_out: Sequence[Array]) -> tuple[Array, Array]:
        """Factors of ``d_out`` and of ``y``, ``[rows, 1]``, whose sum is the gradient of ``y``.

        Args:
          y: its parts.
          d_out: gradients of ``y`` normalized, in the same parts.
        """
        scale = self.scale(self.along(y, y))
        along = self.along(d_out, y)
        unit = scale * scale * np.float32(self.magnitude**-2)
        # A norm below the least counts as the least, whatever y is.
        along = jnp.where(unit < np.float32(0.5 / TINY), along, 0.0)
        return scale, -scale * along * unit


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
    several = len(kernel.parts(inputs)) > 1
    warps = kernel.warps or (2 if several or tile_size(inputs["e"].shape[-2]) > 16 else 1)
    return pl.pallas_call(
        functools.partial(body, kernel),
        out_shape=out,
        grid=(pl.cdiv(inputs["e"].shape[1], kernel.tokens), batch_size(inputs)),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=kernel.stages),
        interpret=kernel.interpret,
        name=f"tape_update{body.__name__.removesuffix('_body')}",
    )(inputs)


def _forward_body(kernel: UpdateKernel, inputs: Refs, outputs: Refs) -> None:
    program, b = pl.program_id(0), pl.program_id(1)
    mix = _read(inputs["mix"], b) if "mix" in inputs else None

    def step(t: Array, _: None) -> None:
        matrix, parts = _read(inputs["matrix"], b, t), kernel.parts(inputs)
        new = [kernel.dot(matrix, _total(kernel, mix, inputs, b, t, part)) for part in parts]
        if kernel.square is not None:
            scale = kernel.scale(kernel.along(new, new))
            new = [y * scale for y in new]
        for part, y in zip(parts, new, strict=True):
            _write(outputs["out"], y, b, t, part=part)

    lax.fori_loop(*_tokens(kernel, program, inputs), step, None)


def _backward_body(kernel: UpdateKernel, inputs: Refs, outputs: Refs) -> None:
    program, b = pl.program_id(0), pl.program_id(1)
    mix = _read(inputs["mix"], b) if "mix" in inputs else None

    def step(t: Array, d_mix: Array | None) -> Array | None:
        matrix, parts = _read(inputs["matrix"], b, t), kernel.parts(inputs)

        def read(part: slice) -> tuple[Array, Array, Array]:
            total = _total(kernel, mix, inputs, b, t, part)
            return total, kernel.dot(matrix, total), _read(inputs["d_out"], b, t, part=part)

        read_once = [read(part) for part in parts]
        factors = None
        if kernel.square is not None:
            _, new, given = zip(*read_once, strict=True)
            factors = kernel.through_norm(new, given)
        d_matrix: Any = None
        for part in parts:
            # Several are read again, so that they need no registers meanwhile.
            total, y, d_y = read_once[0] if len(parts) == 1 else read(part)
            if factors is not None:
                of_given, of_new = factors
                d_y = of_given * d_y + of_new * y
            own = kernel.dot(d_y, total, rows=(1, 1))
            d_matrix = own if d_matrix is None else d_matrix + own
            d_total = kernel.dot(matrix, d_y, rows=(0, 0))
            _write(outputs["d_e"], d_total, b, t, part=part)
            if mix is not None and d_mix is not None:
                _write(outputs["d_a"], kernel.dot(mix, d_total, rows=(0, 0)), b, t, part=part)
                a = _read(inputs["a"], b, t, part=part)
                d_mix = d_mix + kernel.dot(d_total, a, rows=(1, 1))
        _write(outputs["d_matrix"], d_matrix, b, t)
        return d_mix

    zeros = None if mix is None else jnp.zeros(mix.shape, jnp.float32)
    d_mix = lax.fori_loop(*_tokens(kernel, program, inputs), step, zeros)
    if d_mix is not None:
        _write(outputs["d_mix"], d_mix, b, program)


def _tokens(kernel: UpdateKernel, program: Array, inputs: Refs) -> tuple[Array, Array]:
    """First token of a program, and one past its last."""
    first = program * np.int32(kernel.tokens)
    return first, jnp.minimum(first + np.int32(kernel.tokens), np.int32(inputs["e"].shape[1]))


def _total(
    kernel: UpdateKernel, mix: Array | None, inputs: Refs, b: Array, t: Array, part: slice
) -> Array:
    """``e + mix a`` of a token, of some columns."""
    e = _read(inputs["e"], b, t, part=part)
    return e if mix is None else e + kernel.dot(mix, _read(inputs["a"], b, t, part=part))


def _read(ref: Any, b: Array, *at: Array, part: slice | None = None) -> Array:
    """A matrix of ``[b|1, ..., rows, columns]`` in float32, padded to a tile with zeros.

    Args:
      ref: of an array.
      b: of the batch.
      at: of the axes between.
      part: its columns; None: all.
    """
    b = ZERO if ref.shape[0] == 1 else b
    part = slice(0, tile_size(ref.shape[-1])) if part is None else part
    index, mask = _tile(ref, (b, *at), tile_size(ref.shape[-2]), part)
    x = plt.load(index) if mask is None else plt.load(index, mask=mask, other=0.0)
    return x.astype(jnp.float32)


def _write(ref: Any, x: Array, b: Array, t: Array, *, part: slice | None = None) -> None:
    """Writes what :func:`_read` would read."""
    index, mask = _tile(ref, (b, t), x.shape[0], part or slice(0, x.shape[1]))
    plt.store(index, x.astype(ref.dtype), mask=mask)


def _tile(ref: Any, at: tuple[Any, ...], rows: int, part: slice) -> tuple[Any, Array | None]:
    """Returns the reference to some columns, and which of their numbers exist; None if all do."""
    columns = part.stop - part.start
    # Not a constant, of which jax would ask that all of the tile exists.
    start: Any = lax.add(np.int32(part.start), ZERO)
    index: Any = ref.at[(*at, pl.ds(ZERO, rows), pl.ds(start, columns))]
    if ref.shape[-2] == rows and ref.shape[-1] >= part.stop:
        return index, None
    exists = lax.iota(jnp.int32, rows)[:, None] < ref.shape[-2]
    return index, exists & (lax.iota(jnp.int32, columns)[None, :] < ref.shape[-1] - part.start)
