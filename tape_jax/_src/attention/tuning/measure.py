"""Checks implementations against the reference, and times those that agree."""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import itertools
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.attention import choice
from tape_jax._src.attention.api import attention
from tape_jax._src.attention.normalize import normalize
from tape_jax._src.attention.tuning import records
from tape_jax._src.attention.tuning.records import LATE, CallShape, Measured, Table, finished
from tape_jax._src.core.timing import Timing, take_turns

Array = jax.Array
Attend = Callable[..., Any]
Program = tuple[jax.stages.Compiled, tuple[Any, ...]]

FORWARD, GRADIENTS = DIRECTIONS = ("forward", "forward and backward")
# Shapes measured by default, by platform; tokens are those of a batch of several heads. A chip is
# filled as in training. A CPU meets both small models and single sequences, whose best choices
# differ; it has no 16-bit arithmetic, and takes long.
ACCELERATOR: Mapping[str, Any] = {
    "head_dims": (64, 128),
    "lengths": (256, 512, 1024, 2048, 4096, 8192, 16_384),
    "dtypes": ("bfloat16", "float32"),
    "heads": (12,),
    "tokens": 16_384,
}
CPU: Mapping[str, Any] = {
    "head_dims": (64,),
    "lengths": (128, 256, 512, 1024, 2048),
    "dtypes": ("float32",),
    "heads": (1, 8),
    "tokens": 2048,
}
# The largest error of a row, relative to its norm and that of the others; or ``TIMES_REFERENCE``
# times the reference's own error in the type of the call.
TOLERANCE, TOLERANCE_IN_16_BITS = 1e-4, 2e-2
TIMES_REFERENCE = 4.0
# Timed runs of each; the least seconds of a run.
REPEATS = 7
LEAST = {"cpu": 0.002}
LEAST_ELSEWHERE = 0.02


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on the time and the memory that measuring a case may take.

    Attributes:
      seconds: the most that a call may take, forward and backward, to be timed.
      memory: the most temporary memory in bytes that a call may need.
      deadline: by ``time.monotonic``; implementations that come later are left out.
    """

    seconds: float = 3.0
    memory: float = 4 * 2.0**30
    deadline: float = math.inf


def shapes(
    head_dims: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    *,
    heads: Sequence[int] | None = None,
    tokens: int | None = None,
) -> list[CallShape]:
    """Returns the shapes to measure, most used and quickest first; None chooses by platform.

    Args:
      head_dims, lengths, dtypes: of the calls.
      heads: several numbers of heads. One head stands for one sequence.
      tokens: number in a batch.
    """
    cpu = jax.default_backend() == "cpu"
    usual = CPU if cpu else ACCELERATOR
    # On a CPU, float32 is used most.
    types = sorted(
        dtypes or usual["dtypes"], key=lambda name: (jnp.dtype(name).itemsize < 4) == cpu
    )
    tokens = tokens or usual["tokens"]
    every = itertools.product(
        types,
        sorted(lengths or usual["lengths"]),
        head_dims or usual["head_dims"],
        heads or usual["heads"],
        (True, False),
    )
    return [
        CallShape(dim, length, dtype, state, batch, count, count)
        for dtype, length, dim, count, state in every
        for batch in (1 if count == 1 else max(1, tokens // length),)
    ]


class Trials(NamedTuple):
    """The implementations that could do a call.

    Attributes:
      names: of implementations to be measured, the default first.
      refused: why others cannot do it, by name.
      default: the implementation taken if nothing was measured.
    """

    names: list[str]
    refused: dict[str, str]
    default: str


def trials(shape: CallShape) -> Trials:
    """Return the implementations that could do a call of a shape on one device."""
    found: list[Trials] = []

    def decide(q: Array, k: Array, v: Array, e: Array | None = None) -> None:
        request = normalize(q, k, v, state=e, is_causal=True)
        default, refused = choice.default(request), {}
        # ``tokamax`` is the first of two others that runs here.
        names = [name for name in choice.BACKENDS if name not in ("ring", "tokamax")]
        for name in names:
            try:
                choice.check(name, request)
            except NotImplementedError as refusal:
                refused[name] = str(refusal)
        able = [name for name in names if name not in refused]
        found.append(Trials(sorted(able, key=lambda name: name != default), refused, default))

    jax.eval_shape(decide, *shape.structs())
    return found[0]


def tune(
    shapes: Sequence[CallShape],
    *,
    seconds: float,
    again: bool = False,
    limits: Limits | None = None,
    say: Callable[[str], None] = print,
    timer: Callable[..., Mapping[str, Timing]] = take_turns,
) -> Table:
    """Measures what this machine's file lacks, and writes each case as soon as it is done.

    A case that lacks an implementation is timed as a whole, in turns; what there is no time for
    keeps the outcome that the file has.

    Args:
      shapes: to measure, in this order.
      seconds: time after which nothing new is begun.
      again: whether to measure what the file has, too.
      limits: what may be spent on a case.
      say: called with a line about each case.
      timer: measures functions by name, as :func:`tape_jax._src.core.timing.take_turns` does.

    Returns:
      Everything that the file holds.
    """
    end = time.monotonic() + seconds
    limits = dataclasses.replace(limits or Limits(), deadline=end)
    table: Table = {}
    for done, shape in enumerate(shapes):
        # One case at a time, so that several processes measure in turns, not simultaneously.
        with records.locked():
            table = records.read()[0] or {}
            if shape in table and not again and finished(table[shape]):
                continue
            if time.monotonic() >= end:
                say(f"{len(shapes) - done} of {len(shapes)} cases are left: the time is over")
                break
            found = trials(shape)
            old = table.get(shape, [])
            decided = {x.implementation for x in old if not (x.timed or x.struck == LATE)}
            names = [name for name in found.names if again or name not in decided]
            results = [Measured(name, struck=why) for name, why in found.refused.items()]
            results += measure(shape, names, limits=limits, timer=timer)
            results = _merged(old, results)
            table[shape] = results
            records.write(table)
        say(f"{done + 1} of {len(shapes)}, {shape}: {describe(results, found.default)}")
    records.forget()
    return table


def _merged(old: Sequence[Measured], new: Sequence[Measured]) -> list[Measured]:
    """Returns new results, and old ones of what there was no time for.

    Times of two runs do not compare: if there was no time for one that has a time, no new time
    counts.
    """
    before, now = ({x.implementation: x for x in results} for results in (old, new))
    late = {name for name, x in now.items() if x.struck == LATE}
    if any(x.timed and x.implementation in late for x in old):
        late |= {name for name, x in now.items() if x.timed}
    unmeasured = {name: Measured(name, struck=LATE) for name in late}
    kept = {name: x for name, x in before.items() if name in late or name not in now}
    return [*(now | unmeasured | kept).values()]


def measure(
    shape: CallShape,
    names: Sequence[str],
    *,
    limits: Limits,
    timer: Callable[..., Mapping[str, Timing]] = take_turns,
) -> list[Measured]:
    """Checks implementations at a shape, and times those that agree with the reference, in turns.

    Args:
      shape: of the call.
      names: of the implementations.
      limits: how much may be spent.
      timer: as in :func:`tune`.
    """
    inputs = shape.arrays()
    truth = _Truth(inputs)
    results: dict[str, Measured] = {}
    programs: dict[str, dict[str, Program]] = {}
    pool = concurrent.futures.ThreadPoolExecutor()
    # Traced here, since threads do not see jax.enable_x64 and the like; compiled in parallel.
    compiling = {name: _start_both(pool, name, inputs) for name in names}
    for name in names:
        if time.monotonic() > limits.deadline:
            results[name] = Measured(name, struck=LATE)
            continue
        try:
            own = compiling[name].result()
            error = truth.error(_run_once(own, limits))
        except Exception as reason:  # Whatever a compiler or a library may raise.
            results[name] = Measured(name, struck=_first_line(reason))
            continue
        if error <= truth.tolerance:
            results[name], programs[name] = Measured(name, error=error), own
        else:
            why = f"disagrees with the reference: error {error:.1e}, allowed {truth.tolerance:.1e}"
            results[name] = Measured(name, error=error, struck=why, wrong=True)
    pool.shutdown(cancel_futures=True)
    least = LEAST.get(jax.default_backend(), LEAST_ELSEWHERE)
    forward, gradients = (
        timer(
            {name: _bound(*own[direction]) for name, own in programs.items()},
            repeats=REPEATS,
            warm_up=1,
            least=least,
            before=hand_back_memory,
        )
        for direction in DIRECTIONS
    )
    for name in programs:
        both = (forward[name], gradients[name])
        results[name] = dataclasses.replace(
            results[name],
            forward=both[0].median,
            gradients=both[1].median,
            spreads=(both[0].spread, both[1].spread),
        )
    return list(results.values())


class _Truth:
    """Outputs and gradients of the reference, with products in full precision.

    It is computed one block of queries at a time, so that shapes may be as large as those timed.

    Attributes:
      tolerance: the largest error that is allowed.
    """

    def __init__(self, inputs: Sequence[Array]):
        wide = tuple(x.astype(jnp.float32) for x in inputs)
        with jax.default_matmul_precision("highest"):
            program, args = compiled(caller("rows"), wide, GRADIENTS)
            self._wanted = _arrays(program(*args))
        program, args = compiled(caller("rows"), inputs, GRADIENTS)
        floor = TOLERANCE if inputs[0].dtype.itemsize > 2 else TOLERANCE_IN_16_BITS
        self.tolerance = max(floor, TIMES_REFERENCE * self.error(program(*args)))

    def error(self, found: Any) -> float:
        """Returns the largest error of outputs and gradients."""
        return max(row_error(x, y) for x, y in zip(_arrays(found), self._wanted, strict=True))


def _arrays(tree: Any) -> list[np.ndarray]:
    """Return the leaves of a tree as numpy arrays of float32."""
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]


def row_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """Returns the largest distance between two rows, relative to the wanted and the usual row."""
    size = np.linalg.norm(wanted, axis=-1)
    error = np.linalg.norm(got - wanted, axis=-1) / (size + np.sqrt(np.mean(size**2)) + 1e-30)
    worst = float(error.max())
    return worst if math.isfinite(worst) else math.inf


def caller(name: str) -> Attend:
    """Returns an implementation's causal call of q, k, v and optionally e."""

    def call(q: Array, k: Array, v: Array, e: Array | None = None) -> Any:
        return attention(q, k, v, state=e, is_causal=True, implementation=name)

    return call


