"""Trains a model in a new run folder, or continues a run that was interrupted.

  python -m train.main train --config=configs/addition_demo.py --run=runs/x
  python -m train.main train --run=runs/x --resume

Any field of the config can be changed: --config.train.steps=100
--config.model.position.kind=rope. Ctrl-C or SIGTERM saves before leaving.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tape_jax.config import require
from train import experiment, loop, runs
from train.commands import eval as evaluation


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--config", type=Path, help="the config file; not needed with --resume")
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest intact checkpoint"
    )
    parser.add_argument("--evaluate", action="store_true", help="evaluate when training is done")
    parser.set_defaults(overrides=())


def run(args: argparse.Namespace) -> None:
    """Trains."""
    require(args.config is not None or args.resume, "train: give --config=FILE, or --resume a run")
    if args.config is None:
        require(
            not args.overrides,
            f"train: {' '.join(args.overrides)} needs --config; a run is resumed as it was started",
        )
        wanted = runs.load(args.run)
    else:
        wanted = experiment.from_file(args.config, args.overrides)
    loop.train(wanted, args.run, resume=args.resume)
    print(f"{args.run}: {wanted.train.steps} steps done")
    if args.evaluate:
        evaluation.evaluate(args.run, wanted.evaluation)
