"""Addition, as an endless stream of examples for training and a grid of them for evaluation.

An example is written with the least significant digit first and nothing between the symbols::

    <bos> 7 0 4 + 5 8 = 2 9 4 <eos>          407 + 85 = 492

The setting is that of TAPE's arithmetic experiment (arXiv:2501.00712, section 5.1), taken there
from McLeish et al. (arXiv:2405.17399): each pair of operand lengths is equally likely, and the loss
counts only what comes after ``=``.

**Numbers.** A number of one digit is one of 0..9; a number of n > 1 digits is uniform among those
without a leading zero.

**Held-out pairs.** A hash of the unordered pair keeps one pair in ten out of training, so that
neither ``a+b`` nor ``b+a`` has been seen when it is asked. The hash is fixed: every seed, length
and model shares the same held-out pairs. Pairs of lengths with fewer than 10,000 sums (1+1, 1+2,
2+2 and 1+3 digits) are too few to be divided: training and evaluation share all their sums, and
results mark them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from train.data import synthetic
from train.evaluation.grids import Grid, Wording
from train.tasks import Score
from train.tasks.digits import VOCABULARY, DigitQuestions, Part, read_operands, write
from train.tasks.questions import Options, Questions, Written, scores_by_range

_ZERO, _PLUS, _EQUALS = VOCABULARY.encode("0+=")


@dataclasses.dataclass(frozen=True)
class AdditionEvaluation(Options):
    """The options of an evaluation of addition.

    Attributes:
      longest: digits of the longest operands; None: twice the trained length.
      samples_per_pair: questions for each pair of operand lengths.
      shapes: how many sequence lengths to compile for.
    """

    samples_per_pair: int = 100
    shapes: int = 2

    @property
    def samples(self) -> int:
        """The number of questions of each cell."""
        return self.samples_per_pair


@dataclasses.dataclass(frozen=True)
class Addition(DigitQuestions):
    """The addition task (the module docstring describes its form and its held-out pairs).

    The symbols of a question are the digits of both operands, uint8 [2, B, W], least significant
    digit first, and zero beyond their lengths.

    Attributes:
      max_digits: N; both operands are trained with 1..N digits.
    """

    kind: ClassVar[str] = "addition"
    Evaluation: ClassVar[type] = AdditionEvaluation
    question_example: ClassVar[str] = "407+85"
    operands: ClassVar[int] = 2
    smallest_split: ClassVar[int] = 10_000
    drawn_together: ClassVar[bool] = True

    max_digits: int = 20

    def __post_init__(self):
        synthetic.require_positive(self.kind, max_digits=self.max_digits)

    @property
    def trained_length(self) -> int:
        """The greatest trained number of digits, N."""
        return self.max_digits

    def width(self, *lengths: int) -> int:
        """Tokens of the longest sum of numbers of these lengths, BOS and EOS included."""
        return sum(lengths) + max(lengths) + 5

    def number(self, *lengths: Any) -> np.ndarray:
        """Returns how many ordered sums a + b have operands of these lengths, as float64."""
        # Beyond 100 digits the exact count does not matter, and float64 ends at 308.
        a, b = (np.where(np.equal(n, 1), 10, 9 * 10.0 ** np.minimum(n, 100) / 10) for n in lengths)
        return a * b

    def every(self, *lengths: int) -> Questions:
        """All pairs of numbers of these two lengths."""
        ranges = [np.arange(10 ** (n - 1) if n > 1 else 0, 10**n) for n in lengths]
        values = np.stack(np.meshgrid(*ranges, indexing="ij")).reshape(2, -1, 1)
        digits = values // 10 ** np.arange(max(lengths)) % 10
        each = np.broadcast_to(np.array(lengths)[:, None], values.shape[:2])
        return Questions(digits.astype(np.uint8), each)

    def draw(self, rng: np.random.Generator, lengths: np.ndarray, longest: int) -> Questions:
        """Draws uniform numbers of ``lengths`` [2, B] digits."""
        digits = rng.integers(0, 10, (*lengths.shape, longest), dtype=np.uint8)
        leading = rng.integers(1, 10, lengths.shape, dtype=np.uint8)
        place, last = np.arange(longest), lengths[..., None] - 1
        digits[place > last] = 0
        np.copyto(digits, leading[..., None], where=(place == last) & (last > 0))
        return Questions(digits, lengths)

    def write(self, questions: Questions, width: int) -> Written:
        """Writes sums as tokens: up to and including ``=``, and what comes after it."""

        def number(digits: np.ndarray, lengths: np.ndarray) -> np.ndarray:
            present = np.arange(digits.shape[1]) < lengths[:, None]
            return np.where(present, digits + np.uint8(_ZERO), np.uint8(VOCABULARY.PAD))

        a, b = map(number, *questions)
        prompt: list[Part] = [VOCABULARY.BOS, a, _PLUS, b, _EQUALS]
        return write(prompt, [number(*add(questions)), VOCABULARY.EOS], width)

    def ordinary(self, questions: Questions) -> list[str]:
        """Sums such as ``"407+85"``."""
        first, second = (
            [
                "".join(map(str, row[:n][::-1]))
                for row, n in zip(rows.tolist(), lengths, strict=True)
            ]
            for rows, lengths in zip(*questions, strict=True)
        )
        return [f"{a}+{b}" for a, b in zip(first, second, strict=True)]

    def read(self, text: str) -> Questions:
        """The operands of a sum such as ``"407+85"``; leading zeros are dropped."""
        expected = "a sum of two numbers such as '407+85'"
        match = read_operands(text, r"([0-9]+) *\+ *([0-9]+)", expected)
        numbers = [number.lstrip("0") or "0" for number in match.groups()]
        symbols = np.zeros((2, 1, max(map(len, numbers))), np.uint8)
        for operand, number in zip(symbols, numbers, strict=True):
            operand[0, : len(number)] = [int(c) for c in reversed(number)]
        return Questions(symbols, np.array([[len(number)] for number in numbers]))

    @property
    def scores(self) -> tuple[Score, ...]:
        """Exact match beyond the trained range, and inside it."""
        return scores_by_range({"exact_match": ""}, f"{self.max_digits} digits")

    @property
    def wording(self) -> Wording:
        """The words for the sums in tables and figures."""
        return Wording(
            title="Addition: exact match by operand lengths",
            rows="digits of the first operand",
            columns="digits of the second operand",
            unit="digits",
            questions="sums",
            cells="pairs of lengths",
            trained=f"1 to {self.max_digits} digits",
        )

    @property
    def heading(self) -> str:
        """The title of a report."""
        return "Addition beyond the trained length"

    def introduction(self, grid: Grid) -> str:
        """Returns the introduction of a report: what was trained on, and what was asked."""
        return (
            f"Trained on sums of numbers of 1 to {grid.trained} digits and asked sums of numbers "
            f"of 1 to {grid.lengths.max()} digits: up to {grid.counts.max()} for each pair of "
            f"operand lengths, {grid.counts.sum():,} in all. An answer is right if it is to the "
            "last digit, and ends there."
        )


def add(pairs: Questions) -> tuple[np.ndarray, np.ndarray]:
    """The sums: digits uint8 [B, W + 1], least significant first, and their number [B]."""
    _, count, width = pairs.symbols.shape
    digits = np.zeros((count, width + 1), np.uint8)
    digits[:, :width] = pairs.symbols[0] + pairs.symbols[1]
    for place in range(width):
        carry = digits[:, place] > 9
        digits[:, place] -= np.uint8(10) * carry
        digits[:, place + 1] += carry
    longest = pairs.lengths.max(axis=0)
    return digits, longest + (digits[np.arange(count), longest] > 0)