def _start_both(
    pool: concurrent.futures.Executor, name: str, inputs: Sequence[Array]
) -> concurrent.futures.Future[dict[str, Program]]:
    """Starts compiling an implementation, forward, and forward and backward."""
    found: concurrent.futures.Future[dict[str, Program]]
    try:
        lowered = {direction: _lowered(caller(name), inputs, direction) for direction in DIRECTIONS}
    except Exception as reason:  # Whatever a library may raise.
        found = concurrent.futures.Future()
        found.set_exception(reason)
        return found
    return pool.submit(lambda: {n: (x.compile(), args) for n, (x, args) in lowered.items()})


def both_ways(forward: Callable[..., Any], inputs: Sequence[Array]) -> dict[str, Program]:
    """Returns both programs of :func:`compiled`."""
    return {direction: compiled(forward, inputs, direction) for direction in DIRECTIONS}


def compiled(forward: Callable[..., Any], inputs: Sequence[Array], direction: str) -> Program:
    """Compiles the forward pass, or forward and backward; returns it with its arguments.

    Gradients are of all inputs, for random gradients of the outputs.
    """
    lowered, args = _lowered(forward, inputs, direction)
    return lowered.compile(), args


def _lowered(
    forward: Callable[..., Any], inputs: Sequence[Array], direction: str
) -> tuple[jax.stages.Lowered, tuple[Any, ...]]:
    if direction == FORWARD:
        return jax.jit(forward).lower(*inputs), tuple(inputs)
    outputs = jax.eval_shape(forward, *inputs)
    rng = np.random.default_rng(1)
    given = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), outputs)

    def both(given, *inputs):
        out, pull = jax.vjp(forward, *inputs)
        return out, pull(given)

    return jax.jit(both).lower(given, *inputs), (given, *inputs)


