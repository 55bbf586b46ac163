"""The page that says what came out, made from the results files and from nothing else."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from research import overview, protocol, stability
from research.claims import Claim, standing
from research.figures import dots
from research.overhead import PlannedCost
from research.overview import LEARNED, learned
from research.records import Record
from research.stability import PlannedGrowth
from research.states import COLUMNS, PlannedStates, states_figure
from research.studies import BEYOND, INSIDE
from research.study import Place, State, Study
from research.suites import TAPE, Suite
from research.trainings import PlannedTrainings
from research.verdicts import HEADER, Kind, Verdict
from train.compare.plots import MARK, require_ours, save
from train.evaluation.grids import text_table
from train.files import write_atomically
from train.statistics import estimate
from train.tasks import Score

MOST_NAMES = 6
# Per cent right at the trained lengths up to which nobody has even begun to learn a task.
HARDLY = 50

LEGEND = (
    "*Better by*: the mean paired difference over five seeds in the form's favour, in points of "
    "exact match, or in % of perplexity or growth, with its interval by Student's t, which may "
    "leave what is possible; of what a form costs, the multiple of RoPE's. *p*: paired t test, "
    "adjusted by Holm's method. *Would have seen*: the smallest difference found with a chance of "
    "80 % ([protocol](protocol.md#statistic))."
)
CAPTION = (
    "*A dot is a seed, the bar the mean of the five, the line its 95 % interval, cut at 0 and "
    "100 %. Red is TAPE, whole or with a part changed; blue is all else.*"
)
UNLEARNED = (
    "\\* Hardly any encoding had learned the task, and training was still improving, or none had "
    f"{HARDLY} % of the trained lengths right: no finding about encodings."
)

Studies = Mapping[str, Any]
# Claims with the verdict on each of their forms, and with those beside contextual rivals.
Judged = Sequence[tuple[Claim, Sequence[Verdict], Sequence[Verdict]]]
# Studies, each with a rival of which it has runs.
Begun = Collection[tuple[str, str]]


def studies_at(suite: Suite, place: Place) -> dict[str, Any]:
    """Every study of a suite at a place, by name, and those that it reads."""
    designs = itertools.chain(suite.designs, *suite.read.values())
    return {design.name: design.at(place) for design in designs}


def write(suite: Suite, studies: Studies, page: Path, *, changed: Study | None = None) -> None:
    """Writes the page, and its pictures into ``images/<its name>`` beside it.

    Args:
      suite: whose page it is.
      studies: of :func:`studies_at`.
      page: the Markdown file.
      changed: the only study whose pictures are drawn again; None: all.

    Raises:
      ValueError: a file in the way that is not ours.
    """
    require_ours(page)
    folder = page.parent / "images" / page.stem
    found: dict[str, Figure] = {}
    for study in _own(suite, studies).values() if changed is None else [changed]:
        found |= figures(suite, study)
    if suite.overview and (figure := overview.picture(_columns(suite, studies))) is not None:
        found[overview.PICTURE] = figure
    for name, figure in found.items():
        folder.mkdir(parents=True, exist_ok=True)
        save(figure, folder / name)
    write_atomically(page, markdown(suite, studies, f"images/{page.stem}"))


def markdown(suite: Suite, studies: Studies, images: str) -> str:
    """The page.

    Args:
      suite: whose page it is.
      studies: of :func:`studies_at`.
      images: the folder of the pictures, as the page names it.
    """
    own = _own(suite, studies)
    states = {name: study.state for name, study in studies.items()}
    begun = {(name, record.rival) for name, state in states.items() for record in state.finished}
    states = {name: states[name] for name in own}
    folder = next(iter(own.values())).place.store.folder.name
    judged = [
        (claim, [claim.judge(studies, form) for form in claim.forms], standing(studies, claim))
        for claim in suite.claims
    ]
    awaited = {
        name
        for claim, *found in judged
        if any(verdict.missing for verdict in itertools.chain(*found))
        for name in claim.studies
    }
    parts = [f"<!-- {MARK} -->\n# {suite.title}", *_introduction(suite, states, awaited, folder)]
    columns = _columns(suite, studies) if suite.overview else {}
    parts += ["## Verdicts", *_verdicts(suite, studies, judged)]
    if overview.has_picture(columns):
        parts.append(f"![{suite.title}]({images}/{overview.PICTURE})")
    parts += ["## Names", *_names(suite), f"## {suite.subject.capitalize()} by {suite.subject}"]
    parts += overview.tables(columns)
    parts += [*_tests(suite, studies, judged, begun), "## Studies"]
    for name, study in own.items():
        parts += [f"### {name}", *_study(suite, study, states[name], name in awaited)]
        for picture in figures_of(study):
            parts.append(f"![{suite.headed(name)}]({images}/{picture})")
            if isinstance(study, PlannedTrainings) and CAPTION not in parts:
                parts.append(CAPTION)
    records = [record for state in states.values() for record in state.finished]
    parts += ["## Versions, hardware and code", _environments(records)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _own(suite: Suite, studies: Studies) -> dict[str, Any]:
    """The studies that are described on the suite's own page."""
    read = {design.name for design in itertools.chain(*suite.read.values())}
    return {name: study for name, study in studies.items() if name not in read}


