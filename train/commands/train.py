"""Trains a model in a new run folder, or continues a run that was interrupted.

  python -m train.main train --config=configs/addition_demo.py --run=runs/x
  python -m train.main train --run=runs/x --resume [--config.train.steps=6000]

--config with --resume starts the run if it does not exist yet: one command for a scheduler. You can
change any field (--help-config lists them): --config.model.position.kind=rope; with --resume, only
fields that no trained value depends on. --config.adapt.base=FOLDER adapts a trained model by
--config.adapt.method. Ctrl-C or SIGTERM saves before leaving, a second Ctrl-C does not. On a GPU or
TPU without similar measurements, attention is measured first, for a minute (--no-tune).

All devices: --config.sharding.data=-1 (each has all parameters) or --config.sharding.fsdp=-1 (each
has its part); also tensor and sequence. Several hosts: run the same command on each, with
--distributed if SLURM, Open MPI, Kubernetes or a TPU pod tell each process its place, or with
--distributed=HOST:PORT,PROCESSES,INDEX.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--config", type=Path, help="the config file; not needed with --resume")
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest intact checkpoint"
    )
    parser.add_argument("--evaluate", action="store_true", help="evaluate when training is done")
    parser.add_argument("--suite", help="a suite to ask when done, as ruler:lengths=512")
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
    parser.add_argument(
        "--no-tune",
        dest="tune",
        action="store_false",
        help="do not measure attention first, on a GPU or TPU",
    )
    parser.set_defaults(overrides=())


def run(args: argparse.Namespace) -> None:
    """Trains the run, then evaluates it, asks a suite and validates, as the options say."""
    begun = time.monotonic()  # The imports below take time, too.
    if args.config is None and not args.resume:
        raise ValueError("train: give --config=FILE, or --resume a run")
    steps = parse_steps(args.profile)

    from train import experiment
    from train.training import distributed, loop, messages, runs
    from train.training.metrics import Clock

    if args.distributed:
        distributed.initialize(args.distributed)
    if args.config is None:
        wanted = experiment.change(runs.load(args.run), args.overrides)
    else:
        wanted = experiment.from_file(args.config, args.overrides)
    asked = None
    if args.suite is not None:
        from train.compare import suites

        asked = suites.parse(args.suite)
        suites.check(asked, [wanted])
    if args.validate:
        from train.compare import sweep

        sweep.check(wanted)
    loop.train(
        wanted,
        args.run,
        resume=args.resume,
        profile=steps,
        report=distributed.report,
        clock=Clock(begun),
        tune=args.tune,
    )
    if distributed.is_main():  # It restores the model for its own devices, without the others.
        _judge(args, wanted.evaluation, asked)
    distributed.report(messages.next_commands(args.run, wanted, evaluated=args.evaluate))


def _judge(args: argparse.Namespace, evaluation: Any, suite: Any) -> None:
    """Evaluates the trained run, asks it a suite and validates it, as the options say."""
    if args.evaluate:
        from train.compare.evaluations import evaluate

        evaluate(args.run, evaluation)
    if suite is not None:
        from train.compare.evaluations import evaluate_suite

        evaluate_suite(args.run, suite)
    if args.validate:
        from train.compare import sweep
        from train.training import metrics

        with metrics.Progress.of(f"validating {args.run.name}") as progress:
            sweep.validate(args.run, evaluation, progress)


def parse_steps(text: str | None) -> range | None:
    """Parses the steps ``FIRST:STOP``."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not 1 <= int(match[1]) < int(match[2]):
        raise ValueError(f"--profile: expected FIRST:STOP, such as 10:13; got {text!r}")
    return range(int(match[1]), int(match[2]))
