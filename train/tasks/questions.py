"""Base classes for tasks of questions and answers in symbols, judged by exact match.

A task subclasses :class:`QuestionTask`: it says which questions exist, how one is drawn and
written, and which symbols are hashed to hold it out of training. The base class does the rest: the
training stream, the choice of questions, a grid of scores over their lengths, and the model's
answer to one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from train.checks import not_negative, positive, require
from train.data import held_out, synthetic
from train.evaluation import Progress, Trained, fits
from train.evaluation.exact_match import Examples, answer, exact_match
from train.evaluation.grids import Grid, Wording, tally
from train.tasks import Score


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of an evaluation by length; see :func:`train.evaluation.exact_match.exact_match`.

    A subclass has ``samples``, the questions of each cell, as a field or a property.

    Attributes:
      longest: the greatest length asked for; None: a multiple of the trained one.
      seed: decides the choice of questions.
      batch_size: questions of one pass.
    """

    longest: int | None = None
    seed: int = 0
    batch_size: int = 512

    def __post_init__(self):
        for field in dataclasses.fields(self):
            what, value = f"evaluation: {field.name}", getattr(self, field.name)
            if field.name == "seed":
                not_negative(what, value)
            elif not isinstance(field.default, str):
                positive(what, value, optional=field.default is None)


TRAINING, EVALUATION = 0, 1
VALIDATION_SEED = 2**31

# Tokens [B, width], padded at the end; tokens [B] of each prompt; and of prompt and answer.
Written = tuple[np.ndarray, np.ndarray, np.ndarray]


class Questions(NamedTuple):
    """B questions of A operands each, such as the two numbers of a sum.

    Attributes:
      symbols: integers [A, B, W].
      lengths: int [A, B], which sort the questions into cells.
    """

    symbols: np.ndarray
    lengths: np.ndarray


class GridTask(synthetic.Stream):
    """A computed stream of training examples, and exact match over a grid of questions."""

    def examples_to_learn(self, rng: np.random.Generator, size: int) -> synthetic.Batch:
        """Random examples that are not held out; see :meth:`batch`."""
        raise NotImplementedError

    def batch(self, seed: int, index: int, size: int) -> synthetic.Batch:
        """Batch ``index`` of the stream of ``seed``: a pure function of its arguments.

        Returns:
          ``inputs`` and ``targets``, int32 [size, T], and ``weights``, float32 [size, T]: 1 where
          the target counts, else 0.
        """
        synthetic.require_positive(self.kind, size=size)
        return self.examples_to_learn(synthetic.generator(seed, TRAINING, index), size)

    def validation(self, options: Any) -> Any:
        """Options of an evaluation with a new draw of questions.

        If hardly more questions exist than are asked, some of them repeat.
        """
        return dataclasses.replace(options, seed=options.seed + VALIDATION_SEED)

    @property
    def wording(self) -> Wording:
        """The words for the questions in tables and figures."""
        raise NotImplementedError

    def read_result(self, record: Any) -> Any:
        """The grid that ``to_json`` described."""
        return Grid.from_json(record, self.wording)


