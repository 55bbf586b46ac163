"""Settings chosen for each rival by validation, after trainings with all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from train.compare import sweep
from train.compare.jobs import Job, claim
from train.compare.processes import EVALUATE, VALIDATE, train_all
from train.compare.sweep import Setting
from train.files import write_atomically
from train.tasks import Result
from train.training import metrics


def tune(folder: Path, trials: Sequence[Job], side_by_side: int) -> dict[str, Setting]:
    """Trains every setting, and chooses one for each name by validation.

    Raises:
      ValueError: before anything is trained, if the task has no validation apart from its test.
    """
    task = trials[0].experiment.task
    sweep.validation_options(task, trials[0].experiment.evaluation)
    claim(folder, trials)
    missing = [job for job in trials if not job.finished]
    train_all(missing, side_by_side, ends=(*EVALUATE, *VALIDATE))
    results: dict[str, dict[Setting, list[Result]]] = {}
    for job in trials:
        with metrics.Progress.of(f"validating {job.folder.name}") as progress:
            result = sweep.validate(job.folder, progress)
        results.setdefault(job.name, {})[job.setting] = [result]
    table = sweep.table(task, results)
    write_atomically(folder / "sweep.txt", table + "\n")
    print(f"Validation of the sweep\n\n{table}")
    return {name: sweep.best(task, by_setting) for name, by_setting in results.items()}
