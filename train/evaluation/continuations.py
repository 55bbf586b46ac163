"""Greedy continuations of many prompts: batches of similar length, each length compiled once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax import Cache, Transformer, decode, init_cache, pad_prompts, prefill
from train.checks import require
from train.evaluation import Progress, few_widths
from train.evaluation.programs import Programs

# Tokens that are written before a check whether they suffice: the largest of these numbers that
# leaves no remainder, which would need another compiled program.
BLOCKS = range(8, 17)


@dataclasses.dataclass
class Continuer:
    """Continues prompts with one model and keeps the programs, one for each shape.

    Attributes:
      model, variables: of the model; its sharding, if any, also splits batches.
      pad: the token of padding.
      stops: the tokens that end a continuation, and are left out.
      batch_size: prompts that are continued at once.
      chunk: tokens of the prompts that are run at a time; None: all.
      enough: takes the continuations of a batch so far, [B, n], and says whether they suffice;
        None: all go on to a stop, or to the end.
      programs: those compiled, and the continuations that are kept, if any; those that ``enough``
        ends are not kept.
    """

    model: Transformer
    variables: Any
    pad: int
    stops: tuple[int, ...] = ()
    batch_size: int = 16
    chunk: int | None = None
    enough: Callable[[np.ndarray], bool] | None = None
    programs: Programs = dataclasses.field(default_factory=Programs)

    def run(
        self, prompts: Sequence[np.ndarray], max_new_tokens: int, widths: Sequence[int] | np.ndarray
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Continues prompts, the longest first.

        Args:
          prompts: token ids [P] each, at least 1.
          max_new_tokens: N.
          widths: ascending lengths to compile for, the last at least that of the longest prompt;
            each batch is padded to the next of them.

        Yields:
          Rows of ``prompts``, and for each at most N token ids, up to the stop.

        Raises:
          ValueError: a batch that does not fit into the memory.
        """
        lengths = np.array([len(prompt) for prompt in prompts])
        for rows, filled in batches(
            -lengths, batch_rows(self.model, self.batch_size, len(prompts))
        ):
            width = int(widths[np.searchsorted(widths, lengths[rows[0]])])
            padded, sizes = map(np.asarray, pad_prompts([prompts[i] for i in filled], self.pad))
            margin = (0, 0), (width - padded.shape[1], 0)
            tokens = np.pad(padded, margin, constant_values=self.pad)
            asked = [max_new_tokens, self.pad, *(self.stops or [-1])]
            given = tokens, sizes, np.array(asked)
            key, written = self.programs.kept_result("continuations", given)
            if is_new := written is None:
                with self.programs.speed.measured():
                    written = self._continue(tokens, sizes, max_new_tokens)
                if self.enough is None:
                    self.programs.keep(key, written)
            answers = [before(self.stops, row) for row in written[: len(rows)]]
            if is_new:
                self.programs.speed.tokens += int(lengths[rows].sum()) + sum(map(len, answers))
            yield rows, answers

    def _continue(self, tokens: np.ndarray, sizes: np.ndarray, new: int) -> np.ndarray:
        given = self.variables, *place(self.model, (tokens, sizes))
        cache = self.programs.run(_Fill(self.model, new, self.chunk), *given)
        token, rows = given[1][:, -1], np.zeros((len(tokens), 0), np.int32)
        block = max((size for size in BLOCKS if new % size == 0), default=BLOCKS[-1])
        while rows.shape[1] < new:
            count = min(block, new - rows.shape[1])
            written, cache = _write(
                self.model, count, self.stops, self.pad, *given[:1], cache, token
            )
            token, rows = written[:, -1], np.concatenate([rows, written], axis=1)
            ended = np.isin(rows, self.stops).any(axis=1).all()
            if ended or (self.enough is not None and self.enough(rows)):
                break
        return rows


def before(stops: Collection[int], row: np.ndarray) -> np.ndarray:
    """Returns the tokens [n] of a continuation [N] before the first of ``stops``."""
    ends = np.flatnonzero(np.isin(row, list(stops)))
    return row[: ends[0]] if len(ends) else row


def batches(key: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the rows of each batch in the order of a key, and the same padded to ``size``."""
    order = np.argsort(key, kind="stable")
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        yield rows, np.pad(rows, (0, size - len(rows)), mode="edge")


def batch_rows(model: Transformer, batch_size: int, count: int) -> int:
    """Rows of a batch, a multiple of the model's batch shards."""
    parts = 1 if model.sharding is None else model.sharding.shards("batch")
    return -(-min(batch_size, count) // parts) * parts


def place(model: Transformer, arrays: tuple[np.ndarray, ...]) -> tuple[Any, ...]:
    """Places arrays [B, ...] on the mesh of a model, if it has one."""
    return arrays if model.sharding is None else model.sharding.place(arrays)


@dataclasses.dataclass(frozen=True)
class _Fill:
    """Makes a cache of prompts without their last token, with room for ``new`` more."""

    model: Transformer
    new: int
    chunk: int | None

    def __call__(self, variables: Any, tokens: jax.Array, lengths: jax.Array) -> Cache:
        """The cache of left-padded prompts [B, P]."""
        batch, width = tokens.shape
        sizes: Any = {"capacity": width + self.new, "length": lengths + self.new}
        if width == 1:
            return init_cache(self.model, batch, **sizes)
        prompts = tokens[:, :-1], lengths - 1
        return prefill(self.model, variables, *prompts, chunk=self.chunk, **sizes)[1]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=5)
def _write(
    model: Transformer,
    count: int,
    stops: tuple[int, ...],
    pad: int,
    variables: Any,
    cache: Cache,
    token: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Returns the next ``count`` tokens, int32 [B, count], and the cache."""
    stop = jnp.array(stops) if stops else None
    return decode(model, variables, cache, token, count, stop=stop, pad_id=pad)


def continuations(
    continuer: Continuer,
    prompts: Sequence[np.ndarray],
    max_new_tokens: int,
    *,
    shapes: int = 4,
    progress: Progress | None = None,
) -> list[np.ndarray]:
    """Continues many prompts greedily, batched by similar length.

    Args:
      continuer: the model.
      prompts: token ids [P] each, at least 1.
      max_new_tokens: N.
      shapes: how many different lengths to compile for.
      progress: called with the number of prompts done and the total.

    Returns:
      At most N token ids for each prompt, up to the stop, which is left out.
    """
    require(len(prompts) > 0, "evaluation: no prompts")
    widths = few_widths([len(prompt) for prompt in prompts], shapes)
    answers: list[np.ndarray] = [np.zeros(0, np.int32)] * len(prompts)
    done = 0
    for rows, found in continuer.run(prompts, max_new_tokens, widths):
        for row, answer in zip(rows, found, strict=True):
            answers[row] = answer
        done += len(rows)
        if progress is not None:
            progress(done, len(prompts))
    return answers
