"""Multi-query recall: which value came with the key x? (Arora et al. 2023, arXiv:2312.04927.)

A text has pairs of distinct keys and random values, then keys::

    c 3 a 1 x 8 a? x?        a came with 1, x with 8

**Why.** It asks only for content: the only place that matters is the one just after the key. Every
encoding that tells neighbours apart should succeed. One that fails here, or at more pairs than were
trained, disturbs the search by content, for example by a decay that forgets. So keys are asked
about from the last to the first of a text.

**Held out.** A hash of key and value keeps one combination in ten out of training.
"""

from __future__ import annotations

import dataclasses
import functools
import string
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from train.checks import require
from train.data import synthetic
from train.tasks.places import Called, PlaceTask, Texts, with_queries
from train.tasks.questions import Options

LETTERS = string.ascii_letters


@dataclasses.dataclass(frozen=True)
class Recall(PlaceTask):
    """Multi-query recall (the module's text describes it).

    The rows of its grid say how many pairs ago the key stood.

    Attributes:
      symbols: how many keys there are, and how many values.
      shortest, longest: pairs of the texts trained on, all numbers equally likely.
      questions: of a training text.
    """

    kind: ClassVar[str] = "recall"
    heading: ClassVar[str] = "The value of a key"
    called: ClassVar[Called] = ("pairs from the key on", "pairs of the text", "pairs")

    symbols: int = 40
    shortest: int = 8
    longest: int = 16
    questions: int = 16

    def __post_init__(self):
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        synthetic.require_positive(self.kind, **fields)
        require(
            self.shortest <= self.longest <= self.symbols <= len(LETTERS),
            f"{self.kind}: expected shortest <= longest <= symbols <= {len(LETTERS)}, for keys are "
            f"distinct letters; got {fields}",
        )

    @property
    def trained(self) -> tuple[range, range]:
        """The trained numbers of pairs from the key on, and of all pairs."""
        return range(1, self.longest + 1), range(self.shortest, self.longest + 1)

    @functools.cached_property
    def alphabets(self) -> dict[str, Sequence[str]]:
        """The tokens by kind: keys, values, keys that are asked about."""
        letters = LETTERS[: self.symbols]
        values = [str(value) for value in range(self.symbols)]
        return {"k": letters, "v": values, "q": [f"{name}?" for name in letters]}

    @property
    def form(self) -> str:
        """The form of a question, for errors."""
        return (
            f"pairs of a letter from a to {LETTERS[self.symbols - 1]} and a number from 0 to "
            f"{self.symbols - 1}, and one of the letters, such as 'c 3 a 1 c?'"
        )

    def widest(self, column: int, row: int | None = None) -> int:
        """Returns the number of tokens of the longest text."""
        return 2 * column + (self.questions if row is None else 1)

    def texts(
        self, rng: np.random.Generator, columns: np.ndarray, rows: np.ndarray | None = None
    ) -> Texts:
        """Draws random pairs with questions; see :meth:`PlaceTask.texts`."""
        size, count, first = len(columns), 1 if rows is not None else self.questions, self.first
        pairs, each = columns[:, None], np.arange(size)[:, None]
        keys = rng.random((size, self.symbols), np.float32).argsort(1)
        values = rng.integers(self.symbols, size=keys.shape)
        body = np.stack([first["k"] + keys, first["v"] + values], 2).reshape(size, -1)
        if rows is None:
            at = rng.integers(0, pairs, (size, count))
        else:
            at = pairs - rows[:, None]
        asked, found = keys[each, at], values[each, at]
        tokens, places = with_queries(body, 2 * columns, first["q"] + asked[..., None])
        return Texts(tokens, places, first["v"] + found, np.stack([asked, found], 2))

    def parse(self, tokens: np.ndarray) -> tuple[int, int, int]:
        """Returns the numbers of pairs from the key on and of all pairs, and the answer."""
        body, (asked,) = self.parts("((?:kv)+)(q)", tokens)
        keys, text = body[::2], self.decode(tokens)
        require(len(set(keys)) == len(keys), f"keys are distinct; got {text!r}")
        require(asked in keys, f"there is no key {LETTERS[asked]} in {text!r}")
        at = keys.index(asked)
        return len(keys) - at, len(keys), self.first["v"] + body[2 * at + 1]

    def axes(self, options: Options) -> tuple[Sequence[int], ...]:
        """Returns pairs from the key on by powers of two, and all numbers of pairs."""
        _, columns = super().axes(options)
        return [2**n for n in range(columns[-1].bit_length())], columns

    def needs(self, *lengths: int) -> dict[str, bool]:
        """Returns what a cell needs: a key that is one of the text's."""
        row, column = lengths
        return {f"at least {row} pairs": column >= row, **super().needs(*lengths)}

    @property
    def most(self) -> int:
        """The greatest number of pairs, which is that of the keys."""
        return self.symbols

    @property
    def guess(self) -> int:
        """The number of answers that a guess is among: the values of the longest trained text."""
        return self.longest
