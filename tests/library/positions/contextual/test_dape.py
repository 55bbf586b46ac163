"""DAPE against loops over pairs."""

import numpy as np
import pytest

from tape_jax._src.positions.fixed.bias import alibi_slopes
from tape_jax.positions import DapeAlibi, DapeFire, DapeKerple
from tests.library.positions.pairs import HEADS, alone_and_packed, drawn


def bias(pairs, h, distance, place):
    if pairs.encoding.kind == "dape_alibi":
        return -alibi_slopes(HEADS)[h] * distance
    if pairs.encoding.kind == "dape_fire":
        p = {name.removeprefix("fire_"): x for name, x in pairs.params.items() if "fire_" in name}
        far = max(place, abs(p["multiplier"] * pairs.encoding.threshold))
        near, far = (np.log(abs(p["c"]) * n + 1) for n in (distance, far))
        hidden = near / (far + 1e-6) * p["w1"][0] + p["b1"]
        return (np.where(hidden > 0, hidden, 0.01 * hidden) @ p["w2"] + p["b2"])[h]
    r1, r2 = (max(pairs.params[name][h], 0.01) for name in ("r1", "r2"))
    return -r1 * np.log(1 + r2 * distance)


@alone_and_packed
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize(
    "encoding",
    [DapeAlibi(width=5), DapeKerple(), DapeFire(width=5, fire_width=4, threshold=3.0)],
    ids=lambda x: x.kind,
)
def test_formula(encoding, is_causal, ids, x64):
    pairs = drawn(encoding, ids=ids)
    p = pairs.params

    def logit(b, h, i, j):
        distance = abs(pairs.place(b, i) - pairs.place(b, j))
        scores = [pairs.scores(b, head)[i, j] for head in range(HEADS)]
        biases = [bias(pairs, head, distance, pairs.place(b, i)) for head in range(HEADS)]
        hidden = np.array([*scores, *biases]) @ p["w1"] + p["b1"]
        hidden = np.where(hidden > 0, hidden, 0.01 * hidden)
        return scores[h] + biases[h] + (hidden @ p["w2"] + p["b2"])[h]

    want = pairs.softmax(logit, is_causal=is_causal)
    np.testing.assert_allclose(pairs.attend(is_causal=is_causal), want, atol=1e-12)
    found = pairs.attend(is_causal=is_causal, implementation="rows", block_q=4)
    np.testing.assert_allclose(found, want, atol=1e-12)


def test_wrong_options():
    with pytest.raises(ValueError, match="dape_kerple: width must be a positive integer; got 0"):
        DapeKerple(width=0)
    with pytest.raises(ValueError, match="dape_fire: fire_width must be a positive integer; got 0"):
        DapeFire(fire_width=0)
