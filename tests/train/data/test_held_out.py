"""Which things are held out: fixed shares of them, and always the same ones.

What is held out defines a task: changing a hash invalidates every stored result.
"""

import numpy as np

from train.data import held_out


class TestSymbols:
    def test_fixed(self):
        rows = np.stack(np.meshgrid(np.arange(10), np.arange(10)), axis=-1).reshape(1, 100, 2)
        found = held_out.symbols(rows)
        assert np.flatnonzero(found).tolist() == [16, 32, 33, 63, 66, 72, 75, 80]

    def test_order_and_zeros_do_not_matter(self):
        rows = np.random.default_rng(0).integers(1, 10, (2, 1000, 5))
        found = held_out.symbols(rows)
        assert 50 < found.sum() < 150
        padded = np.pad(rows, ((0, 0), (0, 0), (0, 3)))
        for same in (rows[::-1], padded, rows.astype(np.uint8)):
            np.testing.assert_array_equal(held_out.symbols(same), found)
        assert np.any(held_out.symbols(rows[..., ::-1]) != found)


class TestKeys:
    def test_fixed(self):
        found = [key for key in range(100, 200) if held_out.key(key)]
        assert found == [114, 115, 116, 122, 137, 140, 143, 149, 168, 181]


class TestDocuments:
    def test_fixed(self):
        found = [i for i in range(100) if held_out.document(str(i).encode(), 0.1)]
        assert found == [9, 39, 49, 51, 55, 65]

    def test_a_larger_share_holds_out_the_same_and_more(self):
        keys = [str(i).encode() for i in range(1000)]
        small, large = ({k for k in keys if held_out.document(k, s)} for s in (0.1, 0.2))
        assert small < large
