"""Evaluation: exact match of whole answers, over a grid of operand lengths.

An answer that is generated greedily is right exactly when, with the right answer fed to the model
instead, the most probable token is the right one at every place of it: up to the first wrong token
both see the same inputs. So one pass over prompt and answer replaces one pass for every token.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax.config import require
from train.data import Examples

Apply = Callable[[Any, jax.Array], jax.Array]
Progress = Callable[[int, int], None]

FORMAT = "tape-jax exact-match grid, version 1"


class GridTask(Protocol):
    """A task whose examples have two operands (see :class:`train.data.arithmetic.Addition`)."""

    @property
    def max_digits(self) -> int: ...

    def is_shared(self, length_a: int, length_b: int) -> bool: ...

    def grid(
        self,
        lengths_a: Sequence[int],
        lengths_b: Sequence[int],
        samples_per_pair: int,
        seed: int = 0,
    ) -> Examples: ...


class QuestionTask(Protocol):
    """A task that can be asked in ordinary writing."""

    def question(self, text: str) -> np.ndarray: ...

    def solve(self, text: str) -> str: ...

    def max_answer_length(self, prompt: np.ndarray) -> int: ...

    def read_answer(self, tokens: np.ndarray) -> str: ...

    def decode(self, tokens: np.ndarray) -> str: ...


@dataclasses.dataclass(frozen=True)
class Proportion:
    """``correct`` answers out of ``count``."""

    correct: int
    count: int

    @property
    def value(self) -> float:
        """The share of correct answers, NaN of none."""
        return self.correct / self.count if self.count else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson score interval of the share, (0, 1) of none."""
        if not self.count:
            return 0.0, 1.0
        z2 = 1.959964**2 / self.count
        centre = (self.value + z2 / 2) / (1 + z2)
        half = math.sqrt(z2 * self.value * (1 - self.value) + z2 * z2 / 4) / (1 + z2)
        return max(0.0, centre - half), min(1.0, centre + half)

    def __str__(self) -> str:
        if not self.count:
            return "none asked"
        low, high = self.interval
        return f"{_percent(self.value)} [{_percent(low)}, {_percent(high)}]"


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """Exact match for each pair of operand lengths.

    Attributes:
      lengths_a, lengths_b: digits of the operands; rows and columns.
      correct: int [A, B], answers that are right to the last token.
      counts: int [A, B], sums asked.
      shared: bool [A, B], whether these sums were trained on as well, being too few to divide.
      trained: the longest operands trained on, in digits.
    """

    lengths_a: tuple[int, ...]
    lengths_b: tuple[int, ...]
    correct: np.ndarray
    counts: np.ndarray
    shared: np.ndarray
    trained: int

    def __post_init__(self):
        expected = (len(self.lengths_a), len(self.lengths_b))
        for name, dtype in (("correct", np.int64), ("counts", np.int64), ("shared", np.bool_)):
            array = np.array(getattr(self, name), dtype)
            require(
                array.shape == expected,
                f"grid: {name} has shape {array.shape}, expected {expected} from the lengths",
            )
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        for name in ("lengths_a", "lengths_b"):
            lengths = getattr(self, name)
            require(
                len(lengths) > 0 and list(lengths) == sorted(set(lengths)),
                f"grid: {name} must ascend; got {lengths}",
            )
        require(
            bool(np.all((self.correct >= 0) & (self.correct <= self.counts))),
            "grid: correct must lie between 0 and counts",
        )

    @property
    def accuracy(self) -> np.ndarray:
        """float [A, B], share of right answers, NaN where nothing was asked."""
        return np.divide(
            self.correct,
            self.counts,
            out=np.full(self.counts.shape, np.nan),
            where=self.counts > 0,
        )

    @property
    def longest(self) -> np.ndarray:
        """int [A, B], digits of the longer operand."""
        return np.maximum.outer(self.lengths_a, self.lengths_b)

    def proportion(self, where: np.ndarray) -> Proportion:
        """Right answers among all sums of the chosen cells (bool [A, B])."""
        return Proportion(int(self.correct[where].sum()), int(self.counts[where].sum()))

    @property
    def inside(self) -> Proportion:
        """Over the trained range: both operands no longer than any trained on."""
        return self.proportion(self.longest <= self.trained)

    @property
    def inside_held_out(self) -> Proportion:
        """Over the trained range without the cells that are shared with training."""
        return self.proportion((self.longest <= self.trained) & ~self.shared)

    @property
    def outside(self) -> Proportion:
        """Beyond the trained range: at least one operand longer than any trained on."""
        return self.proportion(self.longest > self.trained)

    def summary(self) -> dict[str, float]:
        """The averages that have any sums, as scalars for a log."""
        averages = {"inside": self.inside, "outside": self.outside}
        return {f"exact_match_{name}": p.value for name, p in averages.items() if p.count}

    def table(self) -> str:
        """Exact match by operand length, as text."""
        return length_table({"exact match": self})

    def to_json(self) -> dict[str, Any]:
        """The grid in JSON types."""
        return {
            "format": FORMAT,
            "trained": self.trained,
            "lengths_a": list(self.lengths_a),
            "lengths_b": list(self.lengths_b),
            **{name: getattr(self, name).tolist() for name in ("correct", "counts", "shared")},
        }

    @classmethod
    def from_json(cls, record: Any) -> Grid:
        """The grid that :meth:`to_json` described.

        Raises:
          ValueError: ``record`` is something else.
        """
        found = record.get("format") if isinstance(record, dict) else None
        require(found == FORMAT, f"expected a record of format {FORMAT!r}; got {found!r}")
        values = {k: v for k, v in record.items() if k != "format"}
        values |= {k: tuple(values.get(k, ())) for k in ("lengths_a", "lengths_b")}
        fields = {f.name for f in dataclasses.fields(cls)}
        require(
            values.keys() == fields,
            f"a grid has the fields {sorted(fields)}; got {sorted(values)}",
        )
        return cls(**values)


