"""Endless streams of batches, each a function of its number: training can resume anywhere.

Also what tasks share whose questions are rows of symbols: which of them are held out of training,
which are asked in evaluation, and how they are written down as tokens.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import grain
import numpy as np

from tape_jax.config import require

Batch = dict[str, np.ndarray]

HELD_OUT_ONE_IN = 10
PAD = 0


def generator(seed: int, *stream: int) -> np.random.Generator:
    """Independent random numbers for each seed and each stream of at most three numbers."""
    # Philox counts in the low words of its counter; the high words therefore name the stream.
    counter = np.zeros(4, np.uint64)
    counter[1 : 1 + len(stream)] = stream
    return np.random.Generator(
        np.random.Philox(key=np.array([seed, 0], np.uint64), counter=counter)
    )


def dataset(
    task: str,
    batch: Callable[[int, int, int], Batch],
    seed: int,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.IterDataset:
    """The endless stream of batches that ``batch(seed, index, size)``, a pure function, gives.

    The stream of ``seed`` is a sequence of batches of ``batch_size / process_count`` examples;
    process p reads batches p, p + ``process_count``, and so on. The iterator's state is the number
    of batches that it has given.

    Args:
      task: its name, for errors.
      batch: makes batch ``index``.
      seed: 0..2**64 - 1, the same in all processes.
      batch_size: examples of one training step, of all processes together.
      process_index, process_count: which share of each step to read.

    Raises:
      ValueError: a batch that does not divide among the processes, or an argument out of range.
    """
    require_positive(task, batch_size=batch_size, process_count=process_count)
    require(
        0 <= process_index < process_count,
        f"{task}: process_index must be in 0..{process_count - 1}; got {process_index}",
    )
    require(
        batch_size % process_count == 0,
        f"{task}: batch_size = {batch_size} is not a multiple of process_count = {process_count}",
    )
    require_seed(task, seed)
    batches = _Batches(batch, seed, batch_size // process_count)
    # One thread ahead of the training step; more would only compete with it for the cores.
    return grain.MapDataset.source(batches)[process_index::process_count].to_iter_dataset(
        grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    )


@dataclasses.dataclass(frozen=True)
class _Batches:
    """The stream as a random-access source, which lets grain restore it from an index."""

    batch: Callable[[int, int, int], Batch]
    seed: int
    size: int

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Batch:
        return self.batch(self.seed, index, self.size)


class Stream:
    """A task with an endless stream of batches.

    Attributes:
      kind: the task's name, for errors.
    """

    kind: ClassVar[str]

    def batch(self, seed: int, index: int, size: int) -> Batch:
        """Batch ``index`` of the stream of ``seed``: a pure function of its arguments.

        Returns:
          ``inputs`` and ``targets``, int32 [size, T], and ``weights``, float32 [size, T]: 1 where
          the target counts, else 0.
        """
        raise NotImplementedError

    def dataset(
        self, seed: int, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> grain.IterDataset:
        """The endless stream of training batches: :func:`dataset`.

        A batch is the same for every number of processes: each makes all of it and keeps its rows.
        """

        def rows(seed: int, index: int, size: int) -> Batch:
            step, process = divmod(index, process_count)
            batch = self.batch(seed, step, size * process_count)
            return {name: x[process * size : (process + 1) * size] for name, x in batch.items()}

        return dataset(self.kind, rows, seed, batch_size, process_index, process_count)


def mix(x: np.ndarray) -> np.ndarray:
    """A bijection of uint64 in which each bit depends on all (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def fingerprints(symbols: np.ndarray) -> np.ndarray:
    """uint64 [...]: a hash of each row of ``symbols`` [..., W]. Zeros at its end do not matter."""
    place = np.arange(1, symbols.shape[-1] + 1, dtype=np.uint64)
    factors = mix(place * np.uint64(0x9E3779B97F4A7C15))
    return mix(symbols.astype(np.uint64) @ factors + np.uint64(1))


def is_held_out(fingerprint: np.ndarray) -> np.ndarray:
    """bool [...]: whether what has this fingerprint is in the tenth kept out of training."""
    return mix(fingerprint) % np.uint64(HELD_OUT_ONE_IN) == 0


def choose_questions(
    rng: np.random.Generator,
    samples: int,
    *,
    number: float,
    every: Callable[[], np.ndarray],
    draw: Callable[[int], np.ndarray],
    held_out: Callable[[np.ndarray], np.ndarray] | None,
) -> np.ndarray:
    """Up to ``samples`` distinct questions, or all if there are fewer, in random order.

    Args:
      rng: random numbers.
      samples: how many are wanted.
      number: how many questions there are.
      every: makes all of them, [number, W].
      draw: makes so many random ones, [count, W].
      held_out: tells for rows [N, W] which may be asked; None: all.
    """
    share = 1 if held_out is None else HELD_OUT_ONE_IN

    def select(rows: np.ndarray) -> np.ndarray:
        _, first = np.unique(rows, axis=0, return_index=True)
        rows = rows[np.sort(first)]
        return (rows if held_out is None else rows[held_out(rows)])[:samples]

    # Random drawing would be slow, or endless, where most of the questions are to be found.
    if number < 2 * HELD_OUT_ONE_IN * samples:
        rows = every()
        return select(rows[rng.permutation(len(rows))])
    rows = select(draw(samples * share))
    while len(rows) < samples:
        rows = select(np.concatenate([rows, draw(samples * share)]))
    return rows


Part = int | np.ndarray


def write(
    prompt: Sequence[Part], answer: Sequence[Part], width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Joins the parts of prompts and their answers.

    Args:
      prompt: tokens [B, W], each row of which may hold ``PAD`` in between; or one token for all.
      answer: likewise.
      width: tokens of a row of the result.

    Returns:
      tokens uint8 [B, width], padded at the end; tokens [B] of each prompt; and of prompt and
      answer together.
    """
    parts = [*prompt, *answer]
    count = next(len(part) for part in parts if not isinstance(part, int))
    columns = [np.full((count, 1), p, np.uint8) if isinstance(p, int) else p for p in parts]
    spread = np.concatenate(columns, axis=1)
    prompt_width = sum(column.shape[1] for column in columns[: len(prompt)])
    present = spread != PAD
    lengths = present.sum(axis=1)
    tokens = np.full((count, width), PAD, np.uint8)
    tokens[np.arange(width) < lengths[:, None]] = spread[present]
    return tokens, present[:, :prompt_width].sum(axis=1), lengths


def answers_counted(tokens: np.ndarray, prompt_lengths: np.ndarray, lengths: np.ndarray) -> Batch:
    """Training examples of which only the answers count; the arguments are those of `write`."""
    target = np.arange(1, tokens.shape[1])
    in_answer = (target >= prompt_lengths[:, None]) & (target < lengths[:, None])
    return {
        "inputs": tokens[:, :-1].astype(np.int32),
        "targets": tokens[:, 1:].astype(np.int32),
        "weights": in_answer.astype(np.float32),
    }


def require_positive(task: str, **values: Any) -> None:
    """Raises ValueError unless all values are positive integers."""
    for name, value in values.items():
        require(
            isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value > 0),
            f"{task}: {name} must be a positive integer; got {value!r}",
        )


def require_seed(task: str, seed: Any) -> None:
    """Raises ValueError unless ``seed`` is an integer that :func:`generator` takes."""
    require(
        isinstance(seed, int) and 0 <= seed < 2**64,
        f"{task}: seed must be an integer from 0 to 2**64 - 1; got {seed!r}",
    )
