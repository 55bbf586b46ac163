"""Compiles for machines that are not here.

For CUDA this needs ``jax-cuda13-plugin`` and ``jax-cuda13-pjrt`` of jax's own version and the
packages of :data:`CUDA_PACKAGES`, all installed with ``--no-deps``; for TPU ``libtpu``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.extend.backend
from jax._src.cudnn import fused_attention_stablehlo as cudnn_calls
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import core as mosaic_core

from tape_jax import tune
from train.checks import choose, require
from train.training.flops import CHIPS, Chip

# Where Triton's kernels ask for their GPU since jax 0.11.
GPU_INFO = "jax._src.pallas.triton.gpu_info"

# cuDNN 9.10, as it counts: the first that takes values wider than keys.
CUDNN_VERSION = 91_000
CUDA_PACKAGES = (
    "jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm nvidia-nvjitlink "
    "nvidia-cuda-runtime nvidia-cuda-cupti nvidia-cuda-crt"
)

# Without cuDNN jax loads no CUDA plugin unless told to; compiling needs no cuDNN. jax decides when
# it first looks for devices.
if importlib.util.find_spec("nvidia") and not importlib.util.find_spec("nvidia.cudnn"):
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


@dataclasses.dataclass(frozen=True)
class Cuda:
    """An NVIDIA GPU as XLA describes it, with numbers from the vendor's data sheets.

    Attributes:
      chip: its specification.
      name: the driver's name for it.
      capability: compute capability.
      processors: streaming multiprocessors.
      shared_memory: of a multiprocessor, in bytes; a block gets 1 KiB less.
      l2, memory: sizes in bytes.
      clock: in GHz.
      fpus: float32 units of a multiprocessor.
    """

    chip: Chip
    name: str
    capability: tuple[int, int]
    processors: int
    shared_memory: int
    l2: int
    memory: int
    clock: float
    fpus: int

    def devices(self, layout: str = "1") -> Sequence[Any]:
        """Returns the compiler's stand-ins for the GPUs of one host or ``hosts x GPUs``."""
        host = self.chip.host
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)", layout)
        hosts, each = (int(match[1] or 1), int(match[2])) if match else (0, 0)
        require(
            hosts > 0 and 0 < each <= host,
            f"topology: expected GPUs of one host, up to {host}, or hosts x GPUs, such as 8 or "
            f"4x8; got {layout!r}",
        )
        try:
            topology = topologies.get_topology_desc(
                platform="cuda",
                target_config=self.description(),
                topology=f"1x{hosts}x{each}",
            )
            ptxas()
        except (RuntimeError, NotImplementedError, ImportError) as error:
            raise NotImplementedError(
                f"cannot compile for CUDA ({error}); pip install --no-deps {CUDA_PACKAGES}, the "
                f"first two in version {jax.__version__}"
            ) from error
        return topology.devices

    def description(self) -> str:
        """Returns XLA's description of the target, a text proto."""
        return f"""
            platform_name: "CUDA"
            device_description_str: "{self.name}"
            runtime_version {{ major: 13 }}
            gpu_device_info {{
              cuda_compute_capability {{
                major: {self.capability[0]} minor: {self.capability[1]}
              }}
              core_count: {self.processors}
              fpus_per_core: {self.fpus}
              threads_per_block_limit: 1024
              threads_per_warp: 32
              threads_per_core_limit: 2048
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_memory}
              shared_memory_per_block_optin: {self.shared_memory - 1024}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              memory_bandwidth: {self.chip.bandwidth:.0f}
              device_memory_size: {self.memory}
              l2_cache_size: {self.l2}
              clock_rate_ghz: {self.clock}
            }}"""


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A generation of TPUs.

    Attributes:
      chip: the specification of one.
      name: libtpu's name for the generation.
    """

    chip: Chip
    name: str

    def devices(self, layout: str = "1x1") -> Sequence[Any]:
        """Returns the compiler's stand-ins for the chips of a slice such as ``4x8``."""
        require(
            re.fullmatch(r"\d+(x\d+){1,2}", layout) is not None,
            f"topology: expected the shape of a slice, such as 4x8 or 2x2x4; got {layout!r}",
        )
        if importlib.util.find_spec("libtpu") is None:
            raise NotImplementedError("cannot compile for TPU: pip install libtpu")
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        try:
            topology = topologies.get_topology_desc(
                platform="tpu", topology_name=f"{self.name}:{layout}"
            )
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"topology: libtpu knows no slice {self.name}:{layout}: {error}"
            ) from error
        return topology.devices


