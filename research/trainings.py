"""Studies of trainings: the rates tried for each rival, and the seeds at the chosen one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from matplotlib.figure import Figure

from research import protocol
from research.choosing import Budget, Curve, RateStep, choose_budget, next_rates
from research.figures import dots
from research.protocol import Procedure
from research.records import Item, Made, Record, describe_source, portable
from research.study import Base, Fields, Finished, Place, State, Study, options
from train import experiment
from train.checks import choose, require
from train.compare import evaluations, sweep
from train.compare.environment import describe_environment
from train.compare.jobs import Job
from train.compare.processes import (
    CONVERGED_OR_NOT,
    EVALUATE,
    VALIDATE,
    Ended,
    shares,
    train_all,
)
from train.compare.sweep import Setting
from train.evaluation import fits
from train.evaluation.grids import text_table
from train.experiment import Experiment
from train.statistics import estimate
from train.tasks import Score, Task
from train.training import changes, metrics, runs
from train.training.signals import NON_FINITE_EXIT_CODE

# Further rates that a walk is expected to try, beside the first three.
FURTHER = 0.5
# The most losses that a record keeps of a run.
MOST_LOSSES = 50
# Keys of exact match beyond the trained lengths and at them.
BEYOND, INSIDE = "exact_match_outside", "exact_match_inside"
# Pages call a task learned from this per cent right at the trained lengths on.
LEARNED = 95
# The end of a score's key: the multiple of the trained length.
TIMES = re.compile(r"_([\d.]+)x$")


@dataclasses.dataclass(frozen=True)
class Trainings:
    """Rivals that are trained alike and judged by scores of their task (research/protocol.md).

    Attributes:
      name: a word, fit for a folder.
      config: the config file.
      rivals: by name, the fields of the config in which each differs; the first are made first.
      scores: keys of those that claims read; each has its own choice of rates.
      minutes: of one idle core that a run takes with the configuration's steps, for plans.
      shown: keys of further scores, for the runs that the first score chose.
      fields: fields in which all rivals differ from the file.
      by_scale: further fields, by scale.
      first: by scale, the rate that is tried first.
      curve: chooses the budget; None: it is `multiple`.
      multiple: of the configuration's steps, if there is no curve.
      base: what is adapted, if anything.
      quick: rivals of which one run belongs to the quick part.
      not_kept: fields of a result that are None in records.
      only: rivals whose runs are made; None: all.
      procedure: how it chooses rates and reports.
    """

    name: str
    config: Path
    rivals: Mapping[str, Fields]
    scores: Sequence[str]
    minutes: float
    shown: Sequence[str] = ()
    fields: Fields = dataclasses.field(default_factory=dict)
    by_scale: Mapping[str, Fields] = dataclasses.field(default_factory=dict)
    first: Mapping[str, str] = dataclasses.field(default_factory=lambda: protocol.FIRST)
    curve: Curve | None = None
    multiple: int = 1
    base: Base | None = None
    quick: Sequence[str] = ()
    not_kept: Sequence[str] = ()
    only: Sequence[str] | None = None
    procedure: Procedure = protocol.FIRST_PROCEDURE

    def at(self, place: Place) -> PlannedTrainings:
        """Returns the study at a place."""
        return PlannedTrainings(self, place)


class PlannedTrainings(Study):
    """A study of trainings at a place.

    Attributes:
      design: the study.
      first: the rate that is tried first.
      rivals: rivals whose runs are made, besides those that choose the budget.
      procedure: of the design.
    """

    def __init__(self, design: Trainings, place: Place):
        self.name = design.name
        self.design, self.place, self.procedure = design, place, design.procedure
        self.folder = place.runs / design.name
        self.rivals = [r for r in design.rivals if design.only is None or r in design.only]
        choose("scale", place.scale, design.first)
        self.first = design.first[place.scale]
        self._budget: Budget | None = None
        self._made_once = functools.cache(self._made)
        self._job_once = functools.cache(self._job)
        self._base_once = functools.cache(self._base)
        self._read_once = functools.cache(self._read)

    @functools.cached_property
    def task(self) -> Task:
        """The task that the rivals are trained on."""
        return self._made_once(next(iter(self.design.rivals)))[0].task

    @property
    def _known_scores(self) -> dict[str, Score]:
        return {score.key: score for score in self.task.scores}

    @property
    def scores(self) -> list[Score]:
        """The scores that claims read."""
        return [self._known_scores[key] for key in self.design.scores]

    @property
    def shown(self) -> list[Score]:
        """The scores that claims read, and the others that are shown."""
        return self.scores + [self._known_scores[key] for key in self.design.shown]

    def score(self, key: str) -> Score:
        """Returns a score of the task."""
        return self._known_scores[key]

    @property
    def budget(self) -> Budget | None:
        """The budget of steps for every rival; None while the curve for it is not complete."""
        if self._budget is None:
            curve, values = self.design.curve, self.curve()
            if curve is None:
                self._budget = Budget(self.design.multiple, None)
            elif all(len(found) == len(protocol.MULTIPLES) for found in values.values()):
                self._budget = choose_budget(
                    values,
                    curve.most,
                    higher_is_better=self.score(curve.score).higher_is_better,
                    sudden=curve.sudden,
                )
        return self._budget

    def curve(self) -> dict[str, dict[int, float]]:
        """Returns the score that chooses the budget, by rival and multiple, as far as known."""
        found: dict[str, dict[int, float]] = {}
        for rival, multiple, job in self._curve_jobs():
            assert self.design.curve is not None
            if record := self.record(job):
                value = self.value(record, self.score(self.design.curve.score))
                found.setdefault(rival, {})[multiple] = value
            else:
                found.setdefault(rival, {})
        return found

    def _curve_jobs(self) -> Iterator[tuple[str, int, Job]]:
        if self.design.curve is not None:
            for rival in self.design.curve.rivals:
                for multiple in protocol.MULTIPLES:
                    first, seed = self.first, self.procedure.choosing[0]
                    yield rival, multiple, self._job_once(rival, first, seed, multiple)

    @property
    def curve_jobs(self) -> list[Job]:
        """Returns the runs that choose the budget; some of them also choose rates."""
        return [job for _, _, job in self._curve_jobs()]

    def walk(self, rival: str, key: str) -> tuple[list[Job], RateStep]:
        """Returns the known runs that choose a rival's rate for a score, and what they say."""
        scores: dict[str, float] = {}
        jobs: list[Job] = []
        while True:
            step = next_rates(scores, self.first, protocol.RATES, self.procedure.within)
            if not step.missing or self.budget is None:
                return jobs, step
            tried = {
                rate: [self.job(rival, rate, seed) for seed in self.procedure.choosing]
                for rate in step.missing
            }
            jobs += [job for of_rate in tried.values() for job in of_rate]
            for rate, of_rate in tried.items():
                records = [self.record(job) for job in of_rate]
                if not all(records):
                    return jobs, step
                score = self.score(key)
                assert score.higher_is_better or not self.procedure.within, (
                    "points are of exact match"
                )
                values = [self.comparable(self.value(r, score), score) for r in records if r]
                scores[rate] = statistics.fmean(values)

    def rate(self, rival: str, key: str) -> str | None:
        """Returns a rival's rate for a score; None while it is unknown, or at the ladder's end."""
        _, step = self.walk(rival, key)
        return None if step.at_end else step.chosen

    def reports(self, rival: str, key: str) -> list[Job] | None:
        """Returns the runs that judge claims about a score; None while their rate is not known."""
        rate = self.rate(rival, key)
        if rate is None:
            return None
        return [self.job(rival, rate, seed) for seed in self.procedure.reporting]

    def values(self, rival: str, key: str, shown: str | None = None) -> dict[int, float] | None:
        """Returns a score by seed, as shown; None unless every seed has reported.

        Args:
          rival: whose it is.
          key: of the score by which the rate was chosen.
          shown: key of the score that is wanted; None: the same.
        """
        records = [self.record(job) for job in self.reports(rival, key) or ()]
        if not records or not all(records):
            return None
        score = self.score(shown or key)
        return {record.seed: self.value(record, score) for record in records if record}

    def missing(self, rival: str, key: str) -> str | None:
        """Returns a phrase that names what a rival lacks for a score; None if it lacks nothing."""
        if self.budget is None:
            return "the budget is not chosen yet"
        jobs, step = self.walk(rival, key)
        if step.at_end:
            return f"{rival}: its best rate, {step.chosen}, is at the end of the ladder"
        if step.chosen is None:
            tried = [job.folder.name for job in jobs if not self.record(job)]
            return f"{rival}: no rate yet ({len(tried)} runs to choose it, from {tried[0]} on)"
        reports = self.reports(rival, key) or ()
        seeds = [str(job.experiment.seed) for job in reports if not self.record(job)]
        word = "seed" if len(seeds) == 1 else "seeds"
        return f"{rival}: {word} {', '.join(seeds)}" if seeds else None

    def texts(self, rival: str, key: str) -> dict[int, str]:
        """Returns fingerprints of the texts that judged a rival's runs, by seed, if any."""
        records = [self.record(job) for job in self.reports(rival, key) or ()]
        results = {r.seed: self._read_once(r) for r in records if r and not r.found["diverged"]}
        found = {seed: getattr(result, "perplexity", None) for seed, result in results.items()}
        return {seed: one.fingerprint for seed, one in found.items() if one is not None}

    def diverged(self, rival: str, key: str) -> dict[int, int]:
        """Returns a rival's seeds that diverged, with the last step logged before."""
        records = [self.record(job) for job in self.reports(rival, key) or ()]
        return {r.seed: r.found["diverged"]["step"] for r in records if r and r.found["diverged"]}

    def value(self, record: Record, score: Score) -> float:
        """Returns a run's score, as shown; the worst one if it diverged or cannot take the length.

        Raises:
          ValueError: it has no score for another reason.
        """
        if record.found["diverged"]:
            return self._worst(score)
        found = self._read_once(record).summary()
        if score.key not in found and not takes(self._made_once(record.rival)[0], score.key):
            return self._worst(score)
        return self.of_summary(found, score, record.name)

    def of_summary(
        self, summary: Mapping[str, float], score: Score, run: str = "a run that is looked into"
    ) -> float:
        """Returns a score as shown, from the summary of a result.

        Args:
          summary: of the result.
          score: which one.
          run: whose result it is, for errors.

        Raises:
          ValueError: it is missing, or not finite.
        """
        found = summary.get(score.key, math.nan)
        require(
            math.isfinite(found),
            f"{self.name}: {run} has no {score.key}, though it did not diverge and takes the "
            f"length; it has {dict(summary)}",
        )
        return score.factor * found

    def _worst(self, score: Score) -> float:
        """Returns the worst value of a score: nothing right, or a guess among all tokens."""
        return 0.0 if score.higher_is_better else float(self.task.vocab_size)

    @staticmethod
    def comparable(value: float, score: Score) -> float:
        """Returns a value for which more is better: perplexities become minus their logarithms."""
        return value if score.higher_is_better else -math.log(value)

    @property
    def jobs(self) -> list[Job]:
        """The runs known so far."""
        known = dict.fromkeys(self.curve_jobs)
        for key in self.design.scores:
            for rival in self.rivals:
                known |= dict.fromkeys(self.walk(rival, key)[0])
                known |= dict.fromkeys(self.reports(rival, key) or ())
        return list(known)

    @property
    def items(self) -> list[Item]:
        """The runs known so far."""
        return list(map(self.item, self.jobs))

    @property
    def state(self) -> State:
        """The progress of the study."""
        records = {job: self.record(job) for job in self.jobs}
        unknown: list[str] = []
        choosing, reporting = len(self.procedure.choosing), len(self.procedure.reporting)
        for rival in self.rivals:
            jobs, step = self.walk(rival, self.design.scores[0])
            if step.chosen is None:
                more = max(0, 3 * choosing - len(jobs)) + reporting
                unknown += [f"{rival}, {n} of {more} more" for n in range(1, more + 1)]
        return State(
            total=len(records) + len(unknown),
            finished=[record for record in records.values() if record],
            unfinished=[job.folder.name for job, found in records.items() if not found] + unknown,
        )

    @property
    def hours(self) -> float:
        """The hours of one idle core that the missing runs are expected to take."""
        design = self.design
        known = sum(self.minutes(job) for job in self.jobs if not self.record(job))
        runs = 0.0
        multiple = self.budget.multiple if self.budget else cast(Curve, design.curve).most
        for key, rival in itertools.product(design.scores, self.rivals):
            jobs, step = self.walk(rival, key)
            if step.chosen is None:
                # The other scores choose among the same runs, and often the same rate.
                first = key == design.scores[0]
                more = (
                    max(0, (3 + FURTHER) * len(self.procedure.choosing) - len(jobs)) if first else 0
                )
                runs += multiple * (more + len(self.procedure.reporting) * (1 if first else 0.5))
        return (known + runs * design.minutes) / 60

    def minutes(self, job: Job) -> float:
        """Returns the minutes of one idle core that a run is expected to take."""
        once = self._made_once(job.name)[0].train.steps
        return self.design.minutes * job.experiment.train.steps / once

    @property
    def size(self) -> str:
        """The size of its runs, in words."""
        made = [self._made_once(rival)[0] for rival in self.design.rivals]
        layers, e = sorted({one.model.num_layers for one in made}), made[0]
        steps = e.train.steps * (self.budget.multiple if self.budget else 1)
        return (
            f"`{self.design.config}`: {len(self.design.rivals)} rivals, "
            f"{' or '.join(map(str, layers))} layers of width {e.model.hidden_size}, "
            f"{steps:,} steps of {e.train.batch_size} sequences"
        )

    caption = (
        "*A dot is a seed, the bar the mean of the five, the line its 95 % interval, cut at 0 and "
        "100 %. Red is TAPE, whole or with a part changed; blue is all else.*"
    )

    def pictures(self, heading: str, red: Collection[str]) -> dict[str, Callable[[], Figure]]:
        """Returns a picture of every seed of complete rivals, by the scores that claims read."""
        found: dict[str, dict[str, Mapping[int, float]]] = {}
        for rival, key in itertools.product(self.design.rivals, self.design.scores):
            if (values := self.values(rival, key)) is not None:
                found.setdefault(rival, {})[key] = values
        if not found:
            return {}
        scores = [score._replace(label=self.label(score)) for score in self.scores]
        return {f"{self.name}.png": functools.partial(dots, heading, found, scores, red=red)}

    def tables(self) -> Iterator[str]:
        """Yields how the budget was chosen, and a table for each score that claims read."""
        if self.design.base and (base := self.item(self.jobs[0]).base):
            yield (
                f"1x is {self.task.sequence_length} bytes; the models that are tuned were trained "
                f"on {base.task.sequence_length}."
            )
        yield self._of_the_curve()
        for key in self.design.scores:
            yield self._of_score(key)

    def label(self, score: Score) -> str:
        """Returns the label of a score; of models that are tuned, with the bytes of 1x."""
        label = f"exact match {score.label}" if score.key in (BEYOND, INSIDE) else score.label
        if self.design.base is None:
            return label
        return label.replace(" 1x", f" 1x ({self.task.sequence_length} bytes)")

    def learned(self) -> dict[str, float]:
        """Returns mean scores at the trained lengths by rival, at the rates chosen beyond them."""
        if INSIDE not in self.design.shown:
            return {}
        found = {r: self.values(r, self.design.scores[0], INSIDE) for r in self.design.rivals}
        return {r: statistics.mean(values.values()) for r, values in found.items() if values}

    def _of_the_curve(self) -> str:
        """Returns the paragraph on how the budget was chosen."""
        curve = self.design.curve
        if curve is None or not any(self.curve().values()):
            return ""
        rows = [
            [rival, *(f"{found[m]:.3f}" if m in found else "-" for m in protocol.MULTIPLES)]
            for rival, found in self.curve().items()
        ]
        steps = (f"{m}x the steps" for m in protocol.MULTIPLES)
        label = self.label(self.score(curve.score))
        said = "The budget is not chosen yet."
        if (budget := self.budget) is not None:
            said = f"Budget chosen: {budget.multiple}x."
            if budget.improving:
                said += " Training was still improving there; the suite's hours allow no more."
            elif budget.improving is None:
                said += " Training was still improving before; what more would bring was not tried."
        return f"{said} In validation, {label}:\n\n{text_table(['', *steps], rows)}"

    def _of_score(self, key: str) -> str:
        """Returns the table for the rates that one score chose: means and intervals over seeds."""
        first = key == self.design.scores[0]
        shown = [self.score(key), *(s for s in self.shown if first and s.key != key)]
        rows, lacking = [], []
        for rival in self.design.rivals:
            values = [self.values(rival, key, score.key) for score in shown]
            if values[0] is None:
                lacking.append(f"`{rival}`")
                continue
            cells = [str(estimate([*found.values()])) for found in values if found]
            lost = self.diverged(rival, key)
            rows.append([rival, str(self.rate(rival, key)), str(len(lost)), *cells])
        if not rows:
            return ""
        header = ["", "rate", "diverged", *(self.label(score) for score in shown)]
        note = f"\n\nNot complete: {', '.join(lacking)}." if lacking else ""
        within = self.procedure.within
        chosen = f", the smallest within {within:g} points of the best" if within else ""
        return (
            f"Rates chosen by {self.label(self.score(key))}{chosen}; five seeds, mean and 95 % "
            f"interval:\n\n{text_table(header, rows)}{note}{self._not_learned()}"
        )

    def _not_learned(self) -> str:
        """Returns a note on the rivals that have not learned the trained lengths."""
        below = [f"{r} {mean:.1f}" for r, mean in self.learned().items() if mean < LEARNED]
        if not below:
            return ""
        label = self.label(self.score(INSIDE))
        return (
            f"\n\nNot learned whole (mean of the seeds below {LEARNED}, of: {label}): "
            f"{'; '.join(below)}. What these do beyond says how much was learned as "
            "well as what carries over."
        )

    def run(self, finished: Finished, *, quick: bool = False) -> None:
        """Makes what is missing, or one run of each rival that the quick part has."""
        if quick:
            self._train(self.quick, finished)
            return
        self._train(self.curve_jobs, finished)
        for key in self.design.scores:
            rivals = self.rivals
            while self._train([j for r in rivals for j in self.walk(r, key)[0]], finished):
                pass
            self._train([j for r in rivals for j in self.reports(r, key) or ()], finished)

    @property
    def quick(self) -> list[Job]:
        """The quick part: one run of each rival that has one."""
        seed = self.procedure.choosing[0]
        return [self._job_once(rival, self.first, seed, 1) for rival in self.design.quick]

    def record(self, job: Job) -> Record | None:
        """Returns a run's record; None if it is not finished."""
        return self.recorded(self.item(job))

    def item(self, job: Job) -> Item:
        """Returns the item of a run, before the run is made."""
        e = job.experiment
        asked = "validation" if self.validates(job) else "test"
        base = None if self.design.base is None else self._base_once(e.seed).experiment
        described = {"version": self.procedure.version, "asked": asked}
        return Item(self.name, job.folder.name, job.name, portable(e), base, described)

    def validates(self, job: Job) -> bool:
        """Returns whether a run is asked what no test asks, as it chooses a rate or a budget."""
        return job.experiment.seed in self.procedure.choosing

    def check(self, record: Record) -> None:
        """Raises ValueError, TypeError or KeyError if these are not the task's results."""
        if not record.found["diverged"]:
            self._read_once(record)

    def _read(self, record: Record) -> Any:
        return self.task.read_result(record.found["result"])

    def job(self, rival: str, rate: str, seed: int) -> Job:
        """Returns a run with the study's budget, which must be known."""
        assert self.budget is not None
        return self._job_once(rival, rate, seed, self.budget.multiple)

    def _job(self, rival: str, rate: str, seed: int, multiple: int) -> Job:
        made, given = self._made_once(rival)
        fields: dict[str, Any] = {"train.learning_rate": rate, "seed": seed}
        train = dataclasses.replace(made.train, learning_rate=float(rate))
        if multiple != 1:
            train = dataclasses.replace(train, steps=multiple * train.steps)
            fields["train.steps"] = train.steps
        e = dataclasses.replace(made, seed=seed, train=train)
        if e.adapt is not None:
            folder = str(self._base_once(seed).folder)
            e = dataclasses.replace(e, adapt=dataclasses.replace(e.adapt, base=folder))
            fields["adapt.base"] = folder
        return Job(
            name=rival,
            setting=Setting(),
            folder=self.folder / f"{rival}-{multiple}x-{rate}-seed{seed}",
            experiment=e,
            command=(f"--config={self.design.config}", *given, *options(fields)),
        )

    def _made(self, rival: str) -> tuple[Experiment, tuple[str, ...]]:
        """Returns a rival's experiment, whatever its rate and seed, and the command line for it."""
        design = self.design
        fields = {**design.fields, **design.by_scale.get(self.place.scale, {})}
        given = (*self.place.overrides, *options({**fields, **design.rivals[rival]}))
        if design.base is not None:
            base = self._base_once(self.procedure.choosing[0]).experiment
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder) / "base"
                runs.create(place, base)
                own = (*given, *options({"adapt.base": str(place)}))
                return experiment.from_file(design.config, own, _silent), given
        return experiment.from_file(design.config, given, _silent), given

    def _base(self, seed: int) -> Job:
        base = self.design.base
        assert base is not None
        fields = {**base.fields, **base.by_scale[self.place.scale], "seed": seed}
        given = (*self.place.overrides, *options(fields))
        return Job(
            name="base",
            setting=Setting(),
            folder=self.folder / f"base-seed{seed}",
            experiment=experiment.from_file(base.config, given, _silent),
            command=(f"--config={base.config}", *given),
        )

    def _train(self, jobs: Sequence[Job], finished: Finished) -> bool:
        """Makes the runs that have no record; returns whether there were any."""
        missing = [job for job in dict.fromkeys(jobs) if not self.record(job)]
        if not missing:
            return False
        code, side_by_side = describe_source(), self.place.side_by_side
        cores = len(shares(side_by_side)[0])
        environment = {**describe_environment(), "cores of a training": str(cores)}
        self._make_bases(missing)

        def write(ended: Ended) -> None:
            # Every training imports the code as it is when it starts.
            made = code if describe_source() == code else {**code, "dirty": True}
            item = self.item(ended.job)
            found = kept(ended, validated=self.validates(ended.job))
            if found["result"] is not None:
                found["result"] |= dict.fromkeys(self.design.not_kept)
            self.place.store.put(item, found, Made(environment, made, ended.seconds))
            finished(item)

        for validated, ends in ((False, EVALUATE), (True, VALIDATE)):
            if jobs := [job for job in missing if self.validates(job) == validated]:
                train_all(
                    jobs, side_by_side, same_share=True, ends=ends, finished=write,
                    accepted=CONVERGED_OR_NOT,
                )  # fmt: skip
        return True

    def train_again(self, jobs: Sequence[Job]) -> None:
        """Makes the folders of runs that are not at hand, whether they have records or not."""
        self._make_bases(jobs)
        train_all(jobs, self.place.side_by_side, same_share=True)

    def _make_bases(self, jobs: Sequence[Job]) -> None:
        """Makes what runs start from, and way for these runs."""
        bases = []
        if self.design.base is not None:
            seeds = dict.fromkeys(job.experiment.seed for job in jobs)
            bases = [self._base_once(seed) for seed in seeds]
        # No run is continued on another base: all runs of the study go with it.
        for base in bases:
            _make_way(base, self.folder)
        for job in jobs:
            _make_way(job, job.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if bases:
            unfinished = [base for base in bases if not base.finished]
            train_all(unfinished, self.place.side_by_side, same_share=True)


def _silent(line: str) -> None:
    """Reports nothing."""


def _make_way(job: Job, folder: Path) -> None:
    """Renames ``folder`` if the job's own folder has a run of another experiment; says so.

    Such a run cannot be continued, or would become another one if only its steps differ.

    Raises:
      ValueError: if a run in ``folder`` is being trained.
    """
    if not runs.exists(job.folder):
        return
    with contextlib.suppress(ValueError):
        changes.check_same(job.folder, job.experiment)
        return
    names = (folder.with_name(f"{folder.name}-before{n}") for n in itertools.count(1))
    free = next(name for name in names if not name.exists())
    with contextlib.ExitStack() as stack:
        for run in sorted(
            {job.folder, *(path.parent for path in folder.glob("*/experiment.json"))}
        ):
            stack.enter_context(runs.guarded(run))
        folder.rename(free)
    why = f"{job.folder} has a run of another experiment than the study asks for now"
    print(f"{why}: {folder} is renamed to {free.name}", flush=True)


def kept(ended: Ended, *, validated: bool) -> dict[str, Any]:
    """Returns what a record keeps of a training that was validated, or evaluated by the test.

    A training counts as diverged if its result has a number that is not finite.
    """
    folder = ended.job.folder
    lines = metrics.read(folder / "metrics.jsonl")
    losses = [line for line in lines if "loss" in line]  # Others are only of skipped steps.
    every = max(1, -(-len(losses) // MOST_LOSSES))
    found: dict[str, Any] = {
        "result": None,
        "diverged": None,
        "losses": [[line["step"], line["loss"]] for line in losses[::-every][::-1]],
    }
    diverged = {"diverged": {"step": lines[-1]["step"] if lines else 0}}
    if ended.code == NON_FINITE_EXIT_CODE:
        return found | diverged
    if validated:
        described = sweep.validate(folder, ended.job.experiment.evaluation).to_json()
    else:
        record = evaluations.saved(folder)
        assert record is not None
        described = record["result"]
    summary = ended.job.experiment.task.read_result(described).summary()
    right = all(map(math.isfinite, summary.values()))
    return found | ({"result": described} if right else diverged)


def takes(e: Experiment, key: str) -> bool:
    """Returns whether a model takes the length of a score.

    If a key only says that lengths are beyond the trained one, they begin before its double.
    """
    found = TIMES.search(key)
    times = float(found[1]) if found else 2 if key.endswith("_outside") else 1
    return fits(math.ceil(times * e.task.sequence_length), runs.max_length(e.model))
