"""The fused kernels on Pallas' Mosaic GPU backend: the part that all chips share.

Each warpgroup that multiplies owns 64 rows. Blocks of the other side come through shared memory,
several stages ahead. Arrays are padded to whole blocks beforehand.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from tape_jax._src.attention import pallas_attention
from tape_jax._src.attention.pallas_blocks import Tile
from tape_jax._src.attention.pallas_kernels import ZERO, KernelCall, Program
from tape_jax._src.core.checks import require
from tape_jax._src.core.padding import pad_to_multiple
from tape_jax._src.core.partition import Named, batch_size

Array = jax.Array

# ``pallas_mosaic`` checks for jax 0.11.1, which this needs.
plgpu: Any = mosaic_gpu
# Axes of the grid and of a program. Inside shard_map, jax takes a mesh axis of the same name first.
HEADS, BLOCKS, BATCH, GROUP = (f"tape_{x}" for x in ("heads", "blocks", "batch", "group"))
# Rows of a product of one warpgroup.
ROWS = 64


@dataclasses.dataclass(frozen=True)
class MosaicProgram(Program):
    """A program with tiles in shared memory: its own block's, and those that come in stages.

    Attributes:
      group: index of the warpgroup.
      groups: number of warpgroups that compute.
      sources: the inputs, by name. Tiles come from ``[b|1, t, h * d]``, since ``cp.async`` leaves
        out only leading axes; ``refs`` has only their shapes ``[b|1, t, h, d]``.
      own: tiles ``[groups, 64, d]``, by name.
      stages: tiles ``[stages, rows, d]``, by name; block ``j`` goes into stage ``j % stages``.
      barriers: those of :meth:`barrier_types`.
    """

    group: Any
    groups: int
    sources: Named
    own: Named
    stages: Named
    barriers: Any

    # Warpgroups that copy and do not compute.
    COPYING: ClassVar[int]
    # Whether vectors come in stages too.
    STREAMS_VECTORS: ClassVar[bool]
    # Bytes of a row of a tile in shared memory.
    SWIZZLE: ClassVar[int]
    # The widest heads that a decay leaves registers for.
    WIDEST_DECAY: ClassVar[int]
    # What :meth:`takes` requires of the other side, with ``{}`` for its name.
    WANTED: ClassVar[str]

    @staticmethod
    @abc.abstractmethod
    def takes(columns: int, groups: int, stages: int) -> bool:
        """Returns whether blocks of ``columns`` rows and this many ``stages`` suit ``groups``."""

    @staticmethod
    @abc.abstractmethod
    def barrier_types(
        call: KernelCall, groups: int, depth: int, own: int, streamed: int
    ) -> list[Any]:
        """Returns barriers for these numbers of groups, stages, own and streamed arrays."""

    @abc.abstractmethod
    def run(self, body: Callable[[Program], None], turns: int) -> None:
        """Runs ``body`` in the groups that compute, and copies the blocks that they read.

        Args:
          body: of the kernel.
          turns: how often all blocks are needed: once per query head that shares the own keys.
        """

    @classmethod
    def check_tile(cls, kernel: str, tile: Tile, *, by_queries: bool) -> None:
        """Raises ValueError for a tile that a kernel by queries or keys does not take."""
        groups, names = tile.warps // 4, ("queries", "keys")
        rows, columns = tile.queries, tile.keys
        if not by_queries:
            rows, columns, names = columns, rows, names[::-1]
        require(
            groups in (1, 2) and rows == ROWS * groups and cls.takes(columns, groups, tile.stages),
            f"tiles: {kernel} takes 64 {names[0]} with 4 warps or 128 with 8, "
            f"{cls.WANTED.format(names[1])}; got {tile}",
        )

    @classmethod
    def launch(
        cls,
        body: Callable[[Program], None],
        call: KernelCall,
        tile: Tile,
        inputs: Named,
        out: dict[str, jax.ShapeDtypeStruct],
        *,
        by_queries: bool,
    ) -> Named:
        """Runs ``body`` as a Mosaic kernel; see :data:`pallas_attention.Launch`."""
        of, other = "qk" if by_queries else "kq"
        sizes = {"q": tile.queries, "k": tile.keys}
        rows, columns, groups = sizes[of], sizes[other], tile.warps // 4
        cls.check_tile(body.__name__, tile, by_queries=by_queries)
        sides = {name: _side(name) for name in inputs}
        own = [name for name, side in sides.items() if side == of and inputs[name].ndim == 4]
        streamed = [
            name
            for name, side in sides.items()
            if side not in (of, None) and (cls.STREAMS_VECTORS or inputs[name].ndim == 4)
        ]
        length, (heads, kv_heads) = inputs["k"].shape[1], (inputs[x].shape[2] for x in "qk")
        padded = {name: _whole_blocks(name, x, sizes) for name, x in inputs.items()}
        types = jax.eval_shape(
            lambda out: {n: _whole_blocks(n, x, sizes) for n, x in out.items()}, out
        )
        shapes = {
            n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in padded.items() if x.ndim == 4
        }
        own_tile = dataclasses.replace(tile, **{"queries" if by_queries else "keys": ROWS})

        def kernel(*refs: Any) -> None:
            arrays = dict(zip([*padded, *types], refs, strict=False))
            own_tiles, stages, barriers = refs[len(arrays) :]
            program = cls(
                call, arrays | shapes, own_tile, lax.axis_index(BLOCKS), lax.axis_index(HEADS),
                lax.axis_index(BATCH), length, group=lax.axis_index(GROUP), groups=groups,
                sources=arrays, own=dict(zip(own, own_tiles, strict=True)),
                stages=dict(zip(streamed, stages, strict=True)), barriers=barriers,
            )  # fmt: skip
            program.run(body, 1 if by_queries else heads // kv_heads)

        found = plgpu.kernel(
            kernel,
            out_type=[*types.values()],
            scratch_types=[
                [_tiles(groups, ROWS, padded[name], cls.SWIZZLE) for name in own],
                [_tiles(tile.stages, columns, padded[name], cls.SWIZZLE) for name in streamed],
                cls.barrier_types(call, groups, tile.stages, len(own), len(streamed)),
            ],
            grid=(padded[of].shape[2], padded[of].shape[1] // rows, batch_size(padded)),
            grid_names=(HEADS, BLOCKS, BATCH),
            num_threads=groups + cls.COPYING,
            thread_name=GROUP,
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name=f"tape_attention_{body.__name__}",
            interpret=plgpu.InterpretGPUParams(detect_races=True) if call.interpret else None,
        )(*map(_flat, padded.values()))
        return {
            name: lax.slice(x, (0,) * x.ndim, out[name].shape)
            for name, x in zip(types, found, strict=True)
        }

    def of_group(self) -> Self:
        """Returns the program of this group's 64 rows."""
        return dataclasses.replace(self, block=self.block * self.groups + self.group)

    def source(self, name: str, block: Any, size: int, head: Any) -> Any:
        """Returns the reference to a block of an input, for ``head`` of ``q`` or the own side."""
        ref, letters = self.refs[name], pallas_attention.AXES[name]
        rows = pl.ds(block * size, size)
        if "h" not in letters and "k" not in letters:
            return self.sources[name].at[self.row(ref), rows]
        axis = 2 if len(letters) == 4 else 1
        of_query = letters[axis] == "k" and "q" in self.own
        shared = self.refs["q"].shape[2] // ref.shape[axis] if of_query else 1
        which = ZERO if ref.shape[axis] == 1 else lax.div(head, np.int32(shared))
        if axis == 1:
            return self.sources[name].at[self.row(ref), which, rows]
        dim = ref.shape[-1]
        return self.sources[name].at[self.row(ref), rows, pl.ds(which * np.int32(dim), dim)]

    @property
    def depth(self) -> int:
        """The number of stages."""
        return next(iter(self.stages.values())).shape[0]

    def slot(self, block: Array) -> Array:
        """Returns the stage of a block of the other side."""
        return lax.rem(block, np.int32(self.depth))

    def bounds(self) -> tuple[Array, ...]:
        # All groups walk over the same blocks: those that the program's own block meets.
        return Program.bounds(dataclasses.replace(self, block=lax.axis_index(BLOCKS)))

    def read(self, name: str, block: Array, size: int, head: Array) -> Any:
        if name in self.own:
            return self.own[name].at[self.group]
        return self.stages[name].at[self.slot(block)]

    def read_vector(
        self, name: str, block: Array, size: int, *head: Array, other: float = 0
    ) -> Array:
        if name in self.stages:
            return plgpu.load(self.stages[name].at[self.slot(block)], optimized=False)
        ref = self.refs[name]
        return plgpu.load(
            ref.at[(self.row(ref), *head, pl.ds(block * size, size))], optimized=False
        )

    def write(self, name: str, block: Array, head: Array, value: Array) -> None:
        ref, size = self.refs[name], value.shape[0]
        ref[self.b, pl.ds(block * size, size), head, :] = value.astype(ref.dtype)

    def write_vector(self, name: str, block: Array, head: Array, value: Array) -> None:
        size = value.shape[0]
        self.refs[name][self.b, head, pl.ds(block * size, size)] = value


