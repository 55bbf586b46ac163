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
and model shares the same held-out pairs. Pairs of lengths with fewer than ``SMALLEST_SPLIT`` sums
(1+1, 1+2, 2+2 and 1+3 digits) are too few to be divided: there training and evaluation share all
sums, and results mark them.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from tape_jax.config import require
from train.data import Comparison, Examples, Progress, Score, synthetic
from train.data.questions import EVALUATION, VOCABULARY, DigitQuestions, Options, scores_by_range
from train.evaluate import exact_match_grid
from train.grids import (
    Grid,
    Wording,
    averages_table,
    length_table,
    pool,
    require_same_questions,
)

if TYPE_CHECKING:
    from train.runs import Trained

SMALLEST_SPLIT = 10_000

_ZERO, _PLUS, _EQUALS = VOCABULARY.encode("0+=")


class Pairs(NamedTuple):
    """B pairs of natural numbers of any size: the operands of B sums.

    Attributes:
      digits: uint8 [2, B, W], least significant digit first, zero from ``lengths`` on.
      lengths: int64 [2, B], number of digits, 1..W.
    """

    digits: np.ndarray
    lengths: np.ndarray


def draw(rng: np.random.Generator, lengths: np.ndarray, width: int) -> Pairs:
    """Uniform numbers of ``lengths`` [2, B] digits, in arrays of ``width`` digits."""
    digits = rng.integers(0, 10, (*lengths.shape, width), dtype=np.uint8)
    leading = rng.integers(1, 10, lengths.shape, dtype=np.uint8)
    place, last = np.arange(width), lengths[..., None] - 1
    digits[place > last] = 0
    np.copyto(digits, leading[..., None], where=(place == last) & (last > 0))
    return Pairs(digits, lengths)


def every_pair(lengths: tuple[int, int]) -> Pairs:
    """All pairs of numbers of these two lengths."""
    ranges = [np.arange(10 ** (n - 1) if n > 1 else 0, 10**n) for n in lengths]
    values = np.stack(np.meshgrid(*ranges, indexing="ij")).reshape(2, -1, 1)
    digits = values // 10 ** np.arange(max(lengths)) % 10
    return Pairs(
        digits.astype(np.uint8), np.broadcast_to(np.array(lengths)[:, None], values.shape[:2])
    )


