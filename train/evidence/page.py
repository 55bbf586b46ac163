"""The page that says what came out, made from the results files and from nothing else."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tape_jax._src.files import write_atomically
from train.analysis import stability
from train.comparison.plots import MARK, require_ours, save
from train.evaluation.grids import text_table
from train.evidence import protocol
from train.evidence.claims import CLAIMS, Claim, standing
from train.evidence.figures import dots
from train.evidence.overhead import PlannedCost
from train.evidence.records import Record
from train.evidence.stability import PlannedGrowth
from train.evidence.states import COLUMNS, PlannedStates, states_figure
from train.evidence.statistics import estimate
from train.evidence.studies import Place, State, Study
from train.evidence.suite import STUDIES
from train.evidence.trainings import PlannedTrainings
from train.evidence.verdicts import HEADER, Kind, Verdict

MOST_NAMES = 6

Studies = Mapping[str, Any]


def studies_at(place: Place) -> dict[str, Any]:
    """Every study of the suite at a place, by name."""
    return {design.name: design.at(place) for design in STUDIES}


def write(studies: Studies, page: Path, *, changed: Study | None = None) -> None:
    """Writes the page, and its pictures into ``images/evidence`` beside it.

    Args:
      studies: of :func:`studies_at`.
      page: the Markdown file.
      changed: the only study whose pictures are drawn again; None: all.

    Raises:
      ValueError: a file in the way that is not ours.
    """
    require_ours(page)
    folder = page.parent / "images" / page.stem
    for study in studies.values() if changed is None else [changed]:
        for name, figure in figures(study).items():
            folder.mkdir(parents=True, exist_ok=True)
            save(figure, folder / name)
    write_atomically(page, markdown(studies, f"images/{page.stem}"))


def markdown(studies: Studies, images: str) -> str:
    """The page.

    Args:
      studies: of :func:`studies_at`.
      images: the folder of the pictures, as the page names it.
    """
    states = {name: study.state for name, study in studies.items()}
    parts = [f"<!-- {MARK} -->\n# Does TAPE do what is claimed?", _introduction(states)]
    parts += ["## Verdicts", *_verdicts(studies), "## Studies"]
    for name, study in studies.items():
        parts += [f"### {name}", *_study(study, states[name], images)]
    records = [record for state in states.values() for record in state.finished]
    parts += ["## Versions, hardware and code", _environments(records)]
    return "\n\n".join(part for part in parts if part) + "\n"


def figures(study: Study) -> dict[str, Figure]:
    """The pictures of a study by file name; none before a rival is complete."""
    if isinstance(study, PlannedTrainings):
        values = _values(study)
        return {f"{study.name}.png": dots(study.name, values, study.scores)} if values else {}
    if isinstance(study, PlannedGrowth) and not study.state.unfinished:
        traces = study.traces(seed=protocol.REPORTING[0])
        return {
            f"{study.name}_depth.png": stability.depth_figure(traces),
            f"{study.name}_layers.png": stability.layer_figure(traces),
        }
    if isinstance(study, PlannedStates) and (figure := states_figure(study)):
        return {f"{study.name}.png": figure}
    return {}


def figures_of(study: Study) -> list[str]:
    """The names of a study's pictures, without drawing them."""
    if isinstance(study, PlannedTrainings):
        return [f"{study.name}.png"] if _values(study) else []
    if isinstance(study, PlannedGrowth) and not study.state.unfinished:
        return [f"{study.name}_depth.png", f"{study.name}_layers.png"]
    if isinstance(study, PlannedStates) and study.rows():
        return [f"{study.name}.png"]
    return []


def _values(study: PlannedTrainings) -> dict[str, dict[str, Mapping[int, float]]]:
    """The values of rivals that are complete, by rival and score that claims read."""
    found: dict[str, dict[str, Mapping[int, float]]] = {}
    for rival in study.design.rivals:
        for key in study.design.scores:
            if (values := study.values(rival, key)) is not None:
                found.setdefault(rival, {})[key] = values
    return found


