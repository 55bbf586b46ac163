"""Forget gates against loops over pairs."""

import jax
import numpy as np
import pytest

from tape_jax.positions import Cable, DdaPerRow
from tests.library.positions.pairs import HEADS, IDS, KV_HEADS, drawn, sigmoid, softplus
from tests.models import FLOAT64, random_variables, small_model


@pytest.mark.slow
def test_dda_per_row(x64):
    pairs = drawn(DdaPerRow(width=3, post_log_scale=0.5), ids=IDS)
    x, p = pairs.arrays["x"], pairs.params
    a, c = (
        (x @ p[f"{side}_gate_kernel"]).reshape(*x.shape[:2], HEADS, 3) for side in ("query", "key")
    )

    def logit(b, h, i, j):
        between = [n for n in pairs.seen(b, i) if j <= n < i]
        gates = [sigmoid(a[b, i, h] @ c[b, n, h] / np.sqrt(3)) for n in between]
        return pairs.scores(b, h)[i, j] + 0.5 * np.log(gates).sum()

    pairs.assert_attends(pairs.softmax(logit))


@pytest.mark.slow
def test_cable(x64):
    pairs = drawn(Cable(), ids=IDS)
    p = pairs.params
    decays = softplus(pairs.arrays["x"] @ p["decay_kernel"] + p["decay_bias"])
    q, k = pairs.arrays["q"], pairs.arrays["k"]

    def logit(b, h, i, j):
        between = [n for n in pairs.seen(b, i) if n > j]
        return q[b, i, h] @ k[b, j, h // (HEADS // KV_HEADS)] - decays[b, between, h].sum()

    pairs.assert_attends(pairs.softmax(logit))


def test_a_scale_of_its_own(x64):
    """In a model logits are not divided, neither by the root of the width nor by query_scale."""
    types = {**FLOAT64, "num_layers": 1}
    cable, fox = small_model("cable", **types), small_model("fox", query_scale=1.0, **types)
    variables, tokens = random_variables(cable), np.arange(6)[None]
    layer = dict(variables["params"]["layers_0"])
    for name in ("kernel", "bias"):
        layer[f"position_forget_{name}"] = -layer.pop(f"position_decay_{name}")
    params = {**variables["params"], "layers_0": layer}
    want = jax.jit(fox.apply)({"params": params}, tokens)
    np.testing.assert_allclose(jax.jit(cable.apply)(variables, tokens), want, atol=1e-12)
    for kind in ("cable", "wall", "alibi+path"):
        with pytest.raises(ValueError, match=r"query_scale = 2.0 is for encodings without a scale"):
            small_model(kind, query_scale=2.0)
