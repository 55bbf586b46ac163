"""Checks candidates against the reference, and times those that agree."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.attention.api import attention
from tape_jax._src.attention.tuning.cases import CallShape, Contender, Measured
from tape_jax._src.attention.tuning.programs import (
    DIRECTIONS,
    FORWARD,
    GRADIENTS,
    Program,
    compiled,
)
from tape_jax._src.attention.tuning.programs import temporary as temporary_memory
from tape_jax._src.core.timing import Timing, take_turns

Array = jax.Array
Attend = Callable[..., Any]

# What is checked has at most so many logits, in at most two sequences of two key/value heads: the
# reference keeps all of them.
MOST_LOGITS = {"cpu": 2**23}
MOST_LOGITS_ELSEWHERE = 2**26
# The largest error, of a row relative to its length and that of the others; or this many times the
# error that the reference has in the type of the call.
TOLERANCE = {"float32": 1e-4, "float64": 1e-4}
TOLERANCE_IN_16_BITS = 2e-2
TIMES_REFERENCE = 4.0
# Why a candidate was left out for which there was no time.
LATE = "not measured: no time left"
# Where a call takes so many seconds, so many runs do, and what takes so many times as long as the
# fastest of those before it is not timed.
SLOW, SLOW_REPEATS, FAR = 0.3, (1, 3), 4.0


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much is spent on a case.

    Attributes:
      repeats: timed runs of each candidate in the first round, and in the second.
      least: seconds that a timed run lasts at least; None: by platform.
      seconds: the most that a call may take, forward and backward, to be timed.
      memory: temporary memory in bytes that a call may need.
      deadline: of ``time.monotonic``; candidates that come later are left out.
    """

    repeats: tuple[int, int] = (3, 7)
    least: float | None = None
    seconds: float = 3.0
    memory: float = 4 * 2.0**30
    deadline: float = math.inf

    def shortest(self) -> float:
        """Seconds that a timed run lasts at least."""
        if self.least is not None:
            return self.least
        return 0.002 if jax.default_backend() == "cpu" else 0.02


def measure(
    shape: CallShape,
    found: Sequence[Contender],
    call: Callable[[Contender], Attend],
    *,
    default: Contender | None = None,
    limits: Limits | None = None,
    timer: Callable[..., Mapping[str, Timing]] = take_turns,
) -> list[Measured]:
    """Checks all candidates at a shape, and times those that agree with the reference.

    They run in turns, few times; the fastest, and ``default``, once more and more often, so that
    what wins does not win by luck.

    Args:
      shape: of the call.
      found: the candidates.
      call: the function of q, k, v and perhaps e that a candidate is.
      default: the candidate that the others are to beat.
      limits: how much may be spent.
      timer: measures functions by name, as :func:`tape_jax._src.core.timing.take_turns` does.
    """
    limits = limits or Limits()
    checked = check_shape(shape)
    inputs = checked.arrays()
    wanted = _Truth(inputs)
    results: dict[str, Measured] = {}
    programs: dict[str, dict[str, Program]] = {}
    took: dict[str, float] = {}
    if checked != shape:
        inputs = shape.arrays()
    for one in found:
        struck = error = None
        wrong = False
        if time.monotonic() > limits.deadline:
            struck = LATE
        else:
            try:
                both = compiled(call(one), wanted.inputs, GRADIENTS)
                error = wanted.error(both)
                if error <= wanted.tolerance:
                    if checked != shape:
                        both = compiled(call(one), inputs, GRADIENTS)
                    own = {FORWARD: compiled(call(one), inputs, FORWARD), GRADIENTS: both}
                    fastest = min(took.values(), default=math.inf)
                    took[str(one)] = _run_once(own, limits, math.inf if one == default else fastest)
                    programs[str(one)] = own
                else:
                    wrong = True
                    struck = f"disagrees with the reference: error {error:.1e}, allowed "
                    struck += f"{wanted.tolerance:.1e}"
            except Exception as reason:  # Whatever a compiler or a library may raise.
                struck = _first_line(reason)
        results[str(one)] = Measured(one, error=error, struck=struck, wrong=wrong)

    def timed(names: Sequence[str], repeats: int) -> None:
        found: dict[str, dict[str, Timing]] = {name: {} for name in names}
        for direction in DIRECTIONS:
            calls = {name: _bound(*programs[name][direction]) for name in names}
            timings = timer(
                calls, repeats=repeats, warm_up=1, least=limits.shortest(), before=hand_back_memory
            )
            for name, timing in timings.items():
                found[name][direction] = timing
        for name, got in found.items():
            forward, gradients = (got[direction] for direction in DIRECTIONS)
            results[name] = dataclasses.replace(
                results[name],
                forward=forward.median,
                gradients=gradients.median,
                spreads=(forward.spread, gradients.spread),
            )

    slow = max(took.values(), default=0.0) >= SLOW
    first, second = SLOW_REPEATS if slow else limits.repeats
    timed(list(programs), first)
    if time.monotonic() < limits.deadline:
        timed(_finalists(results, default), second)
    return list(results.values())


