"""Results that no training is needed for."""

import numpy as np

from research.records import Made
from research.trainings import PlannedTrainings
from train.evaluation.grids import Grid

BEYOND, INSIDE = "exact_match_outside", "exact_match_inside"
MADE = Made(
    environment={"python": "3", "devices": "1 x none"},
    code={"commit": "0" * 40, "dirty": False},
    seconds=60.0,
)
# By rate, in place of a training: 3e-3 is the best.
BY_RATE = {"1e-3": 0.5, "3e-3": 1.0, "1e-2": 0.25}


def grid(job, right: float, inside: float = 1.0) -> dict:
    """A result: shares of right answers beyond the trained length and inside."""
    e = job.experiment
    lengths = np.arange(1, e.evaluation.longest + 1)[None]
    counts = np.full(lengths.shape, 10_000)
    correct = np.where(lengths <= e.task.max_length, round(1e4 * inside), round(1e4 * right))
    return Grid(
        rows=(1,),
        columns=tuple(lengths[0].tolist()),
        lengths=lengths,
        correct=correct,
        counts=counts,
        shared=counts < 0,
        trained=e.task.max_length,
        wording=e.task.wording,
    ).to_json()


def finish(planned: PlannedTrainings, job, right: float, inside: float = 1.0, **made) -> None:
    """Writes what a training of ``job`` would have."""
    found = {
        "result": grid(job, right, inside),
        "diverged": None,
        "losses": [[1, 2.0], [2, 1.0]],
    }
    planned.place.store.put(planned.item(job), found, MADE._replace(**made))


def diverge(planned: PlannedTrainings, job) -> None:
    """Writes what a training that diverged would have."""
    found = {"result": None, "diverged": {"step": 7}, "losses": [[1, 2.0]]}
    planned.place.store.put(planned.item(job), found, MADE)


def choose_all(planned: PlannedTrainings) -> None:
    """Finishes the runs that choose the rates: the first one is the best for all."""
    for rival in planned.design.rivals:
        for key in planned.design.scores:
            while missing := [j for j in planned.walk(rival, key)[0] if not planned.record(j)]:
                for job in missing:
                    finish(planned, job, BY_RATE[job.folder.name.split("-", 2)[2][:4]])


def finish_all(planned: PlannedTrainings, right: dict[str, float], step: float = 0.01) -> None:
    """Finishes every run: seeds differ by ``step``, and rivals by a little more or less."""
    choose_all(planned)
    for number, (rival, share) in enumerate(right.items()):
        for i, job in enumerate(planned.reports(rival, planned.design.scores[0])):
            finish(planned, job, share + step * i + 0.001 * ((i + number) % 3))
