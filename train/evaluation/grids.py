"""Exact match over a grid of questions: counts, averages with their uncertainty, tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from train.checks import require
from train.statistics import half_width

FORMAT = "tape-jax exact-match grid, version 2"

# What tables in reports show.
INTERVALS = "Percentages with their 95 % intervals; where there are several seeds, over these"

_ARRAYS = ("lengths", "correct", "counts", "shared")


@dataclasses.dataclass(frozen=True)
class Proportion:
    """``correct`` answers out of ``count``."""

    correct: int
    count: int

    @property
    def value(self) -> float:
        """The share of correct answers; NaN if ``count`` is 0."""
        return self.correct / self.count if self.count else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson score interval of the share; (0, 1) if ``count`` is 0."""
        if not self.count:
            return 0.0, 1.0
        z2 = 1.959964**2 / self.count
        centre = (self.value + z2 / 2) / (1 + z2)
        half = math.sqrt(z2 * self.value * (1 - self.value) + z2 * z2 / 4) / (1 + z2)
        # Rounding must not move an exact bound.
        low = 0.0 if self.correct == 0 else centre - half
        return low, 1.0 if self.correct == self.count else centre + half

    def __str__(self) -> str:
        if not self.count:
            return "none asked"
        low, high = self.interval
        return f"{_percent(self.value)} [{_percent(low)}, {_percent(high)}]"


@dataclasses.dataclass(frozen=True)
class Proportions(Proportion):
    """``correct`` answers out of ``count`` of several models.

    Attributes:
      shares: of each model.
    """

    shares: tuple[float, ...]

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of Student's t over the models, within (0, 1)."""
        half = half_width(self.shares)
        return max(0.0, self.value - half), min(1.0, self.value + half)


@dataclasses.dataclass(frozen=True)
class Wording:
    """The words for the questions of a grid in tables and figures.

    Attributes:
      title: of a figure.
      rows, columns: what they stand for, with the unit.
      unit: of lengths.
      questions: what is asked, in the plural.
      cells: what a row and a column together stand for, in the plural.
      trained: the trained range.
    """

    title: str
    rows: str
    columns: str
    unit: str
    questions: str
    cells: str
    trained: str


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """Exact match in each cell of a table of questions with R rows and C columns.

    Attributes:
      rows, columns: ascending labels, such as the digits of the two operands of a sum.
      lengths: int [R, C], the length under which tables count each cell.
      correct: int [R, C], answers that are right to the last token.
      counts: int [R, C], questions asked; 0 also if the model does not take the length.
      shared: bool [R, C], whether these questions, too few to divide, were also trained on.
      trained: the longest length trained on.
      wording: for tables and figures.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    lengths: np.ndarray
    correct: np.ndarray
    counts: np.ndarray
    shared: np.ndarray
    trained: int
    wording: Wording

    def __post_init__(self):
        expected = (len(self.rows), len(self.columns))
        for name in _ARRAYS:
            array = np.array(getattr(self, name), np.bool_ if name == "shared" else np.int64)
            require(
                array.shape == expected,
                f"grid: {name} has shape {array.shape}, expected {expected} from its labels",
            )
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        for name in ("rows", "columns"):
            labels = getattr(self, name)
            require(
                len(labels) > 0 and list(labels) == sorted(set(labels)),
                f"grid: {name} must ascend; got {labels}",
            )
        require(
            bool(np.all((self.correct >= 0) & (self.correct <= self.counts))),
            "grid: correct must lie between 0 and counts",
        )

    @property
    def accuracy(self) -> np.ndarray:
        """The share of right answers, float [R, C], NaN where nothing was asked."""
        return np.divide(
            self.correct,
            self.counts,
            out=np.full(self.counts.shape, np.nan),
            where=self.counts > 0,
        )

    @property
    def is_inside(self) -> np.ndarray:
        """True where a cell lies in the trained range, bool [R, C]."""
        return self.lengths <= self.trained

    def proportion(self, where: np.ndarray) -> Proportion:
        """Right answers among all questions of the chosen cells (bool [R, C])."""
        return Proportion(int(self.correct[where].sum()), int(self.counts[where].sum()))

    @property
    def inside(self) -> Proportion:
        """The right answers over the trained range: no length greater than any trained on."""
        return self.proportion(self.is_inside)

    @property
    def inside_held_out(self) -> Proportion:
        """The right answers over the trained range, without the cells shared with training."""
        return self.proportion(self.is_inside & ~self.shared)

    @property
    def outside(self) -> Proportion:
        """The right answers beyond the trained range."""
        return self.proportion(~self.is_inside)

    def summary(self) -> dict[str, float]:
        """The averages over ranges with questions, as scalars for a log."""
        averages = {"inside": self.inside, "outside": self.outside}
        return {f"exact_match_{name}": p.value for name, p in averages.items() if p.count}

    def table(self) -> str:
        """Exact match by length, as text."""
        return length_table({"exact match": self})

    def to_json(self) -> dict[str, Any]:
        """The grid in JSON types without its wording, which is not part of a result."""
        return {
            "format": FORMAT,
            **{name: list(getattr(self, name)) for name in ("rows", "columns")},
            **{name: getattr(self, name).tolist() for name in _ARRAYS},
            "trained": self.trained,
        }

    @classmethod
    def from_json(cls, record: Any, wording: Wording) -> Grid:
        """The grid that :meth:`to_json` described, with the wording of its questions.

        Raises:
          ValueError: ``record`` is something else.
        """
        # Grids that were written with a wording also get this one.
        given = {**record, "wording": wording} if isinstance(record, dict) else record
        values = read_record(given, cls, FORMAT)
        values |= {name: tuple(values[name]) for name in ("rows", "columns")}
        return cls(**values)


def read_record(record: Any, cls: type, format: str | None = None) -> dict[str, Any]:
    """The fields of the dataclass ``cls`` in a record, without its format marker.

    Raises:
      ValueError: a record of another format, or without exactly these fields.
    """
    require(isinstance(record, dict), f"expected the fields of a {cls.__name__}; got {record!r}")
    values = dict(record)
    if format is not None:
        found = values.pop("format", None)
        require(found == format, f"expected a record of format {format!r}; got {found!r}")
    fields = {f.name for f in dataclasses.fields(cls)}
    require(
        values.keys() == fields,
        f"a {cls.__name__} has the fields {sorted(fields)}; got {sorted(values)}",
    )
    return values


def tally(cells: np.ndarray, right: np.ndarray, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Returns ``correct`` and ``counts`` of a grid.

    Args:
      cells: int [E, 2], row and column of each example.
      right: bool [E], whether it was answered right.
      shape: rows and columns of the grid.
    """
    correct, counts = np.zeros((2, *shape), np.int64)
    np.add.at(counts, tuple(cells.T), 1)
    np.add.at(correct, tuple(cells[right].T), 1)
    return {"correct": correct, "counts": counts}


