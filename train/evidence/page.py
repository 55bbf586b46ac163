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
from train.comparison.plots import MARK, depth_curves, require_ours, save
from train.comparison.report import RunRecord, by_seed, mean_and_spread
from train.comparison.tasks import algorithms, words
from train.evaluation.grids import text_table
from train.evidence.claims import CLAIMS
from train.evidence.figures import dots
from train.evidence.overhead import PlannedCost
from train.evidence.records import Record
from train.evidence.stability import PlannedGrowth
from train.evidence.studies import Place, State, Study
from train.evidence.suite import CANDIDATES, SECTIONS, STUDIES
from train.evidence.trainings import Diverged, PlannedTrainings
from train.evidence.verdicts import Kind, compare, unfinished

MOST_NAMES = 8
LENGTHS, WORDS = SECTIONS[2:4]

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
      ValueError: a results file that does not belong, or a file in the way that is not ours.
    """
    require_ours(page)
    folder = page.parent / "images" / page.stem
    folder.mkdir(parents=True, exist_ok=True)
    for study in studies.values() if changed is None else [changed]:
        for name, figure in figures(study).items():
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
    parts += ["## Verdicts", *_verdicts(studies)]
    for section in SECTIONS:
        parts.append(f"## {section[0].upper()}{section[1:]}")
        own = [study for study in studies.values() if study.section == section]
        parts += _overview(section, own, studies)
        for study in own:
            parts += [f"### {study.name}", *_study(study, states[study.name], images)]
    parts += ["## Improvement", *_improvement(studies)]
    records = [record for state in states.values() for record in state.finished]
    parts += ["## Versions and hardware", _environments(records)]
    return "\n\n".join(part for part in parts if part) + "\n"


def figures(study: Study) -> dict[str, Figure]:
    """The pictures of a study by file name; none before anything is finished."""
    if isinstance(study, PlannedTrainings):
        results = study.results()
        if any(results.values()):
            by_depth = _by_depth(results) if study.section == WORDS else {}
            drawn = (
                depth_curves(
                    {
                        name: {depth: [r.words for r in seeds] for depth, seeds in found.items()}
                        for name, found in by_depth.items()
                    },
                    title=study.name,
                    y_label="whole words right, %",
                )
                if by_depth
                else dots(study.name, results, study.scores)
            )
            return {f"{study.name}.png": drawn}
    if isinstance(study, PlannedGrowth) and (traces := study.traces(seed=0)):
        return {
            f"{study.name}_depth.png": stability.depth_figure(traces),
            f"{study.name}_layers.png": stability.layer_figure(traces),
        }
    return {}


def _introduction(states: Mapping[str, State]) -> str:
    done = sum(len(state.finished) for state in states.values())
    total = sum(state.total for state in states.values())
    spent = sum(record.seconds for state in states.values() for record in state.finished)
    return (
        "Every claim that the paper makes of TAPE, or others make of it, tested by experiments "
        "that fit on two CPU cores. They are small: a verdict holds at the size that was trained, "
        "and each names the larger test that would settle it. Learning rates are chosen for every "
        "rival by a validation apart from the test. ± is the standard deviation over seeds. One "
        "encoding is called better than another where the 95 % interval of the paired differences "
        "between equal seeds leaves out zero. Three seeds show large differences only, and one "
        "comparison in twenty looks clear by chance.\n\n"
        "`make evidence` makes what is missing, and writes this page after every run, from the "
        f"files in `benchmarks/results/evidence`. Finished: **{done} of {total} runs**, which took "
        f"{spent / 3600:.1f} hours of processor time."
    )


def _verdicts(studies: Studies) -> Iterator[str]:
    found = [(claim, claim.judge(studies)) for claim in CLAIMS]
    rows = [
        f"| {number} | {claim.title} | **{verdict.kind.value}** |"
        for number, (claim, verdict) in enumerate(found, 1)
    ]
    yield "\n".join(["| | claim | verdict |", "|--:|---|---|", *rows])
    for number, (claim, verdict) in enumerate(found, 1):
        where = ", ".join(f"[{name}](#{name})" for name in claim.studies)
        lines = [f"* Test: {claim.test}", f"* Found: {verdict.because}", f"* Runs: {where}."]
        if verdict.kind is not Kind.CONFIRMED:
            lines.append(f"* To settle it: {claim.needs}.")
        lines_of = "\n".join(lines)
        yield f"**{number}. {claim.title}: {verdict.kind.value}.**\n\n{lines_of}"


def _improvement(studies: Studies) -> Iterator[str]:
    """Where options of TAPE are clearly better than its defaults, and where worse."""
    yield (
        "Options of TAPE beside its defaults, by the first score of every study that has both "
        "complete. An option is worth recommending where it is better on studies that it was not "
        "chosen by, and worse on none."
    )
    for name, candidate in CANDIDATES.items():
        fields = candidate.fields.items()
        options = ", ".join(f"`--config.{field}={value}`" for field, value in fields)
        rows = []
        for study in studies.values():
            if not isinstance(study, PlannedTrainings) or name not in study.design.rivals:
                continue
            if unfinished(study, rivals=["tape", name]):
                continue
            score, results = study.scores[0], study.results()
            values = {rival: by_seed(results[rival], score) for rival in ("tape", name)}
            standing = compare(values, name, score)
            said = "better" if standing.worse else "worse" if standing.better else "not told"
            said += ", but chosen by it" if study.name in candidate.chosen_by else ""
            cells = [mean_and_spread([*found.values()]) for found in values.values()]
            rows.append([study.name, score.label, *cells, said])
        yield f"`{name}`: {options}. Why: {candidate.reason}."
        yield text_table(["study", "score", "tape", name, ""], rows) if rows else "Unfinished."


def _overview(section: str, own: Sequence[Any], studies: Studies) -> Iterator[str]:
    """What is said of all studies of a section together, once they are complete."""
    complete = [study for study in own if not study.state.unfinished]
    if section == LENGTHS and len(complete) > 1:
        yield "Exact match in per cent with its 95 % interval, the answers of all seeds together."
        yield _length_table(complete, studies["addition"])
    if section == WORDS:
        for study in complete:
            yield f"Layers that follow 90 % of the words of `{study.name.removeprefix('words-')}`:"
            yield words.smallest_depths(_by_depth(study.results()))


def _length_table(complete: Sequence[PlannedTrainings], sums: PlannedTrainings) -> str:
    """Sums and the problems of the length suite, but for those where a training diverged."""
    names = list(complete[0].design.rivals)
    found = {}
    for study in complete if unfinished(sums, rivals=names) else [sums, *complete]:
        results = study.results()
        by_name = {name: [run.result for run in results[name]] for name in names}
        if not any(isinstance(one, Diverged) for seeds in by_name.values() for one in seeds):
            found[study.name.removeprefix("length-")] = by_name
    return algorithms.suite_table(found) if found else ""


def _by_depth(results: Mapping[str, Sequence[RunRecord]]) -> dict[str, dict[int, list[Any]]]:
    """Results of rivals such as ``tape-2`` by name and number of layers, without the diverged."""
    found: dict[str, dict[int, list[Any]]] = {}
    for rival, runs in results.items():
        name, _, depth = rival.rpartition("-")
        kept = [run.result for run in runs if not isinstance(run.result, Diverged)]
        if kept:
            found.setdefault(name, {})[int(depth)] = kept
    return found


def _study(study: Study, state: State, images: str) -> Iterator[str]:
    yield _budget(study, state)
    if state.unfinished:
        names = ", ".join(f"`{name}`" for name in state.unfinished[:MOST_NAMES])
        more = len(state.unfinished) - MOST_NAMES
        yield (
            f"**Unfinished: {len(state.unfinished)} of {state.total} runs**, which count nowhere: "
            f"{names}{f' and {more} more' if more > 0 else ''}."
        )
    if isinstance(study, PlannedTrainings):
        if any(study.results().values()):
            yield _scores(study)
            yield _settings(study)
    elif isinstance(study, PlannedCost):
        yield _costs(study)
    elif isinstance(study, PlannedGrowth) and state.finished:
        yield _growth(study)
    for name in figures_of(study):
        yield f"![{study.name}]({images}/{name})"


def figures_of(study: Study) -> list[str]:
    """The names of a study's pictures, without drawing them."""
    if isinstance(study, PlannedTrainings) and any(study.results().values()):
        return [f"{study.name}.png"]
    if isinstance(study, PlannedGrowth) and study.traces(seed=0):
        return [f"{study.name}_depth.png", f"{study.name}_layers.png"]
    return []


