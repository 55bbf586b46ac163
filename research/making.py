"""Makes the runs that a suite lacks, and compares quick runs with recorded ones."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from research import page
from research.records import Item, Record, Store
from research.study import Measurements, Study
from research.suites import SUITES, Suite
from research.trainings import PlannedTrainings
from train.evaluation.grids import text_table
from train.tasks import Score

# Writing the page of all studies takes a third of the time of their shortest runs, and no run
# starts meanwhile.
SECONDS_BETWEEN_PAGES = 600.0


def plan(suite: Suite, studies: Mapping[str, Study], side_by_side: int) -> str:
    """Returns a table of how many runs studies have, and the hours that the missing ones take."""
    rows, hours = [], 0.0
    for name, study in studies.items():
        state = study.state
        claims = [str(n) for n, claim in enumerate(suite.claims, 1) if name in claim.studies]
        done = f"{len(state.finished)} of at least {state.total}"
        rows.append([name, ", ".join(claims), done, f"{study.hours:.2f}"])
        hours += study.hours
    table = text_table(["study", f"{suite.subject}s", "runs", "hours of a core"], rows)
    return (
        f"{table}\n\nMissing: about {hours / side_by_side:.1f} hours of {side_by_side} idle cores."
    )


def make(suite: Suite, studies: dict[str, Any], study: Study, out: Path, *, quick: bool) -> None:
    """Makes a study's missing runs; writes the page every ten minutes and at the end.

    Args:
      suite: whose page it is.
      studies: all studies of the page.
      study: to make: one of these, or one with part of its runs.
      out: the page.
      quick: whether only the quick part is made.
    """
    start = written = time.monotonic()
    made: list[Item] = []

    def finished(item: Item) -> None:
        nonlocal written
        made.append(item)
        if time.monotonic() - written > SECONDS_BETWEEN_PAGES:
            page.write(suite, studies, out, changed=studies[study.name])
            written = time.monotonic()
        state, took = study.state, (time.monotonic() - start) / 60
        done = f"{len(state.finished)} of at least {state.total} runs"
        print(f"{item.study}/{item.name}: {done}, {took:.0f} min", flush=True)

    try:
        study.run(finished, quick=quick)
        if made:
            study.place.store.tidy(study.name)
    finally:
        if made:
            page.write(suite, studies, out, changed=studies[study.name])


def remarks(store: Store, studies: Mapping[str, Study]) -> Iterator[str]:
    """Yields lines on records left out, with the reason, and on those that no study uses."""
    suites = [{design.name: design for design in suite.designs} for suite in SUITES.values()]
    for study in studies.values():
        yield from study.remarks()
        unused = set(study.unused)
        for designs in suites:
            # Another suite may have more rivals in the same study.
            if unused and study.name in designs:
                unused &= {*designs[study.name].at(study.place).unused}
        if unused:
            yield f"not used by any study: {store.path(study.name)}: {', '.join(sorted(unused))}"
    known = {*studies, *itertools.chain(*suites)}
    for path in sorted(store.folder.glob("*.jsonl")):
        if path.stem not in known:
            yield f"not used by any study: {path}"


def compared(here: dict[str, Any], recorded: dict[str, Any]) -> str:
    """Returns a table of the scores of runs made here beside those on record."""
    rows: list[list[str]] = []
    for name, study in here.items():
        if isinstance(study, Measurements):
            rows += _measured(study, recorded[name])
        if not isinstance(study, PlannedTrainings):
            continue
        before: PlannedTrainings = recorded[name]
        for job, there in zip(study.quick, before.quick, strict=True):
            mine, theirs = study.record(job), before.record(there)
            if mine is None:
                continue
            for score in study.shown:
                values = [_shown(study, score, record) for record in (mine, theirs)]
                same = "-" if theirs is None else "equal" if values[0] == values[1] else "DIFFERS"
                rows.append([f"{name}/{job.folder.name}", score.label, *values, same])
    return text_table(["run", "score", "here", "on record", ""], rows)


def _measured(here: Measurements, recorded: Measurements) -> Iterator[list[str]]:
    """Yields a row for each measurement made here: whether its numbers are those on record."""
    for item in here.items[: here.quick]:
        mine, theirs = here.recorded(item), recorded.recorded(item)
        if mine is None:
            continue
        same = "-" if theirs is None else "equal" if mine.found == theirs.found else "DIFFERS"
        yield [f"{here.name}/{item.name}", "all that was measured", "", "", same]


def _shown(study: PlannedTrainings, score: Score, record: Record | None) -> str:
    """Returns a score of a run, as a table shows it."""
    if record is None:
        return "-"
    return "diverged" if record.found["diverged"] else f"{study.value(record, score):.6g}"
