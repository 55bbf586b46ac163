"""Tables: what stands in the cell at row a and column B?

A text has a header of column names, then rows, each a row's name and a value for every column, then
questions of two tokens, a row and a column::

    B A C  a 3 1 4  c 1 5 9  a? A?      the cell at row a and column A holds 1

**Why.** The column's name is found by content in the header, the row's by content among the rows.
The cell is as many places after the row's name as the column's name is after the beginning of the
header, and one more. The difference between two places, one of them found by content, has to be
added to a third, also found by content. Names are a random choice in random order, so neither says
where anything is.

**Held out.** A hash of row, column and value keeps one combination in ten out of training.
"""

from __future__ import annotations

import dataclasses
import functools
import string
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from train.checks import require
from train.data import synthetic
from train.evaluation.grids import Wording
from train.tasks.places import Called, PlaceTask, Texts, with_queries
from train.tasks.questions import Options

VALUES = string.digits
MOST = 13


@dataclasses.dataclass(frozen=True)
class Table(PlaceTask):
    """Cells of tables (the module's text describes them).

    Attributes:
      rows, columns: the greatest numbers of rows and columns trained on, from 2 on, all sizes
        equally likely; evaluation asks for tables of up to twice as many.
      questions: of a training text.
    """

    kind: ClassVar[str] = "table"
    heading: ClassVar[str] = "The cell of a table by its row and its column"
    called: ClassVar[Called] = (
        "rows of the table",
        "columns of the table",
        "columns",
    )

    rows: int = 6
    columns: int = 6
    questions: int = 16

    def __post_init__(self):
        synthetic.require_positive(self.kind, questions=self.questions)
        for name in ("rows", "columns"):
            value = getattr(self, name)
            synthetic.require_positive(self.kind, **{name: value})
            require(
                2 <= value <= MOST,
                f"{self.kind}: {name} must be from 2 to {MOST}, for names are letters and twice as "
                f"many are asked for; got {value}",
            )

    @property
    def trained(self) -> tuple[range, range]:
        """The trained numbers of rows, and of columns."""
        return range(2, self.rows + 1), range(2, self.columns + 1)

    @functools.cached_property
    def alphabets(self) -> dict[str, Sequence[str]]:
        """The tokens by kind: names of columns and rows, values, and those names in questions."""
        columns = string.ascii_uppercase[: 2 * self.columns]
        rows = string.ascii_lowercase[: 2 * self.rows]
        asked = [[f"{name}?" for name in names] for names in (columns, rows)]
        return {"c": columns, "r": rows, "v": VALUES, "C": asked[0], "R": asked[1]}

    @property
    def form(self) -> str:
        """The form of a question, for errors."""
        return (
            f"names of columns from A to {self.alphabets['c'][-1]}, rows of a name from a to "
            f"{self.alphabets['r'][-1]} and a digit for each column, then the row and the column "
            "asked for, such as 'B A a 3 1 b 1 5 a? A?'"
        )

    def widest(self, column: int, row: int | None = None) -> int:
        """Returns the number of tokens of the longest text."""
        rows, count = (self.rows, self.questions) if row is None else (row, 1)
        return column + rows * (column + 1) + 2 * count

    def texts(
        self, rng: np.random.Generator, columns: np.ndarray, rows: np.ndarray | None = None
    ) -> Texts:
        """Draws random tables with questions; see :meth:`PlaceTask.texts`."""
        size, count, first = len(columns), 1 if rows is not None else self.questions, self.first
        high = rng.integers(2, self.rows + 1, size) if rows is None else rows
        wide, high, each = columns[:, None], high[:, None], np.arange(size)[:, None]

        column_names = rng.random((size, 2 * self.columns)).argsort(1)
        row_names = rng.random((size, 2 * self.rows)).argsort(1)
        cells = rng.integers(len(VALUES), size=(size, 2 * self.rows, 2 * self.columns))

        lengths = wide + high * (wide + 1)
        place = np.broadcast_to(np.arange(lengths.max()), (size, lengths.max()))
        row, at = np.divmod(np.maximum(place - wide, 0), wide + 1)
        row = np.minimum(row, 2 * self.rows - 1)
        header = column_names[each, np.minimum(place, 2 * self.columns - 1)]
        body = np.where(
            at == 0,
            first["r"] + row_names[each, row],
            first["v"] + cells[each, row, np.maximum(at - 1, 0)],
        )
        body = np.where(place < wide, first["c"] + header, body)

        i, j = rng.integers(0, high, (size, count)), rng.integers(0, wide, (size, count))
        names = np.stack([row_names[each, i], column_names[each, j]], 2)
        queries = names + np.array([first["R"], first["C"]])
        values = cells[each, i, j]
        tokens, places = with_queries(body, lengths[:, 0], queries)
        hashed = np.concatenate([names, values[..., None]], 2)
        return Texts(tokens, places, first["v"] + values, hashed)

    def parse(self, tokens: np.ndarray) -> tuple[int, int, int]:
        """Returns the numbers of rows and of columns, and the answer of a question."""
        header, body, (row,), (column,) = self.parts("(c+)((?:rv+)+)(R)(C)", tokens)
        wide = len(header)
        high, rest = divmod(len(body), wide + 1)
        names = [int(x) - self.first["r"] for x in tokens[wide : wide + len(body) : wide + 1]]
        require(
            not rest and all(0 <= name < 2 * self.rows for name in names),
            f"every row has a digit for each of the {wide} columns; got {self.decode(tokens)!r}",
        )
        for kind, what, asked, found in (("c", "column", column, header), ("r", "row", row, names)):
            name = self.alphabets[kind][asked]
            require(len(set(found)) == len(found), f"the names of {what}s are distinct")
            require(asked in found, f"there is no {what} {name} in {self.decode(tokens)!r}")
        value = body[names.index(row) * (wide + 1) + 1 + header.index(column)]
        return high, wide, self.first["v"] + value

    @property
    def most(self) -> int:
        """The greatest number of columns, which is that of their names."""
        return 2 * self.columns

    def needs(self, *lengths: int) -> dict[str, bool]:
        """Returns what a cell needs: rows and columns that there are names for."""
        most = 2 * self.rows
        return {f"at most {most} rows": lengths[0] <= most, **super().needs(*lengths)}

    def axes(self, options: Options) -> tuple[Sequence[int], ...]:
        """Returns the axes, with rows up to twice those trained."""
        return range(2, 2 * self.rows + 1), super().axes(options)[1]

    @property
    def wording(self) -> Wording:
        """The terms for the questions in tables and figures; rows are limited in training too."""
        found = super().wording
        return dataclasses.replace(found, trained=f"2 to {self.rows} rows, {found.trained}")

    @property
    def guess(self) -> int:
        """The number of answers that a guess is among: all digits."""
        return len(VALUES)
