"""What tasks share whose questions are asked and answered in symbols, and judged by exact match."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tape_jax.config import require
from train.data import Score, synthetic
from train.evaluate import answer
from train.grids import Grid, require_same_questions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from train.plots import Series
    from train.runs import Trained

TRAINING, EVALUATION = 0, 1
VALIDATION_SEED = 2**31


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Characters as token ids: PAD 0, UNK 1, BOS 2, EOS 3, then ``characters`` in order."""

    characters: str = "0123456789+-x= "

    SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
    PAD, UNK, BOS, EOS = range(4)

    @property
    def size(self) -> int:
        """Number of token ids."""
        return len(self.SPECIAL) + len(self.characters)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without BOS and EOS.

        Raises:
          ValueError: a character outside the vocabulary.
        """
        for position, character in enumerate(text):
            require(
                character in self.characters,
                f"character {character!r} at position {position} of {text!r} is not in the "
                f"vocabulary {self.characters!r}",
            )
        return [len(self.SPECIAL) + self.characters.index(c) for c in text]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of ``tokens``; special tokens appear by name, such as ``<eos>``.

        An id outside the vocabulary, which a wider model may produce, appears as ``<unk>``.
        """
        symbols = dict(enumerate((*self.SPECIAL, *self.characters)))
        return "".join(symbols.get(int(t), self.SPECIAL[self.UNK]) for t in tokens)


VOCABULARY = Vocabulary()


@dataclasses.dataclass(frozen=True)
class Options:
    """How questions of all lengths are asked; see :func:`train.evaluate.exact_match`.

    Attributes:
      longest: the greatest length asked for; None: a multiple of the trained one.
      seed: of the choice of questions.
      batch_size: questions of one pass.
    """

    longest: int | None = None
    seed: int = 0
    batch_size: int = 512

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), int(field.name != "seed")
            require(
                value is None or value >= least,
                f"evaluation: {field.name} must "
                f"{'be at least 1' if least else 'not be negative'}; got {value}",
            )


