"""Breaks training on purpose, and sees whether anything is lost.

    python -m tests.faults [--kills 50] [--only NAME ...] [--keep FOLDER]

Every trial runs the real command line in processes of its own and starts it again by the same
command, as a scheduler would. A trial is survived if in the end the parameters, and the losses of
all steps, are bit for bit those of a run that nobody disturbed. The exit code is 1 if one is lost.

  kill        SIGKILL at random moments
  terminate   SIGTERM: saves and leaves in time
  full-disk   no room for a checkpoint
  read-only   a run folder that cannot be written
  damage      a checkpoint with flipped bits, or with truncated or missing files
  devices     SIGKILL, then continued on another number of simulated devices; survived if no step is
              lost or repeated, and parameters and losses are those of a run on one mesh to 1e-5
              (devices sum in another order, so that bits differ)
  processes   SIGKILL to one of two processes: the other must end by itself, with exit code 4 and a
              message; both continue when they are started again
  non-finite  batches with a loss that is not finite, or with a gradient far too large: training
              stops with exit code 3 and a good checkpoint, from which it continues once the data
              are mended, or leaves as many steps out as train.skip allows, and counts them

Mounting a small disk or one that cannot be written needs ``unshare`` (Linux); without it these
trials are left out, and the table says so.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train.training import distributed, metrics, runs
from train.training.signals import NON_FINITE_EXIT_CODE

ROOT = Path(__file__).parents[1]
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
# Seconds after SIGTERM that Kubernetes gives by default, and the shortest that clouds give.
GRACE = 30.0
LIMIT = 300.0
ALL_DEVICES = "--config.sharding.fsdp=-1"
# How far apart trainings on different numbers of devices may be, which sum in another order.
TOLERANCE = 1e-5
# Seconds in which a process must notice that another is dead.
PEER_LIMIT = distributed.HEARTBEAT + 30.0
SKIP, SPIKE = 3, 20
# The same experiment, but some of its batches are not what they should be.
SPOILED = """
import runpy

import numpy as np

from train.tasks.arithmetic import Addition

get_config = runpy.run_path({config!r})["get_config"]
good_batch = Addition.batch


def batch(self, seed, index, size):
    made = good_batch(self, seed, index, size)
    weights = made["weights"]
    if index + 1 in {steps!r}:
        if {how!r} == "nan":
            weights = weights * np.float32("nan")
        else:  # The loss is divided by the sum of the weights, which almost cancel.
            weights = weights.copy()
            weights[-1] *= (1e-4 - weights[:-1].sum()) / weights[-1].sum()
    return made | {{"weights": weights}}


Addition.batch = batch
"""


class Lost(Exception):
    """A trial that was not survived, and why."""


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


class Process(subprocess.Popen):
    """A process in the background, its output in a file."""

    def __init__(self, command: Sequence[str], log: Path, **environment: str):
        self._log = log
        with open(log, "w", encoding="utf-8") as file:
            super().__init__(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def finish(self, expected: int = 0, limit: float = LIMIT) -> str:
        """Waits for its end, checks its exit code, and returns what it has printed."""
        try:
            code = self.wait(limit)
        except subprocess.TimeoutExpired:
            self.destroy()
            raise Lost(f"hung for {limit:.0f} s: {last_line(self.output())}") from None
        if code != expected:
            raise Lost(f"exit code {code}, not {expected}: {last_line(self.output())}")
        return self.output()

    def destroy(self) -> None:
        """SIGKILL to it and to all that it has started."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()


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


