"""Asks the newest checkpoint of a run questions such as "407+85".

  python -m train.main ask --run=runs/x "407+85"
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

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
    experiment, _, model, variables = runs.restore_model(folder)
    require(hasattr(experiment.task, "question"), f"the task of {folder} takes no questions")
    for question in questions:
        yield answer(
            model.apply,
            variables,
            experiment.task,  # type: ignore[arg-type]
            question,
            max_length=runs.max_length(experiment.model),
        )
