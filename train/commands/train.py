"""Trains a model in a new run folder, or continues a run that was interrupted.

  python -m train.main train --config=configs/addition_demo.py --run=runs/x
  python -m train.main train --run=runs/x --resume

--config with --resume starts the run if it is not there yet: one command for a scheduler that
starts it again and again. Any field of the config can be changed: --config.train.steps=100
--config.model.position.kind=rope. With --config.adapt.base=FOLDER a trained model is adapted, by
the method of --config.adapt.method. Ctrl-C or SIGTERM saves before leaving.

All devices: --config.sharding.data=-1 (each has all parameters) or --config.sharding.fsdp=-1 (each
has its part); also tensor and sequence. Several hosts: the same command on each, with --distributed
where SLURM, Open MPI, Kubernetes or a TPU pod tell each process its place, or with
--distributed=HOST:PORT,PROCESSES,INDEX.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from tape_jax.config import require
from train import distributed, experiment, loop, metrics, runs, sweep
from train.commands import eval as evaluation


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--config", type=Path, help="the config file; not needed with --resume")
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest intact checkpoint"
    )
    parser.add_argument("--evaluate", action="store_true", help="evaluate when training is done")
    parser.add_argument(
        "--validate", action="store_true", help="validate when training is done, as a sweep does"
    )
    parser.add_argument(
        "--distributed",
        nargs="?",
        const="auto",
        metavar="HOST:PORT,PROCESSES,INDEX",
        help="join other processes",
    )
    parser.add_argument(
        "--profile",
        nargs="?",
        const="10:13",
        metavar="FIRST:STOP",
        help="write a trace of these steps to the run's folder (10:13)",
    )
    parser.set_defaults(overrides=())


def run(args: argparse.Namespace) -> None:
    """Trains."""
    steps = parse_steps(args.profile)
    if args.distributed:
        distributed.initialize(args.distributed)
    require(args.config is not None or args.resume, "train: give --config=FILE, or --resume a run")
    if args.config is None:
        require(
            not args.overrides,
            f"train: {' '.join(args.overrides)} needs --config; a run is resumed as it was started",
        )
        wanted = runs.load(args.run)
    else:
        wanted = experiment.from_file(args.config, args.overrides)
    loop.train(wanted, args.run, resume=args.resume, profile=steps, report=distributed.report)
    distributed.report(f"{args.run}: {wanted.steps} steps done")
    if args.evaluate and distributed.is_main():
        evaluation.evaluate(args.run, wanted.evaluation)
    if args.validate and distributed.is_main():
        with metrics.Progress.of(f"validating {args.run.name}") as progress:
            sweep.validate(args.run, progress)


def parse_steps(text: str | None) -> range | None:
    """The steps ``FIRST:STOP``."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", text)
    require(
        match is not None and 1 <= int(match[1]) < int(match[2]),
        f"--profile: expected FIRST:STOP, such as 10:13; got {text!r}",
    )
    assert match is not None
    return range(int(match[1]), int(match[2]))
