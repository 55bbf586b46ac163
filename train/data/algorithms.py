"""Problems of one length, trained to a length n and asked to twice that: length generalisation.

An example is a word, ``=``, and what the problem makes of the word::

    <bos> 4 0 7 1 = 1 7 0 4 <eos>          reverse
    <bos> 7 0 4 x 3 = 1 2 2 1 <eos>        multiply: 407 x 3 = 1221, least significant digit first

The problems are those by which length generalisation is usually judged (Delétang et al. 2023,
arXiv:2207.02098; Zhou et al. 2023, arXiv:2310.16028). A new one is a function of words and a line
in ``PROBLEMS``.

**Words.** Each length is equally likely in training, and within a length each word is.

**Held-out words.** A hash keeps one word in ten out of training, the same ones for every seed,
length and model. Lengths with fewer than ``SMALLEST_SPLIT`` words are too short to be divided:
there training and evaluation share all words, and results mark them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tape_jax.config import choose, require
from train.data import Comparison, Examples, Progress, Score, synthetic
from train.data.questions import (
    EVALUATION,
    VOCABULARY,
    DigitQuestions,
    Options,
    length_curves,
    scores_by_range,
)
from train.evaluate import exact_match
from train.grids import (
    Grid,
    Wording,
    averages_table,
    length_table,
    pool,
    require_same_questions,
    tally,
    text_table,
)

if TYPE_CHECKING:
    from train.runs import Trained

SMALLEST_SPLIT = 1_000
NOTHING = 10

_ZERO, _EQUALS = VOCABULARY.encode("0=")
_TOKENS = np.array([*range(_ZERO, _ZERO + NOTHING), VOCABULARY.PAD], np.uint8)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be made of a word.

    Attributes:
      task: what is asked, for reports.
      solve: words of one length, uint8 [B, P], to answers uint8 [B, A], in digits; ``NOTHING``
        stands where an answer is shorter than others.
      symbols: size of the alphabet, the digits from 0 on.
      operator: where it is given, a word is a number with its least significant digit first and no
        leading zero, followed by one digit more, the other operand; the answer is a number too.
      answers: how many answers of equal length are possible, where that does not grow with the
        length: a guess is right once in so many times.
    """

    task: str
    solve: Callable[[np.ndarray], np.ndarray]
    symbols: int = 10
    operator: str = ""
    answers: int | None = None

    def lowest(self, length: int) -> np.ndarray:
        """int [P]: the least symbol at each place of a word."""
        if not self.operator:
            return np.zeros(length, np.int64)
        return np.array([*[0] * (length - 1), int(length > 1), 0])

    def number_of_words(self, length: int) -> int:
        """How many words of a length there are."""
        return math.prod((self.symbols - self.lowest(length)).tolist())

    def every_word(self, length: int) -> np.ndarray:
        """All words of a length: uint8 [N, P]."""
        lowest = self.lowest(length)
        sizes = (self.symbols - lowest).tolist()
        places = np.indices(sizes, np.uint8).reshape(len(lowest), -1).T
        return places + lowest.astype(np.uint8)

    def draw(self, rng: np.random.Generator, count: int, length: int) -> np.ndarray:
        """Uniformly random words of a length: uint8 [count, P]."""
        lowest = self.lowest(length)
        return rng.integers(lowest, self.symbols, (count, len(lowest)), dtype=np.uint8)

    def prompt(self, words: np.ndarray) -> list[synthetic.Part]:
        """The parts of the prompts for words of one length."""
        tokens = _TOKENS[words]
        if not self.operator:
            return [VOCABULARY.BOS, tokens, _EQUALS]
        (operator,) = VOCABULARY.encode(self.operator)
        return [VOCABULARY.BOS, tokens[:, :-1], operator, tokens[:, -1:], _EQUALS]

    def write(self, words: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Words of one length with their answers; see :func:`train.data.synthetic.write`."""
        answers = [_TOKENS[self.solve(words)], VOCABULARY.EOS]
        return synthetic.write(self.prompt(words), answers, width)

    def read(self, text: str) -> np.ndarray:
        """The word of a question in ordinary writing, uint8 [P].

        Raises:
          ValueError: a character outside the vocabulary, or not a word of this problem.
        """
        VOCABULARY.encode(text)
        digits = f"[0-{self.symbols - 1}]"
        if self.operator:
            operator = re.escape(self.operator)
            match = re.fullmatch(rf" *({digits}+) *{operator} *({digits}) *=? *", text)
            expected = f"a number and a digit such as 407{self.operator}3"
        else:
            match = re.fullmatch(rf" *({digits}+) *=? *", text)
            expected = f"a word of digits from 0 to {self.symbols - 1}"
        if match is None:
            raise ValueError(f"expected {expected}; got {text!r}")
        word = match[1]
        if self.operator:
            word = (word.lstrip("0") or "0")[::-1] + match[2]
        return np.array([int(c) for c in word], np.uint8)

    def ordinary(self, word: np.ndarray) -> str:
        """A word as a question in ordinary writing."""
        text = "".join(map(str, word.tolist()))
        return f"{text[-2::-1]}{self.operator}{text[-1]}" if self.operator else text


def multiply(words: np.ndarray) -> np.ndarray:
    """The product of a number and a digit, least significant digit first."""
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
    """How a problem is judged.

    Attributes:
      longest: the greatest length asked for; None: twice the trained one.
      samples_per_length: questions of each length.
      shapes: how many sequence lengths to compile for.
    """

    samples_per_length: int = 100
    shapes: int = 2


@dataclasses.dataclass(frozen=True)
class Algorithm(DigitQuestions):
    """One of ``PROBLEMS`` (the module's text describes the form and the held-out words).

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
        """What is asked."""
        return PROBLEMS[self.problem]

    def width(self, length: int) -> int:
        """Tokens of the longest example of a length, BOS and EOS included."""
        words = np.full((1, len(self.definition.lowest(length))), self.definition.symbols - 1)
        return self.definition.write(words.astype(np.uint8), 3 * length + 8)[2].item()

    @property
    def sequence_length(self) -> int:
        """T: tokens of the longest training example, less one for the next-token shift."""
        return self.width(self.max_length) - 1

    def is_shared(self, length: int) -> bool:
        """Whether words of this length may be both trained on and asked in evaluation."""
        few = self.definition.number_of_words(length) < SMALLEST_SPLIT
        return few and length <= self.max_length

    def training_examples(
        self, rng: np.random.Generator, size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Words of equally likely lengths, none of them held out, with their answers."""
        lengths, width = rng.integers(1, self.max_length + 1, size), self.sequence_length + 1
        tokens = np.zeros((size, width), np.uint8)
        prompt_lengths, ends = np.zeros((2, size), np.int64)
        for length in np.unique(lengths):
            rows = np.flatnonzero(lengths == length)
            words = self.definition.draw(rng, len(rows), length)
            if not self.is_shared(length):
                while (redo := np.flatnonzero(held_out(words))).size:
                    words[redo] = self.definition.draw(rng, len(redo), length)
            tokens[rows], prompt_lengths[rows], ends[rows] = self.definition.write(words, width)
        return tokens, prompt_lengths, ends

    def words(self, length: int, samples: int, seed: int) -> np.ndarray:
        """Up to ``samples`` distinct words of a length that may be asked: uint8 [N, P].

        Inside the trained range only held-out words are drawn, or any where they are shared
        (:meth:`is_shared`); beyond it, any.
        """
        problem, rng = self.definition, synthetic.generator(seed, EVALUATION, length)
        divided = length <= self.max_length and not self.is_shared(length)
        return synthetic.choose_questions(
            rng,
            samples,
            number=problem.number_of_words(length),
            every=lambda: problem.every_word(length),
            draw=lambda count: problem.draw(rng, count, length),
            held_out=held_out if divided else None,
        )

    def line(self, lengths: Sequence[int], samples_per_length: int, seed: int = 0) -> Examples:
        """Questions of each length, whose cells are 0 and the number of the length.

        Those of one length do not depend on which other lengths are asked for.

        Raises:
          ValueError: no lengths, or a length or ``samples_per_length`` below 1.
        """
        synthetic.require_positive(self.kind, samples_per_length=samples_per_length)
        synthetic.require_seed(self.kind, seed)
        require(len(lengths) > 0, f"{self.kind}: lengths is empty")
        for length in lengths:
            synthetic.require_positive(self.kind, length=length)
        width = self.width(max(lengths))
        asked = [
            self.definition.write(self.words(length, samples_per_length, seed), width)
            for length in lengths
        ]
        tokens, prompt_lengths, ends = map(np.concatenate, zip(*asked, strict=True))
        numbers = np.repeat(np.arange(len(lengths)), [len(part[0]) for part in asked])
        cells = np.stack([np.zeros_like(numbers), numbers], axis=1)
        return Examples(tokens, prompt_lengths, ends, cells)

    @property
    def scores(self) -> tuple[Score, ...]:
        """Exact match beyond the trained range, and inside it."""
        return scores_by_range({"exact_match": ""}, f"length {self.max_length}")

    @property
    def wording(self) -> Wording:
        """What tables and figures call the words."""
        return Wording(
            title=f"{self.problem.replace('_', ' ').capitalize()}: exact match by length",
            rows="",
            columns="length of the word, symbols",
            unit="length",
            questions="words",
            cells="lengths",
            trained=f"1 to {self.max_length} symbols",
        )

    def evaluate(
        self, trained: Trained, options: AlgorithmEvaluation, progress: Progress | None = None
    ) -> Grid:
        """Exact match by length: :func:`train.evaluate.exact_match`.

        What is too long for the model is not asked.
        """
        longest = 2 * self.max_length if options.longest is None else options.longest
        lengths, limit = tuple(range(1, longest + 1)), trained.max_length
        able = [n for n in lengths if limit is None or self.width(n) - 1 <= limit]
        require(bool(able), f"{self.kind}: the model accepts {limit} tokens: too few to be asked")
        examples = self.line(able, options.samples_per_length, options.seed)
        right = exact_match(
            trained.apply,
            trained.variables,
            examples,
            batch_size=options.batch_size,
            shapes=options.shapes,
            progress=progress,
        )
        return Grid(
            rows=(1,),
            columns=lengths,
            lengths=np.array([lengths]),
            **tally(examples.cells, right, (1, longest)),
            shared=np.array([[self.is_shared(n) for n in lengths]]),
            trained=self.max_length,
            wording=self.wording,
        )

    def compare(self, results: Mapping[str, Sequence[Grid]]) -> Comparison:
        """Curves and exact match by length; the words of all seeds are counted together."""
        grids = {name: pool(list(of_seeds)) for name, of_seeds in results.items()}
        first = next(iter(grids.values()))
        guess = self.definition.answers
        chance = f" A guess is right in {100 / guess:.0f} % of cases." if guess else ""
        return Comparison(
            title=f"{self.problem.replace('_', ' ').capitalize()} beyond the trained length",
            introduction=(
                f"Asked for {self.definition.task}. Trained on lengths 1 to {first.trained}, and "
                f"asked for 1 to {first.columns[-1]}: up to {first.counts.max()} words for each "
                f"length, {first.counts.sum():,} in all. An answer is right if it is to the last "
                f"symbol, and ends there.{chance} Inside the trained range, the words asked were "
                "held out of training; where * stands, there are too few to hold any out."
            ),
            sections={
                "Exact match": f"{averages_table(grids)}\n\n"
                "![Exact match by length](exact_match.png)",
                "By length": "Percentages with their 95 % intervals.\n\n" + length_table(grids),
            },
            figures={
                "exact_match.png": length_curves(
                    {"": grids}, title=first.wording.title, y_label="words answered right, %"
                )
            },
        )

    def unseen(self, seed: int) -> list[str]:
        """Two words of the trained length, and one of the next."""
        n = self.max_length
        words = [*self.words(n, 2, seed), *self.words(n + 1, 1, seed)]
        return [self.definition.ordinary(word) for word in words]

    def question(self, text: str) -> np.ndarray:
        """The prompt for a word in ordinary writing, such as ``"40713"`` or ``"407x3"``.

        Returns:
          int32 [P]: BOS, the word as in training, and ``=``.

        Raises:
          ValueError: a character outside the vocabulary, or not a word of this problem.
        """
        parts = self.definition.prompt(self.definition.read(text)[None])
        return np.concatenate([np.ravel(part) for part in parts]).astype(np.int32)

    def solve(self, text: str) -> str:
        """The right answer to a question, in ordinary writing."""
        (answer,) = self.definition.solve(self.definition.read(text)[None])
        return self.ordinary_answer("".join(str(s) for s in answer.tolist() if s != NOTHING))

    def max_answer_length(self, prompt: np.ndarray) -> int:
        """Tokens of the longest answer to words of this length, EOS included."""
        extra = 4 if self.definition.operator else 2
        return self.width(len(prompt) - extra) - len(prompt)

    def ordinary_answer(self, digits: str) -> str:
        """An answer as it is usually written: numbers with the most significant digit first."""
        return digits[::-1] if self.definition.operator else digits


def held_out(words: np.ndarray) -> np.ndarray:
    """bool [B]: whether a word, uint8 [B, P], is in the tenth kept out of training."""
    # Zeros count too: a word is not the same as a longer one.
    return synthetic.is_held_out(synthetic.fingerprints(words + 1))


def suite_table(results: Mapping[str, Mapping[str, Sequence[Grid]]]) -> str:
    """Exact match of all problems, inside and beyond the trained length, a column for each name.

    Args:
      results: for each problem the results by name (the encodings'), one for each seed.

    Raises:
      ValueError: no results, names that are not those of the first problem, or results of one
        problem that are of different questions.
    """
    require(len(results) > 0, "no problems to report")
    names = list(next(iter(results.values())))
    rows = []
    for problem, by_name in results.items():
        require(
            list(by_name) == names,
            f"the problem {problem!r} has results of {list(by_name)}, the first one of {names}",
        )
        grids = {name: pool(list(of_seeds)) for name, of_seeds in by_name.items()}
        trained = require_same_questions(grids).trained
        for where, label in (("inside", f"1 to {trained}"), ("outside", f"beyond {trained}")):
            rows.append([problem, label, *(str(getattr(g, where)) for g in grids.values())])
    return text_table(["problem", "length", *(f"{name}, %" for name in names)], rows)