_GIB = 2**30
TARGETS: Mapping[str, Cuda | Tpu] = {
    **{name: Tpu(CHIPS[name], name) for name in ("v4", "v5e", "v5p", "v6e")},
    "a100": Cuda(
        CHIPS["a100"], "NVIDIA A100-SXM4-80GB", (8, 0), 108, 167_936, 41_943_040, 80 * _GIB,
        1.41, 64,
    ),
    "h100": Cuda(
        CHIPS["h100"], "NVIDIA H100 80GB HBM3", (9, 0), 132, 233_472, 52_428_800, 80 * _GIB,
        1.98, 128,
    ),
    "h200": Cuda(
        CHIPS["h200"], "NVIDIA H200", (9, 0), 132, 233_472, 62_914_560,
        CHIPS["h200"].memory, 1.98, 128,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Machine:
    """Several accelerators that need not be here.

    Attributes:
      name: such as ``v5e:8x8``.
      target: the kind of each.
      devices: stand-ins for them.
    """

    name: str
    target: Cuda | Tpu
    devices: tuple[Any, ...]

    @property
    def chip(self) -> Chip:
        """The specification of each accelerator."""
        return self.target.chip


def machine(name: str) -> Machine:
    """Returns the machine of a name such as ``v5e:8x8``, ``v5p:2x2x4``, ``h100:8`` or ``h100:4x8``.

    Raises:
      ValueError: if there is no such machine.
      NotImplementedError: if the packages to compile for it are not installed.
    """
    kind, colon, layout = name.partition(":")
    require(
        bool(colon and layout),
        f"topology: expected a chip and a layout, such as v5e:8x8 or h100:8; got {name!r}",
    )
    choose("chip of the topology", kind, TARGETS)
    target = TARGETS[kind]
    found = Machine(name, target, tuple(target.devices(layout)))
    wanted = math.prod(map(int, layout.split("x")))
    # Chips of older generations appear as two cores each.
    require(
        len(found.devices) in (wanted, 2 * wanted),
        f"topology {name}: expected {wanted} chips, the compiler knows {len(found.devices)}",
    )
    return found


@contextlib.contextmanager
def as_if_on(target: Cuda | Tpu, device: Any) -> Iterator[None]:
    """Makes backends, and the libraries beneath, see the target as their device.

    It assumes a recent cuDNN. cuDNN's own kernels are chosen where they run, and not compiled here.
    """
    capability = target.capability if isinstance(target, Cuda) else None

    def at_least(wanted: str) -> bool:
        return capability is not None and capability >= tuple(map(int, wanted.split(".")))

    platform = "gpu" if isinstance(target, Cuda) else "tpu"
    answers: list[tuple[Any, str, Any]] = [
        (jax, "default_backend", lambda: platform),
        (jax.extend.backend, "get_default_device", lambda: device),
        (cudnn_calls, "check_cudnn_version", lambda: CUDNN_VERSION),
        (cudnn_calls, "check_compute_capability", at_least),
    ]
    if isinstance(target, Cuda):
        # Mosaic GPU otherwise assumes that a block has as much shared memory as on Hopper.
        answers.append((mosaic_core, "_SMEM_SIZE_BOUND", target.shared_memory - 1024))
        if importlib.util.find_spec(GPU_INFO):
            gpu_info = importlib.import_module(GPU_INFO)
            major, minor = target.capability
            found = gpu_info.GpuInfo(
                gpu_version=None,
                arch_name=f"{major}.{minor}",
                compute_capability=10 * major + minor,
            )
            answers.append((gpu_info, "get_gpu_info", lambda: found))
    with contextlib.ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, new=answer))
        stack.enter_context(tune.assume_device(capability, tpu=capability is None))
        yield


def ptxas() -> Path:
    """Returns the path of NVIDIA's assembler in the installed packages."""
    found = importlib.util.find_spec("nvidia.cu13")
    for folder in (found.submodule_search_locations or []) if found else []:
        if (path := Path(folder) / "bin" / "ptxas").exists():
            return path
    raise ImportError("nvidia-cuda-nvcc is not installed")


def cuda_options() -> dict[str, Any]:
    """Returns options that let XLA find NVIDIA's tools in the installed packages."""
    return {
        "xla_gpu_cuda_data_dir": str(ptxas().parent.parent),
        "xla_gpu_enable_libnvptxcompiler": False,
    }
