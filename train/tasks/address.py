"""Addressing: which token stands k places after the token x?

A text is a list of distinct tokens, then queries, each an offset k and a token x::

    m c x a k +2 c? +1 a?          two places after c stands a, and k after a

That is a training text; a person asks one question at a time, ``m c x a k +2 c?``. A query's token
has its own symbol, ``c?`` for ``c``, and so does every offset. The answer is due after the query's
token and is not fed back. Lists are random, so only the list tells what follows what.

**Why.** Attention finds x by content. The question then asks for a place relative to x, not to the
query. A fixed encoding addresses places relative to the query, so it must have carried each token's
neighbours into that token beforehand, for all offsets. If an encoding's state follows attention, it
can hold the place of x after one layer, and look k places further in the next.

**What varies.** Up to ``distractors`` random signs stand in front of the list, and up to ``gap``
between the list and the queries. Evaluation asks for longer lists, more distractors and longer gaps
than training. An offset is a symbol, and a model knows nothing of an untrained symbol: no question
has an unseen offset.

**Held out.** A hash of offset, token and answer keeps one combination in ten out of training,
wherever it occurs; evaluation asks only these.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import string
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from train.checks import choose, not_negative, require
from train.data import synthetic
from train.evaluation import Progress, Trained, fits
from train.evaluation.grids import Wording
from train.evaluation.inside import untrained
from train.tasks.address_result import AddressResult, Pointing, point
from train.tasks.places import PAD, Called, PlaceEvaluation, PlaceTask, Texts
from train.tasks.questions import Options

SIGNS = ("-", "*", "/", "=", ".", ",", ";", "!", "_", "~")
ROWS = {"offset": "offset", "gap": "gap, tokens", "distractors": "distractors, tokens"}
MOST_ROWS = 8
POINTING = 20


@dataclasses.dataclass(frozen=True)
class AddressEvaluation(PlaceEvaluation):
    """The options of an evaluation of addressing.

    Attributes:
      longest: tokens of the longest list; None: twice the longest trained one, or all symbols.
      rows: what the rows of the grid are: ``offset``; ``gap`` or ``distractors``, up to twice the
        greatest trained number of them.
    """

    rows: str = "offset"

    def __post_init__(self):
        choose("evaluation.rows", self.rows, ROWS)
        super().__post_init__()


@dataclasses.dataclass(frozen=True)
class Address(PlaceTask):
    """Addressing (see the module docstring).

    Attributes:
      offsets: K; offsets are 1..K.
      symbols: how many tokens there are for lists.
      shortest, longest: tokens of the lists trained on, all lengths equally likely.
      questions: queries of a training text.
      distractors: the greatest number of signs in front of a list.
      gap: the greatest number of signs between a list and its queries.
      rows: those of the grid (:class:`AddressEvaluation` sets them); training ignores them.
    """

    kind: ClassVar[str] = "address"
    Evaluation: ClassVar[type] = AddressEvaluation

    offsets: int = 20
    symbols: int = 40
    shortest: int = 22
    longest: int = 32
    questions: int = 16
    distractors: int = 0
    gap: int = 0
    rows: str = "offset"

    def __post_init__(self):
        choose(f"rows of {self.kind}", self.rows, ROWS)
        counts = ("offsets", "symbols", "shortest", "longest", "questions")
        synthetic.require_positive(self.kind, **{name: getattr(self, name) for name in counts})
        for name in ("distractors", "gap"):
            not_negative(f"{self.kind}: {name}", getattr(self, name))
        require(
            self.offsets < self.shortest <= self.longest <= self.symbols,
            f"{self.kind}: expected offsets < shortest <= longest <= symbols, for an offset leads "
            "from a token of a list to another, and all of them are distinct; got offsets = "
            f"{self.offsets}, shortest = {self.shortest}, longest = {self.longest}, symbols = "
            f"{self.symbols}",
        )
        most = len(string.ascii_letters) * (1 + len(string.ascii_letters))
        require(
            self.symbols <= most,
            f"{self.kind}: there are names for {most:,} symbols; got symbols = {self.symbols:,}",
        )
        if self.rows != "offset":
            require(
                self.trained_rows >= 1,
                f"{self.kind}: a grid by {self.rows} needs some in training: task.{self.rows} is 0",
            )

    @property
    def trained_rows(self) -> int:
        """The greatest row in training."""
        return getattr(self, "offsets" if self.rows == "offset" else self.rows)

    @property
    def trained(self) -> tuple[range, range]:
        """The trained offsets, gaps or distractors, and the trained lengths of lists."""
        return range(1, self.trained_rows + 1), range(self.shortest, self.longest + 1)

    @property
    def most(self) -> int:
        """The length of the longest list: that of all symbols."""
        return self.symbols

    @property
    def listed(self) -> list[str]:
        """The tokens of lists by name: letters, then two letters each."""
        pairs = map("".join, itertools.product(string.ascii_letters, repeat=2))
        return [*itertools.islice(itertools.chain(string.ascii_letters, pairs), self.symbols)]

    @functools.cached_property
    def alphabets(self) -> dict[str, Sequence[str]]:
        """The names of tokens by kind: of lists, of queries, of offsets, and signs."""
        return {
            "l": self.listed,
            "q": [f"{name}?" for name in self.listed],
            "o": [f"+{k}" for k in range(1, self.offsets + 1)],
            "s": SIGNS,
        }

    @property
    def form(self) -> str:
        """The description of a question, with an example, for error messages."""
        first, *_, last = self.listed
        return (
            f"up to {self.symbols} distinct tokens from {first} to {last}, an offset from +1 to "
            f"+{self.offsets}, and a token of the list with a question mark, one question at a "
            f"time, such as '{' '.join(self.listed[2::-1])} +1 {self.listed[1]}?'"
        )

    def texts(
        self, rng: np.random.Generator, columns: np.ndarray, rows: np.ndarray | None = None
    ) -> Texts:
        """Random texts; see :meth:`PlaceTask.texts`."""
        size, count = len(columns), self.questions if rows is None else 1

        def drawn(name: str) -> np.ndarray:
            if rows is not None and self.rows == name:
                return rows[:, None]
            return rng.integers(0, getattr(self, name) + 1, (size, 1))

        order = rng.random((size, self.symbols), np.float32).argsort(1)
        before, gap, lengths = drawn("distractors"), drawn("gap"), columns[:, None]
        if rows is not None and self.rows == "offset":
            offsets = rows[:, None]
        else:
            offsets = rng.integers(1, self.offsets + 1, (size, count))
        found = rng.integers(0, lengths - offsets)
        asked = before + lengths + gap + 2 * np.arange(count)
        each = np.arange(size)[:, None]

        place = np.arange(asked.max() + 2)
        listed = (place >= before) & (place < before + lengths)
        at = np.clip(place - before, 0, self.symbols - 1)
        start = self.first
        tokens = np.where(listed, start["l"] + order[each, at], PAD)
        if before.any() or gap.any():
            sign = ~listed & (place < asked[:, :1])
            tokens[sign] = start["s"] + rng.integers(len(SIGNS), size=sign.sum())
        tokens[each, asked] = start["o"] + offsets - 1
        tokens[each, asked + 1] = start["q"] + order[each, found]
        answers = start["l"] + order[each, found + offsets]
        return Texts(
            tokens, asked + 1, answers, np.stack([offsets, order[each, found], answers], 2)
        )

    def widest(self, column: int, row: int | None = None) -> int:
        """Tokens of the longest text, with all signs that there may be."""
        signs = {"distractors": self.distractors, "gap": self.gap}
        if row is not None and self.rows != "offset":
            signs[self.rows] = row
        return sum(signs.values()) + column + 2 * (self.questions if row is None else 1)

    def parse(self, tokens: np.ndarray) -> tuple[int, int, int]:
        """Row, length of the list and answer of a question."""
        before, listed, gap, (offset,), (token,) = self.parts("(s*)(l+)(s*)(o)(q)", tokens)
        text, name = " ".join(self.listed[x] for x in listed), self.listed[token]
        require(
            len(set(listed)) == len(listed),
            f"the tokens of a list are distinct; got {text!r}",
        )
        require(token in listed, f"{name} is not in the list {text!r}")
        offset += 1
        place = listed.index(token) + offset
        require(
            place < len(listed),
            f"nothing stands {offset} places after {name} in the list {text!r}",
        )
        row = {"offset": offset, "gap": len(gap), "distractors": len(before)}[self.rows]
        return row, len(listed), self.first["l"] + listed[place]

    def axes(self, options: Options) -> tuple[Sequence[int], ...]:
        """Returns offsets, or gaps or distractors to twice those trained, and lengths of lists."""
        rows, columns = super().axes(options)
        if self.rows != "offset":
            ends = np.linspace(0, 2 * self.trained_rows, min(2 * self.trained_rows, MOST_ROWS) + 1)
            rows = ends[1:].astype(int).tolist()
        return rows, columns

    def needs(self, *lengths: int) -> dict[str, bool]:
        """Returns what a cell needs: an offset that exists, and a list that is longer than it."""
        row, column = lengths
        offset = min(row, self.offsets) if self.rows == "offset" else self.offsets
        return {
            **super().needs(*lengths),
            f"an offset of at most {self.offsets}": self.rows != "offset" or row <= self.offsets,
            f"a list of more than {offset} tokens": column > offset,
        }

    def _by(self, options: AddressEvaluation) -> Address:
        """Returns the task with the rows that the evaluation names."""
        require(
            self.rows in ("offset", options.rows),
            f"{self.kind}: rows are the evaluation's: give evaluation.rows={self.rows}, not "
            f"task.rows; got evaluation.rows={options.rows}",
        )
        return dataclasses.replace(self, rows=options.rows)

    def prepare(self, options: Any, limit: int | None = None) -> str:
        """Prepares as :meth:`PlaceTask.prepare` does, by the rows that the evaluation names."""
        return PlaceTask.prepare(self._by(options), options, limit)

    def evaluate(
        self, trained: Trained, options: AddressEvaluation, progress: Progress | None = None
    ) -> AddressResult:
        """Measures exact match by row and by the length of the list, and where the model points.

        It asks the same again with the encoding as before training, if that has parameters.
        """
        asked = self._by(options)
        without = untrained(trained)
        return AddressResult(
            options.rows,
            PlaceTask.evaluate(asked, trained, options, progress),
            self.pointing(trained, options.seed),
            without and PlaceTask.evaluate(asked, without, options),
        )

    def pointing(self, trained: Trained, seed: int, samples: int = POINTING) -> Pointing | None:
        """Returns where questions of the trained length point; None if too long for the model."""
        task = dataclasses.replace(self, rows="offset", distractors=0, gap=0)
        if not fits(self.longest + 2, trained.max_length):
            return None
        asked = [task.ask([k, self.longest], samples, seed).symbols[0] for k in task.trained[0]]
        tokens = np.stack(asked)[:, :, : self.longest + 2]
        queried = tokens[:, :, -1:] - self.first["q"] + self.first["l"]
        found = (tokens[:, :, : self.longest] == queried).argmax(-1)
        return point(trained, tokens, found, self.longest)

    def read_result(self, record: Any) -> AddressResult:
        """The result that ``to_json`` described."""
        return AddressResult.from_json(record, self.wording_by)

    def wording_by(self, rows: str) -> Wording:
        """The wording of a grid with other rows."""
        return dataclasses.replace(self, rows=rows).wording

    @property
    def called(self) -> Called:
        """The words for the rows, for the length of the list, and for its unit."""
        return ROWS[self.rows], "length of the list, tokens", "tokens"

    @property
    def wording(self) -> Wording:
        """The words for the questions in tables and figures, with the trained limit of the rows."""
        rows = "" if self.rows == "offset" else f", {self.rows} up to {self.trained_rows}"
        trained = f"lists of {super().wording.trained}{rows}"
        return dataclasses.replace(super().wording, trained=trained)

    @property
    def guess(self) -> int:
        """The number of answers to guess among: the tokens of the longest trained list."""
        return self.longest

    @property
    def heading(self) -> str:
        """The title of a report."""
        return "The token k places after the token x"
