"""Length generalisation: problems of one length, trained up to n and asked up to twice that.

An example is a word, ``=``, and the problem's answer to the word::

    <bos> 4 0 7 1 = 1 7 0 4 <eos>          reverse
    <bos> 7 0 4 x 3 = 1 2 2 1 <eos>        multiply: 407 x 3 = 1221, least significant digit first

The problems are the usual tests of length generalisation (Delétang et al. 2023, arXiv:2207.02098;
Zhou et al. 2023, arXiv:2310.16028). A new problem is a function of words and a line in
``PROBLEMS``.

**Words.** In training, each length is equally likely, and so is each word of a length.

**Held-out words.** A hash keeps one word in ten out of training, the same words for every seed,
length and model. Lengths with fewer than 1,000 words are not divided: training and evaluation share
all their words, and results mark them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from train.checks import choose
from train.data import synthetic
from train.evaluation.grids import Grid, Wording
from train.tasks import Score
from train.tasks.digits import VOCABULARY, DigitQuestions, Part, read_operands, write
from train.tasks.questions import Options, Questions, Written, scores_by_range

NOTHING = 10

_ZERO, _EQUALS = VOCABULARY.encode("0=")
_TOKENS = np.array([*range(_ZERO, _ZERO + NOTHING), VOCABULARY.PAD], np.uint8)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem that asks for a function of a word.

    Attributes:
      task: what is asked, for reports.
      solve: words of one length, uint8 [B, P], to answers uint8 [B, A], in digits; ``NOTHING``
        stands where an answer is shorter than others.
      symbols: size of the alphabet, the digits from 0 on.
      operator: if given, a word is a number with its least significant digit first and no leading
        zero, followed by one more digit, the other operand; the answer is a number too.
      answers: how many answers of equal length are possible, if that does not grow with the length:
        a guess is right once in that many times.
    """

    task: str
    solve: Callable[[np.ndarray], np.ndarray]
    symbols: int = 10
    operator: str = ""
    answers: int | None = None


def multiply(words: np.ndarray) -> np.ndarray:
    """Returns the product of a number and a digit, least significant digit first."""
    number, factor = words[:, :-1], words[:, -1]
    answer = np.zeros((len(words), number.shape[1] + 1), np.uint8)
    carry = np.zeros(len(words), np.uint8)
    for place, digits in enumerate(number.T):
        carry, answer[:, place] = np.divmod(digits * factor + carry, 10)
    answer[:, -1] = carry
    # A number has no leading zeros, and zero has one digit.
    used = answer.shape[1] - np.argmax(answer[:, ::-1] > 0, axis=1)
    used = np.where(answer.any(axis=1), used, 1)
    answer[np.arange(answer.shape[1]) >= used[:, None]] = NOTHING
    return answer


PROBLEMS: dict[str, Problem] = {
    "multiply": Problem("the product of a number and a digit", multiply, operator="x"),
    "copy": Problem("a word as it is", lambda words: words),
    "reverse": Problem("a word from its end to its beginning", lambda words: words[:, ::-1]),
    "sort": Problem("the digits of a word in ascending order", lambda w: np.sort(w, axis=1)),
    "parity": Problem(
        "whether a word of bits has an odd number of ones",
        lambda words: words.sum(axis=1, keepdims=True, dtype=np.uint8) % 2,
        symbols=2,
        answers=2,
    ),
    "majority": Problem(
        "whether more than half of a word of bits are ones",
        lambda w: (2 * w.sum(axis=1, keepdims=True, dtype=np.int64) > w.shape[1]).astype(np.uint8),
        symbols=2,
        answers=2,
    ),
    "modular_sum": Problem(
        "the sum, modulo 5, of the digits of a word",
        lambda w: (w.sum(axis=1, keepdims=True, dtype=np.int64) % 5).astype(np.uint8),
        symbols=5,
        answers=5,
    ),
}


@dataclasses.dataclass(frozen=True)
class AlgorithmEvaluation(Options):
    """The options for evaluating a problem.

    Attributes:
      longest: the greatest length asked for; None: twice the trained one.
      samples_per_length: questions of each length.
      shapes: how many sequence lengths to compile for.
    """

    samples_per_length: int = 100
    shapes: int = 2

    @property
    def samples(self) -> int:
        """The number of questions of each cell."""
        return self.samples_per_length


