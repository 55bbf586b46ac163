"""Packing, with tokens that say where in the text they stand."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data.packing import Packed, endless_batches
from train.data.token_cache import TokenStream

PAD = 60_000


def stream_of(sizes, digest="text"):
    """Documents of these sizes whose tokens are 0, 1, 2, ..."""
    offsets = np.cumsum([0, *sizes])
    return TokenStream(np.arange(offsets[-1], dtype=np.uint16), offsets, digest)


def packed(sizes, length, kind):
    return Packed(stream_of(sizes), length, kind, PAD)


def batch_of(sizes, length, kind):
    sequences = packed(sizes, length, kind)
    return sequences.batch(np.arange(len(sequences)))


class TestConcatenated:
    def test_by_hand(self):
        batch = batch_of([4, 1, 6], 3, "concatenated")
        assert batch["inputs"].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
        assert batch["targets"].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
        assert batch["weights"].tolist() == [[1, 1, 1]] * 3
        assert sorted(batch) == ["inputs", "targets", "weights"]
        assert [len(packed([n], 8, "concatenated")) for n in (9, 16, 17)] == [1, 1, 2]


class TestDocuments:
    def test_by_hand(self):
        batch = batch_of([3, 2, 4, 9, 2], 5, "documents")
        # 3 + 2 fit, 4 more do not; the document of 9 is cut after 6, 2 stand beside its rest.
        assert batch["inputs"].tolist() == [
            [0, 1, 2, 3, 4],
            [5, 6, 7, 8, PAD],
            [9, 10, 11, 12, 13],
            [14, 15, 16, 17, 18],
        ]
        assert batch["targets"][:2].tolist() == [[1, 2, 3, 4, PAD], [6, 7, 8, PAD, PAD]]
        assert batch["weights"][:2].tolist() == [[1, 1, 0, 1, 0], [1, 1, 1, 0, 0]]
        assert batch["segment_ids"][:2].tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]]
        assert batch["positions"][:2].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 12))
    def test_every_target_once_and_in_its_document(self, sizes, length):
        document = np.repeat(np.arange(len(sizes)), sizes)
        inside = {(i, i + 1) for i in range(len(document) - 1) if document[i] == document[i + 1]}
        if not inside:
            with pytest.raises(ValueError, match="shorter than one sequence"):
                packed(sizes, length, "documents")
            return
        batch = batch_of(sizes, length, "documents")
        for name in ("inputs", "targets", "segment_ids", "positions"):
            assert batch[name].dtype == np.int32
            assert batch[name].shape == batch["weights"].shape
        weighed = batch["weights"] > 0
        pairs = list(
            zip(batch["inputs"][weighed].tolist(), batch["targets"][weighed].tolist(), strict=True)
        )
        assert len(pairs) == len(inside)
        assert set(pairs) == inside

        present = batch["inputs"] != PAD
        np.testing.assert_array_equal(batch["segment_ids"] > 0, present)
        assert not batch["positions"][~present].any()
        for row in range(len(present)):
            tokens = batch["inputs"][row][present[row]]
            segments = batch["segment_ids"][row][present[row]]
            same_document = document[tokens][:, None] == document[tokens]
            np.testing.assert_array_equal(segments[:, None] == segments, same_document)
            for segment in np.unique(segments):
                positions = batch["positions"][row][present[row]][segments == segment]
                assert positions.tolist() == list(range(len(positions)))
        for d, size in enumerate(sizes):
            rows = np.nonzero(present & (document[batch["inputs"] % PAD] == d))[0]
            assert len({*rows}) == 1 or not 2 <= size <= length

    def test_sequences_are_as_full_as_the_order_allows(self):
        sizes = np.random.default_rng(0).integers(2, 12, 500).tolist()
        # What follows a sequence did not fit into it any more.
        starts = batch_of(sizes, 31, "documents")["inputs"][:, 0]
        size_at = dict(zip(np.cumsum([0, *sizes[:-1]]).tolist(), sizes, strict=True))
        for start, following in itertools.pairwise(starts.tolist()):
            assert following - start <= 32 < following - start + size_at[following]


class TestStream:
    SIZES = (30, 7, 22, 41, 3, 90, 12)

    def stream(self, seed=0, size=4, index=0, count=1, shuffle=True, digest="text"):
        sequences = Packed(stream_of(self.SIZES, digest), 8, "documents", PAD)
        return iter(endless_batches(lambda: sequences, shuffle, seed, size * count, index, count))

    def passes(self, number, **options):
        """The first tokens of the sequences of so many passes: they name them."""
        count = len(packed(self.SIZES, 8, "documents"))
        stream = self.stream(**options, size=1)
        firsts = [int(next(stream)["inputs"][0, 0]) for _ in range(number * count)]
        return np.reshape(firsts, (number, count)).tolist()

    def test_every_pass_visits_each_sequence_once(self):
        in_order, again = self.passes(2, shuffle=False)
        assert in_order == again == sorted(set(in_order))
        shuffled = [x for seed in (0, 1, 2, 2**64 - 1) for x in self.passes(2, seed=seed)]
        assert all(sorted(order) == in_order for order in shuffled)
        assert len({tuple(order) for order in [*shuffled, in_order]}) == 9

    def test_processes_share_the_stream(self):
        whole = self.stream(size=2)
        parts = [self.stream(size=2, index=i, count=3) for i in range(3)]
        for _ in range(4):
            for part in parts:
                np.testing.assert_equal(next(part), next(whole))

    def test_batches_cut_the_same_stream(self):
        small, large = self.stream(size=2), self.stream(size=4)
        for _ in range(5):
            halves = [next(small), next(small)]
            for name, value in next(large).items():
                np.testing.assert_array_equal(value, np.concatenate([h[name] for h in halves]))

    def test_restores_bit_for_bit(self):
        options = {"seed": 2**32 - 1, "index": 1, "count": 2}
        stream, resumed = self.stream(**options), self.stream(**options)
        for _ in range(7):
            next(stream)
        state = json.loads(json.dumps(stream.get_state()))
        resumed.set_state(state)
        for _ in range(12):
            np.testing.assert_equal(next(resumed), next(stream))
        with pytest.raises(ValueError, match="the text has changed since this state was saved"):
            self.stream(digest="another").set_state(state)


@pytest.mark.parametrize(
    ("sizes", "kind", "message"),
    [
        ([8], "concatenated", "tokens is shorter than one sequence of 8 tokens"),
        ([1, 1], "documents", "tokens is shorter than one sequence of 8 tokens"),
        ([99], "document", r"unknown packing 'document'.*did you mean"),
    ],
)
def test_what_cannot_be_packed(sizes, kind, message):
    with pytest.raises(ValueError, match=message):
        packed(sizes, 8, kind)