def exact_match_grid(
    apply: Apply,
    variables: Any,
    task: GridTask,
    *,
    longest: int | None = None,
    samples_per_pair: int = 100,
    seed: int = 0,
    batch_size: int = 512,
    shapes: int = 2,
    max_length: int | None = None,
    progress: Progress | None = None,
) -> Grid:
    """Exact match for all pairs of operand lengths from 1 to ``longest``.

    Args:
      apply: ``apply(variables, tokens int32 [B, T]) -> logits [B, T, V]``, causal and hashable
        (a model's ``apply`` method is); it is compiled once for each shape.
      variables: of the model.
      task: what to ask.
      longest: digits of the longest operands; None: twice the trained length.
      samples_per_pair: sums for each pair of lengths, where so many exist.
      seed: of the choice of sums.
      batch_size, shapes, progress: see :func:`exact_match`.
      max_length: tokens that the model accepts; None: no limit.

    Raises:
      ValueError: an argument out of range, or sums that are too long for the model.
    """
    longest = 2 * task.max_digits if longest is None else longest
    require(longest >= 1, f"evaluation: longest must be at least 1; got {longest}")
    lengths = tuple(range(1, longest + 1))
    examples = task.grid(lengths, lengths, samples_per_pair, seed)
    _require_fits(int(examples.lengths.max()) - 1, max_length, f"a sum with {longest} digits")
    right = exact_match(
        apply, variables, examples, batch_size=batch_size, shapes=shapes, progress=progress
    )
    correct, counts = np.zeros((2, longest, longest), np.int64)
    np.add.at(counts, tuple(examples.cells.T), 1)
    np.add.at(correct, tuple(examples.cells[right].T), 1)
    shared = np.array([[task.is_shared(a, b) for b in lengths] for a in lengths])
    return Grid(lengths, lengths, correct, counts, shared, task.max_digits)


