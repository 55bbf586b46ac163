"""Tests what is claimed of TAPE, or where it is ahead, and writes a page that says what came out.

  python -m train.main evidence
  python -m train.main evidence --only=addition,passkey
  python -m train.main evidence --suite=places
  python -m train.main evidence --config.scale=gpu

Says what is missing and how long it will take, and makes it, claims first, by docs/protocol.md.
Each run is written to --results the moment it ends, and then the page: stopped anywhere, the same
command continues. --plan stops before the first run. --quick makes a few of the runs once more in a
folder of their own, and says whether they are those on record. --page runs nothing, and needs
nothing but the results. Results by other code, another protocol or another config are named and
left out.

--suite=places compares encodings at tasks in which a place is to be found by content, in place of
the claims; its results, runs and page are apart.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

RESULTS, RUNS, PAGE = Path("benchmarks/results"), Path("runs"), Path("docs")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--suite", default="claims", help="claims (the default), or places")
    parser.add_argument("--only", metavar="STUDY,...", help="studies of the page (all)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--quick", action="store_true", help="a few runs once more, in minutes")
    what.add_argument("--page", action="store_true", help="write the page, run nothing")
    what.add_argument("--plan", action="store_true", help="say what is missing, run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="trainings side by side (2)")
    parser.add_argument("--results", type=Path, help="folder of the results files")
    parser.add_argument("--runs", type=Path, help="folder of the run folders")
    parser.add_argument("--out", type=Path, help="the page")
    parser.set_defaults(overrides=())


def run(args: argparse.Namespace) -> None:
    """Runs what is missing."""
    from tape_jax._src.checks import choose, require
    from train import experiment
    from train.evidence import page
    from train.evidence.making import compared, make, plan, remarks
    from train.evidence.records import Store
    from train.evidence.source import describe_source
    from train.evidence.studies import Place
    from train.evidence.suites import SUITES

    choose("suite", args.suite, SUITES)
    suite = SUITES[args.suite]
    require(args.jobs >= 1, f"evidence: --jobs must be at least 1; got {args.jobs}")
    scale, code = scale_of(args.overrides), describe_source()
    name = suite.name if scale == experiment.THIS_SCALE else f"{suite.name}-{scale}"
    # Runs of other code are not continued.
    runs = (args.runs or RUNS / name) / code["modules"]
    recorded = Place(Store(args.results or RESULTS / name), runs, args.jobs, scale)
    with tempfile.TemporaryDirectory() as nowhere:
        # What is only read needs no run folders, and neither finds nor leaves any.
        read = recorded._replace(runs=Path(nowhere))
        idle = args.page or args.plan
        place, out = read if idle else recorded, args.out or PAGE / f"{name}.md"
        if args.quick:
            own = RUNS / f"{name}-quick" / code["modules"]
            place = recorded._replace(store=Store(own / "results"), runs=own / "runs")
            out = args.out or own / "page" / f"{name}.md"
        studies = page.studies_at(suite, place)
        chosen = args.only.split(",") if args.only is not None else list(studies)
        for study in chosen:
            choose("study", study, studies)
        for remark in remarks(place.store, studies):
            print(remark, file=sys.stderr)
        if not args.page and not args.quick:
            print(plan(suite, studies, chosen, args.jobs), flush=True)
        if args.plan:
            return
        if not idle:
            place.store.accept(code)
        out.parent.mkdir(parents=True, exist_ok=True)
        page.write(suite, studies, out)
        if not idle:
            for study in chosen:
                make(suite, studies, study, out, quick=args.quick)
        print(f"page: {out}")
        if args.quick:
            print(compared(studies, page.studies_at(suite, read)))
            print(f"code: {code['modules']}")


def scale_of(overrides: Sequence[str]) -> str:
    """The scale that the command line asks for.

    Raises:
      ValueError: it asks for anything else.
    """
    from tape_jax._src.checks import require
    from train import experiment

    scale, others = experiment.take_scale(overrides)
    require(
        not others,
        f"evidence does not take {' '.join(others)}: the configs of the suite are fixed, but for "
        "--config.scale=NAME",
    )
    return scale
