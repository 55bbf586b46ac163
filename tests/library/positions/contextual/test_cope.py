"""CoPE against loops over pairs."""

import numpy as np
import pytest

from tape_jax import ModelConfig
from tape_jax.positions import Cope
from tests.library.positions.pairs import HEADS, IDS, KV_HEADS, drawn, sigmoid

CASES = {
    "cut": Cope(positions=4),
    "not cut, own keys, not divided": Cope(positions=20, separate_key=True, divide=False),
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

    pairs.assert_attends(pairs.softmax(logit))


def test_as_many_places_as_a_model_has():
    config = ModelConfig(13, hidden_size=16, num_layers=1, num_heads=2, max_length=11)
    assert Cope(None).layer_params(config.sizes, updates=False)["vectors"].shape == (8, 12)
