"""Perplexity by length against a token-by-token calculation, and its tables."""

import functools
import json
import math

import jax
import numpy as np
import pytest

from tests.models import VOCAB, encoding, random_variables, small_model
from tests.train.small import result
from train.evaluation.perplexity import PROTOCOLS, Perplexity, measure, table

TRAINED = 4


def draw(count, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, count).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def apply(model, variables, tokens, mask):
    return model.apply(variables, tokens[None], mask=mask)[0]


def expected_losses(model, variables, text, protocol, length, stride):
    """Loss of each target, from the definition: which tokens each target may see."""
    losses = []
    for target in range(len(text) - 1):
        if protocol != "overlapping" or target < length:
            start = target // length * length
        else:
            start = (target - length) // stride * stride + stride
        seen = text[start : target + 1]
        i = np.arange(8)
        mask = i[:, None] < i + (TRAINED if protocol == "windowed" else 8)
        padded = np.pad(seen, (0, 8 - len(seen)))
        logits = np.asarray(apply(model, variables, padded, mask), np.float64)[len(seen) - 1]
        losses.append(np.log(np.exp(logits).sum()) - logits[text[target + 1]])
    return np.array(losses)


class TestMeasure:
    def test_from_the_definition(self):
        model = small_model("rope", num_layers=1)
        variables, texts = random_variables(model, std=0.5), [draw(17), draw(9, seed=1)]
        given = {"trained": TRAINED, "lengths": (4, 8), "stride": 2, "batch_tokens": 20}
        found = measure(model, variables, texts, **given)
        assert found.targets == 24
        assert [(m.protocol, m.length) for m in found.measurements] == [
            (protocol, length) for protocol in PROTOCOLS for length in (4, 8)
        ]
        for m in found.measurements:
            losses = [
                expected_losses(model, variables, t, m.protocol, m.length, found.stride)
                for t in texts
            ]
            blocks = np.concatenate(losses).reshape(3, 8).mean(axis=1)
            np.testing.assert_allclose(m.blocks, blocks, rtol=1e-5)
            np.testing.assert_allclose(m.loss, blocks.mean(), rtol=1e-5)
            np.testing.assert_allclose(m.error, blocks.std(ddof=1) / 3**0.5, rtol=1e-4)
            if m.protocol != "overlapping":
                places = np.concatenate(losses).reshape(-1, m.length).mean(axis=0)
                np.testing.assert_allclose(m.by_position, places, rtol=1e-5)
        np.testing.assert_equal(np.isnan(found.at("overlapping", 8).by_position), [False] * 8)

    def test_lengths_that_the_model_does_not_take(self):
        model = small_model(encoding("learned", size=8), num_layers=1)
        given = {"trained": 4, "lengths": (4, 8, 16), "protocols": ("disjoint",), "stride": 2}
        found = measure(model, random_variables(model), [draw(17)], max_length=8, **given)
        assert list(found.summary()) == ["perplexity_1x", "perplexity_2x"]
        assert found.at("disjoint", 16).blocks == ()
        assert math.isnan(found.at("disjoint", 8).error), "one block only"


class TestResult:
    def test_summary(self):
        found = result(1.0, 2.0, 1.0, math.log(3), text_bytes=32)
        assert found.summary() == pytest.approx(
            {
                "perplexity_1x": math.e,
                "perplexity_2x": math.e**2,
                "perplexity_windowed_1x": math.e,
                "perplexity_windowed_2x": 3,
                "bits_per_byte_1x": 1 / math.log(2) / 2,
                "bits_per_byte_2x": 2 / math.log(2) / 2,
            }
        )

    @pytest.mark.parametrize(("loss", "shown"), [(math.nan, "nan"), (800.0, "inf")])
    def test_losses_that_are_too_large_are_shown(self, loss, shown):
        bad = result(loss, 3.0, 2.0, 2.5)
        assert str(bad.summary()["perplexity_1x"]) == shown
        assert f" {shown}" in bad.table()
        assert Perplexity.from_json(json.loads(json.dumps(bad.to_json()))).table() == bad.table()
        both = table({"": ("disjoint", [bad, result(1.0, 3.0, 2.0, 2.5)])}).splitlines()
        assert both[2].split("|")[3].strip() == shown

    def test_table(self):
        lines = result(1.0, 5.0, 1.0, math.log(3)).table().splitlines()
        rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines[2:6]]
        assert rows[0] == ["tokens", "of trained", "disjoint windows", "sliding attention window"]
        # exp(1) sinh(0.1) = 0.272, exp(5) sinh(0.1) = 14.9, 3 sinh(0.1) = 0.301
        assert rows[2] == ["4", "1x", "2.718 ± 0.272", "2.718 ± 0.272"]
        assert rows[3] == ["8", "2x", "148.4 ± 14.9", "3.000 ± 0.301"]
