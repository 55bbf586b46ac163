"""The GPU that kernels run on, its compute capability, and tiles and checks of Triton's kernels."""

from __future__ import annotations

import functools
import warnings

import jax

# Ampere's compute capability, the least for kernels of Triton and cuDNN.
AMPERE = (8, 0)


def compute_capability() -> tuple[int, int] | None:
    """Compute capability of this process's first GPU, or None if it has no CUDA GPU."""
    if jax.default_backend() != "gpu":
        return None
    device = jax.local_devices()[0]
    if not device.device_kind.startswith("NVIDIA"):
        return None
    major, minor = str(device.compute_capability).split(".")
    return int(major), int(minor)


def tile_size(size: int) -> int:
    """The least Triton tile that holds ``size``: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


@functools.cache
def _be_quiet() -> None:
    """Hides what jax 0.11 says at every kernel for Triton; users can do nothing about it."""
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")


def gpu_capability(hint: str = "") -> tuple[int, int]:
    """Compute capability of this process's first GPU.

    Raises:
      NotImplementedError: without a CUDA GPU; the message ends with ``hint``.
    """
    capability = compute_capability()
    if capability is None:
        raise NotImplementedError(
            f"needs a CUDA GPU, but jax runs on {jax.default_backend()!r}{hint}"
        )
    return capability


def check_ampere(hint: str = "") -> None:
    """Raises NotImplementedError as :func:`gpu_capability` does, and for GPUs older than Ampere."""
    capability = gpu_capability(hint)
    if capability < AMPERE:
        raise NotImplementedError(
            "needs a GPU of compute capability 8.0 (Ampere) or later; this one has "
            f"{capability[0]}.{capability[1]}"
        )


def check_triton() -> None:
    """Raises NotImplementedError unless this process's first GPU runs Triton's kernels."""
    check_ampere("; interpret=True runs the kernels slowly anywhere")
    _be_quiet()
