"""Evaluates the newest checkpoint of a run and writes the result into it.

Files: evaluation.json, evaluation.txt, and the figures and files of the task.

python -m train.main eval --run=runs/x --config.evaluation.longest=12
python -m train.main eval --run=runs/x --suite=ruler --lengths 4096 8192

With --cut-updates the position encoding is as before training, so that TAPE's states stay at their
start. The result is printed, not written.

With --suite, the questions of a public benchmark replace the task's own; the files are
evaluation_SUITE.*. An evaluation that was stopped continues from there.

It runs on the mesh of the run if the devices of this machine fit it, else on the first device.
Another mesh: --config.sharding.data=-1 or --config.sharding.fsdp=-1. Sequences are not split.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.usage = "%(prog)s --run RUN [--cut-updates | --suite SUITE --lengths N ...] [options]"
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.add_argument(
        "--cut-updates", action="store_true", help="the position encoding as before training"
    )
    suite = parser.add_argument_group("suites")
    suite.add_argument("--suite", help="ruler or babilong")
    suite.add_argument("--lengths", type=int, nargs="+", metavar="N", help="tokens, such as 4096")
    suite.add_argument("--tasks", nargs="+", metavar="NAME", help="of the suite (all)")
    suite.add_argument("--samples", type=int, help="of each task and length (20)")
    suite.add_argument("--form", help="long, or short for small models (long)")
    suite.add_argument("--background", metavar="SOURCE", help="a source of text (stdlib)")
    suite.add_argument("--squad", metavar="FILE", help="SQuAD v1.1, for qa_1")
    suite.add_argument("--hotpotqa", metavar="FILE", help="HotpotQA, for qa_2")
    suite.add_argument("--batch-size", type=int, metavar="N", help="questions at once (16)")
    suite.add_argument("--chunk", type=int, help="tokens of a prompt at a time (all)")
    suite.add_argument("--seed", type=int, help="of the questions (0)")
    parser.add_argument("--fresh", action="store_true", help="forget what was stopped")
    parser.set_defaults(overrides=())


def run(args: argparse.Namespace) -> None:
    """Evaluates the run and prints the result."""
    begun = time.monotonic()

    from train import experiment
    from train.checks import require
    from train.compare.evaluations import evaluate, evaluate_suite, evaluate_untrained
    from train.suites.evaluation import SuiteOptions
    from train.training import runs
    from train.training.metrics import Clock

    clock = Clock(begun)
    options, mesh = experiment.change_evaluation(runs.load(args.run), args.overrides)
    for name in ("suite", "fresh"):
        require(
            not (args.cut_updates and getattr(args, name)),
            f"eval: --cut-updates does not go with --{name}",
        )
    fields = [f.name for f in dataclasses.fields(SuiteOptions)]
    given = {name: value for name in fields if (value := getattr(args, name)) is not None}
    asked = None
    if args.suite is None:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        require(
            not given,
            f"eval: these go with --suite only, got {words}; the task's own options are in "
            "--config.evaluation",
        )
    else:
        ignored = [one for one in args.overrides if one.startswith("--config.evaluation.")]
        require(
            not ignored,
            f"eval: a suite takes the place of the task's own evaluation; got {', '.join(ignored)} "
            "with --suite",
        )
        lengths, tasks = (given.pop(name, ()) for name in ("lengths", "tasks"))
        asked = SuiteOptions(**given, lengths=tuple(sorted({*lengths})), tasks=tuple(tasks))
    clock.lap("to start")
    if asked is not None:
        print(evaluate_suite(args.run, asked, mesh, fresh=args.fresh).table())
    elif args.cut_updates:
        print(evaluate_untrained(args.run, options, mesh).table())
    else:
        evaluate(args.run, options, mesh, fresh=args.fresh)
        print((args.run / "evaluation.txt").read_text(encoding="utf-8"))
    clock.lap("to evaluate")
    if not args.cut_updates:
        print(f"\nwritten: {', '.join(str(p) for p in sorted(args.run.glob('evaluation*')))}")
    print(f"took {clock}")
