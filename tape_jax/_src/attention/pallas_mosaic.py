"""The fused kernels by Pallas' Mosaic GPU backend: NVIDIA Hopper, types of 16 bits.

One warpgroup copies the blocks of the other side into shared memory, several stages ahead, by the
tensor memory accelerator; each of the others owns 64 rows, whose products run on the tensor cores
of Hopper (``wgmma``).

Arrays are padded to whole blocks beforehand.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from tape_jax._src.attention import pallas_attention, pallas_blocks
from tape_jax._src.attention.pallas_blocks import Tile, Tiles, mosaic_tiles
from tape_jax._src.attention.pallas_kernels import KernelCall, Program
from tape_jax._src.attention.request import Request, refuse
from tape_jax._src.attention.vendor import wide_types_enabled
from tape_jax._src.attention.vendor_tokamax import miscompiles_causal
from tape_jax._src.core.checks import require
from tape_jax._src.core.partition import Named, batch_size

Array = jax.Array

# What it needs of jax 0.11.1 is checked where a call enters.
plgpu: Any = mosaic_gpu
# Axes of the grid and of a program. jax takes a mesh axis of the same name first, inside shard_map.
HEADS, BLOCKS, BATCH, GROUP = (f"tape_{x}" for x in ("heads", "blocks", "batch", "group"))
# Rows of a product of one warpgroup.
ROWS = 64


def check(request: Request) -> None:
    """Raises NotImplementedError unless the kernels can do this call on this machine."""
    _check_release()
    if not request.interpret:
        _check_device()
    _check_call(request)


def _check_release() -> None:
    refuse(
        not hasattr(plgpu, "InterpretGPUParams"),
        f"needs jax 0.11.1 or later, and so Python 3.12; this is jax {jax.__version__}",
    )


def _check_device() -> None:
    capability = pallas_blocks.compute_capability()
    if capability is None:
        raise NotImplementedError(
            f"needs a CUDA GPU, but jax runs on {jax.default_backend()!r}; interpret=True runs on "
            "any device"
        )
    refuse(
        capability[0] != 9,
        "needs a GPU of Hopper's generation, compute capability 9.0; this one has "
        f"{capability[0]}.{capability[1]}",
    )
    refuse(miscompiles_causal(), "CUDA 12.8.0 to 12.9.0 miscompiles Mosaic kernels with masks")


def _check_call(request: Request) -> None:
    pallas_attention.check_call(request)
    for x in (request.q, request.k):
        refuse(x.dtype.itemsize != 2, f"types of queries and keys have 16 bits; got {x.dtype}")
    refuse(wide_types_enabled(), "the kernels do not compile with 64-bit types enabled")
    width = max(request.q.shape[-1], request.v.shape[-1])
    refuse(
        request.log_decay is not None and width > 64,
        f"with a decay heads are at most 64 numbers wide; got {width}: registers do not suffice",
    )


def attend(
    request: Request, *, tiles: Tiles | Sequence[Sequence[int]] | None = None
) -> tuple[Array, Array | None]:
    """Computes attention by fused kernels.

    Args:
      request: the call.
      tiles: block sizes, warps and stages of each kernel, or lists of these numbers; None: from the
        table. Four warps own 64 rows of the own side, and there are four or eight beside those that
        copy; blocks of the other side are multiples of 64.

    Returns:
      As :func:`pallas_attention.attend`.

    Raises:
      NotImplementedError: if the call has what the kernels have not.
      ValueError: for tiles that warpgroups cannot have.
    """
    _check_release()
    _check_call(request)
    width = max(request.q.shape[-1], request.v.shape[-1])
    chosen = mosaic_tiles(width) if tiles is None else Tiles.of(tiles)
    # The interpreter's callbacks come in an order, which a program that is split has not.
    split = not request.interpret
    return pallas_attention.attend(request, launch, chosen, narrowest=64, is_split=split)


def launch(
    body: Callable[[Program], None],
    call: KernelCall,
    tile: Tile,
    inputs: Named,
    out: dict[str, jax.ShapeDtypeStruct],
    *,
    by_queries: bool,
) -> Named:
    """See :data:`pallas_attention.Launch`."""
    groups, of = tile.warps // 4, "q" if by_queries else "k"
    sizes = {"q": tile.queries, "k": tile.keys}
    rows, columns = sizes[of], sizes["k" if by_queries else "q"]
    require(
        groups in REGISTERS and rows == ROWS * groups and columns % ROWS == 0,
        f"tiles: {body.__name__} takes 64 {'queries' if by_queries else 'keys'} with 4 warps or "
        f"128 with 8, and a multiple of 64 {'keys' if by_queries else 'queries'}; got {tile}",
    )
    sides = {name: _side(name) for name in inputs}
    own = [name for name, side in sides.items() if side == of and inputs[name].ndim == 4]
    streamed = [name for name, side in sides.items() if side not in (of, None)]
    length, (heads, kv_heads) = inputs["k"].shape[1], (inputs[x].shape[2] for x in "qk")
    padded = {name: _whole_blocks(name, x, sizes) for name, x in inputs.items()}
    types = jax.eval_shape(lambda out: {n: _whole_blocks(n, x, sizes) for n, x in out.items()}, out)
    own_tile = dataclasses.replace(tile, **{"queries" if by_queries else "keys": ROWS})

    def kernel(*refs: Any) -> None:
        arrays = dict(zip([*padded, *types], refs, strict=False))
        own_tiles, stages, own_ready, ready, free = refs[len(arrays) :]
        program = MosaicProgram(
            call, arrays, own_tile, lax.axis_index(BLOCKS), lax.axis_index(HEADS),
            lax.axis_index(BATCH), length, group=lax.axis_index(GROUP), groups=groups,
            own=dict(zip(own, own_tiles, strict=True)), own_ready=own_ready,
            stages=dict(zip(streamed, stages, strict=True)), ready=ready, free=free,
        )  # fmt: skip
        program.run(body, 1 if by_queries else heads // kv_heads)

    found = plgpu.kernel(
        kernel,
        out_type=[*types.values()],
        scratch_types=[
            [_tiles(groups, ROWS, padded[name]) for name in own],
            [_tiles(tile.stages, columns, padded[name]) for name in streamed],
            plgpu.Barrier(num_arrivals=len(own), num_barriers=groups),
            plgpu.Barrier(num_arrivals=len(streamed), num_barriers=tile.stages),
            plgpu.Barrier(num_arrivals=groups, num_barriers=tile.stages),
        ],
        grid=(padded[of].shape[2], padded[of].shape[1] // rows, batch_size(padded)),
        grid_names=(HEADS, BLOCKS, BATCH),
        num_threads=groups + 1,
        thread_name=GROUP,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=f"tape_attention_{body.__name__}",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if call.interpret else None,
    )(*padded.values())
    return {
        name: lax.slice(x, (0,) * x.ndim, out[name].shape)
        for name, x in zip(types, found, strict=True)
    }


def _tiles(count: int, rows: int, x: Array) -> Any:
    """Shared memory for blocks of an array: tiles as products want them, or vectors."""
    if x.ndim < 4:
        return plgpu.SMEM((count, rows), x.dtype)
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((count, rows, x.shape[-1]), x.dtype, transforms=transforms)


def _side(name: str) -> str | None:
    """Whose tokens an array has: ``q``, ``k`` or None."""
    letters = pallas_attention.AXES.get(name, "")
    return "q" if "t" in letters else "k" if "s" in letters else None


def _whole_blocks(name: str, x: Array, sizes: Mapping[str, int]) -> Array:
    """Pads the tokens of an array to whole blocks."""
    side = _side(name)
    if side is None:
        return x
    axis = pallas_attention.AXES[name].index("t" if side == "q" else "s")
    missing = -x.shape[axis] % sizes[side]
    # Queries past the end see nothing: the decay of a row of zeros could be infinite.
    value = -math.inf if name == "query_decay" else 0
    pads = [(0, missing if n == axis else 0) for n in range(x.ndim)]
    return jnp.pad(x, pads, constant_values=value) if missing else x


# Registers of a thread that computes, by the number of warpgroups that do, and of one that copies:
# 65,536 in all.
REGISTERS, COPYING = {1: 248, 2: 240}, 24


@dataclasses.dataclass(frozen=True)
class MosaicProgram(Program):
    """Tiles are in shared memory: those of the own block, and those that come in stages.

    Attributes:
      group: index of the warpgroup.
      groups: how many compute.
      own: tiles ``[groups, 64, d]``, by name.
      own_ready: barriers, one a group: the own tiles have come.
      stages: tiles ``[stages, rows, d]``, by name; block ``j`` comes into stage ``j % stages``.
      ready, free: barriers, one a stage: its tiles have come; no group needs them any longer.
    """

    group: Any
    groups: int
    own: Named
    own_ready: Any
    stages: Named
    ready: Any
    free: Any

    def run(self, body: Callable[[Program], None], turns: int) -> None:
        """What each group does: 64 rows of the own block, or, the last one, the copies.

        Args:
          body: of the kernel.
          turns: of :meth:`stream`.
        """

        @pl.when(self.group < self.groups)
        def compute() -> None:
            plgpu.set_max_registers(REGISTERS[self.groups], action="increase")
            mine = dataclasses.replace(self, block=self.block * self.groups + self.group)
            mine.copy_own()
            body(mine)

        @pl.when(self.group == self.groups)
        def copy() -> None:
            plgpu.set_max_registers(COPYING, action="decrease")
            self.stream(turns)

    def copy_own(self) -> None:
        """Copies the tiles of the own block, and waits for them."""
        barrier = self.own_ready.at[self.group]
        for name, tiles in self.own.items():
            self._copy(name, self.block, self.head, tiles.at[self.group], barrier)
        plgpu.barrier_wait(barrier)

    def stream(self, turns: int) -> None:
        """Copies the blocks of the other side, one after the other, when their stage is free.

        Args:
          turns: how often all are needed: for each query head that shares the own keys.
        """
        begin, _, _, end = self.bounds()
        by_queries = "q" in self.own

        def until_free(j: Array, _: Any = None) -> None:
            plgpu.barrier_wait(self.free.at[self._slot(j)])

        def copy(j: Array, turn: Array) -> Array:
            pl.when((turn > 0) | (j - begin >= self._depth))(lambda: until_free(j))
            slot = self._slot(j)
            head = self.head if by_queries else self.head * np.int32(turns) + turn
            for name, tiles in self.stages.items():
                self._copy(name, j, head, tiles.at[slot], self.ready.at[slot])
            return turn

        def walk(turn: Array, _: Any) -> None:
            lax.fori_loop(begin, end, copy, turn)

        lax.fori_loop(0, turns, walk, None)
        lax.fori_loop(begin, jnp.minimum(end, begin + self._depth), until_free, None)

    def _copy(self, name: str, block: Any, head: Any, to: Any, barrier: Any) -> None:
        """Copies a block of an array: of the head that belongs to ``head``, of ``q`` or own."""
        ref, size = self.refs[name], to.shape[0]
        letters = pallas_attention.AXES[name]
        at: list[Any] = [self.row(ref)]
        for letter, n in zip(letters[1:], ref.shape[1:], strict=True):
            if letter in "hk":
                of_query = letter == "k" and "q" in self.own
                shared = self.refs["q"].shape[2] // n if of_query else 1
                at.append(np.int32(0) if n == 1 else lax.div(head, np.int32(shared)))
            elif letter in "ts":
                at.append(pl.ds(block * size, size))
        plgpu.copy_gmem_to_smem(ref.at[tuple(at)], to, barrier)

    @property
    def _depth(self) -> int:
        return next(iter(self.stages.values())).shape[0]

    def _slot(self, block: Array) -> Array:
        return lax.rem(block, np.int32(self._depth))

    def loop(self, begin: Array, end: Array, step: Callable[..., Any], carry: Any) -> Any:
        def with_stage(j: Array, carry: Any) -> Any:
            plgpu.barrier_wait(self.ready.at[self._slot(j)])
            carry = step(j, carry)
            if self.call.interpret:
                # What it read for itself, not for products: see :meth:`dot`.
                plgpu.commit_smem()
            plgpu.barrier_arrive(self.free.at[self._slot(j)])
            return carry

        return lax.fori_loop(begin, end, with_stage, carry)

    def bounds(self) -> tuple[Array, ...]:
        # All groups walk over the same blocks: those that the program's own block meets.
        return Program.bounds(dataclasses.replace(self, block=lax.axis_index(BLOCKS)))

    def read(self, name: str, block: Array, size: int, head: Array) -> Any:
        if name in self.own:
            return self.own[name].at[self.group]
        return self.stages[name].at[self._slot(block)]

    def read_vector(
        self, name: str, block: Array, size: int, *head: Array, other: float = 0
    ) -> Array:
        if name in self.stages:
            return plgpu.load(self.stages[name].at[self._slot(block)], optimized=False)
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
            # Nor does it know accumulators that begin with a value.
            return super().add_dot(total, x, y, trans_b=trans_b)
        x, y = self._operand(x), y.transpose((1, 0)) if trans_b else y
        return pl.run_state(lambda sums: plgpu.wgmma(sums, x, y))(plgpu.ACC.init(total))

    def _operand(self, x: Any) -> Any:
        return x.astype(self.call.compute) if isinstance(x, jax.Array) else x
