"""Tests every claim that is made of TAPE, and writes a page that says what came out.

  python -m train.main evidence
  python -m train.main evidence --only=addition,passkey
  python -m train.main evidence --config.scale=gpu

Runs what has no results yet, in the order of the page. Each run is written to --results the moment
it ends, and then the page: stopped anywhere, the same command continues. --quick makes a few of the
runs once more in a folder of their own, and says what was recorded of them. --page runs nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tape_jax.config import choose, require
from train import experiment
from train.data import Score
from train.evidence import page
from train.evidence.records import Item, Record, Store
from train.evidence.studies import Place, PlannedTrainings, Study
from train.grids import text_table

RESULTS, RUNS, PAGE = Path("benchmarks/results"), Path("runs"), Path("docs")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--only", metavar="STUDY,...", help="studies of the page (all)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--quick", action="store_true", help="a few runs once more, in minutes")
    what.add_argument("--page", action="store_true", help="write the page, run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="trainings side by side (2)")
    parser.add_argument("--results", type=Path, help="folder of the results files")
    parser.add_argument("--runs", type=Path, help="folder of the run folders")
    parser.add_argument("--out", type=Path, help="the page")
    parser.set_defaults(overrides=())


def run(args: argparse.Namespace) -> None:
    """Runs what is missing."""
    require(args.jobs >= 1, f"evidence: --jobs must be at least 1; got {args.jobs}")
    scale = scale_of(args.overrides)
    name = "evidence" if scale == experiment.THIS_SCALE else f"evidence-{scale}"
    recorded = Place(Store(args.results or RESULTS / name), args.runs or RUNS / name)
    recorded = recorded._replace(side_by_side=args.jobs, scale=scale)
    place, out = recorded, args.out or PAGE / f"{name}.md"
    if args.quick:
        own = RUNS / f"{name}-quick"
        place = recorded._replace(store=Store(own / "results"), runs=own / "runs")
        out = args.out or own / "page" / f"{name}.md"
    studies = page.studies_at(place)
    chosen = args.only.split(",") if args.only else list(studies)
    for study in chosen:
        choose("study", study, studies)
    out.parent.mkdir(parents=True, exist_ok=True)
    page.write(studies, out)
    if not args.page:
        for study in chosen:
            make(studies, study, out, quick=args.quick)
    print(f"page: {out}")
    if args.quick:
        print(compared(studies, page.studies_at(recorded)))


def scale_of(overrides: Sequence[str]) -> str:
    """The scale that the command line asks for.

    Raises:
      ValueError: it asks for anything else.
    """
    scale, others = experiment.take_scale(overrides)
    require(
        not others,
        f"evidence does not take {' '.join(others)}: the configs of the suite are fixed, but for "
        "--config.scale=NAME",
    )
    return scale


def make(studies: dict[str, Any], name: str, out: Path, *, quick: bool) -> None:
    """Makes what a study lacks; the page follows every run."""
    study: Study = studies[name]
    start = time.monotonic()

    def finished(item: Item) -> None:
        page.write(studies, out, changed=study)
        states = [one.state for one in studies.values()]
        done, total = sum(len(s.finished) for s in states), sum(s.total for s in states)
        took = (time.monotonic() - start) / 60
        print(f"{item.study}/{item.name}: {done} of {total} runs, {took:.0f} min in this study")

    study.run(finished, quick=quick)


def compared(here: dict[str, Any], recorded: dict[str, Any]) -> str:
    """The scores of runs that were made here beside those on record."""
    rows = []
    for name, study in here.items():
        if not isinstance(study, PlannedTrainings):
            continue
        before: PlannedTrainings = recorded[name]
        for job, there in zip(study.quick, before.quick, strict=True):
            mine, theirs = study.record(job), before.record(there)
            if mine is None:
                continue
            for score in study.scores:
                values = [_shown(study, score, record) for record in (mine, theirs)]
                rows.append([f"{name}/{job.folder.name}", score.label, *values])
    return text_table(["run", "score", "here", "on record"], rows)


def _shown(study: PlannedTrainings, score: Score, record: Record | None) -> str:
    """A score of a run, in a table."""
    if record is None:
        return "-"
    value = study.read(record).summary().get(score.key)
    return "diverged" if value is None else f"{score.factor * value:.4g}"
