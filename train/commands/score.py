"""Scores a file of SCROLLS predictions, {id: prediction}, with the benchmark's own metrics.

python -m train.main score --data=scrolls --subset=qasper --predictions=runs/x/predictions.json
"""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--data", type=Path, required=True, help="the benchmark, or one archive")
    parser.add_argument("--subset", required=True, metavar="NAME", help="such as qasper")
    parser.add_argument(
        "--split", default="validation", metavar="NAME", help="validation, train or test"
    )
    parser.add_argument("--predictions", type=Path, required=True, metavar="FILE")


def run(args: argparse.Namespace) -> None:
    """Prints the scores of the predictions."""
    from train.tasks.scrolls_files import read
    from train.tasks.scrolls_metrics import Outcome, outputs_by_id, read_predictions, score

    outputs = outputs_by_id(read(args.data, args.subset, args.split))
    predictions = read_predictions(args.predictions)
    scores = score(args.subset, predictions, outputs)
    print(Outcome(args.subset, args.split, predictions, scores).table())