def _columns(suite: Suite, studies: Studies) -> dict[str, Any]:
    """The studies of an overview: those that a claim is about, judged beyond the trained length."""
    names = [claim.studies[0] for claim in suite.claims if len(claim.studies) == 1]
    found = {name: studies[name] for name in dict.fromkeys(names)}
    return {name: one for name, one in found.items() if BEYOND in one.design.scores}


def figures(suite: Suite, study: Study) -> dict[str, Figure]:
    """The pictures of a study by file name; none before a rival is complete."""
    if isinstance(study, PlannedTrainings):
        if not (values := _values(study)):
            return {}
        scores = [score._replace(label=_label(study, score)) for score in study.scores]
        return {f"{study.name}.png": dots(suite.headed(study.name), values, scores, red=TAPE)}
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


def _label(study: PlannedTrainings, score: Score) -> str:
    """What a score is; of models that are tuned, also how long 1x is."""
    label = f"exact match {score.label}" if score.key in (BEYOND, INSIDE) else score.label
    if study.design.base is None:
        return label
    return label.replace(" 1x", f" 1x ({study.task.sequence_length} bytes)")


def _values(study: PlannedTrainings) -> dict[str, dict[str, Mapping[int, float]]]:
    """The values of rivals that are complete, by rival and score that claims read."""
    found: dict[str, dict[str, Mapping[int, float]]] = {}
    for rival in study.design.rivals:
        for key in study.design.scores:
            if (values := study.values(rival, key)) is not None:
                found.setdefault(rival, {})[key] = values
    return found


def _introduction(
    suite: Suite, states: Mapping[str, State], awaited: Collection[str], folder: str
) -> Iterator[str]:
    done = sum(len(state.finished) for state in states.values())
    total = sum(state.total for state in states.values())
    complete = [name for name, state in states.items() if not state.unfinished]
    begun = [
        name if name in awaited else f"{name} (no verdict waits for it)"
        for name, state in states.items()
        if state.unfinished and state.finished
    ]
    none = [n for n, state in states.items() if not state.finished]
    spent = sum(record.seconds for state in states.values() for record in state.finished)
    yield suite.introduction
    yield (
        f"`{suite.make}` makes what is missing, {suite.order}, and writes this page after every "
        f"run, from the files in `research/{folder}`. Finished: **"
        f"{done} of at least {total} runs**, {spent / 3600:.1f} hours of processor time."
    )
    yield (
        f"* Studies finished under the protocol: {', '.join(complete) or 'none yet'}.\n"
        f"* Begun: {', '.join(begun) or 'none'}.\n"
        f"* Not made yet: {', '.join(none) or 'none'}."
    )
    yield suite.closing


def _names(suite: Suite) -> Iterator[str]:
    """What the names in tables stand for: of tasks, where there are, and of what is compared."""
    if suite.overview:
        yield _two_columns(suite.subject, "what is asked", suite.asked)
    yield _two_columns("name", "what it is", suite.names)


def _two_columns(first: str, second: str, rows: Mapping[str, str]) -> str:
    lines = [f"| `{name}` | {what} |" for name, what in rows.items()]
    return "\n".join([f"| {first} | {second} |", "|---|---|", *lines])


