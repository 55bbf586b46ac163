"""Word problems of finite groups: after every element of a word, what is the product so far?

Following a state through a sequence takes more than a constant number of parallel steps, if the
group is not solvable (Merrill et al. 2024, arXiv:2404.08819: "The Illusion of State in State-Space
Models"; by Barrington's theorem the word problem of A5 is complete for NC1). The groups are theirs:
Z60, which is commutative, A4 x Z5, which is solvable, and A5, which is not, have 60 elements each;
S5 has 120.

A sequence is a start symbol and a word ``g_1 ... g_n`` of uniformly random elements; the target at
``g_i`` is the product ``g_1 ... g_i``, so that a word of the greatest length trains all shorter
ones too. Elements are numbered; 0 is the identity. Without the start symbol, a model that keeps
positions out of the embeddings could not tell ``g g`` from ``g``: attention over equal values is
their value, however it weighs them.

**Generators.** Words may also be of two or three fixed elements that generate the group, in place
of all its elements. Their word problem stays as hard: each element is a product of generators, so
words of all elements become words of generators that are longer by a constant factor. Yet a single
step is one of 60 times 3 products, not of 60 times 60, and is soon learned.

**Held-out words.** A hash of a word's beginning keeps one word in ten out of training, the same
ones for every seed, length and model. The beginning has as many elements, ``HASHED`` at least, as
give it ``SMALLEST_SPLIT`` forms: 3 of all elements, 9 of three generators, 14 of two. Evaluation
asks for these words only, so that all words of that many elements and more are new to the model;
shorter ones are too few to be divided.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax.config import choose, require
from train.data import Comparison, Progress, Score, synthetic
from train.data.questions import (
    EVALUATION,
    TRAINING,
    Options,
    Questions,
    length_curves,
    scores_by_range,
)
from train.grids import (
    Grid,
    Wording,
    averages_table,
    length_table,
    pool,
    read_record,
    require_same_questions,
    text_table,
)

if TYPE_CHECKING:
    from train.evaluate import Apply
    from train.runs import Trained

HASHED, SMALLEST_SPLIT = 3, 10_000
FORMAT = "tape-jax word problem, version 1"

Permutation = tuple[int, ...]


def permutation(size: int, *cycles: Sequence[int]) -> Permutation:
    """The permutation of 0..size - 1 that sends each point of a cycle to the next one."""
    image = {a: b for cycle in cycles for a, b in itertools.pairwise((*cycle, cycle[0]))}
    return tuple(image.get(i, i) for i in range(size))


# Each group by permutations, the first two of which generate it: of orders 60 and 12, 15 and 3, 5
# and 3, 5 and 2.
GROUPS: dict[str, tuple[Permutation, ...]] = {
    "Z60": tuple(tuple((i + step) % 60 for i in range(60)) for step in (1, 5, 12)),
    "A4xZ5": (
        permutation(9, (0, 1, 2), range(4, 9)),
        permutation(9, (1, 2, 3)),
        permutation(9, (0, 1), (2, 3)),
    ),
    "A5": (
        permutation(5, range(5)),
        permutation(5, (0, 1, 2)),
        permutation(5, (0, 1), (2, 3)),
    ),
    "S5": (permutation(5, range(5)), permutation(5, (0, 1)), permutation(5, (2, 3, 4))),
}


@functools.cache
def multiplication_table(name: str) -> np.ndarray:
    """``table[a, b]``, the number of the product ``a b``: integers [order, order].

    A product of permutations applies the right one first. Elements are numbered in the order of
    their images, which makes the identity 0.

    Raises:
      ValueError: an unknown group.
    """
    number = _numbers(name)
    images = np.array(list(number))
    table = np.array([[number[tuple(row)] for row in a[images].tolist()] for a in images])
    table.flags.writeable = False
    return table


@functools.cache
def _numbers(name: str) -> dict[Permutation, int]:
    """The numbers of the elements of a group, ascending; ValueError for an unknown one."""
    choose("group", name, GROUPS)
    generators = [np.array(g) for g in GROUPS[name]]
    elements = fresh = {tuple(range(len(generators[0])))}
    while fresh:
        products = {tuple(g[list(element)].tolist()) for element in fresh for g in generators}
        fresh = products - elements
        elements = elements | fresh
    return {element: i for i, element in enumerate(sorted(elements))}


def running_products(table: np.ndarray, words: np.ndarray) -> np.ndarray:
    """The products of all beginnings of words [..., T], in their type."""
    products = words.copy()
    for place in range(1, words.shape[-1]):
        products[..., place] = table[products[..., place - 1], words[..., place]]
    return products


@dataclasses.dataclass(frozen=True)
class WordEvaluation(Options):
    """How a word problem is judged.

    Attributes:
      longest: elements of the longest words; None: four times the trained length.
      samples: words of each of the two lengths that are read, the trained and the longest.
    """

    samples: int = 500


@dataclasses.dataclass(frozen=True, eq=False)
class WordResult:
    """Accuracy by length.

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
    def from_json(cls, record: Any) -> WordResult:
        """The result that :meth:`to_json` described.

        Raises:
          ValueError: ``record`` is something else.
        """
        values = read_record(record, cls, FORMAT)
        return cls(**{name: Grid.from_json(value) for name, value in values.items()})


