"""What finished runs came to, and tables over many of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tape_jax.config import require
from train import runs
from train.commands import eval as evaluation
from train.data import Result, algorithms, groups
from train.experiment import Experiment


class Finished(NamedTuple):
    """A run that was trained to its end and evaluated.

    Attributes:
      folder: the run's.
      experiment: what was trained.
      result: of its evaluation, with the options that it was last evaluated with.
    """

    folder: Path
    experiment: Experiment
    result: Result


def finished(folder: Path) -> list[Finished]:
    """All finished runs in a folder, however deep, in the order of their paths."""
    found = []
    for path in sorted(folder.rglob("experiment.json")):
        record = evaluation.saved(path.parent)
        if record is None:
            continue
        experiment = runs.load(path.parent)
        if record["step"] == experiment.steps:
            result = experiment.task.read_result(record["result"])
            found.append(Finished(path.parent, experiment, result))
    return found


def grouped(
    found: Sequence[Finished],
    outer: Callable[[Any], Hashable],
    inner: Callable[[Any], Hashable],
) -> dict[Any, dict[Any, list[Any]]]:
    """Results by two properties of their experiments, one for each seed."""
    groups: dict[Any, dict[Any, list[Any]]] = {}
    for run in found:
        by_inner = groups.setdefault(outer(run.experiment), {})
        by_inner.setdefault(inner(run.experiment), []).append(run.result)
    return groups


def length_suite(folder: Path) -> str:
    """The table of all problems and encodings (:func:`train.data.algorithms.suite_table`).

    Args:
      folder: holds the runs, which differ in problem, encoding and seed.

    Raises:
      ValueError: no such runs, or runs that cannot be compared.
    """
    found = _of_task(folder, algorithms.Algorithm)
    by_problem = grouped(found, lambda e: e.task.problem, lambda e: e.label)
    order = [name for name in algorithms.PROBLEMS if name in by_problem]
    return algorithms.suite_table({name: dict(sorted(by_problem[name].items())) for name in order})


def smallest_depths(folder: Path, *, solved: float = 0.9) -> str:
    """For each word problem the smallest depths (:func:`train.data.groups.smallest_depths`).

    Args:
      folder: holds the runs, which differ in task (the group, say), encoding, depth and seed.
      solved: share of words that must be right.

    Raises:
      ValueError: no such runs, or runs that cannot be compared.
    """
    found = _of_task(folder, groups.Words)
    order = list(groups.GROUPS)

    def place(task: groups.Words) -> tuple[int, int, int]:
        return order.index(task.group), task.generators or 0, task.max_length

    tables = []
    for task in sorted({run.experiment.task for run in found}, key=place):
        own = [run for run in found if run.experiment.task == task]
        by_label = grouped(own, lambda e: e.label, lambda e: e.model.num_layers)
        table = groups.smallest_depths(dict(sorted(by_label.items())), solved=solved)
        tables.append(f"{task.title}, trained on words of {task.max_length}\n\n{table}")
    return "\n\n".join(tables)


def _of_task(folder: Path, task: type) -> list[Any]:
    found = [run for run in finished(folder) if isinstance(run.experiment.task, task)]
    require(bool(found), f"{folder} holds no finished run of the task {task.__name__!r}")
    return found