def sigkill(bench: Bench) -> Outcome:
    """SIGKILL at random moments: while starting, training, and writing a checkpoint."""
    outcome = Outcome("SIGKILL at a random moment, restart")
    found: collections.Counter[str] = collections.Counter()
    bench.compare(bench.undisturbed)  # Compiles, which the others need not.
    span = seconds(lambda: bench.run("timed"))
    number = 0
    while outcome.tried < bench.kills:
        run = bench.folder / f"killed_{number}"
        number += 1
        killed = 0
        with trial(outcome, count=False):
            while outcome.tried + killed < bench.kills:
                process = bench.start(bench.command(run))
                if bench.random.random() < 0.5:
                    lie_in_wait(bench, run, process, steps=8)
                else:
                    time.sleep(bench.random.uniform(0, span))
                if not kill(process, run, found):
                    break
                killed += 1
            bench.run(run.name)
            bench.compare(run)
        outcome.tried += killed
    outcome.note = f"{summary(found)}; {number} runs"
    return outcome


def sigterm(bench: Bench) -> Outcome:
    """SIGTERM: saves and leaves in time."""
    outcome = Outcome(f"SIGTERM, to leave within {GRACE:.0f} s")
    run, slowest = bench.folder / "terminated", 0.0
    with trial(outcome, count=False):
        for _ in range(4):
            process = bench.start(bench.command(run))
            before = saved(run)
            wait_until(lambda before=before: saved(run) > before, process)
            time.sleep(bench.random.uniform(0, 0.5))
            process.terminate()
            slowest = max(slowest, seconds(lambda p=process: p.finish(143)))
            outcome.tried += 1
            if slowest > GRACE:
                raise Lost(f"took {slowest:.1f} s")
        bench.run(run.name)
        bench.compare(run)
    outcome.note = f"at most {slowest:.1f} s"
    return outcome


def full_disk(bench: Bench) -> Outcome:
    """The disk fills up at several moments; once there is room again, training goes on."""
    outcome = Outcome("full disk: message, then room again")
    if not can_mount():
        outcome.note = "left out: unshare cannot mount here"
        return outcome
    for i, kilobytes in enumerate((64, 140, 220, 300)):
        with trial(outcome):
            run, disk = bench.folder / f"full_{i}", bench.folder / f"disk_{i}"
            disk.mkdir()
            there = disk / "run"
            script = f"""
                mount -t tmpfs -o size={kilobytes}k tmpfs {quoted(disk)}
                {shlex.join(bench.command(there))}
                code=$?
                if [ -d {quoted(there)} ]; then cp -a {quoted(there)} {quoted(run)}; fi
                exit $code"""
            printed = bench.start(["unshare", "-rm", "sh", "-c", script]).finish(2)
            expect(r"No space left|Disk quota|ENOSPC", printed)
            bench.run(run.name)
            bench.compare(run)
    return outcome


def read_only(bench: Bench) -> Outcome:
    """The run's folder cannot be written: it says so and changes nothing."""
    outcome = Outcome("read-only folder: message, nothing changed")
    if not can_mount():
        outcome.note = "left out: unshare cannot mount here"
        return outcome
    with trial(outcome):
        run = bench.half_done("read_only")
        before = content(run)
        script = f"""
            mount --bind {quoted(run)} {quoted(run)}
            mount -o remount,ro,bind {quoted(run)}
            exec {shlex.join(bench.command(run))}"""
        expect("Read-only", bench.start(["unshare", "-rm", "sh", "-c", script]).finish(2))
        if content(run) != before:
            raise Lost("the folder has changed")
        bench.run(run.name)
        bench.compare(run)
    return outcome


def damage(bench: Bench) -> Outcome:
    """A damaged checkpoint is noticed, the one before it used."""
    outcome = Outcome("damaged checkpoint: noticed, the one before used")
    original = bench.half_done("to_be_damaged")
    newest = newest_checkpoint(original)
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    largest = max(files, key=lambda path: path.stat().st_size)
    manifest = newest.with_suffix(".sha256")
    cases: list[tuple[str, Path, Callable[[Path], object]]] = [
        ("a bit flipped in the arrays", largest, lambda path: flip(path, bench.random)),
        ("the arrays truncated", largest, lambda path: os.truncate(path, 7)),
        ("a bit flipped in a small file", files[0], lambda path: flip(path, bench.random)),
        ("a file missing", bench.random.choice(files), Path.unlink),
        ("the manifest truncated", manifest, lambda path: os.truncate(path, 20)),
        ("a bit flipped in the manifest", manifest, lambda path: flip(path, bench.random)),
    ]
    for i, (_, path, harm) in enumerate(cases):
        with trial(outcome):
            run = Path(shutil.copytree(original, bench.folder / f"damaged_{i}"))
            harm(run / path.relative_to(original))
            expect("damaged and not used", bench.run(run.name))
            bench.compare(run)
    outcome.note = ", ".join(name for name, _, _ in cases)
    return outcome