def _introduction(states: Mapping[str, State]) -> str:
    done = sum(len(state.finished) for state in states.values())
    total = sum(state.total for state in states.values())
    complete = [name for name, state in states.items() if not state.unfinished]
    begun = [n for n, state in states.items() if state.unfinished and state.finished]
    none = [n for n, state in states.items() if not state.finished]
    spent = sum(record.seconds for state in states.values() for record in state.finished)
    return (
        "Every claim that the paper makes of TAPE, or others make of it, tested by experiments "
        "that fit on two CPU cores, by [a protocol](protocol.md) that was written before them. "
        "They are small: a verdict holds at the size that was trained, and each names the larger "
        "test that would settle it.\n\n"
        "`make evidence` makes what is missing, claims first, and writes this page after every "
        "run, from the files in `benchmarks/results/evidence`. Finished: **"
        f"{done} of at least {total} runs**, {spent / 3600:.1f} hours of processor time.\n\n"
        f"* Studies finished under the protocol: {', '.join(complete) or 'none yet'}.\n"
        f"* Begun: {', '.join(begun) or 'none'}.\n"
        f"* Not made yet: {', '.join(none) or 'none'}.\n\n"
        "What was found before the protocol is on [a page of its own](evidence_before.md), and "
        "decides nothing here."
    )


def _verdicts(studies: Studies) -> Iterator[str]:
    found = [(claim, [claim.judge(studies, form) for form in claim.forms]) for claim in CLAIMS]
    rows = []
    for number, (claim, verdicts) in enumerate(found, 1):
        words = ", ".join(
            f"`{form}` **{verdict.kind.value}**"
            for form, verdict in zip(claim.forms, verdicts, strict=True)
        )
        if len({verdict.kind for verdict in verdicts}) == 1:
            words = f"**{verdicts[0].kind.value}**"
        rows.append(f"| {number} | {claim.title} | {words} |")
    yield "\n".join(["| | claim | verdict |", "|--:|---|---|", *rows])
    for number, (claim, verdicts) in enumerate(found, 1):
        where = ", ".join(f"[{name}](#{name})" for name in claim.studies)
        yield f"**{number}. {claim.title}.**\n\n" + "\n".join(
            [
                f"* Test: {claim.test}",
                *(_line(form, v) for form, v in zip(claim.forms, verdicts, strict=True)),
                *_why(studies, claim, verdicts),
                f"* Runs: {where}.",
                f"* To settle it: {claim.needs}.",
            ]
        )
        if tested := [cells for verdict in verdicts for cells in verdict.rows]:
            yield text_table(HEADER, tested)
        beside = [cells for verdict in standing(studies, claim) for cells in verdict.rows]
        if beside:
            yield "Beside contextual rivals, a family for each form, which decides nothing:"
            yield text_table(HEADER, beside)


def _line(form: str, verdict: Verdict) -> str:
    said = f"* `{form}`: **{verdict.kind.value}**"
    if verdict.kind is not Kind.UNFINISHED:
        return f"{said}."
    more = len(verdict.missing) - MOST_NAMES
    missing = "; ".join(verdict.missing[:MOST_NAMES]) + (f"; and {more} more" if more > 0 else "")
    return f"{said}. Missing: {missing}."


