"""Needles in a haystack, in the eight kinds of RULER (arXiv:2404.06654, section 3).

A needle states the value of a key. One or several are hidden in a text, and the values of one or
several keys are asked for. Keys are pairs of words: RULER's come from a dictionary, these from the
background.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from train.suites import SuiteQuestion
from train.suites.background import Background, noise, room
from train.tasks.retrieval import FILLER

_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
# The start, a needle, and the question, in the plural if several values are asked for.
_LONG = (
    "Some special magic {kind}s are hidden in the text below. Memorise them: you will be asked "
    "about them afterwards.\n",
    "One of the special magic {kind}s for {key} is: {value}.",
    "\nWhich special magic {kind}{s} for {keys} does the text mention? The special magic "
    "{kind}{s} for {keys} that the text mentions {be}",
)
_SHORT = ("", "<{key}={value}>", "\n<{keys}=")


@dataclasses.dataclass(frozen=True)
class Needles:
    """A kind of question about needles.

    Attributes:
      haystack: ``noise``, ``text``, or ``needles``: other needles, as many as fit.
      key, value: what they are, ``words``, ``number`` or ``uuid``.
      keys: those with needles, unless needles make the haystack.
      values: of each key.
      queries: keys that are asked for.
    """

    haystack: str = "text"
    key: str = "words"
    value: str = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1

    rule = "all"

    @property
    def answer_tokens(self) -> dict[str, int]:
        """The tokens of an answer, by form: RULER's, or if short twice the bytes of the values."""
        return {"long": 128, "short": 2 * self.values * self.queries * self._width("short")}

    def _width(self, form: str) -> int:
        return 37 if self.value == "uuid" else 8 if form == "long" else 4

    def ask(
        self, rng: np.random.Generator, background: Background, size: int, form: str
    ) -> SuiteQuestion:
        """Hides the needles and asks for some; see :class:`train.suites.SuiteTask`."""
        start, needle, question = _LONG if form == "long" else _SHORT
        kind = self.value if self.value == "uuid" else "number"
        before, between, after = needle.format(kind=kind, key="|", value="|").split("|")
        after += "\n" if self.haystack == "needles" else " "

        def state(keys: list[str], values: list[str]) -> list[str]:
            pairs = zip(keys, values, strict=True)
            return [f"{before}{key}{between}{value}{after}" for key, value in pairs]

        keys = self._keys(rng, background, self.keys, form)
        values = _draw(rng, self.value, self.keys * self.values, form)
        statements = state([key for key in keys for _ in range(self.values)], values)
        asked, right = keys[: self.queries], values[: self.queries * self.values]
        several = len(right) > 1
        words = {"s": "s" if several else "", "be": "are" if several else "is", "kind": kind}
        names = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])} and {asked[-1]}"
        start, end = start.format(kind=kind), question.format(keys=names, **words)
        left = room(size, start, end, *statements)
        if self.haystack == "needles":
            # As many as fit if their words are short.
            count = left // len(state(["a" * len(keys[0][:9])], values[:1])[0])
            others = [k for k in self._keys(rng, background, count, form) if k not in keys]
            more = state(others, _draw(rng, self.value, len(others), form))
            fitting = int(np.searchsorted(np.cumsum([len(x) for x in more]), left, "right"))
            lines = [*statements, *more[:fitting]]
            text = "".join(lines[i] for i in rng.permutation(len(lines)))
        else:
            noisy = self.haystack == "noise"
            passage = noise(FILLER, left) if noisy else background.passage(rng, left)
            text = passage.hide(rng, statements)
        return SuiteQuestion(start + text + end, tuple(right))

    def _keys(
        self, rng: np.random.Generator, background: Background, count: int, form: str
    ) -> list[str]:
        if self.key == "uuid":
            return _draw(rng, "uuid", count, form)
        first = background.words(rng, count)
        if form == "short":
            return first
        return [f"{a}-{b}" for a, b in zip(first, background.words(rng, count), strict=True)]


def _draw(rng: np.random.Generator, kind: str, count: int, form: str) -> list[str]:
    """Draws values: numbers of seven digits, of three in the short form, or UUIDs."""
    if kind == "uuid":
        digits = _HEX[rng.integers(16, size=(count, 32))].tobytes().decode()
        return [_as_uuid(digits[i : i + 32]) for i in range(0, len(digits), 32)]
    low = 10**6 if form == "long" else 100
    return list(map(str, rng.integers(low, 10 * low, count).tolist()))


def _as_uuid(digits: str) -> str:
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


SINGLE_NOISE = Needles(haystack="noise")
SINGLE_NUMBER = Needles()
SINGLE_UUID = Needles(value="uuid")
MULTIKEY_TEXT = Needles(keys=4)
MULTIKEY_NEEDLES = Needles(haystack="needles")
MULTIKEY_UUIDS = Needles(haystack="needles", key="uuid", value="uuid")
MULTIVALUE = Needles(values=4)
MULTIQUERY = Needles(keys=4, queries=4)