def _budget(study: Study, state: State) -> str:
    parts = [study.budget]
    if state.finished:
        minutes = statistics.fmean(record.seconds for record in state.finished) / 60
        parts.append(f"{minutes:.1f} minutes of processor time for a run")
    command = f"`python -m train.main evidence --only={study.name}`"
    return f"{', '.join(parts)}. {command}"


def _scores(study: PlannedTrainings) -> str:
    rows = []
    for name, runs in study.results().items():
        lost = [run for run in runs if isinstance(run.result, Diverged)]
        seeds = f"{len(runs)} of {study.design.seeds}" + (
            f", {len(lost)} diverged at step " + ", ".join(f"{run.result.step:,}" for run in lost)
            if lost
            else ""
        )
        cells = [mean_and_spread([*by_seed(runs, score).values()]) for score in study.scores]
        rows.append([name, seeds, *cells])
    return text_table(["", "seeds", *(score.label for score in study.scores)], rows)


def _settings(study: PlannedTrainings) -> str:
    """What the sweep chose, and for whom something better may lie beyond it."""
    if len(study.settings) < 2:
        return ""
    chosen, at_an_end = {}, []
    for rival in study.design.rivals:
        if (jobs := study.finals(rival)) is None:
            continue
        chosen[rival] = setting = jobs[0].setting
        tried = sorted({job.setting for job in study.trials(rival)}, key=study.ladder.index)
        if setting in (tried[0], tried[-1]):
            at_an_end.append(rival)
    if not chosen:
        return ""
    settings = ", ".join(f"{rival} {setting.name}" for rival, setting in chosen.items())
    ends = f" At an end of what was tried: {', '.join(at_an_end)}." if at_an_end else ""
    return f"Chosen: {settings}.{ends}"