class Questions(synthetic.Stream):
    """A task that can be asked in ordinary writing (:class:`train.evaluate.QuestionTask`)."""

    def question(self, text: str) -> np.ndarray:
        """The prompt for a question in ordinary writing: int32 [P]; ValueError if it is none."""
        raise NotImplementedError

    def solve(self, text: str) -> str:
        """The right answer to a question, in ordinary writing."""
        raise NotImplementedError

    def max_answer_length(self, prompt: np.ndarray) -> int:
        """Tokens of the longest answer that questions such as this one have."""
        raise NotImplementedError

    def read_answer(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The answer in ordinary writing; ValueError if it is not well formed."""
        raise NotImplementedError

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The tokens as text."""
        raise NotImplementedError

    def unseen(self, seed: int) -> Sequence[str]:
        """A few questions in ordinary writing that were held out of training."""
        raise NotImplementedError

    @property
    def question_example(self) -> str:
        """A question in ordinary writing."""
        return self.unseen(0)[0]

    def encode(self, text: str) -> np.ndarray:
        """The prompt for a question in ordinary writing: :meth:`question`."""
        return self.question(text)

    def validation(self, options: Any) -> Any:
        """Options of an evaluation whose questions are drawn anew.

        Where hardly more questions exist than are asked, some of them are the same.
        """
        return dataclasses.replace(options, seed=options.seed + VALIDATION_SEED)

    def samples(self, trained: Trained, options: Any) -> list[str]:
        """What the model answers to a few questions that were held out."""
        lines, limit = [], trained.max_length
        for text in self.unseen(options.seed + 1):
            prompt = self.question(text)
            if limit is None or len(prompt) + self.max_answer_length(prompt) - 1 <= limit:
                reply = answer(trained.apply, trained.variables, self, text, max_length=limit)
                lines.append(str(reply))
        return lines


class DigitQuestions(Questions):
    """Questions and answers in the characters of :data:`VOCABULARY`; only the answers count.

    The result of an evaluation is a :class:`Grid`.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return VOCABULARY.size

    @property
    def digit_ids(self) -> tuple[int, ...]:
        """Token ids of the digits 0..9, for encodings that count places inside a number."""
        return tuple(VOCABULARY.encode("0123456789"))

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The tokens as text, special ones by name."""
        return VOCABULARY.decode(tokens)

    def ordinary_answer(self, digits: str) -> str:
        """Ordinary writing of an answer from its digits in the order in which they are trained."""
        raise NotImplementedError

    def read_answer(self, tokens: Sequence[int] | np.ndarray) -> str:
        """What the tokens after ``=`` say, in ordinary writing.

        Raises:
          ValueError: not digits followed by EOS.
        """
        written = VOCABULARY.decode(tokens)
        match = re.match(rf"([0-9]+){VOCABULARY.SPECIAL[VOCABULARY.EOS]}", written)
        if match is None:
            raise ValueError(f"the answer is not a number followed by <eos>: {written!r}")
        return self.ordinary_answer(match[1])

    def training_examples(
        self, rng: np.random.Generator, size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Examples that are not held out, as :func:`train.data.synthetic.write` returns them."""
        raise NotImplementedError

    def batch(self, seed: int, index: int, size: int) -> synthetic.Batch:
        """Batch ``index`` of the stream of ``seed``: a pure function of its arguments.

        Returns:
          ``inputs`` and ``targets``, int32 [size, T], and ``weights``, float32 [size, T]: 1 where
          the target belongs to the answer (EOS included), else 0.
        """
        rng = synthetic.generator(seed, TRAINING, index)
        return synthetic.answers_counted(*self.training_examples(rng, size))

    def read_result(self, record: Any) -> Grid:
        """The grid that ``to_json`` described."""
        return Grid.from_json(record)


def scores_by_range(measures: Mapping[str, str], trained: str) -> tuple[Score, ...]:
    """Accuracies beyond the trained range, then those inside it.

    Args:
      measures: by the beginning of their keys, what stands in front of the range in a label.
      trained: the end of the range.
    """
    return tuple(
        Score(f"{key}_{where}", f"{label}{range} {trained}, %", True, 100)
        for where, range in (("outside", "beyond"), ("inside", "up to"))
        for key, label in measures.items()
    )


def length_curves(grids: Mapping[str, Mapping[str, Grid]], *, title: str, y_label: str) -> Figure:
    """Accuracy by length, with bands of one standard error.

    Args:
      grids: for each heading of a panel, grids with one row by the name of their line.
      title: of the figure.
      y_label: what the share is of, with the unit: per cent.

    Raises:
      ValueError: no grids, or grids of different questions in one panel.
    """
    from train.plots import Series

    def series(grid: Grid) -> Series:
        asked = grid.counts[0] > 0
        share, count = grid.accuracy[0][asked], grid.counts[0][asked]
        error = np.sqrt(share * (1 - share) / count)
        return Series(np.array(grid.columns)[asked], 100 * share, 100 * error)

    first, *_ = (require_same_questions(lines) for lines in grids.values())
    panels = {
        heading: {name: series(grid) for name, grid in lines.items()}
        for heading, lines in grids.items()
    }
    return _length_panels(panels, first, title, y_label)


def depth_curves(
    grids: Mapping[str, Mapping[int, Sequence[Grid]]], *, title: str, y_label: str
) -> Figure:
    """Accuracy by length, a panel for each depth; bands are the standard deviation over seeds.

    Args:
      grids: for each name, by number of layers, grids with one row, one for each seed.
      title, y_label: as in :func:`length_curves`.

    Raises:
      ValueError: no grids, or grids of different questions.
    """
    from train.plots import Series

    def series(seeds: Sequence[Grid]) -> Series:
        shares = 100 * np.array([grid.accuracy[0][asked] for grid in seeds])
        mean = shares.mean(0)
        spread = shares.std(0, ddof=1) if len(seeds) > 1 else np.full_like(mean, np.nan)
        return Series(np.array(first.columns)[asked], mean, spread)

    every = (
        (f"{name}, {depth} layers, seed {seed}", grid)
        for name, by_depth in grids.items()
        for depth, seeds in by_depth.items()
        for seed, grid in enumerate(seeds)
    )
    first = require_same_questions(dict(every))
    asked = first.counts[0] > 0
    panels = {
        f"{depth} layer{'s' if depth > 1 else ''}": {
            name: series(by_depth[depth]) for name, by_depth in grids.items() if by_depth.get(depth)
        }
        for depth in sorted({depth for by_depth in grids.values() for depth in by_depth})
    }
    return _length_panels(panels, first, title, y_label)


def _length_panels(
    panels: Mapping[str, Mapping[str, Series]], first: Grid, title: str, y_label: str
) -> Figure:
    from matplotlib.ticker import MaxNLocator

    from train.plots import line_panels

    figure = line_panels(
        panels,
        title=title,
        x_label=first.wording.columns,
        y_label=y_label,
        trained=first.trained,
        log=False,
    )
    figure.axes[0].set_ylim(-3, 103)
    figure.axes[0].xaxis.set_major_locator(MaxNLocator(10, integer=True))
    return figure
