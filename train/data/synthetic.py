"""Endless streams of batches, each a function of its index, so training can resume anywhere."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import grain
import numpy as np

from train.checks import positive, require

Batch = dict[str, np.ndarray]


def generator(seed: int, *stream: int) -> np.random.Generator:
    """Makes independent random numbers for each seed and stream (at most three numbers)."""
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
    """Makes an endless stream of batches from the pure function ``batch(seed, index, size)``.

    The stream of ``seed`` is a sequence of batches of ``batch_size / process_count`` examples;
    process p reads batches p, p + ``process_count``, and so on. The iterator's state is the number
    of batches that it has given.

    Args:
      task: its name, for errors.
      batch: makes batch ``index``.
      seed: 0..2**64 - 1, the same in all processes.
      batch_size: examples of one training step, of all processes together.
      process_index, process_count: the share of each step to read.

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
    # One prefetch thread; more would compete with the training step for the cores.
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


class OfOneText(grain.IterDataset):
    """A dataset whose iterators know which text they read.

    Their state holds the text's digest and the number of batches given. Restoring it on another
    text raises ValueError.
    """

    def __init__(self, parent: grain.IterDataset, digest: str):
        super().__init__(parent)
        self._digest = digest

    def __iter__(self) -> grain.DatasetIterator:
        return _OfOneTextIterator(iter(self._parent), self._digest)


class _OfOneTextIterator(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, digest: str):
        super().__init__(parent)
        self._digest = digest

    def __next__(self) -> Batch:
        return next(self._parent)

    def get_state(self) -> dict[str, Any]:
        return {"text": self._digest, "batches": self._parent.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        if "text" not in state:  # From an old SCROLLS run without a digest.
            self._parent.set_state(state)
            return
        require(
            state["text"] == self._digest,
            "the text has changed since this state was saved: its source or its tokenizer gives "
            f"other tokens (SHA-256 {state['text'][:12]}... then, {self._digest[:12]}... now)",
        )
        self._parent.set_state(state["batches"])


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

        A batch does not depend on the number of processes: each makes all of it and keeps its rows.
        """

        def rows(seed: int, index: int, size: int) -> Batch:
            step, process = divmod(index, process_count)
            batch = self.batch(seed, step, size * process_count)
            return {name: x[process * size : (process + 1) * size] for name, x in batch.items()}

        return dataset(self.kind, rows, seed, batch_size, process_index, process_count)


def require_positive(task: str, **values: Any) -> None:
    """Raises ValueError unless all values are positive integers."""
    for name, value in values.items():
        positive(f"{task}: {name}", value)


def require_seed(task: str, seed: Any) -> None:
    """Raises ValueError unless ``seed`` is an integer that :func:`generator` takes."""
    require(
        isinstance(seed, int) and 0 <= seed < 2**64,
        f"{task}: seed must be an integer from 0 to 2**64 - 1; got {seed!r}",
    )