def _costs(study: PlannedCost) -> str:
    rows = []
    for length, found in study.measured().items():
        keys = ("time", "noise", "memory", "parameters", "operations")
        cells = [mean_and_spread([x[key] for x in found if key in x]) for key in keys]
        rows.append([f"{length:,}", str(len(found)), *cells])
    if not rows:
        return ""
    header = ["tokens", "measurements", "time of a step", "RoPE against itself"]
    table = text_table([*header, "memory of a step", "parameters", "operations"], rows)
    return f"{study.design.encoding} as a multiple of {study.design.reference}:\n\n{table}"


def _growth(study: PlannedGrowth) -> str:
    rows = []
    for variant in study.design.variants:
        for depth in study.design.depths:
            found = [t for t in study.traces() if (t.variant, t.depth) == (variant, depth)]
            if not found:
                continue
            cells = []
            for what in ("growth", "spread"):
                for moment in stability.MOMENTS:
                    worst = max(getattr(getattr(t, moment), what) for t in found)
                    cells.append(f"{worst:.3g}")
            diverged = [str(t.diverged) for t in found if t.diverged is not None]
            bad = f"{len(diverged)}, at step {', '.join(diverged)}" if diverged else "none"
            rows.append([variant, str(depth), str(len(found)), *cells, bad])
    moments = stability.MOMENTS
    header = ["variant", "layers", "seeds", *(f"state, {m}" for m in moments)]
    header += [*(f"gradients, {m}" for m in moments), "diverged"]
    note = (
        "State: the largest norm that enters a layer, relative to the start. Gradients: the "
        "largest of a layer over the smallest. The worst of all seeds."
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
    return "\n".join(lines)
