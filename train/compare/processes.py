"""Runs trainings in separate processes, side by side."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import tqdm

from train.compare import sweep
from train.compare.jobs import Job, claim
from train.compare.sweep import Setting
from train.files import write_atomically
from train.tasks import Result, program
from train.training import metrics
from train.training.signals import NON_FINITE_EXIT_CODE, Signals, Stopped

SECONDS_BETWEEN_LOOKS = 0.5
# What ``train`` does after training.
EVALUATE, VALIDATE = ("--evaluate",), ("--validate",)
# Exit codes of trainings that reached the end or diverged.
CONVERGED_OR_NOT = (0, NON_FINITE_EXIT_CODE)
SAVING = "the trainings save; again to abandon their steps since the last checkpoints"


# What one of the processes may use: cores, and a GPU, as CUDA_VISIBLE_DEVICES names it, if any.
Share = tuple[list[int], str | None]
# Running jobs, with their processes and what these may use.
Running = dict[Job, tuple[subprocess.Popen, Share]]


class Ended(NamedTuple):
    """The exit code of a training that has ended, and the processor time that it took.

    Attributes:
      job: what was trained.
      code: the exit code of its process.
      seconds: processor time that the process took.
    """

    job: Job
    code: int
    seconds: float


def train_all(
    jobs: Sequence[Job],
    side_by_side: int,
    *,
    same_share: bool = False,
    ends: Sequence[str] = EVALUATE,
    finished: Callable[[Ended], None] = lambda ended: None,
    accepted: Container[int] = (0,),
) -> None:
    """Trains and evaluates in separate processes, ``side_by_side`` at a time.

    Args:
      jobs: what to train; runs that have begun are continued.
      side_by_side: number of processes; on a TPU they follow one another.
      same_share: whether each keeps its share of the cores if fewer are left to run. With more
        cores a training rounds differently.
      ends: options of ``train`` for what follows it: the test, or the validation of a sweep.
      finished: called whenever a training ends with an accepted exit code.
      accepted: accepted exit codes; any other is a failure, which stops the rest.

    Raises:
      Stopped: if a training fails, or on SIGINT, SIGTERM or SIGHUP, after all have saved; a second
        SIGINT ends them without saving. Before any other exception they have saved and ended.
    """
    if on_tpu():
        side_by_side = 1
    if not same_share:
        side_by_side = min(side_by_side, len(jobs))
    waiting = collections.deque(_distinct_first(jobs))
    free = collections.deque(
        zip(shares(side_by_side), itertools.cycle(gpus() or [None]), strict=False)
    )
    running: Running = {}
    failed: list[tuple[Job, int]] = []
    with Signals(lambda: SAVING) as signals, _progress() as show, _ending(running):
        while running or waiting:
            while waiting and free and not failed and not signals.received:
                job, share = waiting.popleft(), free.popleft()
                cores, gpu = share
                process = _start(job, cores, gpu=gpu, ends=ends)
                running[job] = (process, share)
            if failed or signals.received:
                waiting.clear()
                _end(running)
            for job, (process, share) in list(running.items()):
                show(job)
                if (ended := _ended(job, process)) is not None:
                    del running[job]
                    free.append(share)
                    if ended.code in accepted:
                        finished(ended)
                    elif not signals.received:
                        failed.append((job, ended.code))
            time.sleep(SECONDS_BETWEEN_LOOKS if running else 0)
    if signals.received:
        raise Stopped(
            f"stopped by {signal.Signals(signals.received).name}; what was trained is saved, and "
            "the same command continues",
            128 + signals.received,
        )
    if failed:
        job, code = failed[0]
        last = "\n".join(job.log.read_text(encoding="utf-8").strip().splitlines()[-5:])
        raise Stopped(
            f"the training of {job.label} failed; {job.log} ends with:\n{last}",
            code if code > 0 else 128 - code,
        )


def train_missing(jobs: Sequence[Job], side_by_side: int, ends: Sequence[str]) -> set[Job]:
    """Trains the jobs that are not finished, and prints how many are.

    Args:
      jobs, side_by_side, ends: as for :func:`train_all`.

    Returns:
      The jobs that diverged. Another call continues them, and they diverge again.

    Raises:
      Stopped: as :func:`train_all` does; one that diverges does not stop the rest.
    """
    missing = [job for job in jobs if not job.finished]
    numbers = itertools.count(len(jobs) - len(missing) + 1)
    diverged = set()

    def finished(ended: Ended) -> None:
        how = ""
        if ended.code == NON_FINITE_EXIT_CODE:
            diverged.add(ended.job)
            how = f"; {ended.job.label} diverged, as {ended.job.log} says"
        # Above the bars.
        tqdm.tqdm.write(f"{next(numbers)} of {len(jobs)} runs done{how}", file=sys.stderr)

    train_all(missing, side_by_side, ends=ends, finished=finished, accepted=CONVERGED_OR_NOT)
    return diverged


def _distinct_first(jobs: Sequence[Job]) -> list[Job]:
    """Puts a job of each name and setting first; the other seeds reuse what these compile."""
    first: dict[Any, Job] = {}
    for job in jobs:
        first.setdefault((job.name, job.setting), job)
    return [*first.values(), *(job for job in jobs if job is not first[job.name, job.setting])]


@contextlib.contextmanager
def _ending(running: Running) -> Iterator[None]:
    """Leaves nothing running if an exception leaves the block."""
    try:
        yield
    except KeyboardInterrupt:
        # The second signal that a training receives ends it at once.
        _end(running)
        raise Stopped(
            "abandoned; what was saved before stays, and the same command continues",
            128 + signal.SIGINT,
        ) from None
    except BaseException:
        _end(running)
        raise


def _end(running: Running) -> None:
    """Lets all save what they have, and waits until they are gone."""
    for process, _ in running.values():
        process.terminate()
    for process, _ in running.values():
        process.wait()


def _ended(job: Job, process: subprocess.Popen) -> Ended | None:
    """Returns how a training ended, or None while it goes on."""
    seconds = 0.0
    if process.returncode is None:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if not pid:
            return None
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = usage.ru_utime + usage.ru_stime
    return Ended(job, process.returncode, seconds)


def _start(job: Job, cores: list[int], *, gpu: str | None, ends: Sequence[str]) -> subprocess.Popen:
    """Starts a training on the given cores, in a session of its own.

    If it is not split over devices, and there is a GPU, it sees only the given one.
    """
    arguments = [*ends, *(["--resume"] if job.folder.exists() else [])]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(len(cores))}
    if len(cores) == 1:
        flags = os.environ.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    if gpu is not None and job.experiment.sharding is None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    with open(job.log, "a", encoding="utf-8") as log:
        # The terminal's Ctrl-C must reach this process only, which passes it on once.
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", program(job.experiment.task), "train"),
                f"--run={job.folder}",
                *(*job.command, *arguments),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(ProcessLookupError):  # It may have ended already.
            os.sched_setaffinity(process.pid, cores)
    return process


def shares(count: int) -> list[list[int]]:
    """Divides the cores that this process may use among ``count`` processes."""
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = list(range(os.cpu_count() or 1))
    if count >= len(cores):
        return [[cores[i % len(cores)]] for i in range(count)]
    return [cores[i * len(cores) // count : (i + 1) * len(cores) // count] for i in range(count)]


def on_tpu() -> bool:
    """Returns whether jax will run on a TPU, without taking it: it serves only one process."""
    return "tpu" in (jax.config.values["jax_platforms"] or "").split(",")


def gpus() -> list[str]:
    """Returns the NVIDIA GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        # For CUDA the list ends at the first invalid name.
        return [*itertools.takewhile(lambda name: name not in ("", "-1"), given.split(","))]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    lines = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [str(number) for number, _ in enumerate(lines)]


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Job], None]]:
    """Yields a function that shows how far a job is, with one bar for each begun job.

    A training's log ends with how far its evaluation is.
    """

    bars: dict[Job, metrics.Progress] = {}

    def show(job: Job) -> None:
        lines: list[dict[str, Any]] = []
        # Damaged lines are cut when the run is continued.
        with contextlib.suppress(ValueError):
            lines = metrics.read(job.folder / "metrics.jsonl")
        if lines:
            step, steps = lines[-1]["step"], job.experiment.steps
            if job not in bars:
                bars[job] = metrics.Progress(steps, start=step, label=job.label, row=len(bars))
            done = step == steps
            bars[job].update(step, _evaluating(job) if done else metrics.describe(lines[-1]))

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()


