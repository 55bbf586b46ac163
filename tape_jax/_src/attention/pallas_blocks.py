"""Block sizes of the fused attention kernels, by kind of device, head dimension and type.

The sizes for Ampere and Hopper are among those that compile without spilling registers, as
``python -m benchmarks.tiles`` lists them. The 16-bit sizes for Hopper are the fastest of those
timed on an H200 (benchmarks/results/2026-11-26-nvidia-h200-2.md); no others were compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from tape_jax._src.core import devices
from tape_jax._src.core.checks import check_fields, require


@dataclasses.dataclass(frozen=True)
class Tile:
    """The block sizes of one kernel and how it is compiled.

    Attributes:
      queries, keys: queries and keys in a block: powers of two, at least 16.
      warps: warps of one program.
      stages: depth of the software pipeline.

    Raises:
      ValueError: if a size is not allowed.
    """

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2

    def __post_init__(self) -> None:
        check_fields(self, "Tile: ")
        for name in ("queries", "keys"):
            size = getattr(self, name)
            require(
                size >= 16 and size.bit_count() == 1,
                f"Tile: {name} must be a power of two, at least 16; got {size}",
            )
        require(
            self.warps in (1, 2, 4, 8, 16),
            f"Tile: warps must be 1, 2, 4, 8 or 16; got {self.warps}",
        )
        require(self.stages >= 1, f"Tile: stages must be at least 1; got {self.stages}")


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tile of each kernel; :meth:`same` gives all kernels the same.

    Attributes:
      forward: for ``o`` and ``a``.
      query_gradients: for dq.
      key_gradients: for dk, dv and de.
      value_gradients: for dv and de, if they have their own kernel; None if not.
    """

    forward: Tile
    query_gradients: Tile
    key_gradients: Tile
    value_gradients: Tile | None = None

    @classmethod
    def same(cls, queries: int, keys: int, warps: int = 4, stages: int = 2) -> Tiles:
        """Returns the same tile for every kernel."""
        return cls(*[Tile(queries, keys, warps, stages)] * 3)

    @classmethod
    def of(cls, tiles: Tiles | Sequence[Sequence[int]]) -> Tiles:
        """Returns ``tiles`` as :class:`Tiles`; lists give the numbers of each :class:`Tile`.

        Raises:
          ValueError: if a size is not allowed, or if there are too few or too many.
        """
        if isinstance(tiles, Tiles):
            return tiles
        try:
            return cls(*(Tile(*tile) for tile in tiles))
        except TypeError as error:
            raise ValueError(
                "tiles must be Tiles, or three or four lists of two to four integers (queries, "
                f"keys, warps, stages); got {tiles!r}"
            ) from error


# By generation and by (bytes of an operand, largest head dimension). A multiprocessor of compute
# capability 8.0 has nearly as much shared memory as one of Hopper's, but its matrix products take
# their operands from registers.
_HOPPER: Mapping[tuple[int, int], Tiles] = {
    (2, 64): Tiles(Tile(64, 64), Tile(64, 64), Tile(64, 64, stages=3)),
    (2, 128): Tiles(Tile(64, 64), Tile(64, 64, stages=3), Tile(64, 64, stages=3), Tile(64, 64)),
    (4, 64): Tiles(Tile(64, 32, 8), Tile(32, 32, 4), Tile(32, 32, 8)),
    (4, 128): Tiles(Tile(32, 16, 8), Tile(32, 16, 4), Tile(32, 16, 4)),
}
TABLE: Mapping[str, Mapping[tuple[int, int], Tiles]] = {
    "hopper": _HOPPER,
    "blackwell": {
        **_HOPPER,
        (2, 64): Tiles(Tile(64, 64), Tile(64, 64, 8), Tile(64, 64, stages=3)),
        (2, 128): Tiles(Tile(64, 64), Tile(64, 64, stages=3), Tile(64, 64, 8), Tile(64, 64, 8)),
    },
    "ampere": {
        (2, 64): Tiles(Tile(128, 32, 8), Tile(64, 32, 8), Tile(16, 64, 8)),
        (2, 128): Tiles(Tile(32, 64, 8), Tile(32, 64, 8), Tile(64, 32, 8)),
        (4, 64): Tiles(Tile(64, 32, 8), Tile(32, 32, 4), Tile(32, 32, 8)),
        (4, 128): Tiles(Tile(32, 32, 8), Tile(32, 16, 4), Tile(16, 32, 8)),
    },
    "small": {
        (2, 64): Tiles(Tile(64, 32, 4), Tile(32, 32, 4), Tile(32, 32, 4)),
        (2, 128): Tiles(Tile(32, 32, 4), Tile(32, 16, 4), Tile(16, 32, 4)),
        (4, 64): Tiles(Tile(32, 16, 4), Tile(16, 16, 4), Tile(16, 16, 4)),
        (4, 128): Tiles.same(16, 16, warps=4, stages=1),
    },
}
# Generations with at least 160 KiB of shared memory for a program; the others are small.
GENERATIONS = {(8, 0): "ampere", (9, 0): "hopper", (10, 0): "blackwell", (10, 3): "blackwell"}


# Tiles for Mosaic and 16-bit types, by generation and largest head dimension.
MOSAIC: Mapping[str, Mapping[int, Tiles]] = {
    "hopper": {
        64: Tiles(Tile(128, 128, 8), Tile(128, 64, 8), Tile(64, 128, 8)),
        128: Tiles(Tile(128, 64, 8), Tile(128, 64, 8), Tile(64, 128, 8), Tile(64, 128, 8)),
    },
    "ampere": {
        64: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(32, 128, 8, 3)),
        128: Tiles(Tile(128, 32, 8, 3), Tile(128, 32, 8), Tile(32, 128, 8), Tile(32, 128, 8, 3)),
    },
    "small": {
        64: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8), Tile(32, 128, 8, 3)),
        128: Tiles(Tile(128, 32, 8), Tile(64, 32, 4), Tile(32, 64, 4), Tile(32, 128, 8)),
    },
}


def default_tiles(dtype: jnp.dtype, width: int) -> Tiles:
    """Returns tiles for a dtype and the larger of head dimension and value width."""
    return TABLE[_generation()][jnp.dtype(dtype).itemsize, 64 if width <= 64 else 128]


def mosaic_tiles(width: int, *, segments: bool = False) -> Tiles:
    """Returns Mosaic tiles for the larger of head dimension and value width.

    A GPU without tiles can only interpret, and gets those of Hopper.
    """
    capability = devices.compute_capability()
    if capability is not None and capability[0] == 8:
        return MOSAIC[_generation()][64 if width <= 64 else 128]
    tiles = MOSAIC["hopper"][64 if width <= 64 else 128]
    # Ids take registers: with eight warps, the kernel would spill.
    one_group = dataclasses.replace(tiles, key_gradients=Tile(64, 64, 4))
    return one_group if segments and width > 64 else tiles


def _generation() -> str:
    """Returns this GPU's generation, or Hopper without one (interpreted, or compiled elsewhere)."""
    capability = devices.compute_capability()
    return "hopper" if capability is None else GENERATIONS.get(capability, "small")