def add(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """The sums: digits uint8 [B, W + 1], least significant first, and their number [B]."""
    _, count, width = pairs.digits.shape
    digits = np.zeros((count, width + 1), np.uint8)
    digits[:, :width] = pairs.digits[0] + pairs.digits[1]
    for place in range(width):
        carry = digits[:, place] > 9
        digits[:, place] -= np.uint8(10) * carry
        digits[:, place + 1] += carry
    longest = pairs.lengths.max(axis=0)
    return digits, longest + (digits[np.arange(count), longest] > 0)


def held_out(pairs: Pairs) -> np.ndarray:
    """bool [B]: whether the unordered pair is in the tenth kept out of training.

    What a pair of numbers gives does not depend on W, nor on the pairs beside it.
    """
    first, second = synthetic.fingerprints(pairs.digits)
    return synthetic.is_held_out(first + second)


def number_of_sums(lengths_a: Any, lengths_b: Any) -> np.ndarray:
    """How many ordered sums a + b have operands of these lengths; broadcast, as float64."""

    def numbers(lengths: Any) -> np.ndarray:
        # Beyond 100 digits the exact count matters to nobody, and float64 ends at 308.
        return np.where(np.equal(lengths, 1), 10.0, 9 * 10.0 ** np.minimum(lengths, 100) / 10)

    return numbers(lengths_a) * numbers(lengths_b)


def undivided(lengths_a: Any, lengths_b: Any) -> np.ndarray:
    """bool, broadcast: whether these operand lengths have too few sums to hold any out."""
    return number_of_sums(lengths_a, lengths_b) < SMALLEST_SPLIT


def to_tokens(pairs: Pairs, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Writes sums down.

    Returns:
      tokens uint8 [B, width], padded at the end; tokens [B] up to and including ``=``; and tokens
      [B] up to and including EOS.
    """

    def number(digits: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        present = np.arange(digits.shape[1]) < lengths[:, None]
        return np.where(present, digits + np.uint8(_ZERO), np.uint8(VOCABULARY.PAD))

    a, b = map(number, pairs.digits, pairs.lengths)
    prompt: list[synthetic.Part] = [VOCABULARY.BOS, a, _PLUS, b, _EQUALS]
    return synthetic.write(prompt, [number(*add(pairs)), VOCABULARY.EOS], width)


def longest_example(digits: int) -> int:
    """Tokens of the longest sum of two numbers of this many digits, BOS and EOS included."""
    return 3 * digits + 5


@dataclasses.dataclass(frozen=True)
class AdditionEvaluation(Options):
    """How addition is judged; the options of :func:`train.evaluate.exact_match_grid`.

    Attributes:
      longest: digits of the longest operands; None: twice the trained length.
      samples_per_pair: questions for each pair of operand lengths.
      shapes: how many sequence lengths to compile for.
    """

    samples_per_pair: int = 100
    shapes: int = 2


@dataclasses.dataclass(frozen=True)
class Addition(DigitQuestions):
    """The addition task (the module's text describes its form and its held-out pairs).

    Attributes:
      max_digits: N; both operands are trained with 1..N digits.
    """

    kind: ClassVar[str] = "addition"
    Evaluation: ClassVar[type] = AdditionEvaluation
    question_example: ClassVar[str] = "407+85"

    max_digits: int = 20

    def __post_init__(self):
        synthetic.require_positive("addition", max_digits=self.max_digits)

    @property
    def sequence_length(self) -> int:
        """T: tokens of the longest training example, less one for the next-token shift."""
        return longest_example(self.max_digits) - 1

    def training_examples(
        self, rng: np.random.Generator, size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sums whose pairs of operand lengths are equally likely, none of them held out."""
        lengths = rng.integers(1, self.max_digits + 1, (2, size))
        pairs = draw(rng, lengths, self.max_digits)
        divided = ~undivided(*lengths)
        while (redo := np.flatnonzero(divided & held_out(pairs))).size:
            pairs.digits[:, redo] = draw(rng, lengths[:, redo], self.max_digits).digits
        return to_tokens(pairs, self.sequence_length + 1)

    @property
    def wording(self) -> Wording:
        """What tables and figures call the sums."""
        return Wording(
            title="Addition: exact match by operand lengths",
            rows="digits of the first operand",
            columns="digits of the second operand",
            unit="digits",
            questions="sums",
            cells="pairs of lengths",
            trained=f"1 to {self.max_digits} digits",
        )

    def is_shared(self, length_a: int, length_b: int) -> bool:
        """Whether sums of these operand lengths may be both trained on and asked in evaluation."""
        trained = max(length_a, length_b) <= self.max_digits
        return trained and bool(undivided(length_a, length_b))

    def grid(
        self,
        lengths_a: Sequence[int],
        lengths_b: Sequence[int],
        samples_per_pair: int,
        seed: int = 0,
    ) -> Examples:
        """Sums to be asked, for every pair of operand lengths.

        Inside the trained range only held-out sums are drawn, or any where they are shared
        (:meth:`is_shared`); beyond it, any. The sums of one pair of lengths are distinct, and do
        not depend on which other lengths are asked for. Where fewer than ``samples_per_pair``
        exist, all of them are taken.

        Raises:
          ValueError: no lengths, or a length or ``samples_per_pair`` below 1.
        """
        synthetic.require_positive("addition", samples_per_pair=samples_per_pair)
        synthetic.require_seed("addition", seed)
        for name, lengths in (("lengths_a", lengths_a), ("lengths_b", lengths_b)):
            require(len(lengths) > 0, f"addition: {name} is empty")
            for length in lengths:
                synthetic.require_positive("addition", **{name: length})

        width = longest_example(max(*lengths_a, *lengths_b))
        sums = [
            to_tokens(self._questions(lengths, samples_per_pair, seed), width)
            for lengths in itertools.product(lengths_a, lengths_b)
        ]
        cells = np.indices((len(lengths_a), len(lengths_b))).reshape(2, -1).T
        tokens, prompt_lengths, ends = map(np.concatenate, zip(*sums, strict=True))
        return Examples(
            tokens, prompt_lengths, ends, np.repeat(cells, [len(s[0]) for s in sums], axis=0)
        )

    def _questions(self, lengths: tuple[int, int], samples: int, seed: int) -> Pairs:
        """Up to ``samples`` distinct pairs of numbers of these lengths that may be asked."""
        rng = synthetic.generator(seed, EVALUATION, *lengths)
        width = max(lengths)
        divided = width <= self.max_digits and not undivided(*lengths)

        def rows(pairs: Pairs) -> np.ndarray:
            return np.hstack([*pairs.digits])

        def each(count: int) -> np.ndarray:
            return np.tile(np.array(lengths)[:, None], count)

        def pairs(rows: np.ndarray) -> Pairs:
            return Pairs(rows.reshape(-1, 2, width).swapaxes(0, 1), each(len(rows)))

        chosen = synthetic.choose_questions(
            rng,
            samples,
            number=float(number_of_sums(*lengths)),
            every=lambda: rows(every_pair(lengths)),
            draw=lambda count: rows(draw(rng, each(count), width)),
            held_out=(lambda rows: held_out(pairs(rows))) if divided else None,
        )
        return pairs(chosen)

    @property
    def scores(self) -> tuple[Score, ...]:
        """Exact match beyond the trained range, and inside it."""
        return scores_by_range({"exact_match": ""}, f"{self.max_digits} digits")

    def evaluate(
        self, trained: Trained, options: AdditionEvaluation, progress: Progress | None = None
    ) -> Grid:
        """Exact match over operand lengths: :func:`train.evaluate.exact_match_grid`."""
        return exact_match_grid(
            trained.apply,
            trained.variables,
            self,
            max_length=trained.max_length,
            progress=progress,
            **dataclasses.asdict(options),
        )

    def compare(self, results: Mapping[str, Sequence[Grid]]) -> Comparison:
        """Heat maps, and exact match by length; the sums of all seeds are counted together."""
        from train.plots import heat_maps

        grids = {name: pool(list(of_seeds)) for name, of_seeds in results.items()}
        first = require_same_questions(grids)
        return Comparison(
            title="Addition beyond the trained length",
            introduction=(
                f"Trained on sums of numbers of 1 to {first.trained} digits and asked sums of "
                f"numbers of 1 to {first.lengths.max()} digits: up to {first.counts.max()} for "
                f"each pair of operand lengths, {first.counts.sum():,} in all. An answer is right "
                "if it is to the last digit, and ends there. Inside the trained range, the sums "
                "asked were held out of training; where * or \u2022 stands, there are too few to "
                "hold any out."
            ),
            sections={
                "Exact match": f"{averages_table(grids)}\n\n"
                "![Exact match by operand lengths](exact_match.png)",
                "By length": "Percentages with their 95 % intervals, by the digits of the longer "
                f"operand.\n\n{length_table(grids)}",
            },
            figures={"exact_match.png": heat_maps(grids)},
        )

    def unseen(self, seed: int) -> list[str]:
        """Three sums: two of the trained length, and one a digit longer."""
        texts = []
        for digits, count in ((self.max_digits, 2), (self.max_digits + 1, 1)):
            sums = self.grid([digits], [digits], count, seed)
            for tokens, length in zip(sums.tokens, sums.prompt_lengths, strict=True):
                a, b = self.decode(tokens[1 : length - 1]).split("+")
                texts.append(f"{a[::-1]}+{b[::-1]}")
        return texts

    def question(self, text: str) -> np.ndarray:
        """The prompt for a sum in ordinary writing, such as ``"407+85"``.

        Spaces, a final ``=`` and leading zeros are dropped.

        Returns:
          int32 [P]: BOS, the operands with their least significant digit first, ``+`` and ``=``.

        Raises:
          ValueError: a character outside the vocabulary, or not the sum of two numbers.
        """
        a, b = _operands(text)
        prompt = VOCABULARY.encode(f"{a[::-1]}+{b[::-1]}=")
        return np.array([VOCABULARY.BOS, *prompt], np.int32)

    def solve(self, text: str) -> str:
        """The right answer to a question, in ordinary writing."""
        a, b = _operands(text)
        return str(int(a) + int(b))

    def max_answer_length(self, prompt: np.ndarray) -> int:
        """Tokens of the longest answer that sums of these operand lengths have, EOS included."""
        plus = int(np.flatnonzero(np.equal(prompt, _PLUS))[0])
        return max(plus - 1, len(prompt) - plus - 2) + 2

    def ordinary_answer(self, digits: str) -> str:
        """A sum with its most significant digit first."""
        return digits[::-1]


def _operands(text: str) -> tuple[str, str]:
    """The two operands of a question, without leading zeros."""
    VOCABULARY.encode(text)
    match = re.fullmatch(r" *([0-9]+) *\+ *([0-9]+) *=? *", text)
    if match is None:
        raise ValueError(f"expected a sum of two numbers such as '407+85'; got {text!r}")
    a, b = (operand.lstrip("0") or "0" for operand in match.groups())
    return a, b
