"""Word problems of finite groups: after every element of a word, what is the product so far?

Following a state through a sequence takes more than a constant number of parallel steps, if the
group is not solvable (Merrill et al. 2024, arXiv:2404.08819: "The Illusion of State in State-Space
Models"; by Barrington's theorem the word problem of A5 is complete for NC1). The groups are theirs
(:mod:`research.tasks.groups`).

A sequence is a start symbol and a word ``g_1 ... g_n`` of uniformly random elements; the target at
``g_i`` is the product ``g_1 ... g_i``, so that a word of the greatest length trains all shorter
ones too. Elements are numbered; 0 is the identity. Without the start symbol, a model that keeps
positions out of the embeddings could not tell ``g g`` from ``g``: attention over equal values is
their value, however it weighs them.

**Generators.** Words may also consist of two or three fixed elements that generate the group,
instead of all its elements. Their word problem stays as hard: each element is a product of
generators, so words of all elements become words of generators that are longer by a constant
factor. Yet a single step is one of 60 times 3 products, not of 60 times 60, and is soon learned.

**Held-out words.** A hash of a word's beginning keeps one word in ten out of training, the same
ones for every seed, length and model. The beginning is long enough for 10,000 forms, and has
``HASHED`` elements at least: 3 of all elements, 9 of three generators, 14 of two. Evaluation asks
only for these words, so all words of that many elements and more are new to the model; shorter ones
are too few to be divided.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from research.tasks.groups import GROUPS, element_numbers, multiplication_table, running_products
from train.checks import choose, require
from train.data import synthetic
from train.evaluation import Progress, Trained, part_of
from train.evaluation.grids import Grid, Wording, length_table, read_record
from train.tasks import Score
from train.tasks.questions import Options, Questions, QuestionTask, Written, scores_by_range

if TYPE_CHECKING:
    from train.evaluation.exact_match import Apply

HASHED = 3
FORMAT = "tape-jax word problem, version 1"


@dataclasses.dataclass(frozen=True)
class WordEvaluation(Options):
    """The options for evaluating a word problem.

    Attributes:
      longest: elements of the longest words; None: four times the trained length.
      samples: words of each of the two lengths that are read, the trained and the longest.
    """

    samples: int = 500


@dataclasses.dataclass(frozen=True, eq=False)
class WordResult:
    """The accuracies of whole words and of products, by length.

    Attributes:
      words: whether all products up to a length are right.
      products: whether the product at a length is right.
    """

    words: Grid
    products: Grid

    def summary(self) -> dict[str, float]:
        """The averages over lengths, as scalars for a log."""
        parts = {"words": self.words, "products": self.products}
        return {
            key.replace("exact_match", name): value
            for name, grid in parts.items()
            for key, value in grid.summary().items()
        }

    def table(self) -> str:
        """Both accuracies by length, as text."""
        return length_table({"whole words": self.words, "products": self.products})

    def to_json(self) -> dict[str, Any]:
        """The result in JSON types."""
        parts = {"words": self.words.to_json(), "products": self.products.to_json()}
        return {"format": FORMAT, **parts}

    @classmethod
    def from_json(cls, record: Any, wording: Wording) -> WordResult:
        """The result that :meth:`to_json` described, with the wording of its questions.

        Raises:
          ValueError: ``record`` is something else.
        """
        values = read_record(record, cls, FORMAT)
        return cls(**{name: Grid.from_json(value, wording) for name, value in values.items()})


@dataclasses.dataclass(frozen=True)
class Words(QuestionTask):
    """The word problem of a group (the module's text describes it).

    The symbols of a question are its elements, int32 [1, B, length].

    Attributes:
      group: one of ``GROUPS``.
      max_length: n; words of n elements are trained, and their beginnings with them.
      generators: words are of the first two or three permutations of ``GROUPS``; None: of all
        elements. Products can always be any elements.
    """

    kind: ClassVar[str] = "words"
    Evaluation: ClassVar[type] = WordEvaluation
    reach: ClassVar[int] = 4
    smallest_split: ClassVar[int] = 10_000

    group: str = "A5"
    max_length: int = 16
    generators: int | None = None

    def __post_init__(self):
        choose("group", self.group, GROUPS)
        synthetic.require_positive(self.kind, max_length=self.max_length)
        require(
            self.generators in (None, 2, 3),
            f"{self.kind}: generators must be 2 or 3, or None for words of all elements; got "
            f"{self.generators!r}",
        )

    @property
    def title(self) -> str:
        """The group and what its words are of."""
        count = self.generators
        return self.group if count is None else f"{self.group} with {count} generators"

    @property
    def table(self) -> np.ndarray:
        """The multiplication table of the group."""
        return multiplication_table(self.group)

    @property
    def order(self) -> int:
        """The number of elements, which is also the id of the start symbol."""
        return len(self.table)

    @property
    def symbols(self) -> np.ndarray:
        """The elements that words are made of, integers [S]."""
        if self.generators is None:
            return np.arange(self.order)
        numbers = element_numbers(self.group)
        return np.array([numbers[g] for g in GROUPS[self.group][: self.generators]])

    @property
    def alphabet(self) -> str:
        """The name of the symbols that words are made of."""
        what = "elements" if self.generators is None else "generators"
        return f"{what} of {self.group}"

    @property
    def beginning(self) -> int:
        """The number of first elements that decide whether a word is held out of training."""
        symbols, length = len(self.symbols), HASHED
        while symbols**length < self.smallest_split:
            length += 1
        return length

    @property
    def vocab_size(self) -> int:
        """The number of token ids: the elements, and the start symbol after them."""
        return self.order + 1

    @property
    def trained_length(self) -> int:
        """The number of elements of trained words, n."""
        return self.max_length

    def width(self, *lengths: int) -> int:
        """Tokens of a word, with the start symbol and the product."""
        return sum(lengths) + 2

    def is_divided(self, *lengths: Any) -> Any:
        """Returns whether words of a length have all elements that are hashed."""
        (length,) = lengths
        return length >= self.beginning

    def draw(self, rng: np.random.Generator, lengths: np.ndarray, longest: int) -> Questions:
        """Draws words of one length, of uniformly random symbols."""
        symbols, size = self.symbols.astype(np.int32), (lengths.shape[1], lengths[0, 0].item())
        words = symbols[rng.integers(len(symbols), size=size, dtype=np.int32)]
        return Questions(words[None], lengths)

    def draw_again(self, rng: np.random.Generator, questions: Questions, longest: int) -> Questions:
        """Returns the same words with other beginnings."""
        drawn, size = questions.symbols.copy(), (questions.lengths.shape[1], self.beginning)
        drawn[0, :, : self.beginning] = self.symbols[rng.integers(len(self.symbols), size=size)]
        return Questions(drawn, questions.lengths)

    def hashed(self, questions: Questions) -> np.ndarray:
        """Returns the beginnings of words."""
        return questions.symbols[..., : self.beginning]

    def choose(self, rng: np.random.Generator, lengths: Sequence[int], samples: int) -> Questions:
        """Draws held-out words, beyond the trained range too; a word may come twice."""
        each = np.tile(np.array(lengths)[:, None], samples)
        return self.sample(rng, each, max(lengths), to_ask=True)

    def examples_to_learn(self, rng: np.random.Generator, size: int) -> synthetic.Batch:
        """Words of n elements, with the product so far as the target at every place.

        Only the start symbol has the weight 0.
        """
        n = self.max_length
        (words,) = self.sample(rng, np.full((1, size), n), n).symbols
        weights = np.ones((size, self.sequence_length), np.float32)
        weights[:, 0] = 0
        return {
            "inputs": self.begun(words),
            "targets": self.begun(running_products(self.table, words)),
            "weights": weights,
        }

    def begun(self, words: np.ndarray) -> np.ndarray:
        """Words [B, T] after the start symbol: [B, T + 1]."""
        return np.pad(words, ((0, 0), (1, 0)), constant_values=self.order)

    def write(self, questions: Questions, width: int) -> Written:
        """Words after the start symbol, answered by their products."""
        (words,) = questions.symbols
        count, length = words.shape
        tokens = np.zeros((count, width), np.int32)
        tokens[:, : length + 1] = self.begun(words)
        tokens[:, length + 1] = running_products(self.table, words)[:, -1]
        return tokens, np.full(count, length + 1), np.full(count, length + 2)

    def ordinary(self, questions: Questions) -> list[str]:
        """Words by the numbers of their elements, such as ``"17 3 58"``."""
        return [self.decode(word) for word in questions.symbols[0]]

    def read(self, text: str) -> Questions:
        """Reads a word from the numbers of its elements."""
        symbols = self.symbols.tolist()
        numbers = [int(x) for x in text.split()] if re.fullmatch(r"[0-9 ]+", text) else []
        if self.generators is None:
            expected = f"numbers from 0 to {symbols[-1]}"
        else:
            expected = f"the numbers {', '.join(map(str, symbols))}"
        require(
            bool(numbers) and set(numbers) <= set(symbols),
            f"expected {expected} of {self.alphabet}, such as '{symbols[1]} {symbols[0]}'; got "
            f"{text!r}",
        )
        return Questions(np.array([[numbers]], np.int32), np.array([[len(numbers)]]))

    def read_answer(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Returns the number of the product."""
        return self.decode(tokens[:1])

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The numbers of elements; the start symbol appears as ``<bos>``."""
        return " ".join("<bos>" if t == self.order else str(int(t)) for t in tokens)

    @property
    def scores(self) -> tuple[Score, ...]:
        """Whole words and single products, beyond the trained range and inside it."""
        measures = {"words": "whole words ", "products": "products "}
        return scores_by_range(measures, str(self.max_length))

    @property
    def wording(self) -> Wording:
        """The terms for the words in tables and figures."""
        return Wording(
            title=f"Word problem of {self.title}",
            rows="",
            columns="elements of the word",
            unit="elements",
            questions="words",
            cells="lengths",
            trained=f"1 to {self.max_length} elements",
        )

    @property
    def heading(self) -> str:
        """The title of a report."""
        return f"The word problem of {self.title} beyond the trained length"

    def introduction(self, grid: Grid) -> str:
        """Returns the paragraph of a report on training and evaluation."""
        return (
            f"Trained on words of {grid.trained} {self.alphabet}, with the product so far as "
            f"the target at every place, and asked for words of up to "
            f"{grid.columns[-1]}. A word is right if all its products are; a guessed product "
            f"is right in {100 / self.order:.1f} % of cases."
        )

    def evaluate(
        self, trained: Trained, options: WordEvaluation, progress: Progress | None = None
    ) -> WordResult:
        """Returns accuracy at every length, from words of the trained length and of the longest.

        A causal model answers a word's beginning as it would without the rest. Lengths in the
        trained range are still read from words of the trained length, since some encodings depend
        on the length of the sequence. Words too long for the model are not asked.

        Raises:
          ValueError: the longest length was given, and is too long.
        """
        self.require_room(options, trained.max_length)
        longest = self.longest_asked(options)
        limit = longest if trained.max_length is None else trained.max_length - 1
        reads = list(dict.fromkeys(min(x, longest, limit) for x in (self.max_length, longest)))
        correct, counts = np.zeros((2, longest), np.int64), np.zeros((1, longest), np.int64)
        total, start = options.samples * len(reads), 0
        for number, length in enumerate(reads):
            (words,) = self.ask([length], options.samples, options.seed).symbols
            right = _right(
                trained.apply,
                trained.variables,
                self.begun(words),
                running_products(self.table, words),
                options.batch_size,
                part_of(progress, number * options.samples, total),
            )
            whole = np.logical_and.accumulate(right, axis=1)
            for row, outcomes in enumerate((whole, right)):
                correct[row, start:length] = outcomes.sum(axis=0)[start:]
            counts[0, start:length] = options.samples
            start = length
        axes = self.axes(options)
        return WordResult(*(self.grid(axes, right[None], counts) for right in correct))

    def read_result(self, record: Any) -> WordResult:
        """Returns the result that ``to_json`` described."""
        return WordResult.from_json(record, self.wording)


def _right(
    apply: Apply,
    variables: Any,
    words: np.ndarray,
    targets: np.ndarray,
    batch_size: int,
    progress: Progress | None,
) -> np.ndarray:
    """Returns whether the most probable token is the target, at every place: bool [B, T].

    ``words`` are [B, T + 1] with the start symbol, ``targets`` [B, T].
    """

    @jax.jit
    def predict(variables: Any, words: jax.Array) -> jax.Array:
        return jnp.argmax(apply(variables, words)[:, 1:], axis=-1)

    parts, size = [], min(batch_size, len(words))
    for start in range(0, len(words), size):
        part = words[start : start + size]
        filled = np.pad(part, ((0, size - len(part)), (0, 0)))
        parts.append(np.asarray(predict(variables, filled))[: len(part)])
        if progress is not None:
            progress(start + len(part), len(words))
    return np.concatenate(parts) == targets
