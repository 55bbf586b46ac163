"""Writes the report that compares trained models and says which won."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train.checks import require
from train.compare.environment import describe_environment
from train.compare.plots import MARK, loss_curves, require_ours, save
from train.compare.tasks import Comparison
from train.evaluation.grids import text_table
from train.files import write_atomically
from train.statistics import LEVEL, deviation, estimate, holm, mean
from train.tasks import Score, Task

# The widest table, in characters.
PAGE = 120
ADJUSTED = (
    "A difference is clear or significant if its p-value is below 5 % after Holm's adjustment for "
    "all pairs of rivals, since the best was chosen afterwards; each score is judged by itself."
)
ONE_SEED = "One seed each cannot tell any of this from chance; --seeds=3 trains each three times."

TWO_SEEDS = (
    "Two seeds leave an interval one degree of freedom, at which it reaches 12.7 standard errors "
    "to either side: hardly any difference is clear. --seeds=3 trains each three times."
)


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The record of one run in a report: its result, its losses and its command.

    Attributes:
      name: what is compared, such as the position encoding.
      seed: the run's; name and seed together are unique in the report.
      result: the evaluation's; None if the training diverged.
      steps: [S] training steps at which the loss was logged.
      losses: [S] cross entropy, in nats for each token that counts.
      command: the command that repeats the run.
      facts: more about the run, such as the number of its parameters; the same names in all runs.
      samples: lines that show what the trained model does.
      suite: further scores, by key, from 0 to 1.
    """

    name: str
    seed: int
    result: Any
    steps: Sequence[int]
    losses: Sequence[float]
    command: str
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    samples: Sequence[str] = ()
    suite: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def scores(self) -> dict[str, float]:
        """All scores by key; none if the training diverged."""
        return {} if self.result is None else {**self.result.summary(), **self.suite}