@dataclasses.dataclass(frozen=True)
class Algorithm(DigitQuestions):
    """One of ``PROBLEMS`` (the module's text describes the form and the held-out words).

    The symbols of a question are those of its word, uint8 [1, B, P].

    Attributes:
      problem: its name.
      max_length: n; words are trained with 1..n symbols (numbers with 1..n digits).
    """

    kind: ClassVar[str] = "algorithm"
    Evaluation: ClassVar[type] = AlgorithmEvaluation

    problem: str = "copy"
    max_length: int = 20

    def __post_init__(self):
        choose("problem", self.problem, PROBLEMS)
        synthetic.require_positive(self.kind, max_length=self.max_length)

    @property
    def definition(self) -> Problem:
        """The problem called ``problem``, one of ``PROBLEMS``."""
        return PROBLEMS[self.problem]

    @property
    def trained_length(self) -> int:
        """The greatest trained length, n."""
        return self.max_length

    def lowest(self, length: int) -> np.ndarray:
        """Returns the least symbol at each place of a word: int [P]."""
        if not self.definition.operator:
            return np.zeros(length, np.int64)
        return np.array([*[0] * (length - 1), int(length > 1), 0])

    def width(self, *lengths: int) -> int:
        """Tokens of the longest example of a length, BOS and EOS included."""
        largest = np.full((1, 1, self.lowest(*lengths).size), self.definition.symbols - 1, np.uint8)
        words = Questions(largest, np.array([lengths]))
        return self.write(words, 3 * sum(lengths) + 8)[2].item()

    def number(self, *lengths: Any) -> np.ndarray:
        """Returns the number of words of a length, as float64."""
        (length,) = lengths
        # Beyond 100 symbols the exact count does not matter, and float64 ends at 308.
        words = np.power(float(self.definition.symbols), np.minimum(length, 100))
        return words * np.where(np.equal(length, 1), 10, 9) if self.definition.operator else words

    def every(self, *lengths: int) -> Questions:
        """Returns all words of a length."""
        lowest = self.lowest(*lengths)
        places = np.indices((self.definition.symbols - lowest).tolist(), np.uint8)
        words = places.reshape(len(lowest), -1).T + lowest.astype(np.uint8)
        return Questions(words[None], np.full((1, len(words)), lengths))

    def draw(self, rng: np.random.Generator, lengths: np.ndarray, longest: int) -> Questions:
        """Draws uniformly random words of one length."""
        lowest = self.lowest(lengths[0, 0].item())
        shape = (*lengths.shape, len(lowest))
        symbols = rng.integers(lowest, self.definition.symbols, shape, dtype=np.uint8)
        return Questions(symbols, lengths)

    def hashed(self, questions: Questions) -> np.ndarray:
        """Returns the symbols of whole words, counted from one."""
        # Zeros count too: a word is not the same as a longer one.
        return questions.symbols + 1

    def write(self, questions: Questions, width: int) -> Written:
        """Writes words of one length, up to and including ``=``, and what comes after it."""
        (words,) = questions.symbols
        tokens = _TOKENS[words]
        prompt: list[Part] = [VOCABULARY.BOS, tokens, _EQUALS]
        if self.definition.operator:
            (operator,) = VOCABULARY.encode(self.definition.operator)
            prompt = [VOCABULARY.BOS, tokens[:, :-1], operator, tokens[:, -1:], _EQUALS]
        return write(prompt, [_TOKENS[self.definition.solve(words)], VOCABULARY.EOS], width)

    def ordinary(self, questions: Questions) -> list[str]:
        """Writes words such as ``"40713"``, or ``"407x3"``."""
        texts = ["".join(map(str, word)) for word in questions.symbols[0].tolist()]
        operator = self.definition.operator
        return [f"{t[-2::-1]}{operator}{t[-1]}" for t in texts] if operator else texts

    def read(self, text: str) -> Questions:
        """Reads a word in ordinary writing."""
        digits, operator = f"[0-{self.definition.symbols - 1}]", self.definition.operator
        if operator:
            pattern = rf"({digits}+) *{re.escape(operator)} *({digits})"
            expected = f"a number and a digit such as 407{operator}3"
            number, digit = read_operands(text, pattern, expected).groups()
            word = (number.lstrip("0") or "0")[::-1] + digit
        else:
            expected = f"a word of digits from 0 to {self.definition.symbols - 1}"
            word = read_operands(text, f"({digits}+)", expected)[1]
        symbols = np.array([[[int(c) for c in word]]], np.uint8)
        return Questions(symbols, np.array([[len(word) - bool(operator)]]))

    def ordinary_answer(self, digits: str) -> str:
        """Writes an answer as usual: numbers with the most significant digit first."""
        return digits[::-1] if self.definition.operator else digits

    @property
    def scores(self) -> tuple[Score, ...]:
        """Exact match beyond the trained range, and inside it."""
        return scores_by_range({"exact_match": ""}, f"length {self.max_length}")

    @property
    def wording(self) -> Wording:
        """The terms for the words in tables and figures."""
        return Wording(
            title=f"{self.problem.replace('_', ' ').capitalize()}: exact match by length",
            rows="",
            columns="length of the word, symbols",
            unit="symbols",
            questions="words",
            cells="lengths",
            trained=f"1 to {self.max_length} symbols",
        )

    @property
    def heading(self) -> str:
        """The title of a report."""
        return f"{self.problem.replace('_', ' ').capitalize()} beyond the trained length"

    def introduction(self, grid: Grid) -> str:
        """Returns the paragraph of a report on training and evaluation."""
        guess = self.definition.answers
        chance = f" A guess is right in {100 / guess:.0f} % of cases." if guess else ""
        return (
            f"Asked for {self.definition.task}. Trained on lengths 1 to {grid.trained}, and asked "
            f"for 1 to {grid.columns[-1]}: up to {grid.counts.max()} words for each length, "
            f"{grid.counts.sum():,} in all. An answer is right if it is to the last symbol, and "
            f"ends there.{chance}"
        )
