"""The faults: each breaks runs in one way, and says what became of them."""

from __future__ import annotations

import collections
import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.faults.bench import (
    CONFIG,
    OPTIONS,
    STEPS,
    Bench,
    Outcome,
    kill,
    lie_in_wait,
    summary,
    trial,
)
from tests.faults.folder import content, flip, newest_checkpoint, restored, saved
from tests.faults.process import (
    Lost,
    Process,
    can_mount,
    expect,
    free_port,
    quoted,
    seconds,
    wait_until,
)
from train.training import distributed, metrics
from train.training.signals import NON_FINITE_EXIT_CODE

# Seconds after SIGTERM that Kubernetes gives by default, and the shortest that clouds give.
GRACE = 30.0
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
