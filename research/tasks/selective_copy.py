"""Selective copying: which is the n-th token, not counting fillers?

The task is that of Gu and Dao (2023, arXiv:2312.00752). A text has a few letters at random places
among fillers, then their numbers in any order::

    . c . . a x . #3 #2       the third letter is x, the second a

**Why.** A letter's place says nothing about its number: the letters before it must be counted. A
fixed encoding measures tokens. Positions that count what the content says (CoPE's), or a state that
moves by what a token is, can count letters.

**Held out.** A hash of the number, the letter's place and the twelve tokens up to it keeps one
combination in ten out of training.
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
from train.tasks.places import Called, PlaceTask, Texts, tokens_before, with_queries

LETTERS, FILLER = string.ascii_lowercase, "."


@dataclasses.dataclass(frozen=True)
class SelectiveCopy(PlaceTask):
    """Selective copying (the module's text describes it).

    Numbers are in any order. In ascending order, a model may learn to look for the letter after the
    last one found, and a question with only one number was never trained.

    Attributes:
      letters: N; every text has N of them, and is asked for all.
      shortest, longest: tokens of the texts trained on, all lengths equally likely.
    """

    kind: ClassVar[str] = "selective_copy"
    heading: ClassVar[str] = "The n-th letter among fillers"
    called: ClassVar[Called] = (
        "number of the letter",
        "length of the text, tokens",
        "tokens",
    )

    letters: int = 8
    shortest: int = 16
    longest: int = 32

    def __post_init__(self):
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        synthetic.require_positive(self.kind, **fields)
        require(
            self.letters <= self.shortest <= self.longest,
            f"{self.kind}: expected letters <= shortest <= longest; got {fields}",
        )

    @property
    def trained(self) -> tuple[range, range]:
        """The trained numbers of the letter, and of tokens."""
        return range(1, self.letters + 1), range(self.shortest, self.longest + 1)

    @functools.cached_property
    def alphabets(self) -> dict[str, Sequence[str]]:
        """The tokens by kind: letters, the filler, numbers."""
        numbers = [f"#{n}" for n in self.trained[0]]
        return {"l": LETTERS, "f": [FILLER], "n": numbers}

    @property
    def form(self) -> str:
        """The form of a question, for errors."""
        return (
            f"letters from a to z among fillers {FILLER}, and the number of one from #1 to "
            f"#{self.letters}, such as '. c . . a #2'"
        )

    def widest(self, column: int, row: int | None = None) -> int:
        """Returns the number of tokens of the longest text."""
        return column + (self.letters if row is None else 1)

    def texts(
        self, rng: np.random.Generator, columns: np.ndarray, rows: np.ndarray | None = None
    ) -> Texts:
        """Draws random letters at random places; see :meth:`PlaceTask.texts`."""
        size, first, each = len(columns), self.first, np.arange(len(columns))[:, None]
        keys = rng.random((size, columns.max()), np.float32)
        keys[np.arange(columns.max()) >= columns[:, None]] = 2
        at = np.sort(keys.argsort(1)[:, : self.letters], axis=1)
        letters = rng.integers(len(LETTERS), size=at.shape)
        body = np.full(keys.shape, first["f"])
        body[each, at] = first["l"] + letters
        if rows is None:
            asked = rng.random(at.shape, np.float32).argsort(1)
        else:
            asked = rows[:, None] - 1
        found = letters[each, asked]
        place = at[each, asked]
        hashed = np.dstack([asked, place, tokens_before(body, place + 1)])
        tokens, places = with_queries(body, columns, first["n"] + asked[..., None])
        return Texts(tokens, places, first["l"] + found, hashed)

    def parse(self, tokens: np.ndarray) -> tuple[int, int, int]:
        """Returns the number of the letter, the number of tokens, and the answer of a question."""
        body, (number,) = self.parts("([lf]+)(n)", tokens)
        text = self.decode(tokens[: len(body)])
        letters = text.replace(FILLER, "").split()
        require(number < len(letters), f"there is no letter {number + 1} in {text!r}")
        return number + 1, len(body), self.first["l"] + LETTERS.index(letters[number])

    def needs(self, *lengths: int) -> dict[str, bool]:
        """Returns what a cell needs: a known number, and a text that has room for all letters."""
        number, tokens = lengths
        return {
            f"a letter of at most {self.letters}": number <= self.letters,
            f"a text of at least {self.letters} tokens": tokens >= self.letters,
        }

    @property
    def guess(self) -> int:
        """The number of answers that a guess is among: the letters of a text."""
        return self.letters
