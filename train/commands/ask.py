"""Asks a trained model questions of its task, such as "407+85" for sums.

python -m train.main ask --run=runs/x "407+85"
python -m train.main ask --model=docs/play/models/tape.js "m c x a k +2 c?"

A run uses its newest checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--run", type=Path, help="the run folder")
    asked.add_argument("--model", type=Path, help="the file of a shipped model")
    parser.add_argument("questions", nargs="+", metavar="QUESTION")


def run(args: argparse.Namespace) -> None:
    """Prints the model's answer to each question."""
    from train.checks import require
    from train.evaluation.exact_match import answer
    from train.training import messages, runs, shipped

    if args.model:
        trained = shipped.read(args.model)
        task: Any = trained.experiment.task
    else:
        task = runs.load(args.run).task
        require(
            hasattr(task, "question"),
            f"the task of {args.run} takes no questions; to have a prompt continued:\n"
            f"  {messages.generate(args.run, task, args.questions[0])}",
        )
        trained = runs.restore_model(args.run)
    limit = trained.max_length
    for question in args.questions:
        print(answer(trained.apply, trained.variables, task, question, max_length=limit))
