"""Tests the claims about TAPE, or where it is ahead, and writes a page with the results.

  python -m research.main evidence
  python -m research.main evidence --only=addition,passkey
  python -m research.main evidence --suite=places
  python -m research.main evidence --suite=places --only=address --rivals=tape_alibi,rope
  python -m research.main evidence --config.scale=gpu

Prints which runs are missing and how long they will take, then makes them, claims first, by
research/protocol.md. Each run is written to --results the moment it ends, the page every ten
minutes: after an interruption, the same command continues. Trainings of a command that was killed
(SIGKILL) go on by themselves, and must end first. --plan stops before the first run.
--quick repeats a few runs in a separate folder, and says whether they equal those on record. --page
runs nothing, and needs only the results. Results by another protocol or config are named and left
out. --rivals makes the runs of these rivals, and those that choose a budget.

--suite=places replaces the claims by tasks in which a place must be found by content. Its page is
separate, and also says what the claims' runs say about one TAPE for all. --suite=arena asks some
questions of both suites about encodings of recent models.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from research.study import Design
    from research.suites import Suite

RESULTS, RUNS, PAGE = Path("research"), Path("runs"), Path("research")
# The name of the results folder.
FOLDER = "records"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--suite", default="claims", help="claims (the default), places, arena")
    parser.add_argument("--only", metavar="STUDY,...", help="studies of the page (all)")
    parser.add_argument("--rivals", metavar="RIVAL,...", help="rivals of these studies (all)")
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
    from research import page
    from research.making import compared, make, plan, remarks
    from research.records import Store
    from research.study import Place, apart
    from research.suites import SUITES
    from train.checks import choose, require

    choose("suite", args.suite, SUITES)
    suite = SUITES[args.suite]
    require(args.jobs >= 1, f"evidence: --jobs must be at least 1; got {args.jobs}")
    own = [design.name for design in suite.designs]
    chosen = args.only.split(",") if args.only is not None else own
    for study in chosen:
        choose("study", study, own)
    narrowed = None if args.rivals is None else _narrowed(suite, chosen, args)
    scale = scale_of(args.overrides)
    folder, name = f"{FOLDER}{apart(scale)}", f"{suite.name}{apart(scale)}"
    runs = args.runs or RUNS / folder
    recorded = Place(Store(args.results or RESULTS / folder), runs, args.jobs, scale)
    with tempfile.TemporaryDirectory() as nowhere:
        # Reading needs no run folders, and neither finds nor leaves any.
        read = recorded._replace(runs=Path(nowhere))
        idle = args.page or args.plan
        place, out = read if idle else recorded, args.out or PAGE / f"{name}.md"
        if args.quick:
            recorded_studies = page.studies_at(suite, read)
            RUNS.mkdir(exist_ok=True)
            apart_from = Path(tempfile.mkdtemp(prefix=f"{name}-quick-", dir=RUNS))
            place = recorded._replace(store=Store(apart_from / "results"), runs=apart_from / "runs")
            out = args.out or apart_from / "page" / f"{name}.md"
        studies = page.studies_at(suite, place)
        makes = {name: studies[name] for name in chosen}
        if narrowed is not None:
            makes = {name: design.at(place) for name, design in narrowed.items()}
        for remark in remarks(place.store, studies):
            print(remark, file=sys.stderr)
        if not args.page and not args.quick:
            print(plan(suite, makes, args.jobs), flush=True)
        if args.plan:
            return
        out.parent.mkdir(parents=True, exist_ok=True)
        page.write(suite, studies, out)
        if not idle:
            for study in makes.values():
                make(suite, studies, study, out, quick=args.quick)
        print(f"page: {out}")
        if args.quick:
            table = compared({name: studies[name] for name in own}, recorded_studies)
            print(table)
            # Other differences may be those of rounding on another machine.
            ends = [x for x in table.splitlines() if "diverged" in x and "DIFFERS" in x]
            require(not ends, "evidence: only here or only on record diverged:\n" + "\n".join(ends))


def _narrowed(suite: Suite, chosen: Sequence[str], args: argparse.Namespace) -> dict[str, Design]:
    """Returns the chosen studies that have rivals named on the command line, with only these.

    Raises:
      ValueError: no study has such a rival.
    """
    from research.trainings import Trainings
    from train.checks import choose, require

    for option in ("quick", "page"):
        require(not getattr(args, option), f"evidence: --rivals has no part in --{option}")
    rivals, found = args.rivals.split(","), {}
    for design in suite.designs:
        if design.name in chosen and isinstance(design, Trainings):
            found[design.name] = dataclasses.replace(design, only=rivals)
    known = dict.fromkeys(rival for design in found.values() for rival in design.rivals)
    require(bool(known), f"evidence: {', '.join(chosen)}: no study of trainings, which have rivals")
    for rival in rivals:
        choose("rival", rival, known)
    return {name: one for name, one in found.items() if not one.rivals.keys().isdisjoint(rivals)}


def scale_of(overrides: Sequence[str]) -> str:
    """Returns the scale that the command line asks for.

    Raises:
      ValueError: it asks for anything else.
    """
    from train import experiment
    from train.checks import require

    scale, others = experiment.take_scale(overrides)
    require(
        not others,
        f"evidence does not take {' '.join(others)}: the configs of the suite are fixed, but for "
        "--config.scale=NAME",
    )
    return scale
