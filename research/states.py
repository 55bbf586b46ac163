"""Measures the use of TAPE's states in reporting runs, and the loss without their updates.

A model may need what it was trained with even if that made it no better. So this only says what a
form of TAPE does where it is ahead or behind; it decides nothing (research/protocol.md).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

from research import protocol
from research.records import Item, Record
from research.study import Finished, Measurements, Place, State
from research.trainings import PlannedTrainings, Trainings
from tape_jax import Transformer
from train.analysis.inspection import examples
from train.checks import require
from train.compare import evaluations
from train.compare.jobs import Job
from train.compare.plots import BODY, SMALL, TITLE
from train.evaluation import Trained
from train.evaluation.grids import text_table
from train.evaluation.inside import look, untrained
from train.statistics import estimate
from train.training import runs
from train.training.step import Batch, weighted_loss

COLUMNS = ("study", "form", "moved, %", "score", "trained", "without updates", "by layer, nats")
FORMS = ("tape_head_scale", "tape", "tape_alibi")
# In per cent: a distance as long as the state. Far larger ones are drawn by their logarithm.
FULL = 100.0
# Studies in a row of the picture.
SIDE_BY_SIDE = 4
# Examples of the task, drawn with a seed of their own: for losses, and to look at.
EXAMPLES, LOOKED_AT = 64, 8
SIZES = {"examples": EXAMPLES, "looked_at": LOOKED_AT}


def measure_updates(folder: Path) -> dict[str, Any]:
    """Measures what the updates of a finished run contribute, in JSON types.

    Args:
      folder: of the run.

    Returns:
      ``moved``: how far the states that enter each layer are from their start, over its norm.
      ``without``: the scores with every update as before training. ``loss``, ``loss_without``: in
      nats, as trained and with those updates. ``lost``: for each updating layer, how much the loss
      rises without only its update.

    Raises:
      ValueError: its encoding has learned nothing.
    """
    trained = runs.restore_for_evaluation(folder)
    e, variables = trained.experiment, trained.variables
    batch = examples(e, EXAMPLES)
    tokens = np.asarray(batch["inputs"])[:LOOKED_AT]
    inside = look(trained.model, variables, tokens, [[""] * tokens.shape[1]] * len(tokens))
    without = untrained(trained)
    require(without is not None, f"{folder}: its encoding has learned no update")
    assert without is not None
    loss = functools.partial(_loss, trained, batch=batch)
    as_trained = loss(variables)
    cut_off = e.task.evaluate(without, e.evaluation).summary()
    return {
        "moved": inside.moved.tolist(),
        "without": finite(cut_off),
        "loss": as_trained,
        "loss_without": loss(without.variables),
        "lost": [
            loss(without_layer(trained.model, variables, n, without.variables)) - as_trained
            for n in updating(trained.model)
        ],
    }


def without_layer(model: Transformer, variables: Any, layer: int, before: Any) -> Any:
    """Returns a model's variables, with those of one layer from before training."""
    blocks = next(blocks for blocks in model.blocks if layer in blocks.layers)
    block, params = blocks.name, variables["params"]
    ours, theirs = params[block], before["params"][block]
    if model.config.scan_layers:
        here = blocks.layers.index(layer)
        theirs = jax.tree.map(lambda x, y: x.at[here].set(y[here]), ours, theirs)
    return {**variables, "params": {**params, block: theirs}}


def updating(model: Transformer) -> list[int]:
    """Returns the layers of a model that update states."""
    return [
        n for n, one in enumerate(model.encoding.of_layers(model.config.num_layers)) if one.updates
    ]


def finite(summary: Mapping[str, float]) -> dict[str, float]:
    """Returns the scores that are finite."""
    return {key: x for key, x in summary.items() if math.isfinite(x)}


def _loss(trained: Trained, variables: Any, *, batch: Batch) -> float:
    """Returns the mean loss over the tokens that count, in nats."""
    logits: Any = trained.apply(variables, batch["inputs"])
    total = weighted_loss(logits, batch["targets"], batch["weights"])
    return float(total / batch["weights"].sum())


@dataclasses.dataclass(frozen=True)
class StateUse:
    """A study of states in the reporting runs of other studies.

    Attributes:
      name: a word, fit for a folder.
      of: the studies; from each, the runs at rates that its first score chose.
      forms: of TAPE.
      minutes: how long a measurement takes, for plans.
    """

    name: str
    of: Sequence[Trainings]
    forms: Sequence[str] = FORMS
    minutes: float = 0.4

    def at(self, place: Place) -> PlannedStates:
        """Returns the study at a place."""
        return PlannedStates(self, place)


class Cut(NamedTuple):
    """The measurements of a form's runs with and without updates, one number per seed.

    Attributes:
      moved: by layer, how far the states that enter it are from their start, over its norm.
      trained: the score as trained.
      without: the score with every update as before training.
      lost: for each updating layer, how many nats the loss rises without its update.
    """

    moved: np.ndarray
    trained: np.ndarray
    without: np.ndarray
    lost: np.ndarray

    @property
    def last(self) -> str:
        """The distance from their start of the states entering the last layer, in per cent."""
        return str(estimate((100 * self.moved[:, -1]).tolist()))