def _verdicts(suite: Suite, studies: Studies, found: Judged) -> Iterator[str]:
    """A line for each claim; with an overview, a column for each form."""
    if suite.overview:
        forms = list(dict.fromkeys(form for claim, *_ in found for form in claim.forms))
        rows = []
        for claim, verdicts, _ in found:
            called = {kind: claim.word(kind) for kind in Kind}
            if _unlearned(studies, claim):
                called[Kind.NOT_TOLD] += "*"
            said = {f: called[v.kind] for f, v in zip(claim.forms, verdicts, strict=True)}
            rows.append([claim.name, *(said.get(form, "") for form in forms)])
        table = text_table([suite.subject, *forms], rows)
        yield table
        if "*" in table:
            yield UNLEARNED
        return
    lines = []
    for number, (claim, verdicts, _) in enumerate(found, 1):
        words = ", ".join(
            f"`{form}` **{claim.word(verdict.kind)}**"
            for form, verdict in zip(claim.forms, verdicts, strict=True)
        )
        if len({verdict.kind for verdict in verdicts}) == 1:
            words = f"**{claim.word(verdicts[0].kind)}**"
        lines.append(f"| {number} | {claim.title} | {words} |")
    yield "\n".join([f"| | {suite.subject} | verdict |", "|--:|---|---|", *lines])


def _unlearned(studies: Studies, claim: Claim) -> bool:
    """Whether not two have learned the task, and longer training was better, or nobody began to."""
    if len(claim.studies) != 1:
        return False
    study: PlannedTrainings = studies[claim.studies[0]]
    means = learned(study).values()
    if not means or sum(mean >= LEARNED for mean in means) > 1:
        return False
    return bool(study.budget and study.budget.improving) or max(means) < HARDLY


def _tests(suite: Suite, studies: Studies, found: Judged, begun: Begun) -> Iterator[str]:
    """What each verdict rests on."""
    yield LEGEND
    pages = {
        design.name: f"{name}{studies[design.name].place.apart}.md"
        for name, designs in suite.read.items()
        for design in designs
    }
    for number, (claim, verdicts, beside) in enumerate(found, 1):
        where = ", ".join(f"[{name}]({pages.get(name, '')}#{name})" for name in claim.studies)
        yield f"**{number}. {claim.title}.**\n\n" + "\n".join(
            [
                f"* Test: {claim.test}",
                *_found(claim, verdicts, begun),
                *_why(studies, claim, verdicts),
                f"* Runs: {where}.",
                f"* To settle it: {claim.needs}.",
            ]
        )
        if tested := [cells for verdict in verdicts for cells in verdict.rows]:
            yield text_table(HEADER, tested)
        if rows := [cells for verdict in beside for cells in verdict.rows]:
            yield "Beside contextual rivals, a family for each form, which decides nothing above:"
            yield "\n".join(_found(claim, beside, begun))
            yield text_table(HEADER, rows)


def _found(claim: Claim, verdicts: Sequence[Verdict], begun: Begun) -> Iterator[str]:
    """A line for the forms of which the same is to be said: those that are judged first."""
    said: dict[str, list[str]] = {}
    not_run = []
    found = zip(claim.forms, verdicts, strict=True)
    for form, verdict in sorted(found, key=lambda one: one[1].kind is Kind.UNFINISHED):
        words = f"**{claim.word(verdict.kind)}**."
        if verdict.kind is Kind.UNFINISHED:
            if not any((study, form) in begun for study in claim.studies):
                not_run.append(f"`{form}`")
                continue
            # Which runs these are is said of the study.
            short = [what.partition(" (")[0] for what in verdict.missing]
            more = len(short) - MOST_NAMES
            missing = "; ".join(short[:MOST_NAMES])
            words += f" Missing: {missing}{f'; and {more} more' if more > 0 else ''}."
        said.setdefault(words, []).append(f"`{form}`")
    for words, forms in said.items():
        yield f"* {', '.join(forms)}: {words}"
    if not_run:
        yield f"* Not run: {', '.join(not_run)}."