def exact_match(
    apply: Apply,
    variables: Any,
    examples: Examples,
    *,
    batch_size: int = 512,
    shapes: int = 2,
    progress: Progress | None = None,
) -> np.ndarray:
    """Whether each answer would be generated greedily to its last token: bool [E].

    Args:
      apply: as for :func:`exact_match_grid`.
      variables: of the model.
      examples: prompts and answers.
      batch_size: examples of one pass.
      shapes: how many different sequence lengths to compile for; each example is padded to the
        next of them. More of them compute less and compile longer.
      progress: called with the numbers of examples done and to be done.

    Raises:
      ValueError: no examples, or ``batch_size`` or ``shapes`` below 1.
    """
    require(len(examples) > 0, "evaluation: no examples")
    require(batch_size >= 1, f"evaluation: batch_size must be at least 1; got {batch_size}")
    require(shapes >= 1, f"evaluation: shapes must be at least 1; got {shapes}")
    right = np.zeros(len(examples), bool)
    done = 0

    def fetch(rows: np.ndarray, outcome: jax.Array) -> None:
        nonlocal done
        right[rows] = outcome[: len(rows)]
        done += len(rows)
        if progress is not None:
            progress(done, len(examples))

    waiting: tuple[np.ndarray, jax.Array] | None = None
    for rows, batch in _batches(examples, min(batch_size, len(examples)), shapes):
        outcome = _all_right(apply, variables, batch.tokens, batch.prompt_lengths, batch.lengths)
        if waiting is not None:
            fetch(*waiting)
        waiting = rows, outcome
    assert waiting is not None
    fetch(*waiting)
    return right


def _batches(
    examples: Examples, batch_size: int, shapes: int
) -> Iterator[tuple[np.ndarray, Examples]]:
    """Row numbers [<= B] and their examples [B], the last one repeated to fill the batch."""
    quantiles = np.arange(1, shapes + 1) / shapes
    widths = np.unique(np.quantile(examples.lengths, quantiles, method="higher"))
    group = np.searchsorted(widths, examples.lengths)
    for index, width in enumerate(widths):
        members = np.flatnonzero(group == index)
        for start in range(0, len(members), batch_size):
            rows = members[start : start + batch_size]
            filled = np.pad(rows, (0, batch_size - len(rows)), mode="edge")
            yield rows, examples.take(filled, int(width))


