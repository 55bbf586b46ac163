"""What a Hopper GPU takes where it has measured nothing: kernels, by the times of an H200.

They were compared with the reference and timed there, in causal calls with as many keys as queries,
from 1,024 tokens on (benchmarks/results/2026-11-26-nvidia-h200.md). Shorter calls down to 256
tokens, and others whose keys are not far more than their queries, go by the same.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re

from tape_jax._src.attention.request import Request
from tape_jax._src.attention.tuning.cases import CallShape
from tape_jax._src.core.devices import compute_capability

BASIS = "times of an H200; nothing was measured here (python -m tape_jax.tune does)"
# Fastest first: without a state to attend or with wider heads, and with a state.
ORDER = ("cudnn", "tokamax_mosaic", "pallas")
ORDER_WITH_STATE, WIDEST_WITH_STATE = ("tokamax_mosaic", "cudnn", "pallas"), 64
SHORTEST = 256
TOKAMAX = (0, 0, 17)


def order(request: Request) -> list[str]:
    """Kernels to try for a call, fastest first; none where they were not timed for its like."""
    capability = compute_capability()
    if capability is None or capability[0] != 9 or request.compute_dtype.itemsize != 2:
        return []
    shape = CallShape.of(request)
    if shape is None or shape.length < SHORTEST:
        return []
    narrow = shape.state and shape.head_dim <= WIDEST_WITH_STATE
    names = ORDER_WITH_STATE if narrow else ORDER
    new = release("tokamax") >= TOKAMAX
    return [name for name in names if new or name != "tokamax_mosaic"]


@functools.cache
def release(package: str) -> tuple[int, ...]:
    """The release of an installed package; empty if it is not installed."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