class PlannedStates(Measurements):
    """A study of states at a place."""

    def __init__(self, design: StateUse, place: Place):
        self.name = design.name
        self.design, self.place, self.minutes = design, place, design.minutes
        self.of = {trainings.name: trainings.at(place) for trainings in design.of}
        self.pairs = [
            (study, form)
            for study, trainings in self.of.items()
            for form in design.forms
            if form in trainings.design.rivals
        ]

    def jobs(self, study: str, form: str) -> list[Job]:
        """Returns the reporting runs that did not diverge; none before their rate is known."""
        trainings = self.of[study]
        reports = trainings.reports(form, trainings.design.scores[0]) or []
        records = [trainings.record(job) for job in reports]
        return [
            job
            for job, record in zip(reports, records, strict=True)
            if record is None or not record.found["diverged"]
        ]

    def _item(self, study: str, job: Job) -> Item:
        described = {"version": protocol.VERSION, **SIZES}
        of = self.of[study].item(job)
        return of._replace(study=self.name, name=f"{study}-{of.name}", protocol=described)

    @property
    def _looks(self) -> list[tuple[PlannedTrainings, Item, Job]]:
        """The measurements known so far, with the runs that they look into."""
        return [
            (self.of[study], self._item(study, job), job)
            for study, form in self.pairs
            for job in self.jobs(study, form)
        ]

    @property
    def items(self) -> Sequence[Item]:
        """The measurements known so far."""
        return [item for _, item, _ in self._looks]

    @property
    def state(self) -> State:
        """The progress of the study."""
        known, unknown = super().state, []
        for study, form in self.pairs:
            trainings = self.of[study]
            if trainings.reports(form, trainings.design.scores[0]) is None:
                unknown += [f"{study}-{form}, seed {seed}" for seed in protocol.REPORTING]
        return State(known.total + len(unknown), known.finished, [*known.unfinished, *unknown])

    @property
    def hours(self) -> float:
        """The most hours of an idle core still needed: runs not at hand are trained again."""
        again = [
            one.minutes(job)
            for one, item, job in self._looks
            if not self.recorded(item) and one.record(job) and not job.finished
        ]
        return super().hours + sum(again) / 60

    @property
    def size(self) -> str:
        """The size of its runs, in words."""
        return (
            f"The reporting runs of {', '.join(self.of)}, trained again where they are not at "
            f"hand; losses of {EXAMPLES} examples"
        )

    def run(self, finished: Finished, *, quick: bool = False) -> None:
        """Makes what is missing; there is no quick part."""
        if quick:
            return
        for trainings in self.of.values():
            here = [(item, job) for one, item, job in self._looks if one is trainings]
            wanted = [job for item, job in here if not self.recorded(item)]
            if again := [job for job in wanted if not job.finished]:
                trainings.train_again(again)
            self.make([item for item, _ in here], finished)

    def measure(self, item: Item) -> dict[str, Any]:
        """Measures how far the states of a run move, and its scores with and without updates."""
        folder = next(job.folder for _, one, job in self._looks if one.name == item.name)
        saved = evaluations.saved(folder)
        assert saved is not None
        whole = item.experiment.task.read_result(saved["result"]).summary()
        return {"trained": finite(whole), **measure_updates(folder)}

    def check(self, record: Record) -> None:
        """Raises ValueError, TypeError or KeyError for any other record."""
        for name in ("moved", "lost"):
            np.asarray(record.found[name], float)
        float(record.found["loss_without"]) - float(record.found["loss"])
        for name in ("trained", "without"):
            dict(record.found[name])

    def cut(self, study: str, form: str, key: str | None = None) -> Cut | None:
        """Returns a form's measurements in a study; None unless complete, of two seeds or more.

        Args:
          study: its name.
          form: of TAPE.
          key: the score; None: the study's first, by which the rates of these runs were chosen.
        """
        trainings, jobs = self.of[study], self.jobs(study, form)
        score = trainings.score(key or trainings.design.scores[0])
        here = [self.recorded(self._item(study, job)) for job in jobs]
        if len(jobs) < 2 or not all(here):
            return None
        found = [record.found for record in here if record]
        return Cut(
            moved=np.array([x["moved"] for x in found]),
            trained=np.array([trainings.of_summary(x["trained"], score) for x in found]),
            without=np.array([trainings.of_summary(x["without"], score) for x in found]),
            lost=np.array([x["lost"] for x in found]),
        )

    def tables(self) -> Iterator[str]:
        """Yields a row for each study and form that is complete."""
        if rows := self.rows():
            yield text_table(COLUMNS, rows)

    def pictures(self, heading: str, red: Collection[str]) -> dict[str, Callable[[], Figure]]:
        """Returns a picture of how far states move and what their updates are for."""
        return {f"{self.name}.png": functools.partial(states_figure, self)} if self.rows() else {}

    def says_of_states(self, studies: Sequence[str], form: str) -> Iterator[str]:
        """Yields a sentence on a form for each of the studies that are looked into."""
        for study in studies:
            if (study, form) in self.pairs and (said := self.said(study, form)):
                yield f"What `{form}` does: {said}"

    def says_of_layers(self, study: str, form: str) -> str | None:
        """Returns a sentence on the loss without each layer's update; None before it is known."""
        if (cut := self.cut(study, form)) is None:
            return None
        lost = cut.lost.mean(0)
        by_layer = ", ".join(f"{x:.3g} (layer {n})" for n, x in enumerate(lost, 1))
        return (
            f"Where all layers update, in `{form}`, the loss rises by so many nats without the "
            f"update of one of them: {by_layer}. That of layer {lost.argmax() + 1} is missed most"
        )

    def rows(self) -> list[list[str]]:
        """Returns a row (:data:`COLUMNS`) for each study and form that is complete."""
        rows = []
        for study, form in self.pairs:
            if (found := self.cut(study, form)) is None:
                continue
            trainings = self.of[study]
            label = trainings.score(trainings.design.scores[0]).label
            lost = ", ".join(f"{x:.3g}" for x in found.lost.mean(0))
            cells = [found.last, label]
            cells += [
                str(estimate(found.trained.tolist())),
                str(estimate(found.without.tolist())),
                lost,
            ]
            rows.append([study, f"`{form}`", *cells])
        return rows

    def said(self, study: str, form: str) -> str | None:
        """Returns a sentence on a form's states in a study; None before it is measured."""
        trainings = self.of[study]
        keys, changes = trainings.design.scores, []
        cuts = [self.cut(study, form, key) for key in keys]
        if (found := cuts[0]) is None:
            return None
        for key, cut in zip(keys, cuts, strict=True):
            assert cut is not None
            before, after = (estimate(x.tolist()) for x in (cut.trained, cut.without))
            by = estimate((cut.without - cut.trained).tolist())
            changes.append(f"{trainings.score(key).label} goes from {before} to {after}, by {by}")
        chosen = f" (rates chosen by {trainings.score(keys[0]).label})" if len(keys) > 1 else ""
        lost = [estimate(column) for column in found.lost.T.tolist()]
        missed = [n for n, one in enumerate(lost, 1) if one.low > 0]
        which = (
            f"a layer alone without its update raises the loss, by an interval above zero: "
            f"{', '.join(map(str, missed))}"
            if missed
            else "no layer alone without its update raises the loss by an interval above zero"
        )
        runs = len(found.trained)
        of = (
            "" if runs == len(protocol.REPORTING) else f", of the {runs} runs that did not diverge,"
        )
        return (
            f"in {study}{of} the states that enter its last layer are {found.last} % of their norm "
            f"away from their start. With the updates of a trained model cut off{chosen}, "
            f"{'; '.join(changes)}; {which}"
        )


