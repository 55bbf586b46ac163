"""Asks the newest checkpoint of a run questions such as "407+85".

python -m train.main ask --run=runs/x "407+85"
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tape_jax.config import require
from train import runs
from train.evaluate import Answer, answer


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.add_argument("questions", nargs="+", metavar="QUESTION")


def run(args: argparse.Namespace) -> None:
    """Asks."""
    for reply in ask(args.run, args.questions):
        print(reply)


def ask(folder: Path, questions: Iterable[str]) -> Iterator[Answer]:
    """The answers of a run's newest intact checkpoint.

    Raises:
      ValueError: if the folder is not a run or has no checkpoint, or a question is none.
    """
    trained = runs.restore_model(folder)
    task: Any = trained.experiment.task
    require(hasattr(task, "question"), f"the task of {folder} takes no questions")
    for question in questions:
        yield answer(
            trained.apply, trained.variables, task, question, max_length=trained.max_length
        )
