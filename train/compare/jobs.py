"""The trainings of a comparison: what is compared, and which run each rival gets.

All have equal steps, data and seeds. Each has its own run inside the comparison's folder.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import shlex
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tape_jax import positions
from train import experiment
from train.checks import choose, require
from train.compare import evaluations
from train.compare.report import RunRecord
from train.compare.sweep import Setting
from train.experiment import Experiment, adaptation
from train.files import write_atomically
from train.tasks import program
from train.training import changes, loop, metrics, runs

FORMAT = "tape-jax comparison, version 1"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The kind of rivals of a comparison, such as position encodings, and the options of each.

    Attributes:
      what: the kind in words.
      known: the ``--config.a.b=value`` options that make each name.
      parts: returns the known names that a name joins; ValueError if it joins another.
      combined: the config field that takes a joined name, if any. Fields beside it can then
        follow a name: ``rope+fox:bias=5.0``.
      beside: further options for a name that joins several.
    """

    what: str
    known: Mapping[str, Sequence[str]]
    parts: Callable[[str], list[str]] | None = None
    combined: str | None = None
    beside: Sequence[str] = ()

    def overrides(self, name: str) -> Sequence[str]:
        """Returns the ``--config.a.b=value`` options of a name; ValueError for an unknown one."""
        if self.combined and ":" in name:
            name, *options = name.split(":")
            for option in options:
                require(
                    "=" in option.strip("="),
                    f"expected NAME:OPTION=VALUE, such as rope+fox:bias=5.0; got {option!r} after "
                    f"{name!r}",
                )
            group = self.combined.rpartition(".")[0]
            return (*self.overrides(name), *(f"--config.{group}.{option}" for option in options))
        if self.parts and len(self.parts(name)) > 1:
            return (*self.beside, f"--config.{self.combined}={name}")
        choose(self.what, name, self.known)
        return self.known[name]

    @classmethod
    def of_field(cls, what: str, field: str, values: Iterable[str], **options: Any) -> Choice:
        """Makes a choice among values of one config field."""
        return cls(what, {value: (f"--config.{field}={value}",) for value in values}, **options)


ENCODINGS = Choice.of_field(
    "position encoding",
    "model.position.kind",
    positions.registry,
    parts=positions.kinds,
    combined="model.position.kind",
)
METHODS = Choice.of_field(
    "adapt method",
    "adapt.method",
    adaptation.METHODS,
    parts=lambda name: positions.kinds(name) if {"+", "/"} & {*name} else [name],
    combined="model.position.kind",
    beside=("--config.adapt.method=encoding",),
)


@dataclasses.dataclass(frozen=True)
class Job:
    """One training of the comparison.

    Attributes:
      name: the encoding, method or variant.
      setting: its setting in the sweep.
      folder: the run folder.
      experiment: what is trained there.
      command: arguments of ``train`` that train it from the start.
    """

    name: str
    setting: Setting
    folder: Path
    experiment: Experiment
    command: tuple[str, ...]

    @property
    def label(self) -> str:
        """A short, unique name of the training."""
        return f"{self.setting.folder(self.name)}, seed {self.experiment.seed}"

    @property
    def log(self) -> Path:
        """The file to which the training prints."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def samples(self) -> Sequence[str]:
        """Returns lines that show what the trained model does when it is asked something unseen."""
        trained = runs.restore_for_evaluation(self.folder)
        return self.experiment.task.samples(trained, self.experiment.evaluation)

    @property
    def finished(self) -> bool:
        """True if the run has been evaluated after its last step, with the wanted options."""
        record = evaluations.saved(self.folder)
        return (
            record is not None
            and record["step"] == self.experiment.steps
            and record["options"] == evaluations.options_to_json(self.experiment.evaluation)
        )


def plan(
    config: Path,
    folder: Path,
    choice: Choice,
    names: Sequence[str],
    seeds: int,
    overrides: Sequence[str],
    settings: Sequence[Setting] = (Setting(),),
) -> list[Job]:
    """Returns the trainings of a comparison, checked before anything is written.

    Each name is trained with every setting.

    Raises:
      ValueError: for a name that is unknown or given twice, a config that does not fit, a request
        that the task cannot meet, or a folder in the way of a run, also another experiment's run.
    """
    require(seeds >= 1, f"compare: --seeds must be at least 1; got {seeds}")
    chosen = {name: choice.overrides(name) for name in names}
    require(len(set(names)) == len(names), f"compare: {choice.what} given twice: {names}")
    report = functools.cache(print)  # Seeds and settings report the same.
    first_seed = experiment.from_file(config, overrides, report=lambda _: None).seed
    jobs, prepared = [], []
    seeds_of_each = range(first_seed, first_seed + seeds)
    for name, setting, seed in itertools.product(names, settings, seeds_of_each):
        another = seed != first_seed
        own = (
            *overrides,
            *chosen[name],
            *setting.overrides,
            *([f"--config.seed={seed}"] if another else []),
        )
        job = Job(
            name=name,
            setting=setting,
            folder=folder
            / (setting.folder(folder_name(name)) + (f"-seed{seed}" if another else "")),
            experiment=experiment.from_file(config, own, report),
            command=(f"--config={config}", *own),
        )
        model = job.experiment.model
        asked = job.experiment.task, job.experiment.evaluation, runs.max_length(model)
        if asked not in prepared:
            loop.prepared(job.experiment, strict=True)
            prepared.append(asked)
        if runs.exists(job.folder):
            changes.check_same(job.folder, job.experiment)
        else:
            runs.require_free(job.folder)
        jobs.append(job)
    return jobs


def folder_name(name: str) -> str:
    """Makes a rival's name a folder name: unusual characters are written as in a URL.

    >>> folder_name("rope/none:base=1e4")
    'rope%2Fnone-base=1e4'
    """
    return urllib.parse.quote(name.replace(":", "-"), safe="=,+()[]")


def claim(folder: Path, jobs: Sequence[Job]) -> None:
    """Creates the folder of a comparison, or checks that it is one.

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


def record(
    job: Job, *, ask: bool, suite: Mapping[str, float] | None = None, diverged: bool = False
) -> RunRecord:
    """Returns the record of a job that has ended.

    Args:
      job: the job, which has been evaluated unless it diverged.
      ask: whether the record has samples.
      suite: scores of a suite.
      diverged: whether its training diverged; it then has only losses and facts.
    """
    result = None
    if not diverged:
        evaluated = evaluations.saved(job.folder)
        assert evaluated is not None
        result = job.experiment.task.read_result(evaluated["result"])
    lines = metrics.read(job.folder / "metrics.jsonl")
    # A line of only skipped steps has neither.
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    parameters, trained = runs.count_parameters(job.experiment)
    return RunRecord(
        name=job.name,
        seed=job.experiment.seed,
        result=result,
        steps=[*losses],
        losses=[*losses.values()],
        command=shlex.join(
            [
                "python",
                "-m",
                program(job.experiment.task),
                "train",
                f"--run={job.folder}",
                *job.command,
            ]
        ),
        facts={
            **({"setting": job.setting.name} if job.setting.name else {}),
            "parameters": f"{parameters:,}",
            "of these trained": f"{trained:,} ({trained / parameters:.2%})",
            "steps": f"{job.experiment.steps:,}",
            "batch": f"{job.experiment.batch_shape[0]:,}",
            "last loss": f"{[*losses.values()][-1]:.5f}" if losses else "-",
            "tokens per second, median": (
                f"{sorted(speeds)[len(speeds) // 2]:,.0f}" if speeds else "-"
            ),
        },
        samples=job.samples() if ask and not diverged else (),
        suite=suite or {},
    )
