"""Compares several encodings, or methods that adapt a model, with equal training.

  python -m train.main compare --config=configs/addition_demo.py --run=runs/addition_demo \\
      --encodings=tape,rope
  python -m train.main compare --config=configs/context_extension.py --run=runs/longer \\
      --methods=base,scaled,tape,lora,longlora,theta,full,drope
  python -m research.main compare --config=research/configs/ablations.py --run=runs/ablations \\
      --variants=all --sweep train.learning_rate=1e-3,3e-3

Options follow a name, and go to the part that has them: --encodings=rope+alibi,fox+alibi:bias=5.0.
A method name with + is an encoding put in place: --methods=tape,rope+alibi:slopes=fixed

Steps, data and seeds are equal. Each training gets its own run inside the run folder. If you call
the command again, it keeps finished runs and continues unfinished ones. It writes report.md, with
pictures, and report.json beside them. --sweep tries every value with the first seed. Each rival is
then compared at its best value in a validation apart from the test. To ask all models a suite, use
--suite=ruler:lengths=512,2048:form=short and other options of eval.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train.compare.jobs import Choice


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--config", type=Path, required=True, help="the config file")
    parser.add_argument("--run", type=Path, required=True, help="the folder of the comparison")
    compared = parser.add_mutually_exclusive_group(required=True)
    compared.add_argument(
        "--encodings", metavar="NAME,...", help="of positions; options: NAME:OPTION=VALUE"
    )
    compared.add_argument("--methods", metavar="NAME,...", help="of adaptation")
    compared.add_argument("--variants", metavar="NAME,...", help="of the config; all: every one")
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="FIELD=VALUE,...", help="choose the best"
    )
    parser.add_argument("--seeds", type=int, default=1, help="of each; 3 or more for a verdict (1)")
    parser.add_argument(
        "--jobs",
        type=int,
        default=2,
        help="trainings side by side (2), on GPUs in turn; on a TPU one at a time",
    )
    parser.add_argument("--suite", metavar="NAME:lengths=N,...", help="ask a suite, too")
    parser.set_defaults(overrides=())


def run(args: argparse.Namespace) -> None:
    """Trains and evaluates the missing runs, then writes and prints the report."""
    # Trainings share a GPU with one another and with this process. Set before jax is loaded.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from train.checks import require
    from train.compare import suites, sweep
    from train.compare.evaluations import evaluate_suite
    from train.compare.jobs import claim, plan, record
    from train.compare.processes import EVALUATE, train_missing, tune
    from train.compare.report import by_name, result_section, sample_lines, write_report
    from train.compare.tasks import compare
    from train.training import messages

    require(args.jobs >= 1, f"compare: --jobs must be at least 1; got {args.jobs}")
    asked = None if args.suite is None else suites.parse(args.suite)
    choice, names = chosen(args)
    plan_for = functools.partial(plan, args.config, args.run, choice)
    settings = sweep.settings(args.sweep)
    jobs = plan_for(
        names, min(args.seeds, 1) if args.sweep else args.seeds, args.overrides, settings
    )
    if asked is not None:
        suites.check(asked, [job.experiment for job in jobs])
    if args.sweep:
        best = tune(args.run, jobs, args.jobs)
        by_rival = [plan_for([name], args.seeds, args.overrides, [best[name]]) for name in names]
        jobs = [job for planned in by_rival for job in planned]
    claim(args.run, jobs)
    asking_suite = [] if asked is None else [f"--suite={args.suite}"]
    diverged = train_missing(jobs, args.jobs, (*EVALUATE, *asking_suite))
    task = jobs[0].experiment.task
    judged = [job for job in jobs if job not in diverged]
    answers = {} if asked is None else {job: evaluate_suite(job.folder, asked) for job in judged}
    first_seeds = {job.name: job for job in reversed(judged)}.values()
    records = [
        record(
            job,
            ask=job in first_seeds,
            suite=suites.summary(answers[job]) if job in answers else None,
            diverged=job in diverged,
        )
        for job in jobs
    ]
    results = {
        name: [run.result for run in group if run.result is not None]
        for name, group in by_name(records).items()
    }
    compared = compare(task, results)
    if answers:
        names_asked = [job.name for job in answers]
        compared = suites.added(compared, task, names_asked, [*answers.values()])
    asking = messages.ask(judged[0].folder, task) if judged else None
    report = write_report(args.run, task, records, compared, ask=asking)
    for heading, text in compared.sections.items():
        if words := _without_pictures(text):
            print(f"\n{heading}\n\n{words}")
    print(f"\n{result_section(task, records, compared)}\n\nreport: {report}\n")
    print("Asked what they have not seen:")
    print(sample_lines(records))
    if asking:
        print(f"ask it another:\n  {asking}")


def chosen(args: argparse.Namespace) -> tuple[Choice, list[str]]:
    """Returns the :class:`Choice` made from the options, and the names to compare."""
    from train.compare import sweep
    from train.compare.jobs import ENCODINGS, METHODS, Choice

    if args.variants is None:
        by_encoding = args.encodings is not None
        choice, names = (ENCODINGS, args.encodings) if by_encoding else (METHODS, args.methods)
        return choice, sweep.split(names)
    choice = Choice(f"variant of {args.config}", dict(sweep.variants(args.config)))
    return choice, [*choice.known] if args.variants == "all" else args.variants.split(",")


def _without_pictures(text: str) -> str:
    """Removes images from Markdown, for a terminal."""
    return re.sub(r"!\[[^]]*\]\([^)]*\)", "", text).strip()
