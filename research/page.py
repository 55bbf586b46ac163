"""Writes the page of results, from the results files only."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from research import overview
from research.claims import Claim, standing
from research.records import Record
from research.study import Place, State, Study
from research.suites import TAPE, Suite
from research.trainings import BEYOND, LEARNED, PlannedTrainings
from research.verdicts import HEADER, Kind, Verdict
from train.compare.plots import MARK, require_ours, save
from train.evaluation.grids import text_table
from train.files import write_atomically

MOST_NAMES = 6
# If all rivals have fewer per cent right at the trained lengths, none has begun to learn.
HARDLY = 50

LEGEND = (
    "*Better by*: the mean paired difference over five seeds in the form's favour, in points of "
    "exact match, or in % of perplexity or growth, with its interval by Student's t, which may "
    "leave what is possible; of what a form costs, the multiple of RoPE's. *p*: paired t test, "
    "adjusted by Holm's method. *Would have seen*: the smallest difference found with a chance of "
    "80 % ([protocol](protocol.md#statistic))."
)
UNLEARNED = (
    "\\* No finding about encodings: nobody had learned the task, and training was still improving "
    f"or nobody had {HARDLY} % of the trained lengths right. If some had learned it and training "
    "still improved, this holds for what is not told apart alone."
)

Studies = Mapping[str, Any]
# Claims, with the verdicts on their forms, and the verdicts beside contextual rivals.
Judged = Sequence[tuple[Claim, Sequence[Verdict], Sequence[Verdict]]]
# Studies, each with a rival that it has runs of.
Begun = Collection[tuple[str, str]]


def studies_at(suite: Suite, place: Place) -> dict[str, Any]:
    """Returns a suite's studies at a place by name, and those that it reads."""
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
      ValueError: a file that is not ours is in the way.
    """
    require_ours(page)
    folder = page.parent / "images" / page.stem
    found: dict[str, Callable[[], Figure]] = {}
    for study in _own(suite, studies).values() if changed is None else [changed]:
        found |= study.pictures(suite.headed(study.name), TAPE)
    columns = _columns(suite, studies) if suite.overview else {}
    if overview.has_picture(columns):
        found[overview.PICTURE] = functools.partial(overview.picture, columns)
    for name, draw in found.items():
        folder.mkdir(parents=True, exist_ok=True)
        save(draw(), folder / name)
    write_atomically(page, markdown(suite, studies, f"images/{page.stem}"))


def markdown(suite: Suite, studies: Studies, images: str) -> str:
    """Returns the page as Markdown.

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
        for picture in study.pictures(suite.headed(name), TAPE):
            parts.append(f"![{suite.headed(name)}]({images}/{picture})")
            if study.caption not in parts:
                parts.append(study.caption)
    records = [record for state in states.values() for record in state.finished]
    parts += ["## Versions, hardware and code", _environments(records)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _own(suite: Suite, studies: Studies) -> dict[str, Any]:
    """Returns the studies that are described on the suite's own page."""
    read = {design.name for design in itertools.chain(*suite.read.values())}
    return {name: study for name, study in studies.items() if name not in read}


def _columns(suite: Suite, studies: Studies) -> dict[str, Any]:
    """Returns the overview's studies: a claim is about each, judged beyond the trained length."""
    names = [claim.studies[0] for claim in suite.claims if len(claim.studies) == 1]
    found = {name: studies[name] for name in dict.fromkeys(names)}
    return {name: one for name, one in found.items() if BEYOND in one.design.scores}


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
        f"`{suite.make}` makes what is missing, {suite.order}, and writes this page as they "
        f"end, from the files in `research/{folder}`. Finished: **"
        f"{done} of at least {total} runs**, {spent / 3600:.1f} hours of processor time."
    )
    yield (
        f"* Studies finished under the protocol: {', '.join(complete) or 'none yet'}.\n"
        f"* Begun: {', '.join(begun) or 'none'}.\n"
        f"* Not made yet: {', '.join(none) or 'none'}."
    )
    yield suite.closing


def _names(suite: Suite) -> Iterator[str]:
    """Yields tables of the names of tasks, if there is an overview, and of what is compared."""
    if suite.overview:
        yield _two_columns(suite.subject, "what is asked", suite.asked)
    yield _two_columns("name", "what it is", suite.names)


def _two_columns(first: str, second: str, rows: Mapping[str, str]) -> str:
    lines = [f"| `{name}` | {what} |" for name, what in rows.items()]
    return "\n".join([f"| {first} | {second} |", "|---|---|", *lines])


def _verdicts(suite: Suite, studies: Studies, found: Judged) -> Iterator[str]:
    """Yields a line for each claim; with an overview, a column for each form."""
    if suite.overview:
        forms = list(dict.fromkeys(form for claim, *_ in found for form in claim.forms))
        rows = []
        for claim, verdicts, _ in found:
            called = {kind: claim.word(kind) for kind in Kind}
            for kind in _no_findings(studies, claim):
                called[kind] += "*"
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


def _no_findings(studies: Studies, claim: Claim) -> set[Kind]:
    """Returns the verdicts that say nothing about encodings (protocol, *Budgets*).

    All, if nobody has learned the task and training still helped, or nobody has begun to learn it;
    else only that forms are not told apart, if training still helped.
    """
    if len(claim.studies) != 1:
        return set()
    study: PlannedTrainings = studies[claim.studies[0]]
    best = max(study.learned().values(), default=None)
    if best is None:
        return set()
    improving = bool(study.budget and study.budget.improving)
    if best < (LEARNED if improving else HARDLY):
        return set(Kind) - {Kind.UNFINISHED}
    return {Kind.NOT_TOLD} if improving else set()


def _tests(suite: Suite, studies: Studies, found: Judged, begun: Begun) -> Iterator[str]:
    """Yields the tests that each verdict rests on."""
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
    """Yields a line for each group of forms with the same words, the judged ones first."""
    said: dict[str, list[str]] = {}
    not_run = []
    found = zip(claim.forms, verdicts, strict=True)
    for form, verdict in sorted(found, key=lambda one: one[1].kind is Kind.UNFINISHED):
        words = f"**{claim.word(verdict.kind)}**."
        if verdict.kind is Kind.UNFINISHED:
            if not any((study, form) in begun for study in claim.studies):
                not_run.append(f"`{form}`")
                continue
            # The study's section says which runs these are.
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
    """Yields what a form's states do if its claim is contradicted, not told apart, or has a cut."""
    for inner in studies.values():
        if claim.cut and (said := inner.says_of_layers(*claim.cut)):
            yield f"* {said} ([{inner.name}](#{inner.name}))."
    for form, verdict in zip(claim.forms, verdicts, strict=True):
        if verdict.kind not in (Kind.CONFIRMED, Kind.UNFINISHED):
            for inner in studies.values():
                for said in inner.says_of_states(claim.studies, form):
                    yield f"* {said} ([{inner.name}](#{inner.name}))."


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
    yield from study.tables()


def _environments(records: Sequence[Record]) -> str:
    if not records:
        return "Nothing has been run."
    counts = Counter(tuple(sorted(record.environment.items())) for record in records)
    lines = []
    for environment, count in counts.most_common():
        described = ", ".join(f"{name} {value}" for name, value in environment)
        lines.append(f"* {count} runs: {described}")
    commits = {record.code["commit"] for record in records}
    return (
        "\n".join(lines)
        + f"\n\nEach record names the commit that made it; there are {len(commits)}."
    )
