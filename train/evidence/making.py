"""Making what the suite lacks, and setting quick runs beside recorded ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.evaluation.grids import text_table
from train.evidence import page
from train.evidence.records import Item, Record, Store
from train.evidence.studies import Study
from train.evidence.suites import Suite
from train.evidence.trainings import PlannedTrainings
from train.tasks import Score


def plan(
    suite: Suite, studies: Mapping[str, Study], names: Sequence[str], side_by_side: int
) -> str:
    """What of some studies is missing, and how long it is expected to take."""
    rows, hours = [], 0.0
    for name in names:
        state, study = studies[name].state, studies[name]
        claims = [str(n) for n, claim in enumerate(suite.claims, 1) if name in claim.studies]
        done = f"{len(state.finished)} of at least {state.total}"
        rows.append([name, ", ".join(claims), done, f"{study.hours:.2f}"])
        hours += study.hours
    table = text_table(["study", f"{suite.subject}s", "runs", "hours of a core"], rows)
    return (
        f"{table}\n\nMissing: about {hours / side_by_side:.1f} hours of {side_by_side} idle cores."
    )


def make(suite: Suite, studies: dict[str, Any], name: str, out: Path, *, quick: bool) -> None:
    """Makes what a study lacks; the page follows every run."""
    study: Study = studies[name]
    start = time.monotonic()
    made: list[Item] = []

    def finished(item: Item) -> None:
        made.append(item)
        page.write(suite, studies, out, changed=study)
        state, took = study.state, (time.monotonic() - start) / 60
        done = f"{len(state.finished)} of at least {state.total} runs"
        print(f"{item.study}/{item.name}: {done}, {took:.0f} min", flush=True)

    study.run(finished, quick=quick)
    if made:
        study.place.store.tidy(name)


def remarks(store: Store, studies: Mapping[str, Study]) -> Iterator[str]:
    """What of the records is left out, and why; and what no study uses."""
    for study in studies.values():
        yield from study.remarks()
    for path in sorted(store.folder.glob("*.jsonl")):
        if path.stem not in studies:
            yield f"not used by any study: {path}"


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
            for score in study.shown:
                values = [_shown(study, score, record) for record in (mine, theirs)]
                same = "-" if theirs is None else "equal" if values[0] == values[1] else "DIFFERS"
                rows.append([f"{name}/{job.folder.name}", score.label, *values, same])
    return text_table(["run", "score", "here", "on record", ""], rows)


def _shown(study: PlannedTrainings, score: Score, record: Record | None) -> str:
    """A score of a run, in a table."""
    if record is None:
        return "-"
    return "diverged" if record.found["diverged"] else f"{study.value(record, score):.6g}"
