"""The fused kernels on Pallas' Mosaic GPU backend: NVIDIA Ampere, Ada and Hopper, 16-bit types.

The programs for each chip are in ``mosaic_hopper`` and ``mosaic_ampere``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from tape_jax._src.attention import pallas_attention
from tape_jax._src.attention.mosaic_ampere import AmpereProgram
from tape_jax._src.attention.mosaic_hopper import HopperProgram
from tape_jax._src.attention.mosaic_program import MosaicProgram, plgpu
from tape_jax._src.attention.pallas_blocks import Tiles, mosaic_tiles
from tape_jax._src.attention.request import Request, refuse
from tape_jax._src.attention.vendor import wide_types_enabled
from tape_jax._src.attention.vendor_tokamax import miscompiles_causal
from tape_jax._src.core import devices

Array = jax.Array

# By the first number of the compute capability.
PROGRAMS: Mapping[int, type[MosaicProgram]] = {8: AmpereProgram, 9: HopperProgram}


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
    capability = devices.gpu_capability("; interpret=True runs on any device")
    refuse(
        capability[0] not in PROGRAMS,
        "needs an Ampere, Ada or Hopper GPU, compute capability 8.x or 9.0; this one has "
        f"{capability[0]}.{capability[1]}",
    )
    refuse(miscompiles_causal(), "CUDA 12.8.0 to 12.9.0 miscompiles Mosaic kernels with masks")


def _check_call(request: Request) -> None:
    pallas_attention.check_call(request)
    for x in (request.q, request.k):
        refuse(x.dtype.itemsize != 2, f"types of queries and keys have 16 bits; got {x.dtype}")
    refuse(wide_types_enabled(), "the kernels do not compile with 64-bit types enabled")
    width = max(request.q.shape[-1], request.v.shape[-1])
    widest = _program().WIDEST_DECAY
    refuse(
        request.log_decay is not None and width > widest,
        f"with a decay heads are at most {widest} numbers wide; got {width}: registers do not "
        "suffice",
    )


def attend(
    request: Request, *, tiles: Tiles | Sequence[Sequence[int]] | None = None
) -> tuple[Array, Array | None]:
    """Computes attention with fused kernels.

    Args:
      request: the call.
      tiles: block sizes, warps and stages of each kernel, or lists of these numbers; None: from the
        table. Four warps own 64 rows of the own side; there are four or eight warps. On Hopper,
        other warps copy, and blocks of the other side are multiples of 64. On Ampere and Ada, there
        are at least 16 rows of the other side for every four warps, and two or three stages.

    Returns:
      As :func:`pallas_attention.attend`.

    Raises:
      NotImplementedError: if the kernels do not support the call.
      ValueError: for tiles that warpgroups cannot have.
    """
    _check_release()
    _check_call(request)
    width = max(request.q.shape[-1], request.v.shape[-1])
    segments = request.visibility.segments is not None
    chosen = mosaic_tiles(width, segments=segments) if tiles is None else Tiles.of(tiles)
    # The interpreter's callbacks are ordered, and a split program has no order.
    split = not request.interpret
    launch = _program().launch
    return pallas_attention.attend(request, launch, chosen, narrowest=64, is_split=split)


def _program() -> type[MosaicProgram]:
    """Returns this GPU's kernels; for another GPU, or without one, Hopper's."""
    capability = devices.compute_capability()
    return PROGRAMS.get(capability[0], HopperProgram) if capability else HopperProgram