@functools.partial(jax.jit, static_argnums=0)
def _all_right(
    apply: Apply, variables: Any, tokens: jax.Array, prompt_lengths: jax.Array, lengths: jax.Array
) -> jax.Array:
    """bool [B]: whether the most probable token is right at every place of the answer."""
    tokens = tokens.astype(jnp.int32)
    predicted = jnp.argmax(apply(variables, tokens[:, :-1]), axis=-1)
    place = jnp.arange(1, tokens.shape[1])
    in_answer = (place >= prompt_lengths[:, None]) & (place < lengths[:, None])
    return jnp.all((predicted == tokens[:, 1:]) | ~in_answer, axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def greedy(apply: Apply, variables: Any, tokens: jax.Array, prompt_lengths: jax.Array) -> jax.Array:
    """Continues prompts token by token, always with the most probable one, without a cache.

    Args:
      apply: as for :func:`exact_match_grid`.
      variables: of the model.
      tokens: int32 [B, T], of which each row starts with its prompt.
      prompt_lengths: int32 [B], 1..T.

    Returns:
      int32 [B, T]: the prompts, each continued to T tokens.
    """
    rows = jnp.arange(tokens.shape[0])

    def step(place: jax.Array, tokens: jax.Array) -> jax.Array:
        predicted = jnp.argmax(apply(variables, tokens[:, :-1])[rows, place - 1], axis=-1)
        given = place < prompt_lengths
        return tokens.at[:, place].set(jnp.where(given, tokens[:, place], predicted))

    return jax.lax.fori_loop(jnp.min(prompt_lengths), tokens.shape[1], step, tokens)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model answered.

    Attributes:
      question: as asked.
      text: the answer in ordinary writing or, if it is not well formed, the tokens as they are.
      solution: the right answer.
    """

    question: str
    text: str
    solution: str

    @property
    def right(self) -> bool:
        """Whether the model is right."""
        return self.text == self.solution

    def __str__(self) -> str:
        verdict = "right" if self.right else f"wrong: it is {self.solution}"
        return f"{self.question} = {self.text} ({verdict})"


def answer(
    apply: Apply,
    variables: Any,
    task: QuestionTask,
    question: str,
    *,
    max_length: int | None = None,
) -> Answer:
    """Asks the model one question.

    Args:
      apply: as for :func:`exact_match_grid`.
      variables: of the model.
      task: knows how to write the question and read the answer.
      question: in ordinary writing, such as ``"407+85"``.
      max_length: tokens that the model accepts; None: no limit.

    Raises:
      ValueError: a question that is none, or whose answer may be too long for the model.
    """
    prompt = task.question(question)
    start, end = len(prompt), len(prompt) + task.max_answer_length(prompt)
    _require_fits(end - 1, max_length, f"{question!r} with its answer")
    # Rounded up, so that questions of similar length share one compilation.
    width = -(-end // 16) * 16
    width = width if max_length is None else min(width, max_length + 1)
    buffer = np.pad(prompt, (0, width - start))[None]
    written = np.asarray(greedy(apply, variables, buffer, np.array([start], np.int32)))
    tokens = written[0, start:end]
    try:
        text = task.read_answer(tokens)
    except ValueError:
        text = task.decode(tokens)
    return Answer(question, text, task.solve(question))


def length_table(grids: Mapping[str, Grid]) -> str:
    """Exact match by the length of the longer operand, a column for each grid.

    Percentages stand with their 95 % Wilson intervals.

    Raises:
      ValueError: no grids, or grids of different questions (see :func:`require_same_questions`).
    """
    first = require_same_questions(grids)
    inside = first.longest <= first.trained

    def row(label: str, where: np.ndarray, note: str) -> list[str]:
        asked = [grid.proportion(where) for grid in grids.values()]
        return [label, note, f"{asked[0].count:,}", *map(str, asked)]

    rows = []
    for length in np.unique(first.longest):
        where = first.longest == length
        mark = "*" if np.any(first.shared[where]) else ""
        rows.append(
            row(f"{length}{mark}", where, "trained" if length <= first.trained else "beyond")
        )
    for label, where in (
        ("trained range", inside),
        ("... held out only", inside & ~first.shared),
        ("beyond it", ~inside),
    ):
        if np.any(first.counts[where]):
            rows.append(row("all", where, label))
    table = text_table(["digits", "range", "sums", *(f"{name}, %" for name in grids)], rows)
    if np.any(first.shared):
        table += (
            "\n\n\\* contains pairs of lengths with too few sums to hold any out: "
            "training and evaluation share them."
        )
    return table


def require_same_questions(grids: Mapping[str, Grid]) -> Grid:
    """The first of the grids, which may be compared.

    Raises:
      ValueError: no grids, or grids of different lengths, trained range or numbers of sums.
    """
    require(len(grids) > 0, "no grids to compare")
    (name, first), *others = grids.items()
    for other, grid in others:
        for field in ("trained", "lengths_a", "lengths_b", "counts", "shared"):
            here, there = getattr(first, field), getattr(grid, field)
            require(
                np.array_equal(here, there),
                f"{name!r} and {other!r} were not asked the same: {field} is {here} and {there}",
            )
    return first


def pool(grids: Sequence[Grid]) -> Grid:
    """The answers of several models to the same sums, counted together."""
    first = require_same_questions({f"seed {i}": grid for i, grid in enumerate(grids)})
    correct = np.sum([grid.correct for grid in grids], axis=0)
    return dataclasses.replace(first, correct=correct, counts=len(grids) * first.counts)


def averages_table(grids: Mapping[str, Grid]) -> str:
    """Exact match inside and beyond the trained range, a row for each grid."""
    trained = require_same_questions(grids).trained
    header = ["%", f"up to {trained} digits", "of these, held out only", "beyond"]
    rows = [
        [name, str(g.inside), str(g.inside_held_out), str(g.outside)] for name, g in grids.items()
    ]
    return text_table(header, rows)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in aligned plain text that is valid Markdown as well; numbers align to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(cell[:1].isdigit() for cell in column[1:]) for column in columns]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        )
        return f"| {' | '.join(aligned)} |"

    rule = [
        "-" * (w - 1) + ":" if right else "-" * w for w, right in zip(widths, numeric, strict=True)
    ]
    return "\n".join(map(line, (header, rule, *rows)))


def _percent(share: float) -> str:
    """In percent; only exact ones are written as 0 and 100."""
    if share in (0, 1):
        return f"{100 * share:.0f}"
    return f"{min(max(100 * share, 0.1), 99.9):.1f}"


def _require_fits(tokens: int, max_length: int | None, what: str) -> None:
    require(
        max_length is None or tokens <= max_length,
        f"{what} needs {tokens} tokens, but the model accepts at most {max_length}",
    )
