"""Studies: sets of like runs. How they are planned, made one by one, and read back.

A study knows its runs before any is made. Each is written to its results file the moment it ends,
so that a study can be stopped anywhere and continued, here or on another machine.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tape_jax.config import require
from train import experiment, metrics, runs, sweep
from train.commands import compare
from train.commands import eval as evaluation
from train.commands.compare import Choice, Ended, Job
from train.data import Result, Score, Task
from train.evidence.records import Item, Record, Store
from train.loop import NON_FINITE_EXIT_CODE, Signals, Stopped
from train.metrics import Progress
from train.report import RunRecord, describe_environment
from train.sweep import Setting

# Losses of a run that a results file keeps at most.
MOST_LOSSES = 50

Fields = Mapping[str, Any]
Finished = Callable[[Item], None]


class Place(NamedTuple):
    """Where the suite is run, and at which scale.

    Attributes:
      store: of the results.
      runs: the folder of the run folders.
      side_by_side: trainings at a time.
      scale: of the configs (``--config.scale``).
    """

    store: Store
    runs: Path
    side_by_side: int = 2
    scale: str = experiment.THIS_SCALE

    @property
    def overrides(self) -> tuple[str, ...]:
        """What the scale adds to the command line of every run."""
        default = self.scale == experiment.THIS_SCALE
        return () if default else (f"--config.scale={self.scale}",)


class State(NamedTuple):
    """How far a study is.

    Attributes:
      total: runs in all.
      finished: those with results, settings of a sweep that were not chosen included.
      unfinished: names of the others, as far as they are known.
    """

    total: int
    finished: Sequence[Record]
    unfinished: Sequence[str]


class Study(abc.ABC):
    """A set of runs that are compared with each other, at a place.

    Attributes:
      name: a word, fit for a folder.
      section: of the page.
    """

    name: str
    section: str

    @property
    @abc.abstractmethod
    def state(self) -> State:
        """How far it is; ValueError names a results file that does not belong."""

    @property
    @abc.abstractmethod
    def budget(self) -> str:
        """The size of its runs, in words."""

    @abc.abstractmethod
    def run(self, finished: Finished, *, quick: bool = False) -> None:
        """Makes what is missing, or the quick part of it.

        Args:
          finished: called after each run, when its results are written.
          quick: whether only a few runs are made.

        Raises:
          Stopped: if a run fails, or on a signal to stop.
        """


class Measurements(Study):
    """A study whose runs are measurements, made one after another in this process.

    Attributes:
      place: where.
      items: the measurements.
      quick: how many of them, from the first, belong to the quick part.
    """

    place: Place
    items: Sequence[Item]
    quick = 0

    @abc.abstractmethod
    def measure(self, item: Item) -> dict[str, Any]:
        """One measurement, in JSON types."""

    @property
    def state(self) -> State:
        """How far it is."""
        records = {item.name: self.place.store.get(item) for item in self.items}
        return State(
            total=len(records),
            finished=[record for record in records.values() if record],
            unfinished=[name for name, record in records.items() if not record],
        )

    def run(self, finished: Finished, *, quick: bool = False) -> None:
        """Makes what is missing."""
        wanted = self.items[: self.quick] if quick else self.items
        missing = [item for item in wanted if not self.place.store.get(item)]
        if not missing:
            return
        environment = describe_environment()
        with Signals() as signals, Progress.of(self.name) as progress:
            for number, item in enumerate(missing):
                progress(number, len(missing))
                start = time.process_time()
                found = self.measure(item)
                self.place.store.put(item, found, environment, time.process_time() - start)
                finished(item)
                if signals.received:
                    raise Stopped(
                        "stopped; what was measured is saved, and the same command continues",
                        128 + signals.received,
                    )


@dataclasses.dataclass(frozen=True)
class Diverged:
    """The result of a training that ended with a number that is not finite.

    Attributes:
      step: the last one that was logged before.
      message: what the training said.
    """

    step: int
    message: str

    def summary(self) -> dict[str, float]:
        """It has no scores."""
        return {}


class Base(NamedTuple):
    """A run from which the others of a study start.

    Attributes:
      config: its config file.
      fields: in which it differs from the file.
      by_scale: further ones, by scale.
    """

    config: Path
    fields: Fields
    by_scale: Mapping[str, Fields]

    def options(self, place: Place) -> tuple[str, ...]:
        """Its command line at a place."""
        return (*place.overrides, *options({**self.fields, **self.by_scale[place.scale]}))


class Design(Protocol):
    """A study, wherever it is run."""

    @property
    def name(self) -> str: ...

    def at(self, place: Place) -> Study:
        """The study at a place."""


@dataclasses.dataclass(frozen=True)
class Trainings:
    """Rivals that are trained alike and judged by the scores of their task.

    Every rival is trained with the first seeds at every setting of the sweep, and on, a neighbour
    at a time, where the best of them is the last on its side. The setting that is best in a
    validation apart from the test is then trained with the other seeds.

    Attributes:
      name: a word, fit for a folder.
      section: of the page.
      config: the config file.
      rivals: by name, the fields of the config in which each differs; the first are made first.
      fields: those in which all of them differ from the file.
      by_scale: further ones, by scale.
      sweep: by scale, what is swept, ``train.learning_rate=1e-3,3e-3`` each.
      wider: by scale, the same field with further values on both sides, in order; none: the sweep
        does not go on.
      choosing: number of seeds by whose mean the setting is chosen.
      scores: keys of the scores that are shown, the one that counts first; none: all of the task.
      seeds: number of them.
      base: what is adapted, in the folder ``base`` beside the runs; None: nothing.
      quick: rivals of which one run belongs to the quick part.
    """

    name: str
    section: str
    config: Path
    rivals: Mapping[str, Fields]
    fields: Fields = dataclasses.field(default_factory=dict)
    by_scale: Mapping[str, Fields] = dataclasses.field(default_factory=dict)
    sweep: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    wider: Mapping[str, str] = dataclasses.field(default_factory=dict)
    choosing: int = 1
    scores: Sequence[str] = ()
    seeds: int = 3
    base: Base | None = None
    quick: Sequence[str] = ()

    def at(self, place: Place) -> PlannedTrainings:
        """The study at a place."""
        return PlannedTrainings(self, place)


class PlannedTrainings(Study):
    """A study of trainings at a place.

    Attributes:
      design: the study.
      place: where.
      settings: with which every rival is trained.
      ladder: the settings to which a sweep may go on, in order.
    """

    def __init__(self, design: Trainings, place: Place):
        self.name, self.section = design.name, design.section
        self.design, self.place = design, place
        self.folder = place.runs / design.name
        shared = {**design.fields, **design.by_scale.get(place.scale, {})}
        if design.base is not None:
            shared["adapt.base"] = str(self._base.folder)
            if not self._base.folder.exists():
                runs.create(self._base.folder, self._base.experiment)
        self._overrides = (*place.overrides, *options(shared))
        known = {name: options(fields) for name, fields in design.rivals.items()}
        self._choice = Choice(f"rival of the study {design.name!r}", known)
        self.settings = sweep.settings(design.sweep.get(place.scale, ()))
        wider = design.wider.get(place.scale)
        self.ladder = sweep.settings([wider]) if wider else self.settings
        missing = [setting.name for setting in self.settings if setting not in self.ladder]
        require(not missing, f"{wider} lacks {', '.join(missing)}, with which the sweep begins")
        self._runs = functools.cache(self._jobs)
        self._first = self._runs(next(iter(design.rivals)), self.settings[0])[0].experiment

    @property
    def task(self) -> Task:
        """What the rivals are trained on."""
        return self._first.task

    @property
    def scores(self) -> list[Score]:
        """What they are compared by, the score that counts first."""
        known = {score.key: score for score in self.task.scores}
        return [known[key] for key in self.design.scores or known]

    @property
    def state(self) -> State:
        """How far it is."""
        records: dict[Job, Record | None] = {}
        unknown = []
        for rival in self.design.rivals:
            for job in self.trials(rival):
                lacking = len(self.settings) > 1 and self._validated(job) is None
                records[job] = None if lacking else self.record(job)
            finals = self.finals(rival)
            if finals is None:
                seeds = range(self.design.choosing + 1, self.design.seeds + 1)
                unknown += [f"{rival}, seed {n} of {self.design.seeds}" for n in seeds]
            records |= {job: self.record(job) for job in finals or ()}
        return State(
            total=len(records) + len(unknown),
            finished=[record for record in records.values() if record],
            unfinished=[job.folder.name for job in records if not records[job]] + unknown,
        )

    @property
    def budget(self) -> str:
        """The size of its runs, in words."""
        e, design = self._first, self.design
        models = [
            self._runs(rival, self.settings[0])[0].experiment.model for rival in design.rivals
        ]
        layers = sorted({model.num_layers for model in models})
        parts = [
            f"`{design.config}`: {len(design.rivals)} rivals, {design.seeds} seeds",
            f"{' or '.join(map(str, layers))} layers of width {e.model.hidden_size}",
            f"{e.train.steps:,} steps of {e.train.batch_size} sequences",
        ]
        if len(self.settings) > 1:
            parts.append(f"settings tried: {'; '.join(setting.name for setting in self.settings)}")
            if self.ladder != self.settings:
                ends = f"{self.ladder[0].name} or {self.ladder[-1].name}"
                parts.append(f"and on towards {ends} while the best is the last")
            if design.choosing > 1:
                parts.append(f"chosen by {design.choosing} seeds")
        return ", ".join(parts)

    def run(self, finished: Finished, *, quick: bool = False) -> None:
        """Makes what is missing, or one run of each rival that the quick part has."""
        swept = len(self.settings) > 1
        if quick:
            missing = [job for job in self.quick if not self.record(job)]
            self._train(missing, finished, validate=swept)
            return
        rivals = self.design.rivals
        while swept and (missing := self._unvalidated(rivals)):
            self._train(missing, finished, validate=True)
        # One rival after another, so that those which come first are soon complete.
        finals = [job for rival in rivals for job in self.finals(rival) or ()]
        self._train([job for job in finals if not self.record(job)], finished)

    def record(self, job: Job) -> Record | None:
        """The results of a run; None if it is not finished."""
        return self.place.store.get(self.item(job))

    def results(self) -> dict[str, list[RunRecord]]:
        """The finished runs that count, by rival."""
        found = {}
        for rival in self.design.rivals:
            records = [self.record(job) for job in self.finals(rival) or ()]
            found[rival] = [self._describe(record) for record in records if record]
        return found

    @property
    def quick(self) -> list[Job]:
        """The quick part: one run of each rival that has one."""
        return [self.trials(rival)[0] for rival in self.design.quick]

    def trials(self, rival: str) -> list[Job]:
        """The runs that choose the setting of a rival, as far as it is known what must be tried."""
        return [job for jobs in self._tried(rival)[0].values() for job in jobs]

    def finals(self, rival: str) -> list[Job] | None:
        """The runs of a rival that count, one for each seed; None while they are not known."""
        chosen = self._tried(rival)[1]
        return None if chosen is None else self._runs(rival, chosen)

    def _tried(self, rival: str) -> tuple[dict[Setting, list[Job]], Setting | None]:
        """What a rival is tried with, and what was chosen; None while that is not known."""
        count = self.design.choosing
        tried = {setting: self._runs(rival, setting)[:count] for setting in self.settings}
        if len(self.settings) == 1:
            return tried, self.settings[0]
        while True:
            results: dict[Setting, list[Any]] = {}
            for setting in sorted(tried, key=self.ladder.index):
                found = [self._validated(job) for job in tried[setting]]
                if not all(found):
                    return tried, None
                results[setting] = found
            further = sweep.neighbour(self.task, self.ladder, results)
            if further is None:
                return tried, sweep.best(self.task, results)
            tried[further] = self._runs(rival, further)[:count]

    def _unvalidated(self, rivals: Iterable[str]) -> list[Job]:
        """The runs that are missing for the choice of the settings, as far as they are known."""
        return [job for rival in rivals for job in self.trials(rival) if not self._validated(job)]

    def _validated(self, job: Job) -> Result | Diverged | None:
        """What came out of the validation of a run; None if it is missing."""
        record = self.record(job)
        if record is None or not (record.found["validation"] or record.found["diverged"]):
            return None
        return self.read(record, "validation")

    def _jobs(self, rival: str, setting: Setting) -> list[Job]:
        where = self.design.config, self.folder, self._choice
        return compare.plan(*where, [rival], self.design.seeds, self._overrides, [setting], _silent)

    def item(self, job: Job) -> Item:
        return Item(self.name, job.folder.name, job.name, job.experiment)

    def _describe(self, record: Record) -> RunRecord:
        losses = record.found["losses"]
        steps = [step for step, _ in losses]
        result = self.read(record)
        return RunRecord(record.rival, record.seed, result, steps, [x for _, x in losses], "")

    def read(self, record: Record, name: str = "result") -> Result | Diverged:
        """What came out of a run: its test, or its validation."""
        if record.found["diverged"]:
            return Diverged(**record.found["diverged"])
        return self.task.read_result(record.found[name])

    def _train(self, jobs: Sequence[Job], finished: Finished, *, validate: bool = False) -> None:
        if not jobs:
            return
        if self.design.base is not None and not self._base.finished:
            compare.train_all([self._base], 1)
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = describe_environment()

        def write(ended: Ended) -> None:
            item, before = self.item(ended.job), self.record(ended.job)
            seconds = ended.seconds + (before.seconds if before else 0)
            self.place.store.put(item, _found(ended, validate), environment, seconds)
            finished(item)

        compare.train_all(
            jobs,
            self.place.side_by_side,
            validate=validate,
            finished=write,
            accepted=(0, NON_FINITE_EXIT_CODE),
        )

    @functools.cached_property
    def _base(self) -> Job:
        base = self.design.base
        assert base is not None
        given = base.options(self.place)
        return Job(
            name="base",
            setting=Setting(),
            folder=self.folder / "base",
            experiment=experiment.from_file(base.config, given, _silent),
            command=(f"--config={base.config}", *given),
        )


def options(fields: Fields) -> tuple[str, ...]:
    """Fields of a config as they are given on the command line."""
    return tuple(f"--config.{name}={value}" for name, value in fields.items())


def _silent(line: str) -> None:
    """Reports nothing."""


def _found(ended: Ended, validated: bool) -> dict[str, Any]:
    """What a results file keeps of a training."""
    folder = ended.job.folder
    lines = metrics.read(folder / "metrics.jsonl")
    every = max(1, -(-len(lines) // MOST_LOSSES))
    found: dict[str, Any] = {
        "result": None,
        "validation": None,
        "diverged": None,
        "losses": [[line["step"], line["loss"]] for line in lines[::-every][::-1]],
    }
    if ended.code == NON_FINITE_EXIT_CODE:
        last = ended.job.log.read_text(encoding="utf-8").strip().splitlines()[-1]
        return found | {"diverged": {"step": lines[-1]["step"] if lines else 0, "message": last}}
    record = evaluation.saved(folder)
    assert record is not None
    found["result"] = record["result"]
    if validated:
        found["validation"] = sweep.validate(folder).to_json()
    return found
