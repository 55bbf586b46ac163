"""Forget gates against loops over pairs."""

import numpy as np
import pytest

from tape_jax.positions import DdaPerRow
from tests.library.positions.pairs import HEADS, alone_and_packed, drawn, sigmoid


def assert_attends(pairs, logit):
    want = pairs.softmax(logit)
    np.testing.assert_allclose(pairs.attend(), want, atol=1e-12)
    found = pairs.attend(implementation="rows", block_q=4)
    np.testing.assert_allclose(found, want, atol=1e-12)


@alone_and_packed
def test_dda_per_row(ids, x64):
    pairs = drawn(DdaPerRow(width=3, post_log_scale=0.5), ids=ids)
    x, p = pairs.arrays["x"], pairs.params
    a, c = (
        (x @ p[f"{side}_gate_kernel"]).reshape(*x.shape[:2], HEADS, 3) for side in ("query", "key")
    )

    def logit(b, h, i, j):
        between = [n for n in pairs.seen(b, i) if j <= n < i]
        gates = [sigmoid(a[b, i, h] @ c[b, n, h] / np.sqrt(3)) for n in between]
        return pairs.scores(b, h)[i, j] + 0.5 * np.log(gates).sum()

    assert_attends(pairs, logit)


def test_wrong_options():
    with pytest.raises(ValueError, match="dda_per_row: width must be a positive integer; got 0"):
        DdaPerRow(width=0)
    with pytest.raises(ValueError, match=r"dda_per_row: post_log_scale must be positive; got -1"):
        DdaPerRow(post_log_scale=-1.0)
    with pytest.raises(ValueError, match="'dda_per_row' needs is_causal=True"):
        drawn(DdaPerRow()).attend(is_causal=False)
