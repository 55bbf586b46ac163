"""DAPE against loops over pairs."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tape_jax import init_cache
from tape_jax._src.positions.fixed.bias import alibi_slopes
from tape_jax.positions import DapeAlibi, DapeFire, DapeKerple, DapeV2Alibi, DapeV2Kerple
from tests.library.positions.pairs import HEADS, IDS, drawn
from tests.models import random_variables, small_model


def bias(pairs, h, distance, place):
    if "alibi" in pairs.encoding.kind:
        return -alibi_slopes(HEADS)[h] * distance
    if pairs.encoding.kind == "dape_fire":
        p = {name.removeprefix("fire_"): x for name, x in pairs.params.items() if "fire_" in name}
        far = max(place, abs(p["multiplier"] * pairs.encoding.threshold))
        near, far = (np.log(abs(p["c"]) * n + 1) for n in (distance, far))
        hidden = near / (far + 1e-6) * p["w1"][0] + p["b1"]
        return (np.where(hidden > 0, hidden, 0.01 * hidden) @ p["w2"] + p["b2"])[h]
    r1, r2 = (max(pairs.params[name][h], 0.01) for name in ("r1", "r2"))
    return -r1 * np.log(1 + r2 * distance)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("encoding", "is_causal"),
    [
        (DapeAlibi(width=5), True),
        (DapeKerple(), False),
        (DapeFire(width=5, fire_width=4, threshold=3.0), True),
    ],
    ids=str,
)
def test_formula(encoding, is_causal, x64):
    pairs = drawn(encoding, ids=IDS)
    p = pairs.params

    def logit(b, h, i, j):
        distance = abs(pairs.place(b, i) - pairs.place(b, j))
        scores = [pairs.scores(b, head)[i, j] for head in range(HEADS)]
        biases = [bias(pairs, head, distance, pairs.place(b, i)) for head in range(HEADS)]
        hidden = np.array([*scores, *biases]) @ p["w1"] + p["b1"]
        hidden = np.where(hidden > 0, hidden, 0.01 * hidden)
        return scores[h] + biases[h] + (hidden @ p["w2"] + p["b2"])[h]

    pairs.assert_attends(pairs.softmax(logit, is_causal=is_causal), is_causal=is_causal)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "encoding",
    [
        DapeV2Alibi(width=5),
        DapeV2Kerple(width=4, taps=5, published=True),
        DapeV2Kerple(width=4, taps=1),
    ],
    ids=str,
)
def test_convolutions(encoding, x64):
    pairs = drawn(encoding, ids=IDS)
    p, side = pairs.params, encoding.taps // 2

    @functools.cache
    def logits(b, i):
        """Of all heads and of the keys that a query sees."""
        seen = pairs.seen(b, i)
        apart = [pairs.place(b, i) - pairs.place(b, j) for j in seen]
        biases = [[bias(pairs, h, n, pairs.place(b, i)) for n in apart] for h in range(HEADS)]
        scores = np.array([pairs.scores(b, h)[i, seen] for h in range(HEADS)])
        whole = len(pairs.seen(b, i, is_causal=False))
        # Zeros for the keys that are not there or, where the text ends, nothing.
        behind = min(side, whole - len(seen)) if encoding.published else side
        c = np.pad(np.concatenate([scores, biases]), [(0, 0), (side, side + behind)])
        hidden = np.array([p["b1"] + np.sum(c[:, j : j + encoding.taps].T[..., None] * p["w1"],
                           axis=(0, 1)) for j in range(len(seen) + behind)])  # fmt: skip
        hidden = np.where(hidden > 0, hidden, 0.01 * hidden)
        hidden = np.pad(hidden, [(side, side), (0, 0)])
        more = [p["b2"] + np.sum(hidden[j : j + encoding.taps, :, None] * p["w2"], axis=(0, 1))
                for j in range(len(seen))]  # fmt: skip
        return dict(zip(seen, (scores + biases + np.transpose(more)).T, strict=True))

    pairs.assert_attends(pairs.softmax(lambda b, h, i, j: logits(b, i)[j][h]))


@pytest.mark.slow
def test_rows_near_the_end(x64):
    """Published code changes ``taps // 2`` of them when the text grows, the default none."""

    def rows(published, time):
        pairs = drawn(DapeV2Kerple(published=published), time=12)
        arrays = {name: x[:, :time] for name, x in pairs.arrays.items()}
        return np.asarray(dataclasses.replace(pairs, arrays=arrays).attend())

    np.testing.assert_allclose(rows(False, 9), rows(False, 12)[:, :9], atol=1e-12)
    np.testing.assert_allclose(rows(True, 9)[:, :8], rows(False, 9)[:, :8], atol=1e-12)
    assert np.abs(rows(True, 9)[:, 8] - rows(True, 12)[:, 8]).max() > 1e-3


@pytest.mark.slow
def test_hidden_units_are_of_all_heads():
    """Their order says nothing, even where each head sees others."""
    model = small_model(DapeV2Alibi(width=2), num_layers=1)
    variables, tokens = random_variables(model), np.arange(8, dtype=np.int32)[None]
    mask = np.random.default_rng(0).random((2, 8, 8)) < 0.5
    mask |= np.eye(8, dtype=bool)
    block = variables["params"]["layers_0"]
    turned = {
        "position_w1": block["position_w1"][..., ::-1],
        "position_b1": block["position_b1"][..., ::-1],
        "position_w2": block["position_w2"][..., ::-1, :],
    }
    other = {"params": {**variables["params"], "layers_0": {**block, **turned}}}
    apply = jax.jit(lambda variables: model.apply(variables, tokens, mask=mask))
    found, expected = (apply(v) for v in (other, variables))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_what_is_published_has_no_cache():
    model = small_model(DapeV2Alibi(published=True))
    variables, cache = random_variables(model), init_cache(model, 1, 4)
    with pytest.raises(ValueError, match="dapev2_alibi: published=True changes rows near the end"):
        model.apply(variables, np.zeros((1, 2), np.int32), cache=cache)
