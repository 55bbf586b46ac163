"""Grid navigation: what stands where the walk has come back to?

A text is a walk on a line or in a plane, as in MapFormer's experiments (Rambaud et al. 2025): a
landmark, then moves, each followed by the landmark found there or, if the walk has been there
before, by a question::

    c R a R q L ?      one step back from q stands a

**Why.** A token's place in the text says little about where the walk was. A question asks for a
place in another space, a sum of moves, which the content says. Encodings whose positions are these
sums (MapFormer's) have it by construction; a state that the content updates can learn it.

Most walks that come back do so by undoing their last move, and have just passed the answer.
Evaluations ask about others, unless ``undo`` is set.

**Held out.** A hash of the twelve tokens before a question keeps one in ten out of training.
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

LETTERS = string.ascii_lowercase
# Place (x, y) has the number x + WIDE y: walks are shorter than WIDE.
WIDE = 2**12
MOVES = {"L": -1, "R": 1, "D": -WIDE, "U": WIDE}
STEPS = np.array([*MOVES.values()], np.int32)


@dataclasses.dataclass(frozen=True)
class Navigation(PlaceTask):
    """Grid navigation (the module's text describes it).

    Attributes:
      dimensions: the most dimensions of a walk, 1 or 2; all are equally likely.
      shortest, longest: moves of the walks trained on, all numbers equally likely.
      undo: whether an evaluation may ask about walks whose last move takes back the one before.
    """

    kind: ClassVar[str] = "navigation"
    heading: ClassVar[str] = "What stands where the walk has come back to"
    called: ClassVar[Called] = ("dimensions", "moves of the walk", "moves")

    dimensions: int = 2
    shortest: int = 8
    longest: int = 24
    undo: bool = False

    def __post_init__(self):
        fields = {name: getattr(self, name) for name in ("dimensions", "shortest", "longest")}
        synthetic.require_positive(self.kind, **fields)
        require(
            self.dimensions <= 2 and self.least <= self.shortest <= self.longest < WIDE // 4,
            f"{self.kind}: expected 1 or 2 dimensions and {self.least} <= shortest <= longest < "
            f"{WIDE // 4}, for shorter walks do not come back; got {fields}",
        )

    @property
    def least(self) -> int:
        """The number of moves of the shortest walk back that an evaluation asks for."""
        return 2 if self.undo else 4

    @property
    def trained(self) -> tuple[range, range]:
        """The trained numbers of dimensions, and of moves."""
        return range(1, self.dimensions + 1), range(self.shortest, self.longest + 1)

    @functools.cached_property
    def alphabets(self) -> dict[str, Sequence[str]]:
        """The tokens by kind: landmarks, moves, the question."""
        return {"l": LETTERS, "m": [*MOVES][: 2 * self.dimensions], "q": ["?"]}

    @property
    def form(self) -> str:
        """The form of a question, for errors."""
        return (
            f"a landmark from a to z, then moves of {', '.join(self.alphabets['m'])}, each with "
            "the landmark of a new place or ? for a known one, and last ?, such as 'c R a L ?'"
        )

    def widest(self, column: int, row: int | None = None) -> int:
        """Returns the number of tokens of the longest text."""
        return 2 * column + 1

    def texts(
        self, rng: np.random.Generator, columns: np.ndarray, rows: np.ndarray | None = None
    ) -> Texts:
        """Draws random walks; see :meth:`PlaceTask.texts`. With ``rows`` they end in a question."""
        size, longest, first = len(columns), int(columns.max()), self.first
        dims = rng.integers(1, self.dimensions + 1, size) if rows is None else rows
        moves = rng.integers(0, 2 * dims[:, None], (size, longest))
        if rows is not None:
            at = np.arange(longest) == columns[:, None] - 1
            last, able = self._known_move(rng, moves, columns, dims)
            moves = np.where(at, last[:, None], moves)
        visited = _visited(moves)
        since = (visited[:, :, None] == visited[:, None]).argmax(-1)
        drawn = rng.integers(len(LETTERS), size=since.shape)
        landmarks = np.take_along_axis(drawn, since, 1)
        known = since < np.arange(longest + 1)

        tokens = np.zeros((size, 2 * longest + 1), np.int64)
        tokens[:, ::2] = np.where(known, first["q"], first["l"] + landmarks)
        tokens[:, 1::2] = first["m"] + moves
        tokens[np.arange(2 * longest + 1) > 2 * columns[:, None]] = 0
        places = np.broadcast_to(np.arange(2, 2 * longest + 1, 2), (size, longest))
        due = known[:, 1:] & (places <= 2 * columns[:, None])
        if rows is not None:
            due &= able[:, None] | ~at
        answers = np.where(due, first["l"] + landmarks[:, 1:], 0)
        return Texts(tokens, places, answers, tokens_before(tokens, places))

    def _known_move(
        self, rng: np.random.Generator, moves: np.ndarray, columns: np.ndarray, dims: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns each walk's last move [B], to where it has been, and whether [B] there is one."""
        visited, before = _visited(moves), columns - 1
        reached = visited[np.arange(len(moves)), before][:, None] + STEPS
        been = reached[:, :, None] == visited[:, None]
        been &= (np.arange(visited.shape[1]) <= before[:, None])[:, None]
        able = been.any(-1) & (np.arange(len(STEPS)) < 2 * dims[:, None])
        if not self.undo:
            # Moves come in pairs that undo each other.
            before = moves[np.arange(len(moves)), columns - 2]
            able &= np.arange(len(STEPS)) != (before ^ 1)[:, None]
        return np.where(able, rng.random(able.shape), -1).argmax(1), able.any(1)

    def parse(self, tokens: np.ndarray) -> tuple[int, int, int]:
        """Returns the numbers of dimensions and of moves, and the answer of a question."""
        self.parts("l(?:m[lq])*mq", tokens)
        start, *rest = self.decode(tokens).split()
        place, known, text = 0, {0: start}, self.decode(tokens)
        for move, found in zip(rest[::2], rest[1::2], strict=True):
            place += MOVES[move]
            require(
                (place in known) == (found == "?"),
                f"a known place is asked for, and a new one has a landmark; got {text!r}",
            )
            known.setdefault(place, found)
        dims = 1 + bool({"U", "D"} & set(rest[::2]))
        return dims, len(rest) // 2, self.first["l"] + LETTERS.index(known[place])

    @property
    def most(self) -> int:
        """The greatest number of moves for which places have numbers of their own."""
        return WIDE // 2 - 1

    def needs(self, *lengths: int) -> dict[str, bool]:
        """Returns what a cell needs: known dimensions, and neither too few nor too many moves."""
        dimensions, moves = lengths
        return {
            f"at most {self.dimensions} dimensions": dimensions <= self.dimensions,
            f"at least {self.least} moves": moves >= self.least,
            **super().needs(*lengths),
        }

    @property
    def guess(self) -> int:
        """The number of answers that a guess is among: all letters."""
        return len(LETTERS)


def _visited(moves: np.ndarray) -> np.ndarray:
    """Returns the numbers of the places that walks visit: of moves [B, S], int32 [B, S + 1]."""
    return np.pad(STEPS[moves].cumsum(1, dtype=np.int32), ((0, 0), (1, 0)))
