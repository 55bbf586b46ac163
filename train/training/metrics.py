"""The metrics of a training run, for people and for programs.

``metrics.jsonl`` holds one JSON object per line, TensorBoard the same numbers, and a terminal a
progress bar. The files are appended to; a resumed run first cuts lines past its checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import tensorboardX
import tqdm

from train.files import json_object, write_atomically

BAR = (
    "{desc}: {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}, {remaining} left{postfix}]"
)
SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """A progress bar on a terminal; elsewhere a plain line every ten seconds."""

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        label: str = "",
        row: int = 0,
        file: TextIO | None = None,
    ):
        """
        Args:
          total: steps of the whole run.
          start: steps taken before.
          label: what is going on.
          row: line of the terminal below the cursor, for several bars at once.
          file: where to; None: standard error.
        """
        self._file = file or sys.stderr
        self._label, self._total = label, total
        self._last_line = time.monotonic()
        self._bar = tqdm.tqdm(
            total=total,
            initial=start,
            desc=label,
            position=row,
            file=self._file,
            dynamic_ncols=True,
            disable=not self._file.isatty(),
            bar_format=BAR,
        )

    def update(self, step: int, values: str) -> None:
        """Shows that ``step`` steps are done, with a few words on how it goes."""
        if not self._bar.disable:
            self._bar.set_postfix_str(values, refresh=False)
            self._bar.update(step - self._bar.n)
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            line = f"{self._label}: {step}/{self._total} {values}".rstrip()
            print(line, file=self._file, flush=True)

    def close(self) -> None:
        """Leaves the bar as it is and moves the cursor past it."""
        self._bar.close()

    @staticmethod
    @contextlib.contextmanager
    def of(label: str) -> Iterator[Callable[[int, int], None]]:
        """Yields a function to call with the numbers of items done and of all items."""
        progress: Progress | None = None

        def update(done: int, total: int) -> None:
            nonlocal progress
            progress = progress or Progress(total, label=label)
            progress.update(done, "")

        try:
            yield update
        finally:
            if progress is not None:
                progress.close()


class NonFiniteError(Exception):
    """Raised if a number that must be finite is not."""

    def __init__(self, step: int, what: str, how: str = "is not finite"):
        super().__init__(f"{what} {how} at step {step}")


class Work(NamedTuple):
    """The work of a training step, and the peak rate of the devices.

    Attributes:
      tokens: of a batch: its size times the length of its sequences.
      operations: needed by a step's mathematics (:func:`train.training.flops.step_flops`).
      peak: most operations per second of all devices together; None: unknown.
    """

    tokens: int
    operations: float = 0.0
    peak: float | None = None

    def rates(self, steps_per_second: float) -> dict[str, float]:
        """Speed in tokens per second, and as a share of the peak."""
        rates = {"tokens_per_second": steps_per_second * self.tokens}
        if self.peak:
            rates["model_flop_utilisation"] = steps_per_second * self.operations / self.peak
        return rates


def memory_in_use() -> dict[str, float]:
    """Returns the first device's peak memory in use, if it reports that."""
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return {} if peak is None else {"peak_memory_gb": peak / 1e9}


class ProfilerTrace:
    """Writes a trace of some steps, for TensorBoard's profiler or Perfetto."""

    def __init__(self, folder: Path, steps: range | None):
        """
        Args:
          folder: where it goes.
          steps: which steps; None: none.
        """
        self._folder, self._steps, self._running = folder, steps or range(0), False

    def __enter__(self) -> ProfilerTrace:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def before(self, step: int, state: Any) -> None:
        """Starts or stops the trace; called before each step, with the previous step's state."""
        inside = step in self._steps
        if inside != self._running:
            jax.block_until_ready(state)
            if inside:
                jax.profiler.start_trace(str(self._folder))
                self._running = True
            else:
                self._stop()

    def _stop(self) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = False


