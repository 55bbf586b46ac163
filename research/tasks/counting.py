"""Counting: how often was x incremented since it was set to zero?

The task is that of CoPE (Golovneva et al. 2024, arXiv:2405.18719). A text has instructions about
variables (set to zero, increment or pass) and reads, which ask for the variable's value, modulo
ten::

    x=0 y=0 x+ . x+ y+ x? y?       x is 2, y is 1

**Why.** The answer is the number of tokens of one kind between two places, not of all tokens.
Positions that count by content give it at once. With others, attention has to tell apart averages
that get closer with every increment and pass in between.

**Held out.** A hash of the twelve tokens before a read keeps one in ten out of training.
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
from train.tasks.places import Called, PlaceTask, Texts, tokens_before

VALUES = string.digits
VARIABLES = "xyzuvw"
PASS, SET, INCREMENT = range(3)


@dataclasses.dataclass(frozen=True)
class Counting(PlaceTask):
    """Counting (the module's text describes it).

    Attributes:
      variables: how many there are; a text begins by setting each to zero.
      shortest, longest: instructions of the texts trained on, all lengths equally likely.
      questions: reads of a training text, at random places, the last one at its end.
      passes, sets: probabilities that an instruction other than a read is a pass, or sets a
        variable to zero; else it increments one.
    """

    kind: ClassVar[str] = "counting"
    heading: ClassVar[str] = "How often a variable was incremented"
    called: ClassVar[Called] = ("increments", "length of the text, instructions", "tokens")

    variables: int = 2
    shortest: int = 16
    longest: int = 32
    questions: int = 8
    passes: float = 0.3
    sets: float = 0.1

    def __post_init__(self):
        counts = {n: getattr(self, n) for n in ("variables", "shortest", "longest", "questions")}
        synthetic.require_positive(self.kind, **counts)
        require(
            self.variables <= len(VARIABLES)
            and self.variables + max(self.questions, len(VALUES)) <= self.shortest <= self.longest,
            f"{self.kind}: expected at most {len(VARIABLES)} variables, and shortest <= longest "
            f"with room for them and the questions, or {len(VALUES)} instructions; got {counts}",
        )
        require(
            min(self.passes, self.sets) >= 0 and self.passes + self.sets <= 1,
            f"{self.kind}: passes and sets must be probabilities of at most 1 together; got "
            f"{self.passes} and {self.sets}",
        )

    @property
    def trained(self) -> tuple[range, range]:
        """The trained numbers of increments, and of instructions."""
        return range(1, len(VALUES)), range(self.shortest, self.longest + 1)

    @functools.cached_property
    def alphabets(self) -> dict[str, Sequence[str]]:
        """The tokens by kind: setting to zero, increments, the pass, reads, values."""
        names = VARIABLES[: self.variables]
        kinds = {"s": "=0", "i": "+", "p": ".", "r": "?"}
        made = {kind: [name + sign for name in names] for kind, sign in kinds.items()}
        return {**made, "p": ["."], "v": VALUES}

    @property
    def form(self) -> str:
        """The form of a question, for errors."""
        names = ", ".join(VARIABLES[: self.variables])
        return (
            f"instructions about {names} such as 'x=0 x+ . x?', of which the last is a read of a "
            "variable that has been set"
        )

    def widest(self, column: int, row: int | None = None) -> int:
        """Returns the number of tokens of a text."""
        return column

    def texts(
        self, rng: np.random.Generator, columns: np.ndarray, rows: np.ndarray | None = None
    ) -> Texts:
        """Draws random instructions; see :meth:`PlaceTask.texts`."""
        size, longest, first = len(columns), columns.max(), self.first
        each, at, end = np.arange(size)[:, None], np.arange(longest), columns[:, None] - 1
        drawn = rng.random((size, longest), np.float32)
        what = np.where(drawn < self.passes + self.sets, SET, INCREMENT)
        what = np.where(drawn < self.passes, PASS, what)
        variable = rng.integers(self.variables, size=(size, longest))
        variable[:, : self.variables] = np.arange(self.variables)
        what[:, : self.variables] = SET
        read = at == end
        keys = rng.random((size, longest), np.float32)
        keys[(at < self.variables) | (at >= end)] = 2
        order = keys.argsort(1)
        if rows is None:
            read[each, order[:, : self.questions - 1]] = True
        else:
            # The variable that is read is incremented so often, and else left alone since it was
            # set again somewhere before the first increment, if there is room.
            asked = variable[each, end]
            chosen = (order.argsort(1) < rows[:, None]) & (keys < 2)
            free = np.where(chosen.any(1), chosen.argmax(1), columns - 1) - self.variables
            again = self.variables + np.floor(rng.random(size) * free).astype(np.int64)
            again = np.where(free > 0, again, 0)[:, None]
            what[(variable == asked) & (at >= self.variables) & (at >= again)] = PASS
            what[chosen] = INCREMENT
            variable = np.where(chosen | (at == again) & (again > 0), asked, variable)
            what[(at == again) & (again > 0)] = SET
        what[read] = PASS

        counted = np.zeros((size, longest), np.int64)
        for one in range(self.variables):
            mine = variable == one
            increments = (mine & (what == INCREMENT)).cumsum(1)
            since = np.maximum.accumulate(np.where(mine & (what == SET), increments, 0), axis=1)
            counted = np.where(mine, increments - since, counted)
        tokens = np.select(
            [read, what == SET, what == INCREMENT],
            [first["r"] + variable, first["s"] + variable, first["i"] + variable],
            first["p"],
        )
        tokens[at > end] = 0
        places = np.nonzero(read)[1].reshape(size, -1)
        answers = first["v"] + counted[each, places] % len(VALUES)
        return Texts(tokens, places, answers, tokens_before(tokens, places))

    def parse(self, tokens: np.ndarray) -> tuple[int, int, int]:
        """Returns the numbers of increments since the reset and of instructions, and the answer."""
        self.parts("[sipr]*r", tokens)
        *words, asked = self.decode(tokens).split()
        name, text = asked[0], " ".join(words)
        require(f"{name}=0" in words, f"{name} has not been set to zero in {text!r}")
        since = len(words) - words[::-1].index(f"{name}=0")
        count = words[since:].count(f"{name}+")
        return count, len(words) + 1, self.first["v"] + count % len(VALUES)

    def needs(self, *lengths: int) -> dict[str, bool]:
        """Returns what a cell needs: room for increments, setting variables, and the read."""
        increments, tokens = lengths
        least = self.variables + increments + 1
        return {f"at least {least} instructions": tokens >= least}

    @property
    def guess(self) -> int:
        """The number of answers that a guess is among: all values."""
        return len(VALUES)
