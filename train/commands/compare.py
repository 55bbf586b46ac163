"""Trains several encodings, or adapts a model by several methods, alike, and compares them.

  python -m train.main compare --config=configs/addition_demo.py --run=runs/addition_demo \\
      --encodings=tape,rope
  python -m train.main compare --config=configs/context_extension.py --run=runs/longer \\
      --methods=base,tape,lora,longlora,theta,full
  python -m train.main compare --config=configs/ablations.py --run=runs/ablations --variants=all \\
      --sweep train.learning_rate=1e-3,3e-3

Steps, data and seeds are equal. Each training gets a run of its own inside the run folder. Called
again, finished runs are kept and unfinished ones continued. Beside them are written report.md, with
pictures, and report.json. With --sweep, every value is tried with the first seed, and each rival is
compared with the one that is best in a validation apart from the test.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tape_jax import positions
from tape_jax.config import choose, require
from tape_jax.files import write_atomically
from train import adaptation, experiment, metrics, runs, sweep
from train.allocator import HUGE_PAGES
from train.commands import eval as evaluation
from train.data import Result
from train.experiment import Experiment
from train.loop import Signals, Stopped
from train.report import RunRecord, by_name, sample_lines, score_table, verdict, write_report
from train.sweep import Setting

FORMAT = "tape-jax comparison, version 1"
SECONDS_BETWEEN_LOOKS = 0.5


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is compared.

    Attributes:
      what: in words.
      known: by name the ``--config.a.b=value`` options that make it.
    """

    what: str
    known: Mapping[str, Sequence[str]]

    @classmethod
    def of_field(cls, what: str, field: str, values: Iterable[str]) -> Choice:
        """The choice among values of one field of the config."""
        return cls(what, {value: (f"--config.{field}={value}",) for value in values})


ENCODINGS = Choice.of_field("position encoding", "model.position.kind", positions.registry)
METHODS = Choice.of_field("adapt method", "adapt.method", adaptation.METHODS)


