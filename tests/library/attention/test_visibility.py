"""Which blocks have visible keys, against loops; pairs are tested with all backends."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax._src.attention.visibility import Band, Visibility, segments_meet, visible_blocks

Q, K = 12, 10
BANDS = [Band(causal, window) for causal in (True, False) for window in (None, (0, 0), (3, 1))]


def visible(band, i, j):
    """From the definitions of :func:`tape_jax.attention`."""
    found = j <= i or not band.is_causal
    if band.window is not None:
        left, right = band.window
        found &= i - left <= j <= i + right
    return found


def test_all_is_visible():
    assert Visibility().pairs(Q, K) is None
    assert Visibility().blocks_meet((4, 3), (5, 2)) is None


@pytest.mark.parametrize("offset", [-30, 3])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_blocks_that_position_lets_meet(band, offset):
    """None that has a visible pair is left out; others only at the ends of a band."""
    size, count = 3, 4
    first = jnp.arange(0, Q, 4, dtype=jnp.int32) + offset
    begin, end = visible_blocks((band.lowest, band.highest), first, first + 3, size, count)
    for n, start in enumerate(first.tolist()):
        met = [
            any(visible(band, i, j) for i in range(start, start + 4) for j in range(m, m + size))
            for m in range(0, size * count, size)
        ]
        assert [begin[n] <= m < end[n] for m in range(count)] == met


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("one", [False, True])
def test_parts_are_those_of_the_whole(band, one):
    """Of queries, of keys, and of both; arrays with one entry along an axis stay as they are."""
    draw = functools.partial(np.random.default_rng(0).integers, dtype=np.int32)
    ids, counts = ((draw(0, 3, (2, Q)), draw(0, 3, (2, K))) for _ in range(2))
    mask = draw(0, 2, (2, 1, 1 if one else Q, K if one else 1)).astype(bool)
    whole = Visibility(band, 2, ids, jnp.asarray(mask), counts)
    pairs = np.broadcast_to(whole.pairs(Q, K), (2, 1, Q, K))
    got = whole.of_queries(5, 4).pairs(4, K)
    np.testing.assert_array_equal(np.broadcast_to(got, (2, 1, 4, K)), pairs[:, :, 5:9])
    got = whole.of_keys(3, 6).pairs(Q, 6)
    np.testing.assert_array_equal(np.broadcast_to(got, (2, 1, Q, 6)), pairs[..., 3:9])
    got = whole.of_queries(5, 4).of_keys(3, 6).pairs(4, 6)
    np.testing.assert_array_equal(np.broadcast_to(got, (2, 1, 4, 6)), pairs[:, :, 5:9, 3:9])


def test_blocks_that_segments_and_mask_let_meet():
    """Ranges of ids overlap; of a mask any pair is visible."""
    queries, keys = jnp.array([[0, 0, 1, 1, 2, 2, 2]]), jnp.array([[0, 1, 5, 5, 5]])
    want = [[True, False, False], [True, False, False], [False] * 3, [False] * 3]
    np.testing.assert_array_equal(segments_meet((queries, keys), 2, 2)[0], want)
    mask = np.zeros((1, 1, 4, 6), bool)
    mask[0, 0, 3, 1] = True
    found = Visibility(mask=jnp.asarray(mask)).blocks_meet((2, 2), (3, 2))
    np.testing.assert_array_equal(found, [[False, False], [True, False]])