def states_figure(study: PlannedStates) -> Figure:
    """Draws how far states move and what their updates are for, by layer, every seed a dot.

    Two panels, one above the other, for each study that is measured, a few studies side by side.
    """
    found = {pair: cut for pair in study.pairs if (cut := study.cut(*pair))}
    names = list(dict.fromkeys(name for name, _ in found))
    side_by_side = min(SIDE_BY_SIDE, len(names))
    blocks = -(-len(names) // side_by_side)
    made = Figure(figsize=(1.2 + 2.6 * side_by_side, 0.4 + 4.8 * blocks), layout="constrained")
    panels = made.subplots(2 * blocks, side_by_side, squeeze=False)
    lines = {}
    for (name, form), cut in found.items():
        block, column = divmod(names.index(name), side_by_side)
        colour = f"C{study.design.forms.index(form)}"
        way, loss = panels[2 * block : 2 * block + 2, column]
        for panel, values in ((way, 100 * cut.moved), (loss, cut.lost)):
            layers = np.arange(1, values.shape[1] + 1)
            (lines[form],) = panel.plot(layers, values.mean(0), color=colour, label=form)
            panel.plot(layers, values.T, "o", color=colour, alpha=0.4, markersize=4)
            panel.set_xticks(layers)
            panel.tick_params(labelsize=SMALL)
            panel.grid(alpha=0.25)
        if 100 * cut.moved.max() > 5 * FULL:
            way.set_yscale("symlog", linthresh=FULL)
            way.yaxis.set_major_formatter("{x:g}")
        way.set_title(name, fontsize=BODY)
        way.set_xlabel("entering layer", fontsize=SMALL)
        loss.set_xlabel("update of layer", fontsize=SMALL)
        if column == 0:
            way.set_ylabel("way from the start, %", fontsize=BODY)
            loss.set_ylabel("loss without, nats", fontsize=BODY)
    for panel in panels.flat:
        panel.set_visible(bool(panel.lines))
    for way in panels[::2].flat:
        way.set_ylim(bottom=0)
    made.legend(handles=[*lines.values()], loc="outside lower right", ncols=3, fontsize=BODY)
    made.suptitle("What states do: how far they move, and which update is missed", fontsize=TITLE)
    return made
