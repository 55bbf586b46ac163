"""How long what took."""

from __future__ import annotations

import time

import jax

# What jax reports of a program that is traced, lowered and compiled, or taken from its cache.
COMPILATION = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
_compiling = 0.0


def _count(event: str, duration_secs: float, **_: str | int) -> None:
    global _compiling
    if event in COMPILATION:
        _compiling += duration_secs


jax.monitoring.register_event_duration_secs_listener(_count)


class Clock:
    """Divides the time since it was made, or since an earlier moment, among what it was spent on.

    >>> clock = Clock(time.monotonic() - 2.0)
    >>> clock.lap("to start")
    >>> print(clock)
    2.0 s: 2.0 s to start
    """

    def __init__(self, begun: float | None = None):
        """
        Args:
          begun: when the time began, of ``time.monotonic()``; None: now.
        """
        self._begun = self._last = time.monotonic() if begun is None else begun
        self._compiling = _compiling
        self._parts: dict[str, float] = {}

    def lap(self, what: str) -> None:
        """The time since the last lap was spent on this, but for compilation."""
        now = time.monotonic()
        # Programs that are traced inside others are counted twice.
        compiling = min(_compiling - self._compiling, now - self._last)
        for name, seconds in ((what, now - self._last - compiling), ("to compile", compiling)):
            self._parts[name] = self._parts.get(name, 0.0) + seconds
        self._last, self._compiling = now, _compiling

    def __str__(self) -> str:
        # What took no time is not worth a word.
        parts = [f"{spoken(x)} {name}" for name, x in self._parts.items() if x >= 0.05]
        return f"{spoken(self._last - self._begun)}: {', '.join(parts)}"


def spoken(seconds: float) -> str:
    """A time in words.

    >>> spoken(3.21), spoken(75), spoken(7380)
    ('3.2 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
