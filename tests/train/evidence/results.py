"""Results that no training is needed for."""

import numpy as np

from train.evaluation.grids import Grid
from train.evidence.records import Made
from train.evidence.trainings import PlannedTrainings

BEYOND, INSIDE = "exact_match_outside", "exact_match_inside"
MADE = Made(
    environment={"python": "3", "devices": "1 x none"},
    code={"commit": "0" * 40, "dirty": False, "modules": "0" * 16},
    seconds=60.0,
)


def grid(job, right: float) -> dict:
    """A result in which all is right inside, and the share ``right`` beyond."""
    e = job.experiment
    lengths = np.arange(1, e.evaluation.longest + 1)[None]
    counts = np.full(lengths.shape, 100)
    correct = np.where(lengths <= e.task.max_length, 100, round(100 * right))
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


def finish(planned: PlannedTrainings, job, right: float, validated: float = 0.5) -> None:
    """Writes what a training of ``job`` would have."""
    found = {
        "result": grid(job, right),
        "validation": grid(job, validated),
        "diverged": None,
        "losses": [[1, 2.0], [2, 1.0]],
    }
    planned.place.store.put(planned.item(job), found, MADE)


def diverge(planned: PlannedTrainings, job) -> None:
    """Writes what a training that diverged would have."""
    found = {"result": None, "validation": None, "diverged": {"step": 7}, "losses": [[1, 2.0]]}
    planned.place.store.put(planned.item(job), found, MADE)


def all_trials(planned: PlannedTrainings) -> list:
    """The runs that choose the settings, as far as they are known."""
    return [job for rival in planned.design.rivals for job in planned.trials(rival)]


def finish_all(planned: PlannedTrainings, right: dict[str, float]) -> None:
    """Finishes every run; the last setting is the best, and seeds differ by a hundredth."""
    for job in all_trials(planned):
        best = job.setting == planned.settings[-1]
        finish(planned, job, right[job.name] if best else 0.0, 0.5 if best else 0.1)
    for rival, share in right.items():
        for job in planned.finals(rival):
            finish(planned, job, share + 0.01 * job.experiment.seed)
