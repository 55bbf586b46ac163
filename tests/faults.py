"""Breaks training on purpose, and sees whether anything is lost.

    python -m tests.faults [--kills 50] [--only NAME ...] [--keep FOLDER]

Every trial runs the real command line in processes of its own and starts it again by the same
command, as a scheduler would. A trial is survived if in the end the parameters, and the losses of
all steps, are bit for bit those of a run that nobody disturbed. The exit code is 1 if one is lost.

Mounting a small disk or one that cannot be written needs ``unshare`` (Linux); without it these
trials are left out, and the table says so.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import chex
import numpy as np

from train import metrics, runs

ROOT = Path(__file__).parents[1]
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


class Bench:
    """A folder with an undisturbed run, and a way to start others like it.

    Attributes:
      folder: for all runs.
      random: decides when and what to break.
      kills: how often to kill.
    """

    def __init__(self, folder: Path, kills: int, seed: int = 0):
        self.folder = folder
        self.kills = kills
        self.random = random.Random(seed)
        self._log = folder / "output.txt"
        self._reference = self.run("undisturbed")

    def command(self, run: Path) -> list[str]:
        """Starts a run, or continues it."""
        config = [f"--config.{name}={value}" for name, value in OPTIONS.items()]
        start = [sys.executable, "-m", "train.main", "train", "--resume", f"--run={run}"]
        return [*start, f"--config={ROOT / 'configs/addition_demo.py'}", *config]

    def start(self, command: Sequence[str], **environment: str) -> subprocess.Popen:
        """A process in the background, its output in a file."""
        cache = {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        with open(self._log, "w", encoding="utf-8") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **cache, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        """What the last process has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def finish(self, process: subprocess.Popen, expected: int = 0) -> None:
        """Waits for a process and checks its exit code."""
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            kill(process)
            raise Lost(f"hung for {LIMIT:.0f} s: {last_line(self.output())}") from None
        if code != expected:
            raise Lost(f"exit code {code}, not {expected}: {last_line(self.output())}")

    def run(self, name: str, **environment: str) -> Path:
        """Starts or continues the run ``name``, to its end."""
        run = self.folder / name
        self.finish(self.start(self.command(run), **environment))
        return run

    def compare(self, run: Path) -> None:
        """Raises :class:`Lost` unless a finished run is that which nobody disturbed."""
        with tempfile.TemporaryDirectory() as scratch:
            # A copy, so that nothing depends on what else the folder is used for.
            copy = Path(shutil.copytree(run, Path(scratch) / "run"))
            ours, theirs = (runs.restore_model(path) for path in (copy, self._reference))
        if (ours.step, theirs.step) != (STEPS, STEPS):
            raise Lost(f"the last step is {ours.step}, not {STEPS}")
        try:
            chex.assert_trees_all_equal(ours.variables, theirs.variables)
        except AssertionError as error:
            raise Lost(f"other parameters: {last_line(str(error))}") from None
        ours, theirs = (losses(path) for path in (run, self._reference))
        if ours != theirs:
            raise Lost("metrics.jsonl differs from that of the undisturbed run")

    def half_done(self, name: str) -> Path:
        """A run that was interrupted by SIGTERM after some steps, and saved."""
        run = self.folder / name
        process = self.start(self.command(run))
        wait_until(lambda: saved(run) >= STEPS // 3, process)
        process.terminate()
        self.finish(process, 128 + signal.SIGTERM)
        return run


def sigkill(bench: Bench) -> Outcome:
    """SIGKILL at random moments: while starting, training, and writing a checkpoint."""
    outcome = Outcome("SIGKILL at a random moment, restart")
    found: collections.Counter[str] = collections.Counter()
    span = seconds(lambda: bench.finish(bench.start(bench.command(bench.folder / "timed"))))
    moments: list[Callable[[Path], bool]] = [is_writing, is_unsealed]
    number = 0
    while outcome.tried < bench.kills:
        run = bench.folder / f"killed_{number}"
        number += 1
        killed = 0
        with trial(outcome, count=False):
            while outcome.tried + killed < bench.kills:
                process = bench.start(bench.command(run))
                if bench.random.random() < 0.5:
                    moment = bench.random.choice(moments)
                    # Not the first such moment, lest the run never gets on.
                    after = saved(run) + bench.random.randint(1, 8)
                    wait_until(
                        lambda run=run, after=after, moment=moment: (
                            saved(run) >= after and moment(run)
                        ),
                        process,
                        patience=span * 2,
                    )
                else:
                    time.sleep(bench.random.uniform(0, span))
                if process.poll() is not None:
                    bench.finish(process)
                    break
                kill(process)
                killed += 1
                found[describe(run)] += 1
            bench.run(run.name)
            bench.compare(run)
        outcome.tried += killed
    outcome.note = ", ".join(f"{count} {what}" for what, count in found.most_common())
    outcome.note += f"; {number} runs"
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
            slowest = max(slowest, seconds(lambda p=process: bench.finish(p, 143)))
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
            bench.finish(bench.start(["unshare", "-rm", "sh", "-c", script]), 2)
            expect(r"No space left|Disk quota|ENOSPC", bench.output())
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
        bench.finish(bench.start(["unshare", "-rm", "sh", "-c", script]), 2)
        expect("Read-only", bench.output())
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
            bench.run(run.name)
            expect("damaged and not used", bench.output())
            bench.compare(run)
    outcome.note = ", ".join(name for name, _, _ in cases)
    return outcome


FAULTS: dict[str, Callable[[Bench], Outcome]] = {
    "kill": sigkill,
    "terminate": sigterm,
    "full-disk": full_disk,
    "read-only": read_only,
    "damage": damage,
}


@contextlib.contextmanager
def trial(outcome: Outcome, count: bool = True) -> Iterator[None]:
    """One trial; what goes wrong in it is noted and does not end the others."""
    outcome.tried += count
    try:
        yield
    except (Lost, ValueError) as error:
        outcome.lost.append(str(error))


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


def describe(run: Path) -> str:
    """What a kill left behind."""
    if not (run / "experiment.json").exists():
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


def losses(run: Path) -> list[tuple[int, float]]:
    """Step and loss of every line of metrics."""
    return [(line["step"], line["loss"]) for line in metrics.read(run / "metrics.jsonl")]


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def flip(path: Path, draw: random.Random) -> None:
    """Flips one bit of a file."""
    data = np.fromfile(path, np.uint8)
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    data.tofile(path)


def wait_until(
    condition: Callable[[], bool], process: subprocess.Popen, patience: float = LIMIT
) -> None:
    """Waits until something is true, the process has ended, or patience has."""
    end = time.monotonic() + patience
    while not condition() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.0005)


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to a process and to all that it has started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
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
            outcomes.append(FAULTS[name](bench))
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