def _evaluating(job: Job) -> str:
    """Returns how far the evaluation after a training is, as text."""
    with open(job.log, "rb") as log:
        log.seek(max(0, job.log.stat().st_size - 200))
        found = re.findall(rb"evaluating [^\n]*: (\d+)/(\d+)", log.read())
    done, total = map(int, found[-1]) if found else (0, 1)
    return f"evaluating, {100 * done // total} %"


def tune(folder: Path, trials: Sequence[Job], side_by_side: int) -> dict[str, Setting]:
    """Trains all settings, and chooses one for each name by validation; diverged ones lose.

    Raises:
      ValueError: before anything is trained, if the task has no validation apart from its test.
    """
    task = trials[0].experiment.task
    for experiment in {(x.task, x.evaluation): x for x in (t.experiment for t in trials)}.values():
        sweep.check(experiment)
    claim(folder, trials)
    diverged = train_missing(trials, side_by_side, (*EVALUATE, *VALIDATE))
    results: dict[str, dict[Setting, list[Result]]] = {}
    for job in trials:
        by_setting = results.setdefault(job.name, {})
        if job in diverged:
            by_setting[job.setting] = []
            continue
        with metrics.Progress.of(f"validating {job.folder.name}") as progress:
            result = sweep.validate(job.folder, job.experiment.evaluation, progress)
        by_setting[job.setting] = [result]
    table = sweep.table(task, results)
    write_atomically(folder / "sweep.txt", table + "\n")
    print(f"Validation of the sweep\n\n{table}")
    return {name: sweep.best(task, by_setting) for name, by_setting in results.items()}
