"""Evaluation: exact match of whole answers.

A greedily generated answer is right exactly when the model, fed the right answer, gives each of its
tokens the highest probability: up to the first wrong token both see the same inputs. So one pass
over prompt and answer replaces one pass for every token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax import Transformer
from train.checks import require
from train.evaluation import Progress, few_widths, fits
from train.evaluation.programs import Programs

Apply = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Prompts with their answers, ready to be judged by :func:`exact_match`.

    Attributes:
      tokens: integers [E, L]: a prompt, its answer (end symbol included), then padding.
      prompt_lengths: [E] tokens of each prompt, at least 1.
      lengths: [E] tokens of prompt and answer together.
      cells: [E, 2] row and column of the grid that each example belongs to.
    """

    tokens: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray
    cells: np.ndarray

    def __post_init__(self):
        shapes = {f.name: np.shape(getattr(self, f.name)) for f in dataclasses.fields(self)}
        count, width = (*shapes["tokens"], 0, 0)[:2]
        expected = {
            "tokens": (count, width),
            "prompt_lengths": (count,),
            "lengths": (count,),
            "cells": (count, 2),
        }
        require(shapes == expected, f"examples: shapes {shapes}, expected {expected}")
        require(
            bool(
                np.all(self.prompt_lengths >= 1)
                and np.all(self.prompt_lengths < self.lengths)
                and np.all(self.lengths <= width)
            ),
            f"examples: need 1 <= prompt_lengths < lengths <= {width} in every row",
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: np.ndarray, width: int) -> Examples:
        """The given rows, cut to ``width`` tokens."""
        return Examples(
            self.tokens[rows, :width],
            self.prompt_lengths[rows],
            self.lengths[rows],
            self.cells[rows],
        )


class Askable(Protocol):
    """A task that can be asked in ordinary writing."""

    def question(self, text: str) -> np.ndarray: ...

    def solve(self, text: str) -> str: ...

    def longest_answer(self, text: str) -> int: ...

    def read_answer(self, tokens: np.ndarray) -> str: ...

    def decode(self, tokens: np.ndarray) -> str: ...


@dataclasses.dataclass(frozen=True)
class AtPlaces:
    """A model that computes logits only at given places: memory for [B, A, V], not [B, T, V]."""

    model: Transformer

    def __call__(
        self, variables: Any, tokens: jax.Array, places: jax.Array, length: jax.Array
    ) -> jax.Array:
        """Logits [B, A, V] after ``tokens`` [B, T] at ``places`` [B, A]; ``length`` [B]."""
        hidden = self.model.apply(variables, tokens, length=length, output="hidden")
        hidden = jnp.asarray(hidden)
        at = jnp.take_along_axis(hidden, places[..., None], axis=1, mode="clip")
        return self.model.project(variables, at)


def exact_match(
    apply: Apply | AtPlaces,
    variables: Any,
    examples: Examples,
    *,
    batch_size: int = 512,
    shapes: int = 2,
    progress: Progress | None = None,
    programs: Programs | None = None,
) -> np.ndarray:
    """Returns whether each answer would be generated greedily to its last token: bool [E].

    Args:
      apply: ``apply(variables, tokens int32 [B, T], length=int32 [B]) -> logits [B, T, V]``, causal
        and hashable (a model's ``apply`` method is), compiled once for each shape; or
        :class:`AtPlaces` to save memory. ``length`` is the number of tokens of each row without
        padding, which decides what encodings draw or scale by the length.
      variables: of the model.
      examples: prompts and answers.
      batch_size: examples of one pass.
      shapes: how many different sequence lengths to compile for; each example is padded to the
        next of them. More shapes compute less but compile longer.
      progress: called with the number of examples done and the total.
      programs: plans, keeps and times the passes; None: a new one.

    Raises:
      ValueError: no examples, ``batch_size`` or ``shapes`` below 1, or a pass that does not fit
        into the memory.
    """
    require(len(examples) > 0, "evaluation: no examples")
    require(batch_size >= 1, f"evaluation: batch_size must be at least 1; got {batch_size}")
    require(shapes >= 1, f"evaluation: shapes must be at least 1; got {shapes}")
    right, done = np.zeros(len(examples), bool), 0
    all_right = _AllRight(apply, int((examples.lengths - examples.prompt_lengths).max()))
    chosen = list(_rows(examples, min(batch_size, len(examples)), shapes))
    batches = (
        ((batch.tokens, batch.prompt_lengths, batch.lengths), int(examples.lengths[rows].sum()))
        for rows, filled, width in chosen
        for batch in [examples.take(filled, width)]
    )
    found = (programs or Programs()).results("exact match", all_right, variables, batches)
    for (rows, _, _), outcome in zip(chosen, found, strict=True):
        right[rows] = outcome[: len(rows)]
        done += len(rows)
        if progress is not None:
            progress(done, len(examples))
    return right