@dataclasses.dataclass
class Sums:
    """The running sums behind the next line of metrics; a checkpoint holds them.

    Attributes:
      since: step of the previous line; None: the step that training continues from.
      steps: number of steps since then that were not skipped.
      skipped: number of skipped steps since then.
      in_a_row: number of the last consecutive steps that were skipped.
      totals: sums of the numbers of ``steps``, by name.
    """

    since: int | None = None
    steps: int = 0
    skipped: int = 0
    in_a_row: int = 0
    totals: dict[str, float] = dataclasses.field(default_factory=dict)

    def means(self) -> dict[str, float]:
        """Returns the means that a line written now would have."""
        means = {name: total / self.steps for name, total in self.totals.items()}
        if self.skipped or "skipped" in means:
            means["skipped"] = float(self.skipped)
        return means

    def start_anew(self, step: int) -> None:
        """Starts the sums anew after the line of a step."""
        self.since, self.steps, self.skipped, self.totals = step, 0, 0, {}

    def get_state(self) -> dict[str, Any]:
        """Returns the sums in JSON types."""
        return dataclasses.asdict(self)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes what :meth:`get_state` gave."""
        for name, value in state.items():
            setattr(self, name, value)


class Metrics:
    """Writes means over ``log_every`` steps to all outputs; shows progress at every step.

    The numbers of a step are fetched from the device when the next step's are recorded, so that
    nothing waits for the step that has just been dispatched.

    Attributes:
      last: the means of the last line.
    """

    def __init__(
        self,
        folder: Path,
        total: int,
        start: int,
        work: Work,
        log_every: int,
        *,
        sums: Sums | None = None,
        write: bool = True,
        patience: int = 0,
    ):
        """
        Args:
          folder: the run's.
          total: steps of the whole run.
          start: steps taken before; entries for later ones are removed from the files.
          work: of a step.
          log_every: steps between two lines.
          sums: of the checkpoint that training continues from; None: there are none.
          write: whether anything is written and shown; if not, numbers are only checked.
          patience: how many steps in a row may be skipped.
        """
        self._total, self._work, self._log_every = total, work, log_every
        self._sums = sums = Sums() if sums is None else sums
        if sums.since is None:
            sums.since = start
        # A line that was due only because training ended is not due when it continues.
        kept = start if start == total else sums.since
        self._outputs = _Outputs(folder, total, start, kept) if write else None
        self._pending: tuple[int, Mapping[str, jax.Array]] | None = None
        self._timed = 0
        self._patience = patience
        self._clock: float | None = None
        self._rates: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        if self._outputs:
            self._outputs.close()

    def record(self, step: int, values: Mapping[str, jax.Array]) -> None:
        """Takes one step's numbers, still on the device, and processes the previous ones.

        Raises:
          NonFiniteError: if one of the previous numbers is not finite.
        """
        self.flush()
        self._pending = step, values

    def flush(self) -> None:
        """Processes the numbers recorded last; writes a line when one is due.

        Raises:
          NonFiniteError: if one of them is not finite.
        """
        if self._pending is None:
            return
        step, values = self._pending
        self._pending = None
        values = jax.device_get(values)
        if values.get("skipped", False):
            self._skip(step)
        else:
            self._add(step, values)
        self._timed += self._clock is not None
        if self._clock is None:  # The first step is mostly compilation, not a measure of speed.
            self._clock = time.monotonic()
        if step % self._log_every == 0 or step == self._total:
            self._write(step)
        elif self._outputs:
            self._outputs.show(step, self._sums.means() | self._rates)

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if not math.isfinite(value):
                raise NonFiniteError(step, f"the {name.replace('_', ' ')}")
            self._sums.totals[name] = self._sums.totals.get(name, 0.0) + float(value)
        self._sums.steps += 1
        self._sums.in_a_row = 0

    def _skip(self, step: int) -> None:
        self._sums.skipped += 1
        self._sums.in_a_row += 1
        if self._sums.in_a_row > self._patience:
            raise NonFiniteError(
                step,
                f"the loss or its gradient, for the {self._sums.in_a_row}th step in a row,",
                "is not finite or far larger than usual",
            )

    def _write(self, step: int) -> None:
        assert self._clock is not None
        now = time.monotonic()
        if self._timed and now > self._clock:
            self._rates = self._work.rates(self._timed / (now - self._clock))
        self.last = self._sums.means() | (self._rates if self._timed else {})
        if self._outputs:
            self._outputs.write(step, self.last | memory_in_use())
        if step % self._log_every == 0:
            self._sums.start_anew(step)
        self._timed, self._clock = 0, now


class _Outputs:
    """The file, TensorBoard and the terminal."""

    def __init__(self, folder: Path, total: int, start: int, kept: int):
        path = folder / "metrics.jsonl"
        cut(path, kept)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._board = tensorboardX.SummaryWriter(str(folder / "tensorboard"), purge_step=kept + 1)
        self._progress = Progress(total, start=start, label=folder.name)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        self.show(step, values)

    def show(self, step: int, values: Mapping[str, float]) -> None:
        self._progress.update(step, describe(values))

    def close(self) -> None:
        self._progress.close()
        # Every line is already written; an error here would hide an earlier one.
        for output in (self._file, self._board):
            with contextlib.suppress(OSError):
                output.close()


def describe(values: Mapping[str, float]) -> str:
    """Describes loss and speed in a few words."""
    words = [f"loss {values['loss']:.4f}"] if "loss" in values else []
    if "balance_loss" in values:
        words.append(f"balance {values['balance_loss']:.3f}")
    if values.get("skipped"):
        words.append(f"{values['skipped']:.0f} steps skipped")
    if "tokens_per_second" in values:
        words.append(f"{values['tokens_per_second']:,.0f} tokens/s")
    return ", ".join(words)


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a ``metrics.jsonl``, without an unfinished last one.

    Raises:
      ValueError: naming the file and the line, if one is damaged.
    """
    found = []
    for number, line in enumerate(_whole_lines(path), start=1):
        values = json_object(line)
        if values is None:
            raise ValueError(
                f"{path}, line {number} is damaged: expected a JSON object; got {line[:40]!r}"
            )
        found.append(values)
    return found