def devices(bench: Bench) -> Outcome:
    """SIGKILL at a random moment, restart on more devices or on fewer."""
    outcome = Outcome("SIGKILL, restart on another number of devices")
    bench.run("on_four", ALL_DEVICES, devices=4)
    found: collections.Counter[str] = collections.Counter()
    largest = 0.0
    for counts in ((4, 2, 8), (8, 1, 4)):
        run = bench.folder / f"on_{'_'.join(map(str, counts))}"
        with trial(outcome, count=False):
            for count in counts[:-1]:
                process = bench.start(bench.command(run, ALL_DEVICES), count)
                lie_in_wait(bench, run, process, steps=STEPS // 3)
                outcome.tried += kill(process, run, found)
            bench.run(run.name, ALL_DEVICES, devices=counts[-1])
            apart = bench.compare(run, bench.folder / "on_four", TOLERANCE)
            largest = max(largest, apart)
    outcome.note = (
        f"to {TOLERANCE:.0e} of a run on 4 devices, not bit for bit: {largest:.1e} at most; "
        f"{summary(found)}"
    )
    return outcome


def processes(bench: Bench) -> Outcome:
    """One of two processes dies: the other ends by itself, and both continue."""
    outcome = Outcome("SIGKILL to one of two processes, restart of both")
    undisturbed = bench.folder / "two_undisturbed"
    run_both(bench, undisturbed, free_port())
    found: collections.Counter[str] = collections.Counter()
    slowest = 0.0
    for i in range(4):
        run, port = bench.folder / f"two_{i}", free_port()
        with trial(outcome):
            with two_processes(bench, run, port) as both:
                killed, other = both[i % 2], both[1 - i % 2]
                lie_in_wait(bench, run, killed, steps=STEPS // 2)
                kill(killed, run, found)
                start = time.monotonic()
                expect("another process has died", other.finish(distributed.PEER_LOST, PEER_LIMIT))
                slowest = max(slowest, time.monotonic() - start)
            run_both(bench, run, port)
            bench.compare(run, undisturbed)
    outcome.note = f"the other ended within {slowest:.1f} s; {summary(found)}"
    return outcome


def non_finite(bench: Bench) -> Outcome:
    """Some batches give a loss that is not finite, or a gradient far too large."""
    outcome = Outcome("NaN or a spike in the loss: stop, or skip")
    skip = f"--config.train.skip={SKIP}"
    spike = f"--config.train.spike={SPIKE}"
    # Not among the first steps, which say too little of what is usual.
    first = bench.random.randint(STEPS // 3, STEPS // 2)
    row = list(range(first, first + SKIP))
    bad = row + sorted(bench.random.sample(range(first + 2 * SKIP, STEPS, 2), 2))
    with trial(outcome):
        stops(bench, "nan", "nan", row[:1])
        bench.run("nan")
        bench.compare(bench.folder / "nan")
    with trial(outcome):
        stops(bench, "nan_too_often", "nan", [*row, first + SKIP], skip)
    with trial(outcome):
        skips(bench, "nan_skipped", "nan", bad, skip)
    with trial(outcome):
        skips(bench, "spike_skipped", "spike", bad, skip, spike)
    outcome.note = (
        f"1 NaN: stopped, data mended, continued; {SKIP + 1} in a row: stopped; {len(bad)} NaN, "
        f"{len(bad)} spikes, with a SIGKILL in between: skipped and counted"
    )
    return outcome


def stops(bench: Bench, name: str, how: str, steps: Sequence[int], *options: str) -> None:
    """A run with spoiled batches ends in the last of these steps; what was saved is good."""
    printed = bench.run(
        name, spoiled(bench, name, how, steps), *options, expected=NON_FINITE_EXIT_CODE
    )
    every = int(OPTIONS["train.save_every"])
    good = (steps[-1] - 1) // every * every
    expect(rf"last good checkpoint of \S+ is that of step {good}\.", printed)
    if (step := restored(bench.folder / name).step) != good:
        raise Lost(f"the last checkpoint is that of step {step}, not {good}")


def skips(bench: Bench, name: str, how: str, steps: Sequence[int], *options: str) -> None:
    """A run leaves just the spoiled batches out; also one that was killed and continued."""
    config = spoiled(bench, name, how, steps)
    undisturbed, run = bench.folder / name, bench.folder / f"{name}_killed"
    bench.run(name, config, *options)
    lines = metrics.read(undisturbed / "metrics.jsonl")
    skipped = {line["step"]: line["skipped"] for line in lines if line["skipped"]}
    if skipped != dict.fromkeys(steps, 1):
        raise Lost(f"of the steps {steps} metrics.jsonl has these as skipped: {skipped}")
    process = bench.start(bench.command(run, config, *options))
    lie_in_wait(bench, run, process, steps=STEPS // 2)
    if not kill(process, run, collections.Counter()):
        raise Lost("ended before it could be killed")
    bench.run(run.name, config, *options)
    bench.compare(run, undisturbed)


def spoiled(bench: Bench, name: str, how: str, steps: Sequence[int]) -> str:
    """The option for a config with spoiled batches: ``nan``, or ``spike``."""
    path = bench.folder / f"{name}.py"
    path.write_text(SPOILED.format(config=str(CONFIG), how=how, steps=tuple(steps)))
    return f"--config={path}"


@contextlib.contextmanager
def two_processes(bench: Bench, run: Path, port: int) -> Iterator[list[Process]]:
    """Two processes that start a run together, or continue it; none is left in the end."""
    both = [
        bench.start(bench.command(run, ALL_DEVICES, f"--distributed=localhost:{port},2,{index}"))
        for index in range(2)
    ]
    try:
        yield both
    finally:
        for process in both:
            process.destroy()


def run_both(bench: Bench, run: Path, port: int) -> None:
    """Two processes start a run, or continue it, to its end."""
    with two_processes(bench, run, port) as both:
        for process in both:
            process.finish()


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


FAULTS: dict[str, Callable[[Bench], Outcome]] = {
    "kill": sigkill,
    "terminate": sigterm,
    "full-disk": full_disk,
    "read-only": read_only,
    "damage": damage,
    "devices": devices,
    "processes": processes,
    "non-finite": non_finite,
}


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


def saved(run: Path) -> int:
    """The step of the newest checkpoint that counts; -1: none."""
    folder = run / "checkpoints"
    names = [path.stem for path in folder.glob("*.sha256")] if folder.is_dir() else []
    return max(map(int, names), default=-1)


def newest_checkpoint(run: Path) -> Path:
    """The folder of the newest checkpoint that counts."""
    return run / "checkpoints" / f"{saved(run):08d}"


def is_writing(run: Path) -> bool:
    """Whether a checkpoint is half written."""
    return any(not re.fullmatch(r"\d{8}(\.sha256)?", name) for name in checkpoint_entries(run))


def is_unsealed(run: Path) -> bool:
    """Whether a checkpoint has no manifest yet."""
    names = set(checkpoint_entries(run))
    return any(re.fullmatch(r"\d{8}", name) and f"{name}.sha256" not in names for name in names)


def is_there(run: Path) -> bool:
    """Whether the run was made."""
    return (run / "experiment.json").exists()


def describe(run: Path) -> str:
    """What a kill left behind."""
    if not is_there(run):
        return "before the run was made"
    if is_writing(run):
        return "with a checkpoint half written"
    if is_unsealed(run):
        return "with a checkpoint not yet counted"
    return "elsewhere"


def checkpoint_entries(run: Path) -> list[str]:
    """Names in the folder of the checkpoints."""
    try:
        return os.listdir(run / "checkpoints")
    except FileNotFoundError:
        return []


def restored(run: Path) -> runs.TrainedRun:
    """The newest checkpoint of a run, which must be intact and finite."""
    damaged: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        # A copy, so that nothing depends on what else the folder is used for.
        copy = Path(shutil.copytree(run, Path(scratch) / "run"))
        trained = runs.restore_model(copy, damaged.append)
    if damaged:
        raise Lost(damaged[0])
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(trained.variables)):
        raise Lost(f"a parameter of step {trained.step} is not finite")
    return trained


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


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def flip(path: Path, draw: random.Random) -> None:
    """Flips one bit of a file."""
    data = np.fromfile(path, np.uint8)
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    data.tofile(path)


def wait_until(condition: Callable[[], bool], process: Process) -> None:
    """Waits until something is true, or the process has ended, but not forever."""
    end = time.monotonic() + LIMIT
    while not condition() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.0005)


def seconds(action: Callable[[], object]) -> float:
    """How long something takes."""
    start = time.monotonic()
    action()
    return time.monotonic() - start


def expect(pattern: str, output: str) -> None:
    """Raises :class:`Lost` unless a process has printed what it should, and no traceback."""
    if not re.search(pattern, output):
        raise Lost(f"expected a message with {pattern!r}; got: {last_line(output)}")
    if "Traceback" in output:
        raise Lost(f"a traceback instead of a message: {last_line(output)}")


def last_line(text: str) -> str:
    """The last line that is not empty."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "(no output)")


def quoted(path: Path) -> str:
    """A path for the shell."""
    return shlex.quote(str(path))


def can_mount() -> bool:
    """Whether a file system can be mounted in a namespace of one's own."""
    if not shutil.which("unshare"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        script = f"mount -t tmpfs -o size=64k tmpfs {shlex.quote(folder)}"
        command = ["unshare", "-rm", "sh", "-c", script]
        return subprocess.run(command, capture_output=True).returncode == 0


def table(outcomes: Sequence[Outcome]) -> str:
    """Faults tried and lost."""
    rows = [("fault", "tried", "lost", ""), ("---", "---:", "---:", "---")]
    rows += [(o.fault, str(o.tried), str(len(o.lost)), o.note) for o in outcomes]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += [f"lost, {o.fault}: {why}" for o in outcomes for why in o.lost]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=50, help="how often to kill (50)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--keep", type=Path, help="an empty folder, in which all runs stay")
    parser.add_argument("--json", type=Path, help="where the outcomes are written too")
    return parser.parse_args(argv)


@contextlib.contextmanager
def workplace(keep: Path | None) -> Iterator[Path]:
    """A folder for all runs."""
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Tries every fault and prints the table."""
    args = parse(argv)
    with workplace(args.keep) as folder:
        start = time.monotonic()
        bench = Bench(folder, args.kills, args.seed)
        outcomes = []
        for name in args.only:
            try:
                outcomes.append(FAULTS[name](bench))
            except Lost as error:  # Already the run that nobody disturbs.
                outcomes.append(Outcome(name, 1, [str(error)]))
            latest = outcomes[-1]
            print(
                f"{time.monotonic() - start:6.0f} s  {latest.fault}: {latest.tried} tried, "
                f"{len(latest.lost)} lost",
                flush=True,
            )
    print(f"\n{table(outcomes)}")
    if args.json:
        records = [dataclasses.asdict(outcome) for outcome in outcomes]
        args.json.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    return int(any(outcome.lost for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