def _rows(
    examples: Examples, batch_size: int, shapes: int
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Row numbers [<= B] of a pass, the same with the last one repeated [B], and their width.

    The widest come first, so that a pass too large for memory fails at once.
    """
    widths = few_widths(examples.lengths, shapes)
    group = np.searchsorted(widths, examples.lengths)
    for index, width in reversed([*enumerate(widths)]):
        members = np.flatnonzero(group == index)
        for start in range(0, len(members), batch_size):
            rows = members[start : start + batch_size]
            yield rows, np.pad(rows, (0, batch_size - len(rows)), mode="edge"), int(width)


@dataclasses.dataclass(frozen=True)
class _AllRight:
    """Tells whether the most probable token is right at every place of each answer."""

    apply: Apply | AtPlaces
    answer_length: int

    def __call__(
        self, variables: Any, tokens: jax.Array, prompt_lengths: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        """Returns bool [B] for ``tokens`` [B, L] with these lengths [B] of prompts and in all."""
        inputs, targets = tokens[:, :-1].astype(jnp.int32), tokens[:, 1:].astype(jnp.int32)
        places = prompt_lengths[:, None] - 1 + jnp.arange(self.answer_length)
        if isinstance(self.apply, AtPlaces):
            logits = self.apply(variables, inputs, places, lengths - 1)
        else:
            logits = self.apply(variables, inputs, length=lengths - 1)
            logits = jnp.take_along_axis(logits, places[..., None], axis=1, mode="clip")
        wanted = jnp.take_along_axis(targets, places, axis=1, mode="clip")
        beyond = places + 1 >= lengths[:, None]
        return jnp.all((jnp.argmax(logits, axis=-1) == wanted) | beyond, axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def greedy(
    apply: Apply, variables: Any, tokens: jax.Array, prompt_lengths: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Continues prompts token by token, always with the most probable one, without a cache.

    Args:
      apply: as for :func:`exact_match`.
      variables: of the model.
      tokens: int32 [B, T]; each row starts with its prompt.
      prompt_lengths: int32 [B], 1..T.
      lengths: int32 [B], 2..T: tokens of each prompt with its longest answer.

    Returns:
      int32 [B, T]: the prompts, each continued to T tokens.
    """
    rows = jnp.arange(tokens.shape[0])

    def step(place: jax.Array, tokens: jax.Array) -> jax.Array:
        logits = apply(variables, tokens[:, :-1], length=lengths - 1)
        predicted = jnp.argmax(logits[rows, place - 1], axis=-1)
        given = place < prompt_lengths
        return tokens.at[:, place].set(jnp.where(given, tokens[:, place], predicted))

    return jax.lax.fori_loop(jnp.min(prompt_lengths), tokens.shape[1], step, tokens)


@dataclasses.dataclass(frozen=True)
class Answer:
    """A model's answer to a question, and the right one.

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
        """True if the model's answer is the right one."""
        return self.text == self.solution

    def __str__(self) -> str:
        verdict = "right" if self.right else f"wrong: it is {self.solution}"
        return f"{self.question} = {self.text} ({verdict})"


def answer(
    apply: Apply,
    variables: Any,
    task: Askable,
    question: str,
    *,
    max_length: int | None = None,
) -> Answer:
    """Asks the model one question.

    Args:
      apply: as for :func:`exact_match`.
      variables: of the model.
      task: knows how to write the question and read the answer.
      question: in ordinary writing, such as ``"407+85"``.
      max_length: tokens that the model accepts; None: no limit.

    Raises:
      ValueError: text that is not a question, or an answer that may be too long for the model.
    """
    prompt = task.question(question)
    start, end = len(prompt), len(prompt) + task.longest_answer(question)
    require(
        fits(end - 1, max_length),
        f"{question!r} with its answer needs {end - 1} tokens, but the model accepts at most "
        f"{max_length}",
    )
    # Rounded up, so that questions of similar length share one compilation.
    width = -(-end // 16) * 16
    width = width if max_length is None else min(width, max_length + 1)
    buffer = np.pad(prompt, (0, width - start))[None]
    ends = (np.array([n], np.int32) for n in (start, end))
    written = np.asarray(greedy(apply, variables, buffer, *ends))
    tokens = written[0, start:end]
    try:
        text = task.read_answer(tokens)
    except ValueError:
        text = task.decode(tokens)
    return Answer(question, text, task.solve(question))
