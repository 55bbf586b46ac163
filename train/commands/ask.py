"""Asks the newest checkpoint of a run questions of its task, such as "407+85" of sums.

python -m train.main ask --run=runs/x "407+85"
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.add_argument("questions", nargs="+", metavar="QUESTION")


def run(args: argparse.Namespace) -> None:
    """Asks."""
    from train.checks import require
    from train.evaluation.exact_match import answer
    from train.training import messages, runs

    task: Any = runs.load(args.run).task
    require(
        hasattr(task, "question"),
        f"the task of {args.run} takes no questions; to have a prompt continued:\n"
        f"  {messages.generate(args.run, task, args.questions[0])}",
    )
    trained = runs.restore_model(args.run)
    limit = trained.max_length
    for question in args.questions:
        print(answer(trained.apply, trained.variables, task, question, max_length=limit))
