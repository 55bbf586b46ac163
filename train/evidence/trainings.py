"""Studies of trainings: rivals, their sweeps, and the seeds of what was chosen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tape_jax._src.checks import require
from train import experiment
from train.comparison import evaluations, jobs, sweep
from train.comparison.jobs import Choice, Job
from train.comparison.processes import Ended, train_all
from train.comparison.report import RunRecord, describe_environment
from train.comparison.sweep import Setting
from train.evidence.records import Item, Made, Record, portable
from train.evidence.source import describe_source
from train.evidence.studies import Fields, Finished, Place, State, Study, options
from train.tasks import Result, Score, Task
from train.training import metrics, runs
from train.training.signals import NON_FINITE_EXIT_CODE

# Losses of a run that a record keeps at most.
MOST_LOSSES = 50


@dataclasses.dataclass(frozen=True)
class Diverged:
    """The result of a training that ended with a number that is not finite.

    Attributes:
      step: the last one that was logged before.
    """

    step: int

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
      same: rivals whose trainings are, step for step, those of another: they are not made again.
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
    same: Mapping[str, str] = dataclasses.field(default_factory=dict)
    base: Base | None = None
    quick: Sequence[str] = ()

    def at(self, place: Place) -> PlannedTrainings:
        """The study at a place."""
        return PlannedTrainings(self, place)


class PlannedTrainings(Study):
    """A study of trainings at a place.

    Attributes:
      design: the study.
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
        self._read_once = functools.cache(self._read)
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
    def items(self) -> list[Item]:
        """Its runs, as far as they are known."""
        known: dict[Job, None] = {}
        for rival in self.design.rivals:
            known |= dict.fromkeys([*self.trials(rival), *(self.finals(rival) or ())])
        return list(map(self.item, known))

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
        while swept and (missing := self._unvalidated):
            self._train(missing, finished, validate=True)
        # One rival after another, so that those which come first are soon complete.
        finals = [job for rival in rivals for job in self.finals(rival) or ()]
        self._train([job for job in finals if not self.record(job)], finished)

    def record(self, job: Job) -> Record | None:
        """The record of a run; None if it is not finished."""
        return self.recorded(self.item(job))

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

    @property
    def _unvalidated(self) -> list[Job]:
        """The runs that are missing for the choice of the settings, as far as they are known."""
        known = (job for rival in self.design.rivals for job in self.trials(rival))
        return [job for job in known if not self._validated(job)]

    def _validated(self, job: Job) -> Result | Diverged | None:
        """What came out of the validation of a run; None if it is missing."""
        record = self.record(job)
        if record is None or not (record.found["validation"] or record.found["diverged"]):
            return None
        return self.read(record, "validation")

    def _jobs(self, rival: str, setting: Setting) -> list[Job]:
        where = self.design.config, self.folder, self._choice
        return jobs.plan(*where, [rival], self.design.seeds, self._overrides, [setting], _silent)

    def item(self, job: Job) -> Item:
        """What is kept of a run, before it is made."""
        base = None if self.design.base is None else self._base.experiment
        return Item(self.name, job.folder.name, job.name, portable(job.experiment), base=base)

    def original(self, job: Job) -> Job:
        """The run that this one would repeat step for step; itself if there is none."""
        if not job.experiment.steps:
            return self._runs(job.name, self.settings[0])[0]
        seed = self._runs(job.name, job.setting).index(job)
        return self._runs(self.design.same.get(job.name, job.name), job.setting)[seed]

    def check(self, record: Record) -> None:
        """Raises ValueError, TypeError or KeyError if the results are none of the task."""
        self._describe(record)
        if record.found["validation"]:
            self.read(record, "validation")

    def _describe(self, record: Record) -> RunRecord:
        losses = record.found["losses"]
        steps = [step for step, _ in losses]
        result = self.read(record)
        return RunRecord(record.rival, record.seed, result, steps, [x for _, x in losses], "")

    def read(self, record: Record, name: str = "result") -> Result | Diverged:
        """What came out of a run: its test, or its validation."""
        return self._read_once(record, name)

    def _read(self, record: Record, name: str) -> Result | Diverged:
        if record.found["diverged"]:
            return Diverged(**record.found["diverged"])
        return self.task.read_result(record.found[name])

    def _train(self, jobs: Sequence[Job], finished: Finished, *, validate: bool = False) -> None:
        if not jobs:
            return
        originals = {job: self.original(job) for job in jobs}
        lacking = self._validated if validate else self.record
        missing = [job for job in dict.fromkeys(originals.values()) if not lacking(job)]
        environment, code = describe_environment(), describe_source()

        def write(ended: Ended) -> None:
            before, item = self.record(ended.job), self.item(ended.job)
            seconds = ended.seconds + (before.seconds if before else 0)
            made = Made(environment, code, seconds)
            self.place.store.put(item, _found(ended, validate), made)
            finished(item)

        if missing:
            self._prepare()
            train_all(
                missing,
                self.place.side_by_side,
                validate=validate,
                finished=write,
                accepted=(0, NON_FINITE_EXIT_CODE),
            )
        for job, original in originals.items():
            if job != original:
                made = Made(environment, code, 0.0)
                self.place.store.refer(self.item(job), original.folder.name, made)
                finished(self.item(job))

    def _prepare(self) -> None:
        """Makes what trainings need: the base, and a folder."""
        if self.design.base is not None and not self._base.finished:
            train_all([self._base], 1)
        self.folder.mkdir(parents=True, exist_ok=True)

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


def _silent(line: str) -> None:
    """Reports nothing."""


def _found(ended: Ended, validated: bool) -> dict[str, Any]:
    """What is kept of a training."""
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
        return found | {"diverged": {"step": lines[-1]["step"] if lines else 0}}
    record = evaluations.saved(folder)
    assert record is not None
    found["result"] = record["result"]
    if validated:
        found["validation"] = sweep.validate(folder).to_json()
    return found
