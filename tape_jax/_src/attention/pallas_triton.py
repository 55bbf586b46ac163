"""The fused kernels on Pallas' Triton backend: NVIDIA GPUs from Ampere on, 16 and 32 bits.

The backend is deprecated since jax 0.11, which warns when a kernel is compiled.

Tiles have power-of-two sizes. Rows past the end of an array are read as zeros and never written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from tape_jax._src.attention import pallas_attention
from tape_jax._src.attention.pallas_blocks import Tile, Tiles, default_tiles
from tape_jax._src.attention.pallas_kernels import ZERO, KernelCall, Program
from tape_jax._src.attention.request import Request
from tape_jax._src.core import devices
from tape_jax._src.core.checks import truth
from tape_jax._src.core.partition import Named, batch_size

Array = jax.Array


def check(request: Request) -> None:
    """Raises NotImplementedError unless the kernels can do this call on this machine."""
    if not request.interpret:
        devices.check_triton()
    pallas_attention.check_call(request)


def attend(
    request: Request,
    *,
    tiles: Tiles | Sequence[Sequence[int]] | None = None,
    allow_tf32: bool = False,
) -> tuple[Array, Array | None]:
    """Computes attention with fused kernels.

    Args:
      request: the call.
      tiles: block sizes, warps and pipeline stages of each kernel, or lists of these numbers; None:
        from the table.
      allow_tf32: multiply float32 operands as TensorFloat-32 (10 bits of mantissa), which is
        faster; has no effect on other types or in interpreted mode.

    Returns:
      As :func:`pallas_attention.attend`.

    Raises:
      NotImplementedError: if the kernels do not support the call.
      ValueError: if ``tiles`` or ``allow_tf32`` are not allowed.
    """
    pallas_attention.check_call(request)
    width = max(request.q.shape[-1], request.v.shape[-1])
    chosen = default_tiles(request.q.dtype, width) if tiles is None else Tiles.of(tiles)
    allow_tf32 = truth("allow_tf32", allow_tf32)
    precision = lax.Precision.HIGH if allow_tf32 else lax.Precision.HIGHEST
    return pallas_attention.attend(request, launch, chosen, precision)


def launch(
    body: Callable[[Program], None],
    call: KernelCall,
    tile: Tile,
    inputs: Named,
    out: dict[str, jax.ShapeDtypeStruct],
    *,
    by_queries: bool,
) -> Named:
    """Runs ``body`` as a Triton kernel; see :data:`pallas_attention.Launch`."""
    of = inputs["q" if by_queries else "k"]
    blocks = pl.cdiv(of.shape[1], tile.queries if by_queries else tile.keys)
    length = inputs["k"].shape[1]

    def kernel(inputs: Named, outputs: Named) -> None:
        # Read outside loops: the interpreter cannot read inside.
        block, head, b = (pl.program_id(n) for n in range(3))
        body(TritonProgram(call, {**inputs, **outputs}, tile, block, head, b, length))

    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=(blocks, of.shape[2], batch_size(inputs)),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=call.interpret,
        name=f"tape_attention_{body.__name__}",
    )(inputs)


class TritonProgram(Program):
    """A program whose tiles are arrays in registers."""

    def read(self, name: str, block: Array, size: int, head: Array) -> Array:
        ref, start = self.refs[name], block * size
        at = ref.at[(self.row(ref), pl.ds(start, size), head, slice(None))]
        mask = _rows_exist(ref.shape[1], start, size, ref.shape[-1])
        return plt.load(at) if mask is None else plt.load(at, mask=mask, other=0.0)

    def read_vector(
        self, name: str, block: Array, size: int, *head: Array, other: float = 0
    ) -> Array:
        ref, start = self.refs[name], block * size
        at = ref.at[(self.row(ref), *head, pl.ds(start, size))]
        if ref.shape[-1] % size == 0:
            return plt.load(at)
        return plt.load(at, mask=start + _iota(size) < ref.shape[-1], other=other)

    def write(self, name: str, block: Array, head: Array, value: Array) -> None:
        ref, start = self.refs[name], block * value.shape[0]
        at = ref.at[(self.b, pl.ds(start, value.shape[0]), head, pl.ds(ZERO, value.shape[1]))]
        plt.store(at, value.astype(ref.dtype), mask=_rows_exist(ref.shape[1], start, *value.shape))

    def write_vector(self, name: str, block: Array, head: Array, value: Array) -> None:
        ref, size = self.refs[name], value.shape[0]
        start = block * size
        exists = None if ref.shape[2] % size == 0 else start + _iota(size) < ref.shape[2]
        plt.store(ref.at[self.b, head, pl.ds(start, size)], value, mask=exists)

    def dot(self, x: Array, y: Array, *, trans_b: bool = False) -> Array:
        x, y = x.astype(self.call.compute), y.astype(self.call.compute)
        return plt.dot(x, y, trans_b=trans_b, precision=self.call.precision)


def _iota(size: int) -> Array:
    return lax.iota(jnp.int32, size)


def _rows_exist(length: int, start: Array, rows: int, columns: int) -> Array | None:
    """Returns a tile's mask ``[rows, columns]``; None if no tile reaches past the end."""
    if length % rows == 0:
        return None
    return jnp.broadcast_to((start + _iota(rows) < length)[:, None], (rows, columns))
