"""What chips can do at most, by their vendors' data sheets."""

from __future__ import annotations

import dataclasses

GB = 10**9


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator.

    Attributes:
      name: for people.
      kind: start of jax's ``device_kind``.
      operations: dense bfloat16 operations per second; a multiplication and an addition are two.
      memory: size, in bytes.
      bandwidth: of the memory, in bytes per second.
      link: bytes per second that it can send over all its links to chips nearby, one way.
      network: its share of what its host can send to other hosts, in bytes per second, one way.
      host: chips of a host.
    """

    name: str
    kind: str
    operations: float
    memory: int
    bandwidth: float
    link: float
    network: float
    host: int


# TPUs of a slice are joined by their links whatever their host, so `network` is that of slices.
CHIPS = {
    "v4": Chip("TPU v4", "TPU v4", 275e12, 32 * GB, 1228e9, 300e9, 6.25e9, 4),
    "v5e": Chip("TPU v5e", "TPU v5 lite", 197e12, 16 * GB, 819e9, 200e9, 3.125e9, 8),
    "v5p": Chip("TPU v5p", "TPU v5", 459e12, 95 * GB, 2765e9, 600e9, 6.25e9, 4),
    "v6e": Chip("TPU v6e", "TPU v6 lite", 918e12, 32 * GB, 1600e9, 400e9, 12.5e9, 8),
    "a100": Chip(
        "NVIDIA A100 80GB", "NVIDIA A100", 312e12, 80 * GB, 2039e9, 300e9, 25e9, 8
    ),
    "h100": Chip(
        "NVIDIA H100 80GB", "NVIDIA H100 80GB HBM3", 989.4e12, 80 * GB, 3352e9, 450e9, 50e9, 8
    ),
    "h200": Chip("NVIDIA H200", "NVIDIA H200", 989.4e12, 141 * GB, 4800e9, 450e9, 50e9, 8),
}  # fmt: skip


def find(device_kind: str) -> Chip | None:
    """The chip that jax calls ``device_kind``, or None if it is not known.

    >>> find("TPU v5 lite").name
    'TPU v5e'
    """
    found = [chip for chip in CHIPS.values() if device_kind.startswith(chip.kind)]
    return max(found, key=lambda chip: len(chip.kind), default=None)