def cut(path: Path, step: int) -> None:
    """Removes the lines past ``step``, damaged ones and an unfinished one, all at once."""
    if not path.exists():
        return
    lines = [
        line
        for line in _whole_lines(path)
        if (json_object(line) or {}).get("step", math.inf) <= step
    ]
    write_atomically(path, b"".join(line + b"\n" for line in lines))


def _whole_lines(path: Path) -> list[bytes]:
    """Reads a file's complete lines, without line ends; none if it does not exist."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


# Jax's events for a program that is traced, lowered and compiled, or loaded from cache.
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


def compiling_seconds() -> float:
    """Returns the seconds of tracing, lowering and compiling so far; nested traces count twice."""
    return _compiling


class Clock:
    """Divides the time since its creation, or an earlier moment, among activities.

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
        """Counts the time since the last lap, except compilation, as spent on ``what``."""
        now = time.monotonic()
        # Programs that are traced inside others are counted twice.
        compiling = min(_compiling - self._compiling, now - self._last)
        for name, seconds in ((what, now - self._last - compiling), ("to compile", compiling)):
            self._parts[name] = self._parts.get(name, 0.0) + seconds
        self._last, self._compiling = now, _compiling

    def __str__(self) -> str:
        # Activities that took no time are left out.
        parts = [f"{spoken(x)} {name}" for name, x in self._parts.items() if x >= 0.05]
        return f"{spoken(self._last - self._begun)}: {', '.join(parts)}"


def spoken(seconds: float) -> str:
    """Formats a time.

    >>> spoken(3.21), spoken(75), spoken(7380)
    ('3.2 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