def _tiles(count: int, rows: int, x: Array, swizzle: int) -> Any:
    """Describes shared memory for an array's blocks: tiles as products need them, or vectors."""
    if x.ndim < 4:
        return plgpu.SMEM((count, rows), x.dtype)
    tiling = (8, swizzle // x.dtype.itemsize)
    transforms = (plgpu.TilingTransform(tiling), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM((count, rows, x.shape[-1]), x.dtype, transforms=transforms)


def _flat(x: Array) -> Array:
    """Merges heads and their numbers into one axis."""
    return x.reshape(*x.shape[:2], -1) if x.ndim == 4 else x


def _side(name: str) -> str | None:
    """Returns the side of an array's tokens: ``q``, ``k`` or None."""
    letters = pallas_attention.AXES.get(name, "")
    return "q" if "t" in letters else "k" if "s" in letters else None


def _whole_blocks(name: str, x: Array, sizes: Mapping[str, int]) -> Array:
    """Pads the tokens of an array to whole blocks."""
    side = _side(name)
    if side is None:
        return x
    axis = pallas_attention.AXES[name].index("t" if side == "q" else "s")
    # Queries past the end see nothing: the decay of a row of zeros could be infinite.
    value = -math.inf if name == "query_decay" else 0
    return pad_to_multiple(x, sizes[side], axis, constant_values=value)
