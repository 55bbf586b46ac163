"""Flip-flops: which bit was written last?

The task is that of Liu et al. (2023, arXiv:2306.00946). A text has instructions: write a bit,
ignore a bit, or read, which asks for the last bit written::

    w1 i0 i0 r w0 i1 r       1 at the first read, 0 at the second

**Why.** A model must find the last write, however far back it is, and no earlier one. Attention has
to prefer the nearest match: a bias that falls with distance does so at every distance, a rotation
at those that it was trained on, and a decay by what the content says does so exactly.

**Held out.** A hash of the twelve instructions before a read keeps one in ten out of training.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from train.checks import require
from train.data import synthetic
from train.tasks.places import Called, PlaceTask, Texts, tokens_before
from train.tasks.questions import Options


@dataclasses.dataclass(frozen=True)
class FlipFlop(PlaceTask):
    """Flip-flops (the module's text describes them).

    Attributes:
      shortest, longest: instructions of the texts trained on, all lengths equally likely.
      questions: reads of a training text, at random places, the last one at its end.
      writes: probability that an instruction other than a read is a write.
    """

    kind: ClassVar[str] = "flip_flop"
    heading: ClassVar[str] = "The bit that was written last"
    called: ClassVar[Called] = ("instructions since", "length of the text, instructions", "tokens")

    shortest: int = 16
    longest: int = 32
    questions: int = 8
    writes: float = 0.1

    def __post_init__(self):
        counts = {name: getattr(self, name) for name in ("shortest", "longest", "questions")}
        synthetic.require_positive(self.kind, **counts)
        require(
            self.questions < self.shortest <= self.longest,
            f"{self.kind}: expected questions < shortest <= longest, for a text begins with a "
            f"write; got {counts}",
        )
        require(
            0 <= self.writes <= 1,
            f"{self.kind}: writes must be a probability; got {self.writes}",
        )

    @property
    def trained(self) -> tuple[range, range]:
        """The trained numbers of instructions since the last write, and of all instructions."""
        return range(1, self.longest), range(self.shortest, self.longest + 1)

    @functools.cached_property
    def alphabets(self) -> dict[str, Sequence[str]]:
        """The tokens by kind: writes, ignored bits, the read, bits."""
        return {"w": ["w0", "w1"], "i": ["i0", "i1"], "r": ["r"], "b": ["0", "1"]}

    @property
    def form(self) -> str:
        """The form of a question, for errors."""
        return "instructions w0, w1, i0, i1 and r, of which the first is a write and the last r"

    def widest(self, column: int, row: int | None = None) -> int:
        """Returns the number of tokens of a text."""
        return column

    def texts(
        self, rng: np.random.Generator, columns: np.ndarray, rows: np.ndarray | None = None
    ) -> Texts:
        """Draws random instructions; see :meth:`PlaceTask.texts`."""
        size, longest, first = len(columns), columns.max(), self.first
        each, at, end = np.arange(size)[:, None], np.arange(longest), columns[:, None] - 1
        write = (rng.random((size, longest), np.float32) < self.writes) | (at == 0)
        read = at == end
        if rows is None:
            keys = rng.random((size, longest), np.float32)
            keys[(at == 0) | (at >= end)] = 2
            read[each, keys.argsort(1)[:, : self.questions - 1]] = True
        else:
            write |= at == end - rows[:, None]
            write &= at <= end - rows[:, None]
        write &= ~read
        bits = rng.integers(2, size=(size, longest))
        tokens = np.where(write, first["w"], first["i"]) + bits
        tokens = np.where(read, first["r"], np.where(at <= end, tokens, 0))
        last = np.maximum.accumulate(np.where(write, at, 0), axis=1)
        places = np.nonzero(read)[1].reshape(size, -1)
        answers = first["b"] + bits[each, last[each, places]]
        return Texts(tokens, places, answers, tokens_before(tokens, places))

    def parse(self, tokens: np.ndarray) -> tuple[int, int, int]:
        """Returns the numbers of instructions since the last write and of all, and the answer."""
        self.parts("w[wir]*r", tokens)
        names = self.decode(tokens).split()
        since, bit = next((n, name[1]) for n, name in enumerate(names[::-1]) if name[0] == "w")
        return since, len(names), self.first["b"] + int(bit)

    def axes(self, options: Options) -> tuple[Sequence[int], ...]:
        """Returns both axes by powers of two, to the longest text."""
        _, columns = super().axes(options)
        powers = [2**n for n in range(columns[-1].bit_length())]
        lengths = sorted({*(n for n in powers if n > self.shortest), columns[0], columns[-1]})
        return [n for n in powers if n < columns[-1]], lengths

    def needs(self, *lengths: int) -> dict[str, bool]:
        """Returns what a cell needs: a text that is long enough for its write."""
        row, column = lengths
        return {f"more than {row} instructions": column > row}

    @property
    def guess(self) -> int:
        """The number of answers that a guess is among: two bits."""
        return 2
