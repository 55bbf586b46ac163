"""Irrelevant texts that hide facts, and the words that facts are made of."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re

import numpy as np

from train.checks import require
from train.data.sources import get_source
from train.data.tokenizers import load

# The most characters used of a long text.
MOST_CHARACTERS = 1 << 26
_WORD = re.compile(r"\b[a-z]{4,8}\b")
# After a line, or after a sentence within one.
_END = re.compile(r"\n+|(?<=[.!?]) +(?=\S)")


@dataclasses.dataclass(frozen=True, eq=False)
class Passage:
    """A piece of text and the places for insertions into it.

    Attributes:
      text: the piece.
      cuts: int [C], ascending offsets, in characters from 0 on, of places between sentences.
    """

    text: str
    cuts: np.ndarray

    def hide(self, rng: np.random.Generator, statements: list[str], *, shuffle: bool = True) -> str:
        """The text with each statement inserted at a random place between sentences.

        Args:
          rng: decides where; the number of draws is the same for all passages.
          statements: what is hidden.
          shuffle: in random order; else in the given one.
        """
        order = rng.permutation(len(statements)) if shuffle else range(len(statements))
        places = np.sort(rng.random(len(statements)))
        chosen = self.cuts[(places * len(self.cuts)).astype(int)]
        parts, start = [], 0
        for place, number in zip(chosen.tolist(), order, strict=True):
            parts += [self.text[start:place], statements[number]]
            start = place
        return "".join([*parts, self.text[start:]])


@dataclasses.dataclass(frozen=True, eq=False)
class Background:
    """A long text.

    Attributes:
      name: what error messages call it.
      text: all of it.
    """

    name: str
    text: str

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the text, equal for equal texts."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """The places where lines and sentences start, int [S], ascending, 0 first."""
        return np.array([0, *(match.end() for match in _END.finditer(self.text))])

    @functools.cached_property
    def vocabulary(self) -> list[str]:
        """The words of four to eight lower-case letters, each once, in alphabetical order."""
        return sorted(set(_WORD.findall(self.text)))

    def passage(self, rng: np.random.Generator, size: int) -> Passage:
        """A piece of exactly ``size`` characters that starts with a random sentence.

        Raises:
          ValueError: a text with fewer characters.
        """
        require(
            size <= len(self.text),
            f"the background {self.name} has {len(self.text):,} characters, and a question needs "
            f"{size:,}: name a longer text, or ask for smaller lengths",
        )
        last = np.searchsorted(self._starts, len(self.text) - size, "right")
        first = int(rng.random() * last)
        start = int(self._starts[first])
        end = np.searchsorted(self._starts, start + size, "right")
        cuts = self._starts[first:end] - start
        return Passage(self.text[start : start + size], cuts)

    def words(self, rng: np.random.Generator, count: int, *, different: bool = False) -> list[str]:
        """Draws words of the text.

        Args:
          rng: draws them.
          count: how many; up to four are always different.
          different: whether more than four are, too.

        Raises:
          ValueError: a text with too few words.
        """
        known, needed = self.vocabulary, count if different else 16
        require(
            needed <= len(known),
            f"the background {self.name} has {len(known):,} different words of four to eight "
            f"letters, and a question needs {needed:,}: name a text with more words, or ask for "
            "smaller lengths",
        )
        alone = different or count <= 4
        return [known[i] for i in rng.choice(len(known), count, replace=not alone)]


def room(size: int, *texts: str) -> int:
    """Characters of ``size`` that these texts leave for their surroundings.

    Raises:
      ValueError: if they leave none.
    """
    taken = sum(map(len, texts))
    require(
        taken <= size,
        f"{size:,} characters are too few for a question that takes {taken:,} without any "
        "background: ask for a larger length",
    )
    return size - taken


@functools.lru_cache(maxsize=32)
def _noise(text: str, size: int) -> Background:
    return Background("of repeated sentences", text * (size // len(text) + 1))


def noise(text: str, size: int) -> Passage:
    """Returns ``size`` characters of sentences that are repeated again and again."""
    # A power of two, so that few texts are made.
    repeated = _noise(text, 1 << max(size, 1).bit_length())
    end = np.searchsorted(repeated._starts, size, "right")
    return Passage(repeated.text[:size], repeated._starts[:end])


def read(source: str) -> Background:
    """The background called ``source``, one of :mod:`train.data.sources` that holds text.

    Raises:
      ValueError: if there is none, or it holds tokens.
    """
    parts: list[str] = []
    size = 0
    for document in get_source(source, "text", load("bytes")).documents():
        text = document.content
        if not isinstance(text, str):
            raise ValueError(f"the background {source!r} holds tokens; expected text")
        parts.append(text if text.endswith("\n") else f"{text}\n")
        size += len(parts[-1])
        if size >= MOST_CHARACTERS:
            break
    return Background(repr(source), "".join(parts)[:MOST_CHARACTERS])