def _why(studies: Studies, claim: Claim, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """What the states of a form do where a claim of it is not confirmed, or where it asks."""
    for inner in studies.values():
        if claim.cut and isinstance(inner, PlannedStates) and (cut := inner.cut(*claim.cut)):
            lost = cut.lost.mean(0)
            by_layer = ", ".join(f"{x:.3g} (layer {n})" for n, x in enumerate(lost, 1))
            yield (
                f"* Where all layers update, in `{claim.cut[1]}`, the loss rises by so many nats "
                f"without the update of one of them: {by_layer}. That of layer "
                f"{lost.argmax() + 1} is missed most ([{inner.name}](#{inner.name}))."
            )
    for form, verdict in zip(claim.forms, verdicts, strict=True):
        if verdict.kind in (Kind.CONFIRMED, Kind.UNFINISHED):
            continue
        for inner in studies.values():
            growth = isinstance(inner, PlannedGrowth) and inner.name in claim.studies
            if growth and (said := inner.said()):
                yield f"* What states do: {said} ([{inner.name}](#{inner.name}))."
            if not isinstance(inner, PlannedStates):
                continue
            for name in claim.studies:
                if (name, form) in inner.pairs and (said := inner.said(name, form)):
                    yield f"* What `{form}` does: {said} ([{inner.name}](#{inner.name}))."


def _study(suite: Suite, study: Study, state: State, awaited: bool) -> Iterator[str]:
    yield f"{study.size}. `{suite.command} --only={study.name}`"
    if state.unfinished:
        names = ", ".join(f"`{name}`" for name in state.unfinished[:MOST_NAMES])
        more = len(state.unfinished) - MOST_NAMES
        made = "Not made yet" if not state.finished else "Unfinished"
        yield (
            f"**{made}: {len(state.finished)} of at least {state.total} runs.** Next: {names}"
            f"{f' and {more} more' if more > 0 else ''}."
            f"{'' if awaited else ' No verdict waits for them.'}"
        )
    if isinstance(study, PlannedTrainings):
        if study.design.base and (base := study.item(study.jobs[0]).base):
            yield (
                f"1x is {study.task.sequence_length} bytes; the models that are tuned were trained "
                f"on {base.task.sequence_length}."
            )
        yield _curve(study)
        for score in study.scores:
            yield _scores(study, score.key)
    elif isinstance(study, PlannedCost):
        yield _costs(study)
    elif isinstance(study, PlannedGrowth) and not state.unfinished:
        yield _growth(study)
    elif isinstance(study, PlannedStates) and (rows := study.rows()):
        yield text_table(COLUMNS, rows)


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
    label = _label(study, study.score(curve.score))
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
            lacking.append(f"`{rival}`")
            continue
        cells = [str(estimate([*found.values()])) for found in values if found]
        lost = study.diverged(rival, key)
        rows.append([rival, str(study.rate(rival, key)), str(len(lost)), *cells])
    if not rows:
        return ""
    header = ["", "rate", "diverged", *(_label(study, score) for score in shown)]
    note = f"\n\nNot complete: {', '.join(lacking)}." if lacking else ""
    within = study.procedure.within
    chosen = f", the smallest within {within:g} points of the best" if within else ""
    return (
        f"Rates chosen by {_label(study, study.score(key))}{chosen}; five seeds, mean and 95 % "
        f"interval:\n\n{text_table(header, rows)}{note}{_not_learned(study)}"
    )


def _not_learned(study: PlannedTrainings) -> str:
    """Who has not learned the trained lengths."""
    below = [f"{r} {mean:.1f}" for r, mean in learned(study).items() if mean < LEARNED]
    if not below:
        return ""
    label = _label(study, study.score(INSIDE))
    return (
        f"\n\nNot learned whole (mean of the seeds below {LEARNED}, of: {label}): "
        f"{'; '.join(below)}. What these do beyond says how much was learned as "
        "well as what carries over."
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
            cells = [
                f"{study.median(variant, depth, moment, what):.3g}"
                for what in ("growth", "spread")
                for moment in stability.MOMENTS
            ]
            diverged = sum(t.diverged is not None for t in found)
            rows.append([variant, str(depth), str(len(found)), *cells, str(diverged)])
    moments = stability.MOMENTS
    header = ["variant", "layers", "seeds", *(f"state, {m}" for m in moments)]
    header += [*(f"gradients, {m}" for m in moments), "diverged"]
    note = (
        "State: the largest norm that enters a layer, relative to the start. Gradients: the "
        "largest of a layer over the smallest. Medians of the seeds; pictures of seed "
        f"{protocol.REPORTING[0]} alone."
    )
    return f"{note}\n\n{text_table(header, rows)}"


def _environments(records: Sequence[Record]) -> str:
    if not records:
        return "Nothing has been run."
    counts = Counter(tuple(sorted(record.environment.items())) for record in records)
    lines = []
    for environment, count in counts.most_common():
        described = ", ".join(f"{name} {value}" for name, value in environment)
        lines.append(f"* {count} runs: {described}")
    commits = {record.code["commit"] for record in records}
    return "\n".join(lines) + f"\n\nEach record names the commit that made it; {len(commits)} have."
