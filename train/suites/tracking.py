"""Variable tracking (RULER): the variables that a value was passed on to, one after another."""

from __future__ import annotations

import dataclasses

import numpy as np

from train.suites import SuiteQuestion
from train.suites.background import Background, noise, room
from train.tasks.retrieval import FILLER

_LONG = (
    "Some sentences of the text below assign variables. Follow the chain of assignments.\n",
    "\nQuestion: which variables have the value {value} at the end of the text?\nAnswer: following "
    "the chain of assignments, {count} variables have the value {value}. They are:",
)
_SHORT = ("", "\n{value}:")


@dataclasses.dataclass(frozen=True)
class Tracking:
    """One chain, in order, in repeated sentences.

    Attributes:
      hops: assignments of one variable to the next, by form.
    """

    hops: tuple[int, int] = (4, 2)

    rule = "all"
    # If long, above RULER's 30, so that bytes suffice.
    answer_tokens = {"long": 40, "short": 20}

    def ask(
        self, rng: np.random.Generator, background: Background, size: int, form: str
    ) -> SuiteQuestion:
        """Hides the chain; see :class:`train.suites.SuiteTask`."""
        start, end = _LONG if form == "long" else _SHORT
        count = 1 + self.hops[form == "short"]
        letters = 5 if form == "long" else 3
        alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        names = ["".join(alphabet[i] for i in row) for row in rng.integers(26, size=(64, letters))]
        names = list(dict.fromkeys(names))[:count]
        value = str(rng.integers(10**4, 10**5) if form == "long" else rng.integers(100, 1000))
        sources = [value, *(f"VAR {name}" for name in names[:-1])]
        statements = [f"VAR {a} = {b}. " for a, b in zip(names, sources, strict=True)]
        end = end.format(value=value, count=count)
        left = room(size, start, end, *statements)
        text = noise(FILLER, left).hide(rng, statements, shuffle=False)
        return SuiteQuestion(start + text + end, tuple(names))


TRACKING = Tracking()
