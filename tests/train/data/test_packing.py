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

    @pytest.mark.parametrize(("size", "count"), [(9, 1), (16, 1), (17, 2)])
    def test_number(self, size, count):
        assert len(packed([size], 8, "concatenated")) == count


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
        assert batch["targets"].tolist() == [
            [1, 2, 3, 4, PAD],
            [6, 7, 8, PAD, PAD],
            [10, 11, 12, 13, 14],
            [15, 16, 17, 18, 19],
        ]
        assert batch["weights"].tolist() == [
            [1, 1, 0, 1, 0],
            [1, 1, 1, 0, 0],
            [1, 1, 1, 1, 1],
            [1, 1, 1, 0, 1],
        ]
        assert batch["segment_ids"].tolist() == [
            [1, 1, 1, 2, 2],
            [1, 1, 1, 1, 0],
            [1, 1, 1, 1, 1],
            [1, 1, 1, 1, 2],
        ]
        assert batch["positions"].tolist() == [
            [0, 1, 2, 0, 1],
            [0, 1, 2, 3, 0],
            [0, 1, 2, 3, 4],
            [0, 1, 2, 3, 0],
        ]

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 12))
    def test_every_target_once_and_in_its_document(self, sizes, length):
        stream = stream_of(sizes)
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
        whole = [d for d, size in enumerate(sizes) if 2 <= size <= length]
        rows = {
            d: set(np.nonzero(present & (document[batch["inputs"] % PAD] == d))[0]) for d in whole
        }
        assert all(len(found) == 1 for found in rows.values())
        assert len(stream.tokens) == sum(sizes)

    def test_sequences_are_as_full_as_the_order_allows(self):
        rng = np.random.default_rng(0)
        sizes = rng.integers(2, 12, 500).tolist()
        batch = batch_of(sizes, 31, "documents")
        used = [int((row != PAD).sum()) for row in batch["inputs"]]
        # What follows a sequence did not fit into it any more.
        starts = batch["inputs"][:, 0]
        size_at = dict(zip(np.cumsum([0, *sizes[:-1]]).tolist(), sizes, strict=True))
        for start, following in itertools.pairwise(starts.tolist()):
            assert following - start <= 32 < following - start + size_at[following]
        assert np.mean(used) > 0.8 * 31


@pytest.mark.parametrize("kind", ["concatenated", "documents"])
class TestStream:
    SIZES = (30, 7, 22, 41, 3, 90, 12)

    def stream(self, kind, seed=0, size=4, index=0, count=1, shuffle=True, digest="text"):
        sequences = Packed(stream_of(self.SIZES, digest), 8, kind, PAD)
        return iter(endless_batches(lambda: sequences, shuffle, seed, size * count, index, count))

    def firsts(self, kind, number, **options):
        """The first tokens of the first sequences of the stream: they name them."""
        stream = self.stream(kind, **options, size=1)
        return [int(next(stream)["inputs"][0, 0]) for _ in range(number)]

    def test_every_pass_visits_each_sequence_once(self, kind):
        count = len(packed(self.SIZES, 8, kind))
        in_order = self.firsts(kind, 2 * count, shuffle=False)
        assert in_order[:count] == sorted(set(in_order))
        assert in_order[count:] == in_order[:count]
        passes = np.array(self.firsts(kind, 3 * count, seed=5)).reshape(3, count)
        np.testing.assert_array_equal(np.sort(passes), np.tile(in_order[:count], (3, 1)))
        orders = {tuple(order) for order in [*passes.tolist(), in_order[:count]]}
        assert len(orders) == 4

    def test_seeds_are_independent(self, kind):
        count = len(packed(self.SIZES, 8, kind))
        orders = [self.firsts(kind, 2 * count, seed=seed) for seed in (0, 1, 2, 2**64 - 1)]
        halves = [tuple(order[i : i + count]) for order in orders for i in (0, count)]
        assert len(set(halves)) == 8

    def test_processes_share_the_stream(self, kind):
        whole = self.stream(kind, size=2)
        parts = [self.stream(kind, size=2, index=i, count=3) for i in range(3)]
        for _ in range(4):
            for part in parts:
                np.testing.assert_equal(next(part), next(whole))

    def test_batches_cut_the_same_stream(self, kind):
        small, large = self.stream(kind, size=2), self.stream(kind, size=4)
        for _ in range(5):
            halves = [next(small), next(small)]
            for name, value in next(large).items():
                np.testing.assert_array_equal(value, np.concatenate([h[name] for h in halves]))

    def test_restores_bit_for_bit(self, kind):
        stream = self.stream(kind, seed=2**32 - 1, index=1, count=2)
        for _ in range(7):
            next(stream)
        state = json.loads(json.dumps(stream.get_state()))
        ahead = [next(stream) for _ in range(12)]
        resumed = self.stream(kind, seed=2**32 - 1, index=1, count=2)
        resumed.set_state(state)
        for expected in ahead:
            np.testing.assert_equal(next(resumed), expected)

    def test_another_text_is_refused(self, kind):
        state = self.stream(kind).get_state()
        with pytest.raises(ValueError, match="the text has changed since this state was saved"):
            self.stream(kind, digest="another").set_state(state)


class TestErrors:
    @pytest.mark.parametrize(("sizes", "kind"), [([8], "concatenated"), ([1, 1], "documents")])
    def test_too_short(self, sizes, kind):
        with pytest.raises(ValueError, match="tokens is shorter than one sequence of 8 tokens"):
            packed(sizes, 8, kind)

    def test_unknown_packing(self):
        with pytest.raises(ValueError, match=r"unknown packing 'document'.*did you mean"):
            packed([99], 8, "document")