def length_table(grids: Mapping[str, Grid]) -> str:
    """Exact match by length, a column for each grid.

    Percentages have 95 % intervals: Wilson's for one model, Student's for several.

    Raises:
      ValueError: no grids, or grids of different questions (see :func:`require_same_questions`).
    """
    first = require_same_questions(grids)
    wording, inside, shared = first.wording, first.is_inside, bool(np.any(first.shared))

    def row(label: str, where: np.ndarray, note: str) -> list[str]:
        asked = [grid.proportion(where) for grid in grids.values()]
        return [label, note, f"{max(p.count for p in asked):,}", *map(str, asked)]

    rows = []
    for length in np.unique(first.lengths):
        where = first.lengths == length
        mark = "*" if np.any(first.shared[where]) else ""
        rows.append(
            row(f"{length}{mark}", where, "trained" if length <= first.trained else "beyond")
        )
    for label, where in (
        ("trained range", inside),
        ("... held out only", inside & ~first.shared & shared),
        ("beyond it", ~inside),
    ):
        if any(np.any(grid.counts[where]) for grid in grids.values()):
            rows.append(row("all", where, label))
    header = [wording.unit, "range", wording.questions, *(f"{name}, %" for name in grids)]
    table = text_table(header, rows)
    if shared:
        table += (
            f"\n\n\\* contains {wording.cells} with too few {wording.questions} to hold any out: "
            "training and evaluation share them."
        )
    return table


def require_same_questions(grids: Mapping[str, Grid]) -> Grid:
    """Returns the first grid if all can be compared.

    Raises:
      ValueError: no grids, or grids of different questions or trained ranges. Questions that were
        too long for a model do not count as different.
    """
    require(len(grids) > 0, "no grids to compare")
    (name, first), *others = grids.items()
    for other, grid in others:
        for field in ("trained", "rows", "columns", "lengths", "shared", "wording", "counts"):
            here, there = getattr(first, field), getattr(grid, field)
            if field == "counts":
                both = (here > 0) & (there > 0)
                here, there = here[both], there[both]
            require(
                np.array_equal(here, there),
                f"{name!r} and {other!r} were not asked the same: {field} is {here} and {there}",
            )
    return first


@dataclasses.dataclass(frozen=True, eq=False)
class Pool(Grid):
    """The answers of several models to the same questions.

    Attributes:
      parts: the grids of the models, at least two.
    """

    parts: tuple[Grid, ...]

    def proportion(self, where: np.ndarray) -> Proportion:
        """Right answers in the chosen cells, with their interval over the models."""
        found = super().proportion(where)
        if not found.count:
            return found
        shares = tuple(part.proportion(where).value for part in self.parts)
        return Proportions(found.correct, found.count, shares)


def pool(grids: Sequence[Grid]) -> Grid:
    """Pools several models' answers to the same questions, with intervals over the models."""
    first = require_same_questions({f"seed {i}": grid for i, grid in enumerate(grids)})
    if len(grids) == 1:
        return first
    fields = {f.name: getattr(first, f.name) for f in dataclasses.fields(Grid)}
    sums = {name: sum(getattr(grid, name) for grid in grids) for name in ("correct", "counts")}
    return Pool(**fields | sums, parts=tuple(grids))


def averages_table(grids: Mapping[str, Grid]) -> str:
    """Exact match inside and beyond the trained range, a row for each grid."""
    first = require_same_questions(grids)
    columns = {
        f"up to {first.trained} {first.wording.unit}": lambda grid: grid.inside,
        "of these, held out only": lambda grid: grid.inside_held_out,
        "beyond": lambda grid: grid.outside,
    }
    if not np.any(first.shared):
        del columns["of these, held out only"]
    rows = [[name, *(str(f(grid)) for f in columns.values())] for name, grid in grids.items()]
    return text_table(["%", *columns], rows)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in aligned plain text that is valid Markdown as well; numbers align to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(c[:1].isdigit() or c == "-" for c in column[1:]) for column in columns]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        )
        return f"| {' | '.join(aligned)} |"

    rule = [
        "-" * (w - 1) + ":" if right else "-" * w for w, right in zip(widths, numeric, strict=True)
    ]
    return "\n".join(map(line, (header, rule, *rows)))


def _percent(share: float) -> str:
    """Formats a share in per cent; only exact ones are written as 0 and 100."""
    if share in (0, 1):
        return f"{100 * share:.0f}"
    return f"{min(max(100 * share, 0.1), 99.9):.1f}"
