"""Evaluates the newest checkpoint of a run, and writes what comes out into it.

Files: evaluation.json, evaluation.txt, and the figures and files of the task.

python -m train.main eval --run=runs/x --config.evaluation.longest=12

With --cut-updates the position encoding is as before training, so that states of TAPE stay at their
start; what comes out is printed, and not written.

It runs on the mesh of the run, as far as the devices of this machine fit it, else on the first of
them. Another mesh: --config.sharding.data=-1 or --config.sharding.fsdp=-1. Sequences are not split.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.add_argument(
        "--cut-updates", action="store_true", help="the position encoding as before training"
    )
    parser.set_defaults(overrides=())


def run(args: argparse.Namespace) -> None:
    """Evaluates."""
    begun = time.monotonic()

    from train import experiment
    from train.compare.evaluations import evaluate, evaluate_untrained
    from train.training import runs
    from train.training.metrics import Clock

    clock = Clock(begun)
    options, mesh = experiment.change_evaluation(runs.load(args.run), args.overrides)
    clock.lap("to start")
    result = (evaluate_untrained if args.cut_updates else evaluate)(args.run, options, mesh)
    clock.lap("to evaluate")
    print(result.table())
    if not args.cut_updates:
        print(f"\nwritten: {', '.join(str(p) for p in sorted(args.run.glob('evaluation*')))}")
    print(f"took {clock}")
