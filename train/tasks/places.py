"""Texts of symbols with places where an answer is due, one symbol that is not fed back.

A text of the training stream has many such places. An evaluation asks only for the last one, in a
grid of two numbers, such as an offset and the length of a list. A task subclasses
:class:`PlaceTask`: it names its symbols, makes random texts with their answers, and reads a text
that a person wrote. The base class does the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from train.checks import require
from train.data import held_out, synthetic
from train.evaluation.grids import Grid, Wording
from train.tasks import Score
from train.tasks.questions import Options, Questions, QuestionTask, Written, scores_by_range

PAD, PADDING = 0, "<pad>"
HASHED = 12
# If so many draws give no question to ask, none is assumed to exist.
DRAWS = 100

# The quantities of a grid's rows and columns, and the unit of columns.
Called = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class PlaceEvaluation(Options):
    """The options of an evaluation of the answers at places.

    Attributes:
      longest: the greatest column asked for; None: the task's own.
      samples: questions of each cell.
      shapes: how many sequence lengths to compile for.
    """

    samples: int = 20
    shapes: int = 2


class Texts(NamedTuple):
    """B texts of at most W tokens with Q answers each.

    Attributes:
      tokens: integers [B, W], ``PAD`` after a text's end.
      places: int [B, Q], ascending, of the tokens after which an answer is due.
      answers: integers [B, Q], the tokens due there; ``PAD`` if none is due after all, or if a
        text's only question is not to be asked.
      hashed: integers [B, Q, H], which decide whether an answer is held out of training.
    """

    tokens: np.ndarray
    places: np.ndarray
    answers: np.ndarray
    hashed: np.ndarray


class PlaceTask(QuestionTask):
    """Texts with answers of one token each, asked for in a grid of two numbers.

    The symbols of a question are the tokens of its text, [1, B, W], its answer last; its lengths
    are the row and the column of the grid.
    """

    operands: ClassVar[int] = 2
    Evaluation: ClassVar[type] = PlaceEvaluation

    @property
    def alphabets(self) -> dict[str, Sequence[str]]:
        """The names of tokens, by a letter for each kind."""
        raise NotImplementedError

    @property
    def form(self) -> str:
        """The description of a question for error messages."""
        raise NotImplementedError

    @property
    def trained(self) -> tuple[range, range]:
        """The rows and columns in training; all columns are equally likely."""
        raise NotImplementedError

    def texts(
        self, rng: np.random.Generator, columns: np.ndarray, rows: np.ndarray | None = None
    ) -> Texts:
        """Random texts.

        Args:
          rng: draws what is random.
          columns: int [B].
          rows: int [B], for texts with one question; None: as many questions as in training, of any
            rows.
        """
        raise NotImplementedError

    def widest(self, column: int, row: int | None = None) -> int:
        """Tokens of the longest text of :meth:`texts`."""
        raise NotImplementedError

    def parse(self, tokens: np.ndarray) -> tuple[int, int, int]:
        """Row, column and answer of a text [W] that ends where an answer is due.

        Raises:
          ValueError: for any other text.
        """
        raise NotImplementedError

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The name of each token, ``PAD`` first and then kind by kind."""
        return (PADDING, *itertools.chain(*self.alphabets.values()))

    @functools.cached_property
    def first(self) -> dict[str, int]:
        """The first token of each kind."""
        sizes = [1, *map(len, self.alphabets.values())]
        return dict(zip(self.alphabets, itertools.accumulate(sizes), strict=False))

    def parts(self, pattern: str, tokens: np.ndarray) -> list[list[int]]:
        """Splits a text by a regular expression over kinds; tokens count from their kind's first.

        Raises:
          ValueError: it does not match.
        """
        kinds = np.repeat(["p", *self.alphabets], [1, *map(len, self.alphabets.values())])
        match = re.fullmatch(pattern, "".join(kinds[tokens]))
        if match is None:
            raise ValueError(f"expected {self.form}; got {self.decode(tokens)!r}")
        spans = [match.span(group) for group in range(1, len(match.groups()) + 1)]
        starts = np.array(
            [0, *(start for k, start in self.first.items() for _ in self.alphabets[k])]
        )
        return [(tokens - starts[tokens])[slice(*span)].tolist() for span in spans]

    @property
    def longest_column(self) -> int:
        """The greatest column that is asked for by default."""
        return min(self.reach * self.trained_length, self.most or sys.maxsize)

    @property
    def trained_length(self) -> int:
        """The greatest column in training."""
        return self.trained[1][-1]

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return len(self.names)

    @property
    def sequence_length(self) -> int:
        """T, the tokens of the longest training text."""
        return self.widest(self.trained_length)

    def width(self, *lengths: int) -> int:
        """Tokens of the longest text of a cell with one question, and its answer."""
        row, column = lengths
        return self.widest(column, row) + 1

    def number(self, *lengths: Any) -> np.ndarray:
        """Returns infinity: there are always more random texts."""
        return np.full(np.broadcast_shapes(*map(np.shape, lengths)), np.inf)

    def examples_to_learn(self, rng: np.random.Generator, size: int) -> synthetic.Batch:
        """Texts in which only the answers that are not held out count."""
        drawn, places, answers, hashed = self.texts(rng, rng.choice(self.trained[1], size))
        tokens = np.zeros((size, self.sequence_length), np.int32)
        tokens[:, : drawn.shape[1]] = drawn
        targets = np.zeros(tokens.shape, np.int32)
        weights = np.zeros(tokens.shape, np.float32)
        rows = np.arange(size)[:, None]
        targets[rows, places] = answers
        weights[rows, places] = (answers != PAD) & ~_held_out(hashed)
        return {"inputs": tokens, "targets": targets, "weights": weights}

    def choose(self, rng: np.random.Generator, lengths: Sequence[int], samples: int) -> Questions:
        """Draws held-out questions; one may occur twice.

        Raises:
          ValueError: none seem to exist.
        """
        found: list[np.ndarray] = []
        while sum(map(len, found)) < samples:
            require(
                len(found) < DRAWS or any(map(len, found)),
                f"{self.kind}: of {len(found) * 2 * held_out.ONE_IN * samples} texts none may be "
                f"asked about where {self.called[0]!r} is {lengths[0]} and {self.called[1]!r} is "
                f"{lengths[1]}: all, if there are such, are trained on",
            )
            each = np.tile(np.array(lengths)[:, None], 2 * held_out.ONE_IN * samples)
            tokens, places, answers, hashed = self.texts(rng, each[1], each[0])
            rows, ends = np.arange(len(tokens)), places[:, -1] + 1
            whole = np.pad(tokens, ((0, 0), (0, self.width(*lengths) - tokens.shape[1])))
            whole[np.arange(whole.shape[1]) >= ends[:, None]] = PAD
            whole[rows, ends] = answers[:, -1]
            found.append(whole[_held_out(hashed)[:, -1] & (answers[:, -1] != PAD)])
        symbols = np.concatenate(found)[:samples]
        return Questions(symbols[None], np.tile(np.array(lengths)[:, None], samples))

    def write(self, questions: Questions, width: int) -> Written:
        """Writes the texts as they are."""
        (tokens,) = questions.symbols
        ends = (tokens != PAD).sum(1)
        require(int(ends.max()) <= width, f"{self.kind}: {ends.max()} tokens are more than {width}")
        padded = np.zeros((len(tokens), width), tokens.dtype)
        padded[:, : tokens.shape[1]] = tokens[:, :width]
        return padded, ends - 1, ends

    def ordinary(self, questions: Questions) -> list[str]:
        """Writes texts in words, without their answers."""
        tokens, starts, _ = self.write(questions, questions.symbols.shape[2])
        return [self.decode(row[:start]) for row, start in zip(tokens, starts, strict=True)]

    def read(self, text: str) -> Questions:
        """Reads a text in words, and finds its answer."""
        numbers, words = self._numbers, text.split()
        for word in words:
            require(
                word in numbers,
                f"{word!r} is no symbol of this task: expected {self.form}; got {text!r}",
            )
        tokens = np.array([numbers[word] for word in words], np.int64)
        row, column, answer = self.parse(tokens)
        return Questions(np.append(tokens, answer)[None, None], np.array([[row], [column]]))

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: token for token, name in enumerate(self.names) if token != PAD}

    def _written(self, text: str) -> tuple[np.ndarray, int]:
        tokens = self.read(text).symbols[0, 0]
        return tokens, len(tokens) - 1

    def read_answer(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The name of the answer."""
        return self.decode(tokens[:1])

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The names of tokens."""
        names = dict(enumerate(self.names))
        return " ".join(names.get(int(token), "<unk>") for token in tokens)

    def unseen(self, seed: int) -> list[str]:
        """Two held-out questions of the trained length and one of the longest, of several rows."""
        rows, n = self.trained[0], self.trained_length
        few, half = rows[len(rows) // 3], rows[len(rows) // 2]
        cells = ((few, n), (rows[-1], n), (half, self.longest_column))
        return [text for cell in cells for text in self.ordinary(self.ask(cell, 1, seed))]

    def longest_asked(self, options: Options) -> int:
        """The greatest column asked for."""
        return self.longest_column if options.longest is None else options.longest

    def counted(self, *lengths: int) -> int:
        """Returns the column, or a greater one, as far beyond the trained range as the row."""
        row, column = lengths
        beyond = row - self.trained[0][-1]
        return max(column, self.trained_length + beyond) if beyond > 0 else column

    def is_shared(self, *lengths: int) -> bool:
        """Returns False: held-out questions are asked at all lengths."""
        return False

    @property
    def counted_as(self) -> str:
        """The quantity in which columns differ, in words."""
        return self.wording.columns

    @property
    def most(self) -> int | None:
        """The greatest column that can be asked for; None: any."""
        return None

    def axes(self, options: Options) -> tuple[Sequence[int], ...]:
        """The trained rows, and columns from the shortest trained one on."""
        shortest, longest = self.trained[1][0], self.longest_asked(options)
        require(
            shortest <= longest and (self.most is None or longest <= self.most),
            f"evaluation.longest: from {shortest} to {self.most or 'any number of'} "
            f"{self.wording.unit} can be asked for; got {longest}",
        )
        return self.trained[0], range(shortest, longest + 1)

    def needs(self, *lengths: int) -> dict[str, bool]:
        """Returns what a cell needs: a column no greater than can be asked for."""
        most = self.most
        return {} if most is None else {f"at most {most} {self.wording.unit}": lengths[1] <= most}

    def prepare(self, options: Any, limit: int | None = None) -> str:
        """Prepares as :meth:`QuestionTask.prepare` does; each cell must have held-out questions."""
        said = super().prepare(options, limit)
        for cell in self.askable(self.axes(options), None).values():
            self.ask(tuple(cell), options.samples, options.seed)
        return said

    @property
    def wording(self) -> Wording:
        """The words for the questions in tables and figures."""
        rows, columns, unit = self.called
        low, high = self.trained[1][0], self.trained_length
        return Wording(
            title=self.heading,
            rows=rows,
            columns=columns,
            unit=unit,
            questions="questions",
            cells=f"{rows} and {columns}",
            trained=f"{low} to {high} {unit}",
        )

    @property
    def called(self) -> Called:
        """The quantities in which rows and columns differ, and the unit of columns."""
        raise NotImplementedError

    @property
    def guess(self) -> int:
        """The number of answers that a guess chooses from."""
        raise NotImplementedError

    def introduction(self, grid: Grid) -> str:
        """Returns the introduction of a report: what was trained on, and what was asked."""
        return (
            f"Trained on {grid.wording.trained}, and asked for {grid.columns[0]} to "
            f"{grid.columns[-1]}: {grid.counts.max()} questions for each cell, "
            f"{grid.counts.sum():,} in all. A guess among {self.guess} answers is right in "
            f"{100 / self.guess:.0f} % of cases."
        )

    @property
    def scores(self) -> tuple[Score, ...]:
        """Exact match beyond the trained range, and inside it."""
        return scores_by_range({"exact_match": ""}, f"{self.trained_length} {self.wording.unit}")


def with_queries(body: np.ndarray, lengths: np.ndarray, queries: np.ndarray) -> tuple[Any, Any]:
    """Returns texts: each body followed by its queries.

    Args:
      body: tokens [B, W].
      lengths: int [B], tokens of each body.
      queries: tokens [B, Q, P].

    Returns:
      Tokens, and the places of the last token of each query.
    """
    size, count, parts = queries.shape
    tokens = np.zeros((size, int(lengths.max()) + count * parts), np.int64)
    inside = np.arange(int(lengths.max())) < lengths[:, None]
    tokens[:, : inside.shape[1]] = np.where(inside, body[:, : inside.shape[1]], PAD)
    places = lengths[:, None] + np.arange(count * parts)
    tokens[np.arange(size)[:, None], places] = queries.reshape(size, -1)
    return tokens, places[:, parts - 1 :: parts]


def tokens_before(tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The ``HASHED`` tokens before each place [B, Q]: [B, Q, HASHED], ``PAD`` before a text."""
    at = places[..., None] - np.arange(1, HASHED + 1)
    each = np.arange(len(tokens))[:, None, None]
    return np.where(at >= 0, tokens[each, np.maximum(at, 0)], PAD)


def _held_out(hashed: np.ndarray) -> np.ndarray:
    """Returns whether each answer is held out of training: bool [B, Q]."""
    # Counted from one, because zeros at the end of a row do not matter.
    rows = hashed.reshape(1, -1, hashed.shape[-1]) + 1
    return held_out.symbols(rows).reshape(hashed.shape[:-1])