@dataclasses.dataclass(frozen=True)
class Job:
    """One training of the comparison.

    Attributes:
      name: of the encoding, method or variant.
      setting: of the sweep.
      folder: the run's.
      experiment: what is trained there.
      command: arguments of ``train`` that do it from the start.
    """

    name: str
    setting: Setting
    folder: Path
    experiment: Experiment
    command: tuple[str, ...]

    @property
    def label(self) -> str:
        """Short and unique."""
        return f"{self.setting.folder(self.name)}, seed {self.experiment.seed}"

    @property
    def log(self) -> Path:
        """What the training prints."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def samples(self) -> Sequence[str]:
        """What the trained model does when it is asked something unseen."""
        trained = runs.restore_for_evaluation(self.folder)
        return self.experiment.task.samples(trained, self.experiment.evaluation)

    @property
    def finished(self) -> bool:
        """Whether it has been trained and evaluated as wanted."""
        record = evaluation.saved(self.folder)
        return (
            record is not None
            and record["step"] == self.experiment.steps
            and record["options"] == evaluation.options_to_json(self.experiment.evaluation)
        )


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--config", type=Path, required=True, help="the config file")
    parser.add_argument("--run", type=Path, required=True, help="the folder of the comparison")
    compared = parser.add_mutually_exclusive_group(required=True)
    compared.add_argument("--encodings", metavar="NAME,...", help="of positions")
    compared.add_argument("--methods", metavar="NAME,...", help="of adaptation")
    compared.add_argument("--variants", metavar="NAME,...", help="of the config; all: every one")
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="FIELD=VALUE,...", help="choose the best"
    )
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each (1)")
    parser.add_argument("--jobs", type=int, default=2, help="trainings side by side (2)")
    parser.set_defaults(overrides=())


def run(args: argparse.Namespace) -> None:
    """Compares."""
    require(args.jobs >= 1, f"compare: --jobs must be at least 1; got {args.jobs}")
    choice, names = chosen(args)
    plan_for = functools.partial(plan, args.config, args.run, choice)
    if args.sweep:
        trials = plan_for(names, 1, args.overrides, sweep.settings(args.sweep))
        best = tune(args.run, trials, args.jobs)
        by_rival = [plan_for([name], args.seeds, args.overrides, [best[name]]) for name in names]
        jobs = [job for planned in by_rival for job in planned]
    else:
        jobs = plan_for(names, args.seeds, args.overrides)
    claim(args.run, jobs)
    train_all([job for job in jobs if not job.finished], args.jobs)
    task = jobs[0].experiment.task
    first_seeds = {job.name: job for job in reversed(jobs)}.values()
    records = [record(job, ask=job in first_seeds) for job in jobs]
    report = write_report(args.run, task, records)
    results = {name: [r.result for r in group] for name, group in by_name(records).items()}
    for heading, text in task.compare(results).sections.items():
        if words := _without_pictures(text):
            print(f"\n{heading}\n\n{words}")
    print(f"\n{verdict(task, records)}\n\n{score_table(task, records)}\n\nreport: {report}\n")
    print("Asked what they have not seen:")
    print(sample_lines(records))
    if example := getattr(task, "question_example", None):
        print("ask it another:")
        example = shlex.quote(example)
        print(f"  {_python()} -m train.main ask --run={shlex.quote(str(jobs[0].folder))} {example}")


def chosen(args: argparse.Namespace) -> tuple[Choice, list[str]]:
    """What is compared, and the names that were given."""
    if not args.variants:
        choice, names = (ENCODINGS, args.encodings) if args.encodings else (METHODS, args.methods)
        return choice, names.split(",")
    choice = Choice(f"variant of {args.config}", dict(sweep.variants(args.config)))
    return choice, [*choice.known] if args.variants == "all" else args.variants.split(",")


def tune(folder: Path, trials: Sequence[Job], side_by_side: int) -> dict[str, Setting]:
    """Trains every setting, and chooses one for each name by validation.

    Raises:
      ValueError: before anything is trained, if the task has no validation apart from its test.
    """
    task = trials[0].experiment.task
    sweep.validation_options(task, trials[0].experiment.evaluation)
    claim(folder, trials)
    train_all([job for job in trials if not job.finished], side_by_side, validate=True)
    results: dict[str, dict[Setting, list[Result]]] = {}
    for job in trials:
        with metrics.Progress.of(f"validating {job.folder.name}") as progress:
            result = sweep.validate(job.folder, progress)
        results.setdefault(job.name, {})[job.setting] = [result]
    table = sweep.table(task, results)
    write_atomically(folder / "sweep.txt", table + "\n")
    print(f"Validation of the sweep\n\n{table}")
    return {name: sweep.best(task, by_setting) for name, by_setting in results.items()}


def _without_pictures(text: str) -> str:
    """Markdown without its images, for a terminal."""
    return re.sub(r"!\[[^]]*\]\([^)]*\)", "", text).strip()


def _python() -> str:
    """How to call this interpreter from the current folder."""
    if shutil.which("python") == sys.executable:
        return "python"
    path = Path(sys.executable)
    near = path.is_relative_to(Path.cwd())
    return shlex.quote(str(path.relative_to(Path.cwd()) if near else path))


def plan(
    config: Path,
    folder: Path,
    choice: Choice,
    names: Sequence[str],
    seeds: int,
    overrides: Sequence[str],
    settings: Sequence[Setting] = (Setting(),),
    report: Callable[[str], None] = print,
) -> list[Job]:
    """The trainings of a comparison, checked before anything is written.

    Each name is trained with every one of the settings.

    Raises:
      ValueError: for a name that is unknown or given twice, a config that does not fit, or a run
        that exists and is of another experiment.
    """
    require(seeds >= 1, f"compare: --seeds must be at least 1; got {seeds}")
    for name in names:
        choose(choice.what, name, choice.known)
    require(len(set(names)) == len(names), f"compare: {choice.what} given twice: {names}")
    first_seed = experiment.from_file(config, overrides, report=lambda _: None).seed
    jobs = []
    seeds_of_each = range(first_seed, first_seed + seeds)
    for name, setting, seed in itertools.product(names, settings, seeds_of_each):
        another = seed != first_seed
        own = (
            *overrides,
            *choice.known[name],
            *setting.overrides,
            *([f"--config.seed={seed}"] if another else []),
        )
        job = Job(
            name=name,
            setting=setting,
            folder=folder / (setting.folder(name) + (f"-seed{seed}" if another else "")),
            experiment=experiment.from_file(config, own, report),
            command=(f"--config={config}", *own),
        )
        if job.folder.exists():
            runs.check_same(job.folder, job.experiment)
        jobs.append(job)
    return jobs


def claim(folder: Path, jobs: Sequence[Job]) -> None:
    """Makes the folder of a comparison, or makes sure that it is one.

    Raises:
      ValueError: if the folder exists, is not empty and is not a comparison.
    """
    marker = folder / "comparison.json"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        try:
            ours = json.loads(marker.read_text(encoding="utf-8"))["format"] == FORMAT
        except (OSError, ValueError, KeyError, TypeError):
            ours = False
        require(ours, f"{folder} exists and is not a comparison: choose another --run")
    folder.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "runs": [job.folder.name for job in jobs]}
    write_atomically(marker, json.dumps(content, indent=2) + "\n")


def train_all(
    jobs: Sequence[Job],
    side_by_side: int,
    *,
    validate: bool = False,
    finished: Callable[[Ended], None] = lambda ended: None,
    accepted: Container[int] = (0,),
) -> None:
    """Trains and evaluates in processes of their own, ``side_by_side`` at a time.

    Args:
      jobs: what is to be trained; runs that were begun are continued.
      side_by_side: number of processes.
      validate: whether they also validate, as a sweep does.
      finished: called whenever one has ended in an accepted way.
      accepted: exit codes; any other is a failure, which stops the rest.

    Raises:
      Stopped: if a training fails, or on SIGINT, SIGTERM or SIGHUP, after all have saved.
    """
    side_by_side = min(side_by_side, len(jobs))
    waiting = collections.deque(jobs)
    free = collections.deque(shares(side_by_side))
    running: dict[Job, tuple[subprocess.Popen, list[int]]] = {}
    failed: list[tuple[Job, int]] = []
    with Signals() as signals, _progress() as show:
        while running or waiting:
            while waiting and free and not failed and not signals.received:
                job, share = waiting.popleft(), free.popleft()
                process = _start(job, share, alone=side_by_side == 1, validate=validate)
                running[job] = (process, share)
            if failed or signals.received:
                waiting.clear()
                for process, _ in running.values():
                    process.send_signal(signal.SIGTERM)
                for process, _ in running.values():
                    process.wait()
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


class Ended(NamedTuple):
    """How a training went.

    Attributes:
      job: what was trained.
      code: the exit code of its process.
      seconds: of processor time that the process took.
    """

    job: Job
    code: int
    seconds: float


def _ended(job: Job, process: subprocess.Popen) -> Ended | None:
    """How a training went; None while it goes on."""
    seconds = 0.0
    if process.returncode is None:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if not pid:
            return None
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = usage.ru_utime + usage.ru_stime
    return Ended(job, process.returncode, seconds)


@functools.cache
def _compiled() -> str:
    """A folder of compiled programs for the trainings that this process starts; it goes with it."""
    folder = tempfile.TemporaryDirectory(prefix="tape-jax-compiled-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return folder.name


def _start(job: Job, cores: list[int], *, alone: bool, validate: bool) -> subprocess.Popen:
    """Starts a training on the given cores, in a session of its own."""
    arguments = ["--evaluate"]
    arguments += ["--resume"] if job.folder.exists() else []
    arguments += ["--validate"] if validate else []
    environment = HUGE_PAGES | os.environ
    environment |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(len(cores))}
    if "JAX_COMPILATION_CACHE_DIR" not in environment:
        environment["JAX_COMPILATION_CACHE_DIR"] = _compiled()
    if len(cores) == 1:
        flags = os.environ.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    if not alone:
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with open(job.log, "a", encoding="utf-8") as log:
        # The terminal's Ctrl-C must reach this process only, which passes it on once.
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "train.main", "train", f"--run={job.folder}"),
                *(*job.command, *arguments),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process.pid, cores)
    return process


def shares(count: int) -> list[list[int]]:
    """The cores that this process may use, divided among ``count`` processes."""
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = list(range(os.cpu_count() or 1))
    if count >= len(cores):
        return [[cores[i % len(cores)]] for i in range(count)]
    return [cores[i * len(cores) // count : (i + 1) * len(cores) // count] for i in range(count)]


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Job], None]]:
    """A function that shows how far a job is, one bar for each that has begun."""

    def lines_of(job: Job) -> list[dict[str, Any]]:
        return metrics.read(job.folder / "metrics.jsonl")

    bars: dict[Job, metrics.Progress] = {}

    def show(job: Job) -> None:
        if lines := lines_of(job):
            step, steps = lines[-1]["step"], job.experiment.steps
            if job not in bars:
                bars[job] = metrics.Progress(steps, start=step, label=job.label, row=len(bars))
            done = step == steps
            bars[job].update(step, "evaluating" if done else metrics.describe(lines[-1]))

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()


def record(job: Job, *, ask: bool) -> RunRecord:
    """What the report says of a finished job, with samples if ``ask``."""
    evaluated = evaluation.saved(job.folder)
    assert evaluated is not None
    lines = metrics.read(job.folder / "metrics.jsonl")
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    parameters, trained = runs.count_parameters(job.experiment)
    train = job.experiment.train
    return RunRecord(
        name=job.name,
        seed=job.experiment.seed,
        result=job.experiment.task.read_result(evaluated["result"]),
        steps=[line["step"] for line in lines],
        losses=[line["loss"] for line in lines],
        command=shlex.join(
            ["python", "-m", "train.main", "train", f"--run={job.folder}", *job.command]
        ),
        facts={
            **({"setting": job.setting.name} if job.setting.name else {}),
            "parameters": f"{parameters:,}",
            "of these trained": f"{trained:,} ({trained / parameters:.2%})",
            "steps": f"{job.experiment.steps:,}",
            "batch": f"{train.batch_size:,}",
            "last loss": f"{lines[-1]['loss']:.5f}" if lines else "-",
            "tokens per second, median": (
                f"{sorted(speeds)[len(speeds) // 2]:,.0f}" if speeds else "-"
            ),
        },
        samples=job.samples() if ask else (),
    )