def check_shape(shape: CallShape) -> CallShape:
    """The shape at which a candidate is compared with the reference: as large as memory allows."""
    most = MOST_LOGITS.get(jax.default_backend(), MOST_LOGITS_ELSEWHERE)
    kv_heads = min(2, shape.kv_heads)
    small = dataclasses.replace(
        shape,
        batch=min(2, shape.batch),
        heads=kv_heads * (shape.heads // shape.kv_heads),
        kv_heads=kv_heads,
    )
    return dataclasses.replace(small, length=min(shape.length, math.isqrt(most // small.rows)))


class _Truth:
    """What the reference says of a call, with products in full precision.

    Attributes:
      inputs: of the call.
      tolerance: the largest error that is allowed.
    """

    def __init__(self, inputs: Sequence[Array]):
        self.inputs = inputs
        wide = tuple(x.astype(jnp.float32) for x in inputs)

        def reference(q: Array, k: Array, v: Array, e: Array | None = None) -> Any:
            return attention(q, k, v, state=e, is_causal=True, implementation="reference")

        with jax.default_matmul_precision("highest"):
            self._wanted = _run(compiled(reference, wide, GRADIENTS))
        floor = TOLERANCE.get(inputs[0].dtype.name, TOLERANCE_IN_16_BITS)
        own = self.error(compiled(reference, inputs, GRADIENTS))
        self.tolerance = max(floor, TIMES_REFERENCE * own)

    def error(self, program: Program) -> float:
        """The largest error of outputs and gradients."""
        pairs = zip(_run(program), self._wanted, strict=True)
        return max(row_error(x, y) for x, y in pairs)


def _run(program: Program) -> list[np.ndarray]:
    """Outputs in float32."""
    function, args = program
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(function(*args))]


def row_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest distance of two rows, relative to the wanted row and to the usual one."""
    size = np.linalg.norm(wanted, axis=-1)
    error = np.linalg.norm(got - wanted, axis=-1) / (size + np.sqrt(np.mean(size**2)) + 1e-30)
    worst = float(error.max())
    return worst if math.isfinite(worst) else math.inf


def _run_once(programs: dict[str, Program], limits: Limits, fastest: float) -> float:
    """The seconds that a candidate takes with gradients.

    Raises:
      RuntimeError: if it takes too much memory or time, or far more time than the fastest.
    """
    if (need := temporary_memory(programs)) > limits.memory:
        raise RuntimeError(f"needs {need / 2**30:.1f} GiB, limit {limits.memory / 2**30:g} GiB")
    program, args = programs[GRADIENTS]
    start = time.perf_counter()
    jax.block_until_ready(program(*args))
    if (took := time.perf_counter() - start) > limits.seconds:
        raise RuntimeError(f"takes {took:.1f} s a call, limit {limits.seconds:g} s")
    if took > SLOW and took > FAR * fastest:
        raise RuntimeError(f"takes {took:.1f} s a call, {took / fastest:.1f} x another")
    return took


def hand_back_memory() -> None:
    """Lets glibc return freed memory to the kernel; elsewhere it does nothing.

    A program that needs much of it for a short time is fast or slow on a CPU by what ran before:
    all of them are timed as where nothing is left over.
    """
    if jax.default_backend() == "cpu" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _finalists(results: Mapping[str, Measured], default: Contender | None) -> list[str]:
    """The four fastest, if within a quarter of the best, and the default."""
    ranked = sorted((x for x in results.values() if x.timed), key=lambda x: x.score)
    close = [x for x in ranked[:4] if x.score <= 1.25 * ranked[0].score]
    names = [str(x.contender) for x in close]
    if default is not None and default not in [x.contender for x in close]:
        names += [str(x.contender) for x in ranked if x.contender == default]
    return names


def _bound(program: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: program(*args)


def _first_line(error: Exception) -> str:
    kind = "" if isinstance(error, NotImplementedError) else f"{type(error).__name__}: "
    return kind + next(iter(str(error).splitlines()), "")[:200]
