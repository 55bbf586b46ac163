"""Pointer chains: which token is reached from x by h hops?

A text is pairs of tokens in random order, each of which says what follows what, then questions of
two tokens, a number of hops and a token; what follows what is one ring of all tokens::

    c: a  b: c  a: b  ^2 b?      two hops from b, over c, leads to a

**Why.** Each hop is a search by content for what the last one found. It needs a place only to tell
which token of a pair belongs to which; all the rest is depth: a layer can follow one hop, or double
those that are known. An encoding that is ahead here does not owe it to places far away. It is a
control: what helps at addressing need not help at composing.

**Held out.** A hash of hops, token and answer keeps one combination in ten from being trained.
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

LETTERS = string.ascii_letters


@dataclasses.dataclass(frozen=True)
class Chains(PlaceTask):
    """Pointer chains (the module's text describes them).

    Attributes:
      hops: the greatest number of hops; all from 1 on are trained equally often.
      symbols: how many tokens there are.
      shortest, longest: pairs of the texts trained on, all numbers equally likely.
      questions: of a training text.
    """

    kind: ClassVar[str] = "chains"
    heading: ClassVar[str] = "The token that is reached by hops"
    called: ClassVar[Called] = ("hops", "pairs of the text", "pairs")

    hops: int = 3
    symbols: int = 32
    shortest: int = 8
    longest: int = 16
    questions: int = 16

    def __post_init__(self):
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        synthetic.require_positive(self.kind, **fields)
        require(
            self.hops < self.shortest <= self.longest <= self.symbols <= len(LETTERS),
            f"{self.kind}: expected hops < shortest <= longest <= symbols <= {len(LETTERS)}, for "
            f"hops do not go round a ring, and symbols are letters; got {fields}",
        )

    @property
    def trained(self) -> tuple[range, range]:
        """Hops, and pairs."""
        return range(1, self.hops + 1), range(self.shortest, self.longest + 1)

    @functools.cached_property
    def alphabets(self) -> dict[str, Sequence[str]]:
        """First and second tokens of pairs, hops, tokens of questions."""
        letters = LETTERS[: self.symbols]
        return {
            "k": [f"{name}:" for name in letters],
            "v": letters,
            "h": [f"^{hops}" for hops in self.trained[0]],
            "q": [f"{name}?" for name in letters],
        }

    @property
    def form(self) -> str:
        """What a question looks like."""
        return (
            f"pairs such as 'c: a' of letters from a to {LETTERS[self.symbols - 1]}, hops from ^1 "
            f"to ^{self.hops}, and a token, such as 'c: a b: c a: b ^1 b?'"
        )

    def widest(self, column: int, row: int | None = None) -> int:
        """Tokens of the longest text."""
        return 2 * column + 2 * (self.questions if row is None else 1)

    def texts(
        self, rng: np.random.Generator, columns: np.ndarray, rows: np.ndarray | None = None
    ) -> Texts:
        """Random rings with questions; see :meth:`PlaceTask.texts`."""
        size, count, first = len(columns), 1 if rows is not None else self.questions, self.first
        pairs, each = columns[:, None], np.arange(size)[:, None]
        ring = rng.random((size, self.symbols), np.float32).argsort(1)
        # The places of a ring that are used, in the order in which they are written.
        keys = rng.random((size, self.symbols), np.float32)
        keys[np.arange(self.symbols) >= pairs] = 2
        at = keys.argsort(1)[:, : columns.max()]
        written = [first["k"] + ring[each, at], first["v"] + ring[each, (at + 1) % pairs]]
        hops = rng.integers(1, self.hops + 1, (size, count)) if rows is None else rows[:, None]
        start = rng.integers(0, pairs, (size, count))
        asked, reached = ring[each, start], ring[each, (start + hops) % pairs]
        tokens, places = with_queries(
            np.stack(written, 2).reshape(size, -1),
            2 * columns,
            np.stack([first["h"] + hops - 1, first["q"] + asked], 2),
        )
        return Texts(tokens, places, first["v"] + reached, np.stack([hops, asked, reached], 2))

    def parse(self, tokens: np.ndarray) -> tuple[int, int, int]:
        """Hops, pairs and answer of a question."""
        body, (hops,), (asked,) = self.parts("((?:kv)+)(h)(q)", tokens)
        follows = dict(zip(body[::2], body[1::2], strict=True))
        text, reached = self.decode(tokens), asked
        require(
            2 * len(follows) == len(body) == 2 * len(set(body[1::2])),
            f"every token leads to one, and is led to by one; got {text!r}",
        )
        for _ in range(hops + 1):
            require(reached in follows, f"nothing follows {LETTERS[reached]} in {text!r}")
            reached = follows[reached]
        return hops + 1, len(follows), self.first["v"] + reached

    def needs(self, *lengths: int) -> dict[str, bool]:
        """Hops that are known, and do not go round the ring."""
        hops, pairs = lengths
        least = min(hops, self.hops)
        return {
            f"at most {self.hops} hops": hops <= self.hops,
            f"more than {least} pairs": pairs > least,
            **super().needs(*lengths),
        }

    @property
    def most(self) -> int:
        """As many as there are tokens."""
        return self.symbols

    @property
    def guess(self) -> int:
        """Among the tokens of the longest trained text."""
        return self.longest