def _run_once(programs: dict[str, Program], limits: Limits) -> Any:
    """Returns outputs and gradients of a candidate.

    Raises:
      RuntimeError: if it takes too much memory or time.
    """
    plans = [program.memory_analysis() for program, _ in programs.values()]
    need = max(plan.temp_size_in_bytes if plan is not None else 0 for plan in plans)
    if need > limits.memory:
        raise RuntimeError(f"needs {need / 2**30:.1f} GiB, limit {limits.memory / 2**30:g} GiB")
    program, args = programs[GRADIENTS]
    start = time.perf_counter()
    out = jax.block_until_ready(program(*args))
    if (took := time.perf_counter() - start) > limits.seconds:
        raise RuntimeError(f"takes {took:.1f} s a call, limit {limits.seconds:g} s")
    return out


def hand_back_memory() -> None:
    """Lets glibc return freed memory to the kernel; elsewhere it does nothing.

    On a CPU, the speed of a program that briefly needs much memory depends on what ran before. So
    all programs are timed with nothing left over.
    """
    if jax.default_backend() == "cpu" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _bound(program: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: program(*args)


def _first_line(error: Exception) -> str:
    kind = "" if isinstance(error, NotImplementedError) else f"{type(error).__name__}: "
    return kind + next(iter(str(error).splitlines()), "")[:200]


def describe(results: Sequence[Measured], default: str) -> str:
    """Return a line about a case: the implementation taken, and those struck off."""
    ranked = records.ranked(results, default)
    if not ranked:
        return "nothing was measured"
    best = ranked[0]
    base = next((x for x in ranked if x.implementation == default), best)
    text = (
        f"{best.implementation}, {1e3 * best.forward:.3g} ms forward, "
        f"{1e3 * best.gradients:.3g} ms with gradients"
    )
    if best is not base:
        text += f": {best.forward / base.forward:.2f} and "
        text += f"{best.gradients / base.gradients:.2f} x {default}"
    wrong = [x.implementation for x in results if x.wrong]
    return text + (f"; struck off: {', '.join(wrong)}" if wrong else "")
