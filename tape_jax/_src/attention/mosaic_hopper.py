"""The fused Mosaic GPU kernels on NVIDIA Hopper.

One warpgroup copies the blocks of the other side into shared memory with the tensor memory
accelerator; the others multiply on the tensor cores of Hopper (``wgmma``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from tape_jax._src.attention.mosaic_program import ROWS, MosaicProgram, plgpu
from tape_jax._src.attention.pallas_kernels import KernelCall, Program

Array = jax.Array

# Registers of a thread that computes, by the number of warpgroups that compute, and of a thread
# that copies: 65,536 in all.
REGISTERS, COPYING = {1: 248, 2: 240}, 24


@dataclasses.dataclass(frozen=True)
class HopperProgram(MosaicProgram):
    """A program with the barriers ``own_ready``, ``ready`` and ``free``, and a group that copies.

    ``own_ready``, one per group: the own tiles have arrived. ``ready`` and ``free``, one per stage:
    its tiles have arrived; no group needs them any longer.
    """

    COPYING = 1
    STREAMS_VECTORS = True
    SWIZZLE = 128
    WIDEST_DECAY = 64
    WANTED = "and a multiple of 64 {}"

    @staticmethod
    def takes(columns: int, groups: int, stages: int) -> bool:
        return columns % 64 == 0

    @staticmethod
    def barrier_types(
        call: KernelCall, groups: int, depth: int, own: int, streamed: int
    ) -> list[Any]:
        return [
            plgpu.Barrier(num_arrivals=own, num_barriers=groups),
            plgpu.Barrier(num_arrivals=streamed, num_barriers=depth),
            plgpu.Barrier(num_arrivals=groups, num_barriers=depth),
        ]

    def run(self, body: Callable[[Program], None], turns: int) -> None:
        """Runs ``body`` in all groups but the last, which copies."""

        @pl.when(self.group < self.groups)
        def compute() -> None:
            plgpu.set_max_registers(REGISTERS[self.groups], action="increase")
            mine = self.of_group()
            mine.copy_own()
            body(mine)

        @pl.when(self.group == self.groups)
        def copy() -> None:
            plgpu.set_max_registers(COPYING, action="decrease")
            self.stream(turns)

    def copy_own(self) -> None:
        """Copies the own block's tiles, and waits for them."""
        own_ready, _, _ = self.barriers
        barrier = own_ready.at[self.group]
        for name, tiles in self.own.items():
            source = self.source(name, self.block, ROWS, self.head)
            plgpu.copy_gmem_to_smem(source, tiles.at[self.group], barrier)
        plgpu.barrier_wait(barrier)

    def stream(self, turns: int) -> None:
        """Copies the blocks of the other side, one after the other, when their stage is free."""
        begin, _, _, end = self.bounds()
        _, ready, free = self.barriers
        by_queries = "q" in self.own

        def until_free(j: Array, _: Any = None) -> None:
            plgpu.barrier_wait(free.at[self.slot(j)])

        def copy(j: Array, turn: Array) -> Array:
            pl.when((turn > 0) | (j - begin >= self.depth))(lambda: until_free(j))
            slot = self.slot(j)
            head = self.head if by_queries else self.head * np.int32(turns) + turn
            for name, tiles in self.stages.items():
                source = self.source(name, j, tiles.shape[1], head)
                plgpu.copy_gmem_to_smem(source, tiles.at[slot], ready.at[slot])
            return turn

        def walk(turn: Array, _: Any) -> None:
            lax.fori_loop(begin, end, copy, turn)

        lax.fori_loop(0, turns, walk, None)
        lax.fori_loop(begin, jnp.minimum(end, begin + self.depth), until_free, None)

    def loop(
        self, begin: Array, end: Array, step: Callable[..., Any], carry: Any, head: Array
    ) -> Any:
        _, ready, free = self.barriers

        def with_stage(j: Array, carry: Any) -> Any:
            plgpu.barrier_wait(ready.at[self.slot(j)])
            carry = step(j, carry)
            if self.call.interpret:
                # What it read for itself, not for products: see :meth:`dot`.
                plgpu.commit_smem()
            plgpu.barrier_arrive(free.at[self.slot(j)])
            return carry

        return lax.fori_loop(begin, end, with_stage, carry)

    def dot(self, x: Any, y: Any, *, trans_b: bool = False) -> Array:
        x, y = self._operand(x), y.transpose((1, 0)) if trans_b else y
        if self.call.interpret and isinstance(x, jax.Array):
            # The interpreter's products take their operands from shared memory only.
            return lax.dot(x, y[...], preferred_element_type=jnp.float32)

        def multiply(total: Any) -> Array:
            plgpu.wgmma(total, x, y)
            return total[...]

        return pl.run_scoped(multiply, plgpu.ACC((x.shape[0], y.shape[1]), jnp.float32))

    def add_dot(self, total: Array, x: Any, y: Any, *, trans_b: bool = False) -> Array:
        if self.call.interpret:
            # The interpreter's accumulators cannot begin with a value either.
            return super().add_dot(total, x, y, trans_b=trans_b)
        x, y = self._operand(x), y.transpose((1, 0)) if trans_b else y
        return pl.run_state(lambda sums: plgpu.wgmma(sums, x, y))(plgpu.ACC.init(total))

    def _operand(self, x: Any) -> Any:
        return x.astype(self.call.compute) if isinstance(x, jax.Array) else x
