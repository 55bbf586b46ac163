"""Runs that are alike, and the moments at which they are killed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.faults.folder import describe, is_there, is_unsealed, is_writing, restored, saved
from tests.faults.process import ROOT, Lost, Process, wait_until
from train.training import metrics

CONFIG = ROOT / "configs/addition_demo.py"
STEPS = 120
OPTIONS = {
    "task.max_digits": 2,
    "model.hidden_size": 16,
    "model.intermediate_size": 16,
    "model.num_layers": 2,
    "train.steps": STEPS,
    "train.batch_size": 8,
    "train.save_every": 2,
    "train.log_every": 1,
}


@dataclasses.dataclass
class Outcome:
    """What became of one kind of fault.

    Attributes:
      fault: its name.
      tried: number of trials.
      lost: why, for each trial that was not survived.
      note: what else there is to say.
    """

    fault: str
    tried: int = 0
    lost: list[str] = dataclasses.field(default_factory=list)
    note: str = ""


class Bench:
    """A folder for runs, and a way to start runs that are alike.

    Attributes:
      folder: for all runs.
      random: decides when and what to break.
      kills: how often to kill.
    """

    def __init__(self, folder: Path, kills: int, seed: int = 0):
        self.folder = folder
        self.kills = kills
        self.random = random.Random(seed)
        self._numbers = itertools.count()

    @functools.cached_property
    def undisturbed(self) -> Path:
        """The run on one device to which nothing happens."""
        self.run("undisturbed")
        return self.folder / "undisturbed"

    def command(self, run: Path, *options: str) -> list[str]:
        """Starts a run, or continues it. Of an option given twice the last counts."""
        config = [f"--config.{name}={value}" for name, value in OPTIONS.items()]
        start = [sys.executable, "-m", "train.main", "train", "--resume", f"--run={run}"]
        return [*start, f"--config={CONFIG}", *config, *options]

    def start(self, command: Sequence[str], devices: int = 1) -> Process:
        """A process with so many simulated devices."""
        return Process(
            command,
            self.folder / f"output_{next(self._numbers)}.txt",
            JAX_PLATFORMS="cpu",
            JAX_COMPILATION_CACHE_DIR=str(self.folder / "compiled"),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}",
        )

    def run(self, name: str, *options: str, devices: int = 1, expected: int = 0) -> str:
        """Starts or continues the run ``name``, to its end; returns what it has printed."""
        command = self.command(self.folder / name, *options)
        return self.start(command, devices).finish(expected)

    def compare(self, run: Path, other: Path | None = None, tolerance: float = 0) -> float:
        """How far a finished run is from one that nobody disturbed.

        Args:
          run: the run.
          other: that which nobody disturbed; None: that on one device.
          tolerance: what is allowed; 0: nothing.

        Returns:
          The largest :func:`difference` of parameters and of losses.

        Raises:
          Lost: if it is larger than the tolerance, or if other steps were done or skipped.
        """
        ours, theirs = map(recorded, (run, other or self.undisturbed))
        if ours["losses"].keys() != theirs["losses"].keys():
            raise Lost("other steps were skipped")
        apart = jax.tree.map(difference, ours, theirs)
        where, largest = max(jax.tree.leaves_with_path(apart), key=lambda leaf: leaf[1])
        if largest > tolerance:
            raise Lost(f"differs by {largest:.1e} in {jax.tree_util.keystr(where)}")
        return largest

    def half_done(self, name: str) -> Path:
        """A run that was interrupted by SIGTERM after some steps, and saved."""
        run = self.folder / name
        process = self.start(self.command(run))
        wait_until(lambda: saved(run) >= STEPS // 3, process)
        process.terminate()
        process.finish(128 + signal.SIGTERM)
        return run


def recorded(run: Path) -> dict[str, Any]:
    """What is compared of a finished run: its parameters, and the losses of all steps."""
    trained = restored(run)
    if trained.step != STEPS:
        raise Lost(f"the last step is {trained.step}, not {STEPS}")
    lines = metrics.read(run / "metrics.jsonl")
    if [line["step"] for line in lines] != list(range(1, STEPS + 1)):
        raise Lost("metrics.jsonl does not have each step once")
    losses = {line["step"]: line["loss"] for line in lines if not line.get("skipped")}
    return {"parameters": trained.variables["params"], "losses": losses}


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference of two arrays, relative to the largest number of the second."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    apart = np.abs(ours - theirs).max()
    return float(apart / (np.abs(theirs).max() or 1)) if np.isfinite(apart) else math.inf


@contextlib.contextmanager
def trial(outcome: Outcome, count: bool = True) -> Iterator[None]:
    """One trial; what goes wrong in it is noted and does not end the others."""
    outcome.tried += count
    try:
        yield
    except (Lost, ValueError) as error:
        outcome.lost.append(str(error))


def lie_in_wait(bench: Bench, run: Path, process: Process, steps: int) -> None:
    """Waits for a random moment: in one of the next steps, maybe while a checkpoint is written."""
    moment = bench.random.choice((is_writing, is_unsealed, is_there))
    # Not the first such moment, lest the run never gets on; and not too late.
    after, late = saved(run) + bench.random.randint(1, steps), STEPS - 20

    def has_come() -> bool:
        now = saved(run)
        return now >= after and (moment(run) or now >= late)

    wait_until(has_come, process)
    if moment is is_there:
        time.sleep(bench.random.uniform(0, 0.1))


def kill(process: Process, run: Path, found: collections.Counter[str]) -> bool:
    """SIGKILL, if the process is still there; counts what the kill left behind."""
    if process.poll() is not None:
        process.finish()
        return False
    process.destroy()
    found[describe(run)] += 1
    return True


def summary(found: collections.Counter[str]) -> str:
    """What kills have left behind, and how often."""
    return ", ".join(f"{count} {what}" for what, count in found.most_common())
