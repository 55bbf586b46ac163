"""Times functions in turns.

Only ratios within one run mean anything: functions take turns, so that other load on the machine
affects all of them alike.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of repeated runs, in the order in which they were made."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median

    def ratio(self, other: Timing) -> float:
        """Median of the ratios to ``other``, run by run."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    def __str__(self) -> str:
        return f"{1e3 * self.median:.1f} ms (+- {100 * self.spread:.0f} %)"


def take_turns(
    functions: Mapping[str, Callable[[], Any]],
    *,
    repeats: int = 10,
    warm_up: int = 1,
    least: float = 0.0,
    before: Callable[[], Any] = lambda: None,
) -> dict[str, Timing]:
    """Runs the functions in turns and waits for each result.

    Args:
      functions: by name, each returning a pytree of arrays.
      repeats: timed runs of each.
      warm_up: runs of each before those, which include compiling.
      least: minimum seconds of a timed run. A faster function is called several
        times and waited for once, so that an accelerator never waits for the host; the time of one
        call is recorded.
      before: called before each run, not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    calls = dict.fromkeys(functions, 1)
    for turn in range(warm_up + repeats):
        for name, function in functions.items():
            before()
            start = time.perf_counter()
            for _ in range(calls[name]):
                out = function()
            jax.block_until_ready(out)
            took = (time.perf_counter() - start) / calls[name]
            if turn >= warm_up:
                seconds[name].append(took)
            elif turn == warm_up - 1:
                calls[name] = max(1, math.ceil(least / took))
    return {name: Timing(tuple(s)) for name, s in seconds.items()}


def describe_device() -> str:
    """Returns the device and versions that measurements depend on."""
    device = jax.devices()[0]
    return f"{device.device_kind} ({device.platform}), jax {jax.__version__}"
