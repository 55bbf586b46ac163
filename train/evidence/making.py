"""Making what the suite lacks, and setting quick runs beside recorded ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from train.evaluation.grids import text_table
from train.evidence import page
from train.evidence.records import Item, Record, Store
from train.evidence.studies import Study
from train.evidence.trainings import PlannedTrainings
from train.tasks import Score


def make(studies: dict[str, Any], name: str, out: Path, *, quick: bool) -> None:
    """Makes what a study lacks; the page follows every run."""
    study: Study = studies[name]
    start = time.monotonic()
    made: list[Item] = []

    def finished(item: Item) -> None:
        made.append(item)
        page.write(studies, out, changed=study)
        states = [one.state for one in studies.values()]
        done, total = sum(len(s.finished) for s in states), sum(s.total for s in states)
        took = (time.monotonic() - start) / 60
        print(f"{item.study}/{item.name}: {done} of {total} runs, {took:.0f} min in this study")

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