def _why(studies: Studies, claim: Claim, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """What the states of a form do where a claim of it is not confirmed."""
    for form, verdict in zip(claim.forms, verdicts, strict=True):
        if verdict.kind in (Kind.CONFIRMED, Kind.UNFINISHED):
            continue
        for inner in studies.values():
            if not isinstance(inner, PlannedStates):
                continue
            for name in claim.studies:
                if (name, form) in inner.pairs and (said := inner.said(name, form)):
                    yield f"* What `{form}` does: {said} ([{inner.name}](#{inner.name}))."


def _study(study: Study, state: State, images: str) -> Iterator[str]:
    yield f"{study.size}. `python -m train.main evidence --only={study.name}`"
    if state.unfinished:
        names = ", ".join(f"`{name}`" for name in state.unfinished[:MOST_NAMES])
        more = len(state.unfinished) - MOST_NAMES
        made = "Not made yet" if not state.finished else "Unfinished"
        yield (
            f"**{made}: {len(state.finished)} of at least {state.total} runs.** Next: {names}"
            f"{f' and {more} more' if more > 0 else ''}."
        )
    if isinstance(study, PlannedTrainings):
        yield _curve(study)
        for score in study.scores:
            yield _scores(study, score.key)
    elif isinstance(study, PlannedCost):
        yield _costs(study)
    elif isinstance(study, PlannedGrowth) and not state.unfinished:
        yield _growth(study)
    elif isinstance(study, PlannedStates) and (rows := study.rows()):
        yield text_table(COLUMNS, rows)
    for name in figures_of(study):
        yield f"![{study.name}]({images}/{name})"


def _curve(study: PlannedTrainings) -> str:
    """How the budget was chosen."""
    curve = study.design.curve
    if curve is None or not any(study.curve().values()):
        return ""
    rows = [
        [rival, *(f"{found[m]:.3f}" if m in found else "-" for m in protocol.MULTIPLES)]
        for rival, found in study.curve().items()
    ]
    steps = (f"{m}x the steps" for m in protocol.MULTIPLES)
    label = study.score(curve.score).label
    said = "The budget is not chosen yet."
    if (budget := study.budget) is not None:
        said = f"Budget chosen: {budget.multiple}x."
        if budget.improving:
            said += " Training was still improving there; the suite's hours allow no more."
        elif budget.improving is None:
            said += " Training was still improving before; what more would bring was not tried."
    return f"{said} In validation, {label}:\n\n{text_table(['', *steps], rows)}"


def _scores(study: PlannedTrainings, key: str) -> str:
    """What came out with the rates that one score chose: means and intervals over seeds."""
    first = key == study.design.scores[0]
    shown = [study.score(key), *(s for s in study.shown if first and s.key != key)]
    rows, lacking = [], []
    for rival in study.design.rivals:
        values = [study.values(rival, key, score.key) for score in shown]
        if values[0] is None:
            lacking.append(str(study.missing(rival, key)))
            continue
        cells = [str(estimate([*found.values()])) for found in values if found]
        lost = study.diverged(rival, key)
        rows.append([rival, str(study.rate(rival, key)), str(len(lost)), *cells])
    if not rows:
        return ""
    header = ["", "rate", "diverged", *(score.label for score in shown)]
    note = f"\n\nNot complete: {'; '.join(lacking)}." if lacking else ""
    return (
        f"Rates chosen by {study.score(key).label}; five seeds, mean and 95 % interval:\n\n"
        f"{text_table(header, rows)}{note}"
    )


def _costs(study: PlannedCost) -> str:
    rows = []
    keys = ("time", "noise", "memory", "parameters", "operations")
    for rival in study.design.rivals:
        for length, found in study.measured(rival).items():
            if len(found) < len(study.design.seeds):
                continue
            cells = [
                str(estimate([x[key] for x in found])) if key in found[0] else "-" for key in keys
            ]
            rows.append([rival, f"{length:,}", *cells])
    if not rows:
        return ""
    header = ["", "tokens", "time of a step", "RoPE against itself"]
    table = text_table([*header, "memory of a step", "parameters", "operations"], rows)
    return f"Multiples of {study.design.reference}, mean and 95 % interval:\n\n{table}"


def _growth(study: PlannedGrowth) -> str:
    rows = []
    for variant in study.design.variants:
        for depth in study.design.depths:
            found = [t for t in study.traces() if (t.variant, t.depth) == (variant, depth)]
            cells = []
            for what in ("growth", "spread"):
                for moment in stability.MOMENTS:
                    values = [getattr(getattr(t, moment), what) for t in found]
                    cells.append(f"{statistics.median(values):.3g}")
            diverged = sum(t.diverged is not None for t in found)
            rows.append([variant, str(depth), str(len(found)), *cells, str(diverged)])
    moments = stability.MOMENTS
    header = ["variant", "layers", "seeds", *(f"state, {m}" for m in moments)]
    header += [*(f"gradients, {m}" for m in moments), "diverged"]
    note = (
        "State: the largest norm that enters a layer, relative to the start. Gradients: the "
        "largest of a layer over the smallest. Medians of the seeds."
    )
    return f"{note}\n\n{text_table(header, rows)}"


def _environments(records: Sequence[Record]) -> str:
    if not records:
        return "Nothing has been run."
    counts = Counter(
        (tuple(sorted(record.environment.items())), record.code["modules"]) for record in records
    )
    lines = []
    for (environment, code), count in counts.most_common():
        described = ", ".join(f"{name} {value}" for name, value in environment)
        lines.append(f"* {count} runs: code `{code}`, {described}")
    return "\n".join(lines)
