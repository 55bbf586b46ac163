"""The parts of a report that depend on the task.

A task may have a function ``compare(task, results)``, named by a line in ``COMPARISONS``, which
compares its models. One function serves every other :class:`train.tasks.questions.QuestionTask`.
The reports of tasks without any have only scores, losses and samples.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from train.tasks import Score, Task, task_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from train.evaluation import Trained

COMPARISONS: dict[str, str] = {
    "address": "train.compare.tasks.address:compare",
    "passkey": "train.compare.tasks.questions:compare_passkeys",
    "scrolls": "train.compare.tasks.scrolls:compare",
    "text": "train.compare.tasks.text:compare",
}
# Figures of a model's inside for one task only.
INSIDE: dict[str, str] = {"address": "train.compare.tasks.address:inside"}
QUESTIONS = "train.compare.tasks.questions:compare"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The contents of a report on several models of one task, beside their scores.

    Attributes:
      title: the report's.
      introduction: a paragraph on what the models were trained on and asked.
      sections: Markdown by heading; figures appear there by their file names.
      figures: matplotlib figures by file name.
      scores: those of the table of results, in order; none: the task's.
    """

    title: str
    introduction: str
    sections: Mapping[str, str]
    figures: Mapping[str, Figure]
    scores: Sequence[Score] = ()


def compare(task: Task, results: Mapping[str, Sequence[Any]]) -> Comparison:
    """Compares models.

    Args:
      task: the task on which they were trained and judged.
      results: each name's results, one for each seed; names without any are left out.

    Raises:
      ValueError: results that cannot be compared.
    """
    from train.tasks.questions import QuestionTask

    name = task_name(task)
    results = {rival: group for rival, group in results.items() if group}
    found = COMPARISONS.get(name, QUESTIONS if isinstance(task, QuestionTask) else None)
    if found is None or not results:
        return Comparison(name.capitalize(), f"Models trained on the task {name!r}.", {}, {})
    return _named(found)(task, results)


def inside(task: Task, trained: Trained) -> dict[str, Figure]:
    """Draws the figures of a model's inside that only its task has, by file name; mostly none.

    Args:
      task: the task on which it was trained.
      trained: the model.
    """
    found = INSIDE.get(task_name(task))
    return _named(found)(task, trained) if found else {}


def _named(function: str) -> Callable[..., Any]:
    """Returns the function that a line of a registry names."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)
