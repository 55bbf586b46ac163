"""The library versions and the hardware with which a result was made."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections import Counter
from pathlib import Path

import jax

CPUINFO = Path("/proc/cpuinfo")
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
# Widest first: XLA compiles for a CPU's widest, and the width changes how sums round.
VECTORS = ("avx512f", "avx2", "avx", "asimd")


def describe_environment() -> dict[str, str]:
    """Returns the versions of Python and of the libraries, and the hardware, by name."""
    devices = Counter(device.device_kind for device in jax.devices())
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in LIBRARIES},
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "processor": _processor(),
        "devices": ", ".join(f"{count} x {kind}" for kind, count in devices.items()),
    }


def _processor() -> str:
    """Returns the processor's name and its widest vectors, as far as the system says."""
    try:
        told = CPUINFO.read_text()
    except OSError:
        return platform.processor() or "unknown"
    facts = dict(re.findall(r"^([^\t:]+?)\s*:[ \t]*(.+)$", told, re.MULTILINE))
    name = facts.get("model name") or facts.get("CPU part") or platform.processor() or "unknown"
    family = [f"{key} {facts[key]}" for key in ("cpu family", "model") if key in facts]
    has = {*facts.get("flags", "").split(), *facts.get("Features", "").split()}
    widest = [one for one in VECTORS if one in has][:1]
    return ", ".join([name, *family, *widest])
