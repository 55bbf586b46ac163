"""CoPE against loops over pairs."""

import numpy as np
import pytest

from tape_jax import ModelConfig
from tape_jax.positions import Cope
from tests.library.positions.pairs import HEADS, IDS, KV_HEADS, drawn, sigmoid
from tests.models import small_model

CASES = {
    "cut": Cope(positions=4),
    "not cut": Cope(positions=20),
    "not divided": Cope(positions=4, divide=False),
    "own keys": Cope(positions=4, separate_key=True),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", CASES)
def test_formula(name, x64):
    encoding = CASES[name]
    pairs = drawn(encoding, ids=IDS)
    q, x = pairs.arrays["q"], pairs.arrays["x"]
    dim, vectors = q.shape[-1], pairs.params["vectors"]
    own = None
    if encoding.separate_key:
        own = (x @ pairs.params["gate_key_kernel"]).reshape(*x.shape[:2], KV_HEADS, dim)

    def gate(b, h, i, j):
        if own is None:
            return sigmoid(pairs.scores(b, h)[i, j])
        return sigmoid(q[b, i, h] @ own[b, j, h // (HEADS // KV_HEADS)] / np.sqrt(dim))

    def logit(b, h, i, j):
        place = sum(gate(b, h, i, n) for n in pairs.seen(b, i) if n >= j)
        place = min(place, encoding.positions - 1)
        low, high = int(np.floor(place)), int(np.ceil(place))
        added = q[b, i, h] @ (
            (1 - place + low) * vectors[:, low] + (place - low) * vectors[:, high]
        )
        return pairs.scores(b, h)[i, j] + (added / np.sqrt(dim) if encoding.divide else added)

    want = pairs.softmax(logit)
    np.testing.assert_allclose(pairs.attend(), want, atol=1e-12)
    np.testing.assert_allclose(pairs.attend(implementation="rows", block_q=4), want, atol=1e-12)


def test_sizes():
    config = ModelConfig(13, hidden_size=16, num_layers=1, num_heads=2, max_length=11)
    assert Cope(None).layer_params(config.sizes, updates=False)["vectors"].shape == (8, 12)
    assert Cope().layer_params(config.sizes, updates=False)["vectors"].shape == (8, 64)
    own = Cope(separate_key=True).layer_params(config.sizes, updates=False)
    assert own["gate_key_kernel"].shape == (16, 16)
    assert Cope(3).max_length() is None


def test_wrong_calls():
    with pytest.raises(ValueError, match="positions must be a positive integer or None; got 0"):
        Cope(positions=0)
    with pytest.raises(ValueError, match="positions=None is for a model with a max_length"):
        small_model(Cope(None))
    with pytest.raises(ValueError, match="'cope' needs is_causal=True: it counts"):
        drawn(Cope()).attend(is_causal=False)
