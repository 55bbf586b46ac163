"""Fixed-length sequences from a stream of documents.

``concatenated``: the stream is cut every T tokens, regardless of its content; every token except
the first is a target once. ``documents``: as many whole documents as fit, in stream order; longer
ones are cut every T tokens. A document's tokens then see only each other: each document has a
segment id, and positions that start at 0.
"""

from __future__ import annotations

import array
import dataclasses
import functools
from collections.abc import Callable

import grain
import numpy as np

from train.checks import choose, require
from train.data import synthetic
from train.data.token_cache import TokenStream

PACKINGS = ("concatenated", "documents")

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """The packed sequences of a stream.

    Attributes:
      stream: the documents.
      length: T.
      kind: one of ``PACKINGS``.
      pad: the token after the last one of a sequence that is not full.
    """

    stream: TokenStream
    length: int
    kind: str
    pad: int = 0
    _rows: tuple[np.ndarray, np.ndarray] | None = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        choose("packing", self.kind, PACKINGS)
        by_document = self.kind == "documents"
        rows = pack(self.stream.offsets, self.length) if by_document else None
        object.__setattr__(self, "_rows", rows)
        require(
            len(self) > 0,
            f"a text of {len(self.stream.tokens)} tokens is shorter than one sequence of "
            f"{self.length} tokens and the one after it",
        )

    def __len__(self) -> int:
        """Returns the number of sequences."""
        if self._rows is None:
            return max(0, len(self.stream.tokens) - 1) // self.length
        return len(self._rows[0])

    def batch(self, rows: np.ndarray) -> Batch:
        """The sequences ``rows`` [B], in the form of :meth:`train.tasks.Task.dataset`."""
        place = np.arange(self.length + 1, dtype=np.int32)
        if self._rows is None:
            tokens = self.stream.tokens[(rows * self.length)[:, None] + place].astype(np.int32)
            weights = np.ones((len(rows), self.length), np.float32)
            return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}

        starts, stops = (ends[rows] for ends in self._rows)
        sizes = stops - starts
        last = len(self.stream.tokens) - 1
        tokens = self.stream.tokens[np.minimum(starts[:, None] + place, last)].astype(np.int32)
        present = place < sizes[:, None]
        tokens[~present] = self.pad
        first = self._document_starts(starts, sizes)
        segments = np.where(present, 1 + np.cumsum(first, axis=1, dtype=np.int32), 0)
        begun = np.maximum.accumulate(np.where(first, place, 0), axis=1)
        positions = np.where(present, place - begun, 0)
        same = present[:, 1:] & (segments[:, 1:] == segments[:, :-1])
        return {
            "inputs": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weights": same.astype(np.float32),
            "segment_ids": segments[:, :-1],
            "positions": positions[:, :-1],
        }

    def _document_starts(self, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Marks document starts inside rows, except the first token: bool [B, T + 1]."""
        offsets = self.stream.offsets
        low = np.searchsorted(offsets, starts, side="right")
        counts = np.searchsorted(offsets, starts + sizes, side="left") - low
        row = np.repeat(np.arange(len(starts)), counts)
        index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        marks = np.zeros((len(starts), self.length + 1), bool)
        marks[row, offsets[low[row] + index] - starts[row]] = True
        return marks


def pack(offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the sequences of packed documents start and stop in the stream.

    A document of more than ``length + 1`` tokens is cut into pieces that begin every ``length``
    tokens. The last token of a piece, a target, is thus the first input of the next. A sequence
    takes pieces, in order, as long as they fit into ``length + 1`` tokens. A sequence of single
    tokens has no target and is left out.

    Args:
      offsets: int64 [documents + 1].
      length: T.

    Returns:
      starts and stops, int64 [sequences].
    """
    sizes = np.diff(offsets)
    pieces = np.maximum(1, -(-(sizes - 1) // length))
    document = np.repeat(np.arange(len(sizes)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = offsets[document] + number * length
    stops = np.minimum(starts + length + 1, offsets[document + 1])
    # Piece i is followed in the next sequence by the first piece that does not fit beside it.
    following = np.searchsorted(stops, starts + length + 1, side="right")
    rows, piece = array.array("q"), 0
    while piece < len(following):
        rows.append(piece)
        piece = int(following[piece])
    first = np.array(rows, np.int64)
    last = np.append(first[1:], len(starts))[: len(first)]
    begin, end = starts[first], stops[last - 1]
    # A piece's first token is not a target.
    useful = end - begin > last - first
    return begin[useful], end[useful]


def endless_batches(
    open_text: Callable[[], Packed], shuffle: bool, seed: int, batch_size: int, *share: int
) -> grain.IterDataset:
    """Returns an endless stream of a text's batches: :func:`train.data.synthetic.dataset`.

    The sequences have a pseudo-random order, different in each pass. The iterator knows its text
    (:class:`train.data.synthetic.OfOneText`).

    Args:
      open_text: gives the sequences; called once, after the other arguments have been checked.
      shuffle: whether the order is pseudo-random, rather than the text's.
      seed: of the order.
      batch_size: examples of one training step, of all processes together.
      share: index and number of processes.
    """
    packed = functools.cache(open_text)

    def batch(seed: int, index: int, size: int) -> Batch:
        places = range(index * size, (index + 1) * size)
        count = len(packed())
        rows = [shuffled(count, seed, place) if shuffle else place % count for place in places]
        return packed().batch(np.array(rows, np.int64))

    batches = synthetic.dataset("text", batch, seed, batch_size, *share)
    return synthetic.OfOneText(batches, packed().stream.digest)


def shuffled(count: int, seed: int, place: int) -> int:
    """Returns the number at ``place`` of endless passes over 0..count - 1, each reordered."""
    number, place = divmod(place, count)
    # Seeds are mixed with the pass, so that pass 1 of seed 0 is not pass 0 of seed 1.
    return grain.experimental.index_shuffle(
        place, max_index=count - 1, seed=_mix(seed, number), rounds=4
    )


@functools.lru_cache(maxsize=16)
def _mix(seed: int, number: int) -> int:
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
