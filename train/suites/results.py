"""The result of a suite: a table by task and length, JSON, and a picture."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.evaluation.grids import read_record, text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = "tape-jax suite, version 1"
_MOST_LINES = 8

# Scores from 0 to 1 of each question, by task and length.
Scores = Mapping[str, Mapping[int, tuple[float, ...]]]


@dataclasses.dataclass(frozen=True)
class SuiteResult:
    """Scores of a suite.

    Attributes:
      suite: its name.
      step: of the checkpoint that was asked.
      trained: tokens of a training sequence.
      about: what the questions depend on besides task and length, in JSON types.
      scores: of each question, by task and length.
      speed: how fast it went, in words.
      memory: what it took, in words; empty if nothing was left to ask.
    """

    suite: str
    step: int
    trained: int
    about: dict[str, Any]
    scores: Scores
    speed: str = ""
    memory: str = ""

    @property
    def lengths(self) -> list[int]:
        """The lengths that were asked, ascending, in tokens."""
        return sorted({length for cells in self.scores.values() for length in cells})

    def mean(self, length: int) -> float:
        """The mean over tasks of their mean scores at one length, from 0 to 1."""
        return statistics.fmean(statistics.fmean(cells[length]) for cells in self.scores.values())

    def table(self) -> str:
        """Returns a table of per cent by task and length, with standard errors over questions."""
        rows = [
            [task, *(_cell(cells[length]) for length in self.lengths)]
            for task, cells in self.scores.items()
        ]
        rows.append(["mean", *(f"{100 * self.mean(length):.1f}" for length in self.lengths)])
        asked = {len(found) for cells in self.scores.values() for found in cells.values()}
        notes = [
            f"Scores of {self.suite} in per cent, the mean of {min(asked)} questions a cell ± its "
            f"standard error. Trained on {self.trained:,} tokens.",
            f"Speed: {self.speed}.",
        ]
        if self.memory:
            notes.append(f"Planned {self.memory}.")
        header = ["task", *(f"{length:,}" for length in self.lengths)]
        return "\n\n".join([text_table(header, rows), "\n".join(notes)])

    def figure(self) -> Figure:
        """Draws the scores by length, a line for each task."""
        from train.compare.plots import Series, line_panels

        tasks = list(self.scores)
        parts = [tasks[i : i + _MOST_LINES] for i in range(0, len(tasks), _MOST_LINES)]

        def line(task: str) -> Series:
            found = [self.scores[task][length] for length in self.lengths]
            means = [100 * statistics.fmean(x) for x in found]
            return Series(self.lengths, means, [100 * _error(x) for x in found])

        figure = line_panels(
            {f"{part[0]} to {part[-1]}": {task: line(task) for task in part} for part in parts},
            title=f"{self.suite} by length",
            x_label="length, tokens",
            y_label="score, %",
            trained=self.trained,
            log=False,
        )
        figure.axes[0].set_ylim(-3, 103)
        return figure

    def to_json(self) -> dict[str, Any]:
        """The result in JSON types."""
        record = dataclasses.asdict(self)
        record["scores"] = {
            task: {str(length): list(found) for length, found in cells.items()}
            for task, cells in self.scores.items()
        }
        return {"format": FORMAT, **record}

    @classmethod
    def from_json(cls, record: Any) -> SuiteResult:
        """The result that :meth:`to_json` described; ValueError if it is something else."""
        values = read_record(record, cls, FORMAT)
        values["scores"] = {
            task: {int(length): tuple(found) for length, found in cells.items()}
            for task, cells in values["scores"].items()
        }
        return cls(**values)


def _error(scores: tuple[float, ...]) -> float:
    """Standard error of a mean; 0 for a single score."""
    return statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else 0.0


def _cell(scores: tuple[float, ...]) -> str:
    return f"{100 * statistics.fmean(scores):.1f} ± {100 * _error(scores):.1f}"
