"""Line numbers: which is the k-th token of the n-th line?

A text has lines of random lengths, each ended by a sign, then questions of two tokens, the number
of a line and the place in it::

    x a | b b c | q a | #2 +3      the third token of the second line is c

**Why.** The n-th sign is found by counting, not by content: it is a token like every other. Lines
vary in length, so no distance tells where it is. A place relative to it must then be addressed. An
encoding needs both: positions that count what the content says (as CoPE does), or a state that one
layer tells where a line begins, and that the next moves on. Line numbers are symbols, so only
trained ones are asked for: longer texts have more lines after them.

**Held out.** A hash of line, place, answer and the token after it keeps one combination in ten out
of training.
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
from train.tasks.places import Called, PlaceTask, Texts, with_queries

LETTERS = string.ascii_lowercase
END = "|"


@dataclasses.dataclass(frozen=True)
class LineNumbers(PlaceTask):
    """Places in numbered lines (the module's text describes them).

    Attributes:
      lines: N; lines 1..N are asked for.
      places: the greatest number of tokens of a line.
      shortest, longest: numbers of lines trained on, all equally likely.
      questions: of a training text.
    """

    kind: ClassVar[str] = "line_numbers"
    heading: ClassVar[str] = "The k-th token of the n-th line"
    called: ClassVar[Called] = ("number of the line", "lines of the text", "lines")

    lines: int = 6
    places: int = 4
    shortest: int = 6
    longest: int = 9
    questions: int = 16

    def __post_init__(self):
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        synthetic.require_positive(self.kind, **fields)
        require(
            self.lines <= self.shortest <= self.longest,
            f"{self.kind}: expected lines <= shortest <= longest, for every line asked for is "
            f"there; got {fields}",
        )

    @property
    def trained(self) -> tuple[range, range]:
        """The trained numbers of the line, and of lines in a text."""
        return range(1, self.lines + 1), range(self.shortest, self.longest + 1)

    @functools.cached_property
    def alphabets(self) -> dict[str, Sequence[str]]:
        """The tokens by kind: tokens of lines, the sign at their ends, numbers of lines, places."""
        return {
            "l": LETTERS,
            "e": [END],
            "n": [f"#{n}" for n in range(1, self.lines + 1)],
            "o": [f"+{k}" for k in range(1, self.places + 1)],
        }

    @property
    def form(self) -> str:
        """The form of a question, for errors."""
        return (
            f"lines of 1 to {self.places} letters from a to z, each ended by {END}, a line from #1 "
            f"to #{self.lines} and a place from +1 to +{self.places}, such as 'x a | b | #1 +2'"
        )

    def widest(self, column: int, row: int | None = None) -> int:
        """Returns the number of tokens of the longest text."""
        return column * (self.places + 1) + 2 * (self.questions if row is None else 1)

    def texts(
        self, rng: np.random.Generator, columns: np.ndarray, rows: np.ndarray | None = None
    ) -> Texts:
        """Draws random lines with questions; see :meth:`PlaceTask.texts`."""
        size, count, first = len(columns), 1 if rows is not None else self.questions, self.first
        each = np.arange(size)[:, None]
        sizes = rng.integers(1, self.places + 1, (size, columns.max()))
        sizes[np.arange(columns.max()) >= columns[:, None]] = -1
        ends = (sizes + 1).cumsum(1)
        lengths = ends[:, -1]
        body = first["l"] + rng.integers(len(LETTERS), size=(size, lengths.max() + 1))
        # Ends of lines that are not there fall on the token after the text.
        last = np.where(sizes < 0, lengths[:, None] + 1, ends) - 1
        body[each, last] = first["e"]
        drawn = rng.integers(1, self.lines + 1, (size, count))
        line = drawn if rows is None else rows[:, None]
        k = rng.integers(0, sizes[each, line - 1])
        at = ends[each, line - 1] - 1 - sizes[each, line - 1] + k
        answers, after = body[each, at], body[each, at + 1]
        queries = np.stack([first["n"] + line - 1, first["o"] + k], 2)
        tokens, places = with_queries(body, lengths, queries)
        return Texts(tokens, places, answers, np.stack([line, k, answers, after], 2))

    def parse(self, tokens: np.ndarray) -> tuple[int, int, int]:
        """Returns the number of the line, the number of lines and the answer of a question."""
        body, (line,), (k,) = self.parts(f"((?:l{{1,{self.places}}}e)+)(n)(o)", tokens)
        text = self.decode(tokens[: len(body)])
        lines = text.removesuffix(f" {END}").split(f" {END} ")
        require(line < len(lines), f"there is no line {line + 1} in {text!r}")
        found = lines[line].split()
        require(k < len(found), f"line {line + 1} has no token {k + 1} in {text!r}")
        return line + 1, len(lines), self.first["l"] + LETTERS.index(found[k])

    def needs(self, *lengths: int) -> dict[str, bool]:
        """Returns what a cell needs: a known number, of a line that is there."""
        line, lines = lengths
        least = min(line, self.lines)
        return {
            f"a line of at most {self.lines}": line <= self.lines,
            f"a text of at least {least} lines": lines >= least,
        }

    @property
    def guess(self) -> int:
        """The number of answers that a guess is among: all letters."""
        return len(LETTERS)