def write_report(
    folder: Path,
    task: Task,
    runs: Sequence[RunRecord],
    compared: Comparison,
    *,
    ask: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Writes ``report.md``, its figures, and its numbers as ``report.json``, null for NaN.

    Args:
      folder: created if it does not exist.
      task: the task that the models were trained on.
      runs: at least one; all were asked the same.
      compared: what to say about their results (:func:`train.compare.tasks.compare`).
      ask: the command that asks one of them a question; None: they take none.
      environment: versions and hardware by name; None: those of this process.

    Returns:
      The path of the report.

    Raises:
      ValueError: runs that cannot be compared, or a file in the way that is not ours; then nothing
        is written.
    """
    require(len(runs) > 0, "no runs to report")
    labels = [(run.name, run.seed) for run in runs]
    require(len(set(labels)) == len(labels), f"runs of the same name and seed: {labels}")
    facts = [list(run.facts) for run in runs]
    require(facts.count(facts[0]) == len(facts), f"the runs state different facts: {facts}")
    groups = by_name(runs)
    curves = {name: [(r.steps, r.losses) for r in group] for name, group in groups.items()}
    figures = {**compared.figures, "loss.png": loss_curves(curves)}
    for name in ("report.md", "report.json", *figures):
        require_ours(folder / name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"{folder} is not a folder and cannot become one: {error}") from error

    for name, figure in figures.items():
        save(figure, folder / name)
    sections = {
        "Result": result_section(task, runs, compared),
        **compared.sections,
        "Training": f"![Training loss](loss.png)\n\n{_facts(runs)}",
        "Samples": sample_lines(runs) + (f"\n\nAsk another:\n\n```\n{ask}\n```" if ask else ""),
        "Commands": "```\n" + "\n".join(run.command for run in runs) + "\n```",
        "Versions and hardware": text_table(
            ["what", "which"],
            [list(x) for x in (environment or describe_environment()).items()],
        ),
    }
    parts = [f"<!-- {MARK} -->\n# {compared.title}", compared.introduction]
    parts += [f"## {heading}\n\n{text}" for heading, text in sections.items() if text]
    write_atomically(folder / "report.md", "\n\n".join(parts) + "\n")
    described = [
        {
            **{name: getattr(run, name) for name in ("name", "seed", "command")},
            "facts": dict(run.facts),
            # JSON has no NaN and no infinity.
            "scores": {k: x if math.isfinite(x) else None for k, x in run.scores.items()},
        }
        for run in runs
    ]
    record = {"format": f"tape-jax report, version 1, {MARK}", "runs": described}
    write_atomically(folder / "report.json", json.dumps(record, indent=2) + "\n")
    return folder / "report.md"


def sample_lines(runs: Sequence[RunRecord]) -> str:
    """Returns a list of all runs' samples."""
    return "\n".join(f"* {_label(run)}: {line}" for run in runs for line in run.samples)


def by_name(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Groups the runs by name, in their order."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    return groups


def result_section(task: Task, runs: Sequence[RunRecord], compared: Comparison) -> str:
    """Returns the verdict by the task's scores, and a table of these and others, in one order."""
    scores = compared.scores or task.scores
    judged = [s for s in scores if s in task.scores or any(s.key in run.suite for run in runs)]
    return f"{verdict(judged, runs)}\n\n{score_table(scores, runs)}"


def score_table(scores: Sequence[Score], runs: Sequence[RunRecord]) -> str:
    """Returns the mean and standard deviation over seeds of every score, by name."""
    groups = by_name(runs)
    columns = [s for s in scores if any(s.key in r.scores for r in runs)]
    rows = []
    for name, group in groups.items():
        cells = [mean_and_spread([*by_seed(group, score).values()]) for score in columns]
        rows.append([name, str(len(group)), *cells])
    note = "\n\nMean ± standard deviation over seeds." if len(runs) > len(groups) else ""
    return fitting_table(["", "seeds", *(score.label for score in columns)], rows) + note


def fitting_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table no wider than a page: as it is, else transposed, else in parts."""
    turned = list(zip(header, *rows, strict=True))
    for head, body in ((header, rows), (turned[0], turned[1:])):
        if _width(table := text_table(head, body)) <= PAGE:
            return table

    def part(start: int, stop: int) -> str:
        chosen = [turned[0], *turned[start:stop]]
        head, *body = zip(*chosen, strict=True)
        return text_table(head, body)

    parts, start = [], 1
    while start < len(turned):
        stop = start + 1
        while stop < len(turned) and _width(part(start, stop + 1)) <= PAGE:
            stop += 1
        parts.append(part(start, stop))
        start = stop
    return "\n\n".join(parts)


def _width(table: str) -> int:
    return table.index("\n")


def verdict(scores: Sequence[Score], runs: Sequence[RunRecord]) -> str:
    """Returns who is best by each score, a line for each outcome, and notes on the judgement."""
    groups = by_name(runs)
    found: dict[str, list[str]] = {}
    for score in scores:
        if outcome := _verdict(score, groups):
            found.setdefault(outcome, []).append(score.label)
    lines = [f"* **{'; '.join(labels)}**: {outcome}" for outcome, labels in found.items()]
    fewest = min(map(len, groups.values()))
    notes = [ADJUSTED] if lines and fewest > 1 and len(groups) > 2 else []
    if lines and fewest <= 2:
        notes.append(ONE_SEED if fewest < 2 else TWO_SEEDS)
    if lost := [_label(run) for run in runs if run.result is None]:
        notes.append(f"Diverged in training, and without scores: {'; '.join(lost)}.")
    return "\n\n".join(["\n".join(lines)] * bool(lines) + notes)


def _verdict(score: Score, groups: Mapping[str, Sequence[RunRecord]]) -> str:
    """Compares the rivals by a score; one that is not finite in every seed is behind all others."""
    known = {name: found for name, group in groups.items() if (found := by_seed(group, score))}
    if len(known) < 2 or all(math.isnan(x) for found in known.values() for x in found.values()):
        return ""
    values = {n: found for n, found in known.items() if all(map(math.isfinite, found.values()))}
    outcome = _among_finite(score, values, len(known)) if values else "none is finite."
    behind = ", ".join(name for name in known if name not in values)
    return f"{outcome} Without a finite score in every seed: {behind}." if behind else outcome


def _among_finite(score: Score, values: Mapping[str, Mapping[int, float]], rivals: int) -> str:
    """Compares the best mean with every other by the paired differences of equal seeds.

    ``rivals`` also counts those that are not finite: a failed run makes no other rival better.
    """
    means = {name: mean([*found.values()]) for name, found in values.items()}
    ranking = sorted(means, key=lambda name: means[name], reverse=score.higher_is_better)
    best, *others = ranking
    if others and all(values[name] == values[best] for name in others):
        return "all equal."
    if not others or min(map(len, values.values())) < 2:
        return f"best is {best}."
    p = _adjusted(values, math.comb(rivals, 2))
    clear = [name for name in others if p.get(frozenset({best, name}), 1.0) < LEVEL]
    unclear = [name for name in others if name not in clear]
    if unclear:
        outcome = (
            f"no clear winner. Best on average is {best}, with no significant difference to "
            f"{', '.join(unclear)}"
        )
        return outcome + (f"; clearly better than {', '.join(clear)}." if clear else ".")
    return f"{best} wins; clearly better than {', '.join(clear)}."


def _adjusted(values: Mapping[str, Mapping[int, float]], size: int) -> dict[frozenset[str], float]:
    """Returns p-values of the testable pairs, out of ``size``, adjusted as in :data:`ADJUSTED`."""
    known = {}
    for first, second in itertools.combinations(values, 2):
        here, there = values[first], values[second]
        found = [here[seed] - there[seed] for seed in here.keys() & there.keys()]
        # A single seed tells nothing, nor do numbers that are too large to be squared.
        if len(found) > 1 and max(map(abs, found)) < 1e150:
            known[frozenset({first, second})] = estimate(found).p
    return holm(known, size)


def by_seed(group: Sequence[RunRecord], score: Score) -> dict[int, float]:
    """Returns one name's score by seed, as it is shown; seeds without it are left out.

    Runs that diverged in training have NaN.
    """
    summaries = {
        run.seed: {score.key: math.nan} if run.result is None else run.scores for run in group
    }
    return {s: score.factor * x[score.key] for s, x in summaries.items() if score.key in x}


def mean_and_spread(values: Sequence[float]) -> str:
    """Formats the mean and, for several, their standard deviation; a dash for none."""
    if not values:
        return "-"
    middle = mean(values)
    if len(values) == 1 or not math.isfinite(middle):
        return _number(middle)
    return f"{_number(middle)} ± {_number(deviation(values), like=middle)}"


def _number(value: float, like: float | None = None) -> str:
    """Formats a number with three decimals below 10, fewer above, or as many as ``like`` gets."""
    size = abs(value if like is None else like)
    return f"{value:.{3 if size < 10 else 2 if size < 100 else 1}f}"


def _label(run: RunRecord) -> str:
    return f"{run.name}, seed {run.seed}"


def _facts(runs: Sequence[RunRecord]) -> str:
    """Returns a table of facts, a column for each run."""
    rows = [[fact, *(run.facts[fact] for run in runs)] for fact in runs[0].facts]
    return fitting_table(["", *map(_label, runs)], rows) if rows else ""