class QuestionTask(GridTask):
    """A task with questions of many lengths, trained up to one and asked beyond it.

    A cell of its grid holds the questions with one length for each operand. A task is a frozen
    dataclass that defines

    * its **cells**: :attr:`operands`, :attr:`trained_length` and :meth:`width`, and what a cell
      :meth:`needs` to exist, if not all do;
    * **how many** questions a cell has, :meth:`number`, and all of them, :meth:`every`, which is
      called if they are few;
    * how random ones are **drawn**, :meth:`draw`;
    * how they are **written**: :meth:`write` as tokens and :meth:`ordinary` as people write them,
      and :meth:`read` and :meth:`read_answer` for the way back, with :meth:`decode` and
      ``vocab_size``; the words of reports are :attr:`wording`, :attr:`heading` and
      :meth:`introduction`;
    * what is **held out**: :meth:`hashed`, the symbols that are hashed, and ``smallest_split``.

    Attributes:
      operands: A, 1 or 2.
      reach: the longest length asked by default, in multiples of the trained one.
      smallest_split: a cell with fewer questions is not divided: training and evaluation share it.
      drawn_together: whether questions of all lengths are drawn at once, rather than one length
        after another. It decides which questions a seed gives.
    """

    operands: ClassVar[int] = 1
    reach: ClassVar[int] = 2
    smallest_split: ClassVar[int] = 1_000
    drawn_together: ClassVar[bool] = False

    @property
    def trained_length(self) -> int:
        """The greatest trained length n: operands are trained with 1..n, all equally likely."""
        raise NotImplementedError

    def width(self, *lengths: int) -> int:
        """Tokens of the longest example of a cell, with its answer."""
        raise NotImplementedError

    def number(self, *lengths: Any) -> Any:
        """Returns how many questions a cell has, float64; lengths may be arrays that broadcast."""
        raise NotImplementedError

    def every(self, *lengths: int) -> Questions:
        """All questions of a cell."""
        raise NotImplementedError

    def draw(self, rng: np.random.Generator, lengths: np.ndarray, longest: int) -> Questions:
        """Draws questions of ``lengths`` [A, B]; all columns are alike unless ``drawn_together``.

        ``longest`` is the greatest length that the symbols must have room for.
        """
        raise NotImplementedError

    def draw_again(self, rng: np.random.Generator, questions: Questions, longest: int) -> Questions:
        """Draws replacements for questions that may not be used."""
        return self.draw(rng, questions.lengths, longest)

    def hashed(self, questions: Questions) -> np.ndarray:
        """The symbols [A, B, W] that decide what is held out.

        Neither the order of the operands nor zeros at the end of a row matter.
        """
        return questions.symbols

    def write(self, questions: Questions, width: int) -> Written:
        """Writes questions with their answers as tokens, in rows of ``width``."""
        raise NotImplementedError

    def ordinary(self, questions: Questions) -> list[str]:
        """Questions as people write them."""
        raise NotImplementedError

    def read(self, text: str) -> Questions:
        """Reads one question that a person wrote; ValueError for other text."""
        raise NotImplementedError

    def read_answer(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The answer in ordinary writing; ValueError if it is not well formed."""
        raise NotImplementedError

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The tokens as text."""
        raise NotImplementedError

    @property
    def heading(self) -> str:
        """The title of a report."""
        raise NotImplementedError

    def introduction(self, grid: Grid) -> str:
        """Returns the introduction of a report, with numbers from one of its grids."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        raise NotImplementedError

    @property
    def scores(self) -> tuple[Score, ...]:
        """Exact match beyond the trained range, and inside it."""
        raise NotImplementedError

    @property
    def sequence_length(self) -> int:
        """T, the tokens of the longest training example, less one for the next-token shift."""
        return self.width(*[self.trained_length] * self.operands) - 1

    def is_held_out(self, questions: Questions) -> np.ndarray:
        """Returns whether questions of divided cells are kept out of training: bool [B]."""
        return held_out.symbols(self.hashed(questions))

    def is_divided(self, *lengths: Any) -> Any:
        """Returns whether a cell has enough questions to hold some of them out: bool, broadcast."""
        return self.number(*lengths) >= self.smallest_split

    def is_shared(self, *lengths: int) -> bool:
        """Returns whether the questions of a cell are both trained on and asked in evaluation."""
        return max(lengths) <= self.trained_length and not self.is_divided(*lengths)

    def sample(
        self, rng: np.random.Generator, lengths: np.ndarray, longest: int, *, to_ask: bool = False
    ) -> Questions:
        """Draws questions of ``lengths`` [A, B]; in divided cells, all are held out or none."""
        found = self.draw(rng, lengths, longest)
        divided = self.is_divided(*lengths)
        while (redo := np.flatnonzero(divided & (self.is_held_out(found) != to_ask))).size:
            some = Questions(found.symbols[:, redo], lengths[:, redo])
            found.symbols[:, redo] = self.draw_again(rng, some, longest).symbols
        return found

    def examples_to_learn(self, rng: np.random.Generator, size: int) -> synthetic.Batch:
        """Examples in which only the answers count."""
        n, width = self.trained_length, self.sequence_length + 1
        lengths = rng.integers(1, n + 1, (self.operands, size))
        parts = [np.arange(size)]
        if not self.drawn_together:
            cells, cell = np.unique(lengths, axis=1, return_inverse=True)
            parts = [np.flatnonzero(cell.ravel() == i) for i in range(cells.shape[1])]
        tokens = np.zeros((size, width), np.min_scalar_type(self.vocab_size - 1))
        starts, ends = np.zeros((2, size), np.int64)
        for rows in parts:
            drawn = self.sample(rng, lengths[:, rows], n)
            tokens[rows], starts[rows], ends[rows] = self.write(drawn, width)
        target = np.arange(1, width)
        in_answer = (target >= starts[:, None]) & (target < ends[:, None])
        return {
            "inputs": tokens[:, :-1].astype(np.int32),
            "targets": tokens[:, 1:].astype(np.int32),
            "weights": in_answer.astype(np.float32),
        }

    def ask(self, lengths: Sequence[int], samples: int, seed: int = 0) -> Questions:
        """Chooses questions of one cell to ask.

        Inside the trained range it draws only held-out ones, or any if they are shared
        (:meth:`is_shared`); beyond it, any. They are distinct, and do not depend on which other
        cells are asked for. If fewer than ``samples`` exist, it takes all of them.

        Raises:
          ValueError: ``samples`` or a length below 1, a wrong number of lengths, a seed out of
            range, or a cell that does not exist (:meth:`needs`).
        """
        synthetic.require_positive(self.kind, samples=samples)
        synthetic.require_seed(self.kind, seed)
        require(
            len(lengths) == self.operands,
            f"{self.kind}: expected a length for each of {self.operands}, {self.wording.cells}; "
            f"got {lengths}",
        )
        for length in lengths:
            synthetic.require_positive(self.kind, length=length)
        lacking = [words for words, there in self.needs(*lengths).items() if not there]
        require(
            not lacking,
            f"{self.kind}: there is no question of {self.wording.cells} {tuple(lengths)}: expected "
            f"{' and '.join(lacking)}",
        )
        return self.choose(synthetic.generator(seed, EVALUATION, *lengths), lengths, samples)

    def choose(self, rng: np.random.Generator, lengths: Sequence[int], samples: int) -> Questions:
        """Chooses the questions of :meth:`ask`."""
        divided = max(lengths) <= self.trained_length and bool(self.is_divided(*lengths))
        share = held_out.ONE_IN if divided else 1

        def questions(rows: np.ndarray) -> Questions:
            symbols = rows.reshape(len(rows), self.operands, -1).swapaxes(0, 1)
            return Questions(symbols, np.tile(np.array(lengths)[:, None], len(rows)))

        def select(rows: np.ndarray) -> np.ndarray:
            _, first = np.unique(rows, axis=0, return_index=True)
            rows = rows[np.sort(first)]
            return (rows[self.is_held_out(questions(rows))] if divided else rows)[:samples]

        def draw() -> np.ndarray:
            each = np.tile(np.array(lengths)[:, None], samples * share)
            return np.hstack([*self.draw(rng, each, max(lengths)).symbols])

        # Random drawing would be slow, or endless, if most of the questions must be found.
        if self.number(*lengths) < 2 * held_out.ONE_IN * samples:
            rows = np.hstack([*self.every(*lengths).symbols])
            return questions(select(rows[rng.permutation(len(rows))]))
        rows = select(draw())
        while len(rows) < samples:
            rows = select(np.concatenate([rows, draw()]))
        return questions(rows)

    def examples(
        self, *lengths: Sequence[int], samples: int, seed: int = 0, limit: int | None = None
    ) -> Examples:
        """The questions of :meth:`ask` for all cells of a grid, with their answers.

        Args:
          lengths: for each operand, the lengths asked for: rows and columns of the grid, or columns
            only.
          samples: questions of each cell.
          seed: decides the choice.
          limit: tokens that the model accepts; questions that may be longer are not asked. None:
            any number.

        Raises:
          ValueError: an argument out of range, or no questions.
        """
        require(
            len(lengths) == self.operands and all(map(len, lengths)),
            f"{self.kind}: expected lengths of {self.operands} operands; got {lengths}",
        )
        for length in itertools.chain(*lengths):
            synthetic.require_positive(self.kind, length=length)
        able = self.askable(lengths, limit)
        width = max(self.width(*x) for x in able.values())
        asked = [self.write(self.ask(x, samples, seed), width) for x in able.values()]
        tokens, starts, ends = map(np.concatenate, zip(*asked, strict=True))
        cells = [(0,) * (2 - self.operands) + cell for cell in able]
        return Examples(
            tokens, starts, ends, np.repeat(cells, [len(part[0]) for part in asked], axis=0)
        )

    def evaluate(self, trained: Trained, options: Any, progress: Progress | None = None) -> Any:
        """Measures exact match by length, leaving out questions too long for the model.

        Raises:
          ValueError: the longest length was given, and is too long.
        """
        self.require_room(options, trained.max_length)
        axes = self.axes(options)
        examples = self.examples(
            *axes, samples=options.samples, seed=options.seed, limit=trained.max_length
        )
        right = exact_match(
            trained.apply,
            trained.variables,
            examples,
            batch_size=options.batch_size,
            shapes=options.shapes,
            progress=progress,
            programs=getattr(trained, "programs", None),
        )
        shape = (len(axes[0]) if self.operands == 2 else 1, len(axes[-1]))
        return self.grid(axes, **tally(examples.cells, right, shape))

    def longest_asked(self, options: Options) -> int:
        """The greatest length asked for."""
        return self.reach * self.trained_length if options.longest is None else options.longest

    def askable(
        self, lengths: Sequence[Sequence[int]], limit: int | None
    ) -> dict[tuple[int, ...], list[int]]:
        """The cells of a grid that exist and fit a model of ``limit`` tokens, by place.

        Raises:
          ValueError: there are none.
        """
        wanted = {
            cell: [axis[i] for axis, i in zip(lengths, cell, strict=True)]
            for cell in np.ndindex(*map(len, lengths))
        }
        there = {cell: x for cell, x in wanted.items() if self.exists(*x)}
        require(
            bool(there), f"{self.kind}: there are no questions of {self.wording.cells} {lengths}"
        )
        able = {cell: x for cell, x in there.items() if fits(self.width(*x) - 1, limit)}
        require(bool(able), f"{self.kind}: the model accepts {limit} tokens: too few to be asked")
        return able

    def require_room(self, options: Options, limit: int | None) -> None:
        """Raises ValueError if options name a longest length that a model does not take."""
        if options.longest is None or limit is None:
            return
        cells = self.askable(self.axes(options), None).values()
        most = max(self.width(*cell) - 1 for cell in cells if cell[-1] == options.longest)
        require(
            fits(most, limit),
            f"evaluation.longest: questions of {options.longest} {self.wording.unit} have up to "
            f"{most} tokens, but the model accepts {limit}",
        )

    def prepare(self, options: Any, limit: int | None = None) -> str:
        """Checks before training that the questions of the evaluation exist.

        Args:
          options: of the evaluation.
          limit: tokens that the model accepts; None: any number.

        Returns:
          What will be asked for, in a line.

        Raises:
          ValueError: if some of it cannot be asked.
        """
        self.require_room(options, limit)
        axes = self.axes(options)
        able, there = self.askable(axes, limit), self.askable(axes, None)
        longest = max(lengths[-1] for lengths in able.values())
        part = "" if len(able) == len(there) else f", as far as {limit} tokens reach"
        return f"asked for {axes[-1][0]} to {longest} {self.wording.unit} in the end{part}"

    def axes(self, options: Options) -> tuple[Sequence[int], ...]:
        """Returns the lengths asked for, for each operand."""
        return (range(1, self.longest_asked(options) + 1),) * self.operands

    def needs(self, *lengths: int) -> dict[str, bool]:
        """Returns the conditions for a cell to have questions, in words, and whether they hold."""
        return {}

    def exists(self, *lengths: int) -> bool:
        """Returns whether a cell of the grid has questions: all that it :meth:`needs`."""
        return all(self.needs(*lengths).values())

    def counted(self, *lengths: int) -> int:
        """The length under which tables count a cell."""
        return max(lengths)

    @property
    def counted_as(self) -> str:
        """The length of :meth:`counted`, in words."""
        return f"the {self.wording.unit} of the longer operand"

    def grid(self, axes: Sequence[Sequence[int]], correct: np.ndarray, counts: np.ndarray) -> Grid:
        """A grid of answers, int [R, C], to the questions of ``axes``; for one operand R = 1."""
        rows, columns = ((1,), *axes)[-2:]
        cells = [*itertools.product(*axes)]
        return Grid(
            rows=tuple(rows),
            columns=tuple(columns),
            lengths=np.reshape([self.counted(*cell) for cell in cells], counts.shape),
            correct=correct,
            counts=counts,
            shared=np.reshape([self.is_shared(*cell) for cell in cells], counts.shape),
            trained=self.trained_length,
            wording=self.wording,
        )

    def unseen(self, seed: int) -> list[str]:
        """Two held-out questions of the trained length, and one of the next length."""
        n = self.trained_length
        asked = ((n, 2), (n + 1, 1))
        found = [self.ask([length] * self.operands, count, seed) for length, count in asked]
        return [text for questions in found for text in self.ordinary(questions)]

    @property
    def question_example(self) -> str:
        """A question in ordinary writing."""
        return self.unseen(0)[0]

    def question(self, text: str) -> np.ndarray:
        """The prompt for a question in ordinary writing, as in training: int32 [P].

        Raises:
          ValueError: for other text.
        """
        tokens, start = self._written(text)
        return tokens[:start].astype(np.int32)

    def solve(self, text: str) -> str:
        """The right answer to a question, both in ordinary writing."""
        tokens, start = self._written(text)
        return self.read_answer(tokens[start:])

    def longest_answer(self, text: str) -> int:
        """Tokens of the longest answer to any question of the same lengths."""
        tokens, start = self._written(text)
        return len(tokens) - start

    def _written(self, text: str) -> tuple[np.ndarray, int]:
        """A question with its answer, padded to its cell's width, and the length of its prompt."""
        questions = self.read(text)
        width = self.width(*questions.lengths[:, 0].tolist())
        tokens, starts, _ = self.write(questions, width)
        return tokens[0], int(starts[0])

    def encode(self, text: str) -> np.ndarray:
        """The prompt for a question in ordinary writing: :meth:`question`."""
        return self.question(text)

    def samples(self, trained: Trained, options: Any) -> list[str]:
        """Returns lines that show the model's answers to a few unseen questions."""
        lines, limit = [], trained.max_length
        for text in self.unseen(options.seed + 1):
            if fits(len(self.question(text)) + self.longest_answer(text) - 1, limit):
                reply = answer(trained.apply, trained.variables, self, text, max_length=limit)
                lines.append(str(reply))
        return lines


def scores_by_range(
    measures: Mapping[str, str], trained: str, inside: str = "up to"
) -> tuple[Score, ...]:
    """Accuracies beyond the trained range, then those inside it.

    Args:
      measures: the text in front of the range in a label, by the start of a key.
      trained: the end of the range.
      inside: the words for being inside it.
    """
    return tuple(
        Score(f"{key}_{where}", f"{label}{range} {trained}, %", True, 100)
        for where, range in (("outside", "beyond"), ("inside", inside))
        for key, label in measures.items()
    )
