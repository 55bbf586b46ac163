"""The fused Mosaic GPU kernels on NVIDIA Ampere and Ada.

All warpgroups multiply (``mma``), and they themselves copy what they will need (``cp.async``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu

from tape_jax._src.attention.mosaic_program import ROWS, MosaicProgram, plgpu
from tape_jax._src.attention.pallas_kernels import KernelCall, Program

Array = jax.Array
# A product takes ``CHUNK`` rows of its right operand at a time and, if this is transposed,
# ``WIDTH`` numbers of each row.
CHUNK, WIDTH = 16, 64


@dataclasses.dataclass(frozen=True)
class AmpereProgram(MosaicProgram):
    """A program in which each group copies its share of each block of the other side.

    All groups meet at its first barrier. The interpreter knows neither ``mma`` nor ``cp.async``.
    There, a product of two operands is plain jax, and a copy is one of Hopper's, with two more
    barriers: for own tiles, one per group; for stages, one per group and stage. So it tests neither
    the layouts of operands in registers nor how many copies a stage counts as.
    """

    COPYING = 0
    STREAMS_VECTORS = False
    SWIZZLE = 64
    WIDEST_DECAY = 128
    WANTED = "at least 16 {} for every 4 warps, and 2 or 3 stages"

    @staticmethod
    def takes(columns: int, groups: int, stages: int) -> bool:
        return columns >= CHUNK * groups and stages in (2, 3)

    @staticmethod
    def barrier_types(
        call: KernelCall, groups: int, depth: int, own: int, streamed: int
    ) -> list[Any]:
        met = plgpu.Barrier(num_arrivals=groups)
        if not call.interpret:
            return [met]
        own_ready = plgpu.Barrier(num_arrivals=own, num_barriers=groups)
        return [met, own_ready, plgpu.Barrier(num_arrivals=streamed, num_barriers=groups * depth)]

    def run(self, body: Callable[[Program], None], turns: int) -> None:
        """Copies the own tiles of each group, and runs ``body`` in all groups."""
        mine = self.of_group()
        for name, tiles in self.own.items():
            source = self.source(name, mine.block, ROWS, self.head)
            self._copy(source, tiles.at[self.group], 1, self.group)
        if self.call.interpret:
            plgpu.barrier_wait(self.barriers[1].at[self.group])
        body(mine)
        if not self.call.interpret:
            # Nobody waited for own tiles if the block meets no other.
            plgpu.wait_gmem_to_smem(0)

    def walk(self, step: Callable[..., Any], carry: Any, *, own: str, head: Array) -> Any:
        begin, _, _, end = self.bounds()
        # Another group may still be reading where the last walk ended.
        self._meet()
        for ahead in range(self.depth - 1):
            pl.when(begin + ahead < end)(functools.partial(self._stream, begin + ahead, head))
        return super().walk(step, carry, own=own, head=head)

    def loop(
        self, begin: Array, end: Array, step: Callable[..., Any], carry: Any, head: Array
    ) -> Any:
        *_, last = self.bounds()
        ahead = self.depth - 1

        def with_stage(j: Array, carry: Any) -> Any:
            # With three stages, the next block may still be on its way, if there is one.
            if self.depth == 2:
                self._wait(j, 0)
            else:
                pl.when(j + 1 < last)(lambda: self._wait(j + 1, 1))
                pl.when(j + 1 == last)(lambda: self._wait(j, 0))
            self._meet()
            pl.when(j + ahead < last)(lambda: self._stream(j + ahead, head))
            return step(j, carry)

        return lax.fori_loop(begin, end, with_stage, carry)

    def _meet(self) -> None:
        """Waits for the other groups, and for the other warps of this one."""
        if self.call.interpret:
            # Hopper's copies overwrite what they read by generic loads.
            plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers[0])
        plgpu.barrier_wait(self.barriers[0])

    def _stream(self, j: Array, head: Array) -> None:
        """Starts to copy this group's share of a block of the other side."""
        slot = self.slot(j)
        for name, tiles in self.stages.items():
            rows = tiles.shape[1] // self.groups
            source = self.source(name, j * np.int32(self.groups) + self.group, rows, head)
            to = tiles.at[slot, pl.ds(self.group * rows, rows)]
            self._copy(source, to, 2, self.group * np.int32(self.depth) + slot)

    def _copy(self, source: Any, to: Any, which: int, index: Array) -> None:
        if self.call.interpret:
            plgpu.copy_gmem_to_smem(source, to, self.barriers[which].at[index])
        else:
            mode = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
            plgpu.copy_gmem_to_smem(source, to, oob_mode=mode)

    def _wait(self, newest: Array, behind: int) -> None:
        """Waits until all but the last ``behind`` of the blocks up to ``newest`` have come."""
        if self.call.interpret:
            index = self.group * np.int32(self.depth) + self.slot(newest - behind)
            plgpu.barrier_wait(self.barriers[2].at[index])
        else:
            plgpu.wait_gmem_to_smem(behind * len(self.stages))

    def dot(self, x: Any, y: Any, *, trans_b: bool = False) -> Array:
        columns = y.shape[0 if trans_b else 1]
        zeros = jnp.zeros((x.shape[0], columns), jnp.float32)
        return self.add_dot(zeros, x, y, trans_b=trans_b)

    def add_dot(self, total: Array, x: Any, y: Any, *, trans_b: bool = False) -> Array:
        # A little of ``y`` at a time: all of it would not fit the registers.
        rows = [slice(n, n + CHUNK) for n in range(0, y.shape[0], CHUNK)]
        if not trans_b:
            for n in rows:
                total = self._multiply(total, self._left(x[:, n]), self._right(y.at[n]))
            return total
        parts = [total[:, n] for n in rows]
        for start in range(0, x.shape[1], WIDTH):
            k = slice(start, start + WIDTH)
            left = self._left(x.at[:, k])
            parts = [
                self._multiply(part, left, self._right(y.at[n, k].transpose((1, 0))))
                for part, n in zip(parts, rows, strict=True)
            ]
        return jnp.concatenate(parts, axis=1)

    def _multiply(self, total: Array, x: Array, y: Array) -> Array:
        if self.call.interpret:
            return total + lax.dot(x, y, preferred_element_type=jnp.float32)
        return plgpu.mma(total, x, y)

    def _left(self, x: Any) -> Array:
        in_registers = isinstance(x, jax.Array)
        if self.call.interpret:
            return x.astype(self.call.compute) if in_registers else x[...]
        if in_registers:
            return _as_operand(x, self.call.compute)
        return plgpu.load(x, layout=plgpu.Layout.MMA_LHS(x.dtype))

    def _right(self, y: Any) -> Array:
        layout = None if self.call.interpret else plgpu.Layout.MMA_RHS(y.dtype)
        return plgpu.load(y, layout=layout)


def _as_operand(x: Array, dtype: jnp.dtype) -> Array:
    """Casts a tile from the layout of a product's result to that of its left operand.

    Each thread has the same numbers in both, in the same order. Cast and change of layout are one
    step: the compiler would cancel the second of two.
    """
    wanted = plgpu.Layout.MMA_LHS(dtype)
    result = plgpu.ShapeDtypeStruct(x.shape, dtype, layout=wanted)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.MMA_ACC(dtype),), return_type=result)
    def cast(_: Any, x: Any) -> Any:
        x, layout = x.astype(mgpu.utils.dtype_to_ir_type(dtype)), wanted.to_mgpu()
        registers = x.registers.reshape(layout.registers_shape(x.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return cast(x)
