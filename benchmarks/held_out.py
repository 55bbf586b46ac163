"""Compares exact match on combinations held out of training with exact match on trained ones.

Evaluations ask only what a hash keeps out of training. If the hash depends on few symbols, such as
a cell's row, column and value, a model that guesses among what it sees can have learned which
combinations never are an answer. In evaluation it then does worse than a guess. Here the same
random texts ask both.

Run ``python -m benchmarks.held_out RUN...`` with finished runs of tasks of places
(:mod:`train.tasks.places`).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tape_jax._src.core.table import markdown
from train.data import held_out
from train.evaluation import Trained
from train.evaluation.exact_match import Examples, exact_match
from train.tasks import task_name
from train.tasks.places import PAD, PlaceTask
from train.training import runs

HEADER = ("run", "of each length", "trained", "held out", "longer, trained", "longer, held out")


class Asked(NamedTuple):
    """The outcomes of B questions that a model has answered.

    Attributes:
      right: bool [B].
      held_out: bool [B], whether the combination was kept from training.
    """

    right: np.ndarray
    held_out: np.ndarray

    def shares(self) -> tuple[str, str]:
        """Returns the per cent right of trained combinations, and of held-out ones."""
        parts = (self.right[~self.held_out], self.right[self.held_out])
        trained, kept = (f"{100 * x.mean():.1f}" if len(x) else "-" for x in parts)
        return trained, kept


def ask(trained: Trained, task: PlaceTask, columns: range, questions: int, seed: int = 0) -> Asked:
    """Asks random questions, one per text, as they come.

    Args:
      trained: the model.
      task: what is asked.
      columns: of the cells; rows are those that are trained, and all cells that exist are equally
        likely.
      questions: about how many.
      seed: of what is random.
    """
    rng = np.random.default_rng(seed)
    cells = [cell for cell in itertools.product(task.trained[0], columns) if task.exists(*cell)]
    rows, drawn = np.array(cells)[rng.integers(len(cells), size=questions)].T
    texts = task.texts(rng, drawn, rows)
    # Counted from one as in a task, because zeros at the end of a row do not matter.
    kept = held_out.symbols(texts.hashed.reshape(1, questions, -1) + 1)
    answers, ends = texts.answers[:, -1], texts.places[:, -1] + 1
    tokens = np.pad(texts.tokens, ((0, 0), (0, 1)))
    tokens[np.arange(questions), ends] = answers
    due = answers != PAD
    examples = Examples(tokens[due], ends[due], ends[due] + 1, np.stack([rows, drawn], 1)[due])
    return Asked(exact_match(trained.apply, trained.variables, examples), kept[due])


def row(folder: Path, questions: int) -> tuple[str, ...]:
    """Returns a run's row of the table.

    Raises:
      ValueError: the run is of another task.
    """
    trained = runs.restore_for_evaluation(folder)
    task = trained.experiment.task
    if not isinstance(task, PlaceTask):
        raise ValueError(
            f"expected a run of a task of places; {folder} is one of {task_name(task)!r}"
        )
    inside = ask(trained, task, task.trained[1], questions)
    longer = ask(trained, task, range(task.trained_length + 1, task.longest_column + 1), questions)
    shares = (*inside.shares(), *longer.shares())
    return (f"{folder.parent.name}/{folder.name}", str(len(inside.right)), *shares)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.held_out", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a finished run")
    parser.add_argument("--questions", type=int, default=6000, help="asked of each run (6000)")
    options = parser.parse_args(argv)
    print(markdown(HEADER, [row(folder, options.questions) for folder in options.runs]))


if __name__ == "__main__":
    main()