@dataclasses.dataclass(frozen=True)
class Words(Questions):
    """The word problem of a group (the module's text describes it).

    Attributes:
      group: one of ``GROUPS``.
      max_length: n; words of n elements are trained, and their beginnings with them.
      generators: words are of the first two or three permutations of ``GROUPS``; None: of all
        elements. Products are any elements all the same.
    """

    kind: ClassVar[str] = "words"
    Evaluation: ClassVar[type] = WordEvaluation

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
        """Of multiplication."""
        return multiplication_table(self.group)

    @property
    def order(self) -> int:
        """Number of elements; the id of the start symbol."""
        return len(self.table)

    @property
    def symbols(self) -> np.ndarray:
        """The elements that words are made of, integers [S]."""
        if self.generators is None:
            return np.arange(self.order)
        numbers = _numbers(self.group)
        return np.array([numbers[g] for g in GROUPS[self.group][: self.generators]])

    @property
    def alphabet(self) -> str:
        """What words are made of, in words."""
        what = "elements" if self.generators is None else "generators"
        return f"{what} of {self.group}"

    @property
    def hashed(self) -> int:
        """How many of its first elements decide whether a word is held out of training."""
        symbols, length = len(self.symbols), HASHED
        while symbols**length < SMALLEST_SPLIT:
            length += 1
        return length

    @property
    def vocab_size(self) -> int:
        """Number of token ids: the elements, and the start symbol after them."""
        return self.order + 1

    @property
    def sequence_length(self) -> int:
        """T: elements of a training word, and the start symbol."""
        return self.max_length + 1

    def draw(
        self, rng: np.random.Generator, count: int, length: int, *, to_ask: bool
    ) -> np.ndarray:
        """Random words, all of them held out of training or none: int32 [count, length].

        Words shorter than :attr:`hashed` are not divided.
        """
        symbols, hashed = self.symbols.astype(np.int32), self.hashed
        words = symbols[rng.integers(len(symbols), size=(count, length), dtype=np.int32)]
        if length >= hashed:
            while (redo := np.flatnonzero(held_out(words, hashed) != to_ask)).size:
                words[redo, :hashed] = symbols[rng.integers(len(symbols), size=(redo.size, hashed))]
        return words

    def batch(self, seed: int, index: int, size: int) -> synthetic.Batch:
        """Batch ``index`` of the stream of ``seed``: a pure function of its arguments.

        Returns:
          ``inputs``, the start symbol and elements, and ``targets``, the products so far, int32
          [size, T]; and ``weights``, float32 [size, T], 1 but at the start symbol.
        """
        rng = synthetic.generator(seed, TRAINING, index)
        words = self.draw(rng, size, self.max_length, to_ask=False)
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

    def words(self, length: int, samples: int, seed: int) -> np.ndarray:
        """Words that are held out of training: int32 [samples, length]."""
        synthetic.require_positive(self.kind, length=length, samples=samples)
        synthetic.require_seed(self.kind, seed)
        rng = synthetic.generator(seed, EVALUATION, length)
        return self.draw(rng, samples, length, to_ask=True)

    @property
    def scores(self) -> tuple[Score, ...]:
        """Whole words and single products, beyond the trained range and inside it."""
        measures = {"words": "whole words ", "products": "products "}
        return scores_by_range(measures, str(self.max_length))

    @property
    def wording(self) -> Wording:
        """What tables and figures call the words."""
        return Wording(
            title=f"Word problem of {self.title}",
            rows="",
            columns="elements of the word",
            unit="elements",
            questions="words",
            cells="lengths",
            trained=f"1 to {self.max_length} elements",
        )

    def evaluate(
        self, trained: Trained, options: WordEvaluation, progress: Progress | None = None
    ) -> WordResult:
        """Accuracy at every length, from words of the trained length and of the longest.

        A causal model says of a word's beginning what it would say without the rest. Lengths in the
        trained range are read from words of the trained length all the same, since some encodings
        depend on the length of the sequence. What is too long for the model is not asked.
        """
        n = self.max_length
        longest = 4 * n if options.longest is None else options.longest
        limit = longest if trained.max_length is None else trained.max_length - 1
        reads = list(dict.fromkeys(min(x, longest, limit) for x in (n, longest)))
        correct, counts = np.zeros((2, longest), np.int64), np.zeros((1, longest), np.int64)
        total, start = options.samples * len(reads), 0
        for number, length in enumerate(reads):
            words = self.words(length, options.samples, options.seed)
            right = _right(
                trained.apply,
                trained.variables,
                self.begun(words),
                running_products(self.table, words),
                options.batch_size,
                progress and _after(progress, number * options.samples, total),
            )
            whole = np.logical_and.accumulate(right, axis=1)
            for row, outcomes in enumerate((whole, right)):
                correct[row, start:length] = outcomes.sum(axis=0)[start:]
            counts[0, start:length] = options.samples
            start = length

        def grid(row: int) -> Grid:
            lengths = np.arange(1, longest + 1)
            return Grid(
                rows=(1,),
                columns=tuple(lengths.tolist()),
                lengths=lengths[None],
                correct=correct[row : row + 1],
                counts=counts,
                shared=(lengths <= min(n, self.hashed - 1))[None],
                trained=n,
                wording=self.wording,
            )

        return WordResult(grid(0), grid(1))

    def read_result(self, record: Any) -> WordResult:
        """The result that ``to_json`` described."""
        return WordResult.from_json(record)

    def compare(self, results: Mapping[str, Sequence[WordResult]]) -> Comparison:
        """Curves and accuracies by length; the words of all seeds are counted together."""
        words, products = (
            {name: pool([getattr(r, part) for r in seeds]) for name, seeds in results.items()}
            for part in ("words", "products")
        )
        first = next(iter(words.values()))
        return Comparison(
            title=f"The word problem of {self.title} beyond the trained length",
            introduction=(
                f"Trained on words of {first.trained} {self.alphabet}, with the product so far as "
                f"the target at every place, and asked for words of up to "
                f"{first.columns[-1]}. A word is right if all its products are; a guessed product "
                f"is right in {100 / self.order:.1f} % of cases. The words asked were held out of "
                f"training; where * stands, there are too few to hold any out."
            ),
            sections={
                "Whole words": averages_table(words) + "\n\n![Accuracy by length](accuracy.png)",
                "Products": averages_table(products),
                "Whole words by length": "Percentages with their 95 % intervals.\n\n"
                + length_table(words),
            },
            figures={
                "accuracy.png": length_curves(
                    {"all products right": words, "this product right": products},
                    title=first.wording.title,
                    y_label="right, %",
                )
            },
        )

    def unseen(self, seed: int) -> list[str]:
        """Two words of the trained length, and one an element longer."""
        n = self.max_length
        words = [*self.words(n, 2, seed), *self.words(n + 1, 1, seed)]
        return [self.decode(word) for word in words]

    def question(self, text: str) -> np.ndarray:
        """A word from the numbers of its elements, such as ``"17 3 58"``.

        Returns:
          int32 [P]: the start symbol and the elements.

        Raises:
          ValueError: not numbers of elements.
        """
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
        return np.array([self.order, *numbers], np.int32)

    def solve(self, text: str) -> str:
        """The number of the product of a word."""
        return str(running_products(self.table, self.question(text)[1:])[-1])

    def max_answer_length(self, prompt: np.ndarray) -> int:
        """One token: the product."""
        return 1

    def read_answer(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The number of the product."""
        return self.decode(tokens[:1])

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The numbers of elements; the start symbol appears as ``<bos>``."""
        return " ".join("<bos>" if t == self.order else str(int(t)) for t in tokens)


def held_out(words: np.ndarray, hashed: int = HASHED) -> np.ndarray:
    """bool [B]: whether a word [B, T >= hashed] is in the tenth kept out of training."""
    return synthetic.is_held_out(synthetic.fingerprints(words[:, :hashed]))


def _right(
    apply: Apply,
    variables: Any,
    words: np.ndarray,
    targets: np.ndarray,
    batch_size: int,
    progress: Progress | None,
) -> np.ndarray:
    """Whether the most probable token is the target, at every place: bool [B, T].

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


def _after(progress: Progress, before: int, total: int) -> Progress:
    """Reports a part of the work, ``before`` of the ``total`` being done already."""
    return lambda done, _: progress(before + done, total)


def smallest_depths(
    results: Mapping[str, Mapping[int, Sequence[WordResult]]], *, solved: float = 0.9
) -> str:
    """A table of the smallest depth that solves each length, a column for each name.

    What counts is whether a depth can do it at all: it solves a length if with its best seed at
    least the share ``solved`` of words is right to the last product. The table ends with the first
    length from which on no depth solves any.

    Args:
      results: for each name (the encoding's) the results by number of layers, one for each seed.
      solved: in (0, 1].

    Raises:
      ValueError: nothing to report, results of different questions, or ``solved`` out of range.
    """
    require(0 < solved <= 1, f"smallest depths: solved must be in (0, 1]; got {solved}")
    grids = {
        f"{name}, {depth} layers, seed {i}": result.words
        for name, by_depth in results.items()
        for depth, seeds in by_depth.items()
        for i, result in enumerate(seeds)
    }
    first = require_same_questions(grids)

    def smallest(by_depth: Mapping[int, Sequence[WordResult]], column: int) -> int | None:
        able = (
            depth
            for depth, seeds in by_depth.items()
            if max((r.words.accuracy[0, column] for r in seeds), default=0.0) >= solved
        )
        return min(able, default=None)

    depths = [
        [smallest(by_depth, column) for by_depth in results.values()]
        for column in range(len(first.columns))
    ]
    while len(depths) > 1 and not any(depths[-1] + depths[-2]):
        depths.pop()

    def say(depth: int | None, tried: Iterable[int]) -> str:
        if depth is None:
            return f"more than {max(tried)}"
        return f"at most {depth}" if depth == min(tried) > 1 else str(depth)

    rows = [
        [
            str(length),
            "trained" if length <= first.trained else "beyond",
            *map(say, row, results.values()),
        ]
        for length, row in zip(first.columns, depths, strict=False)
    ]
    return text_table([first.wording.unit, "range", *(f"{name}, layers" for name in results)], rows)
