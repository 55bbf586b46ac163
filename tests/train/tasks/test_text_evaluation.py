"""How language models are judged: which text, which passkeys, and the result as a record."""

import dataclasses
import json
import math
import types

import numpy as np
import pytest

from tests.models import random_variables, small_model
from tests.train.small import result
from train.data import tokenizers
from train.evaluation.perplexity import PROTOCOLS, Measurement, measure
from train.tasks import retrieval, text_evaluation
from train.tasks.text_evaluation import Evaluation, TextResult, evaluate, held_out
from train.training.runs import TrainedRun

TRAINED = 4


class TestResult:
    def test_round_trip(self):
        found = result(1.0, 2.0, 3.0, 4.0)
        empty = dataclasses.replace(found.measurements[0], blocks=(), by_position=())
        holes = dataclasses.replace(found.measurements[1], by_position=(math.nan, 1.5))
        found = dataclasses.replace(found, measurements=(empty, holes))
        text = json.dumps(TextResult(found).to_json(), allow_nan=False)
        restored = text_evaluation.read_result(json.loads(text))
        np.testing.assert_equal(dataclasses.asdict(restored.perplexity), dataclasses.asdict(found))
        assert restored.passkey is None
        with pytest.raises(ValueError, match=r"of format 'tape-jax evaluation of text.*got 'x'"):
            text_evaluation.read_result({"format": "x"})


class Text:
    """A task with a fixed text."""

    codec = tokenizers.load("bytes")
    sequence_length = TRAINED
    passkeys_asked = retrieval.FORMS["long"]

    def evaluation_tokens(self, limit=None, *, validation=False):
        return np.array(self.codec.encode("a" * 40 + "b" * 60))[:limit]

    def evaluation_documents(self, limit_tokens=None):
        for letter, size in zip("abcd", (5, 20, 16, 40), strict=True):
            yield np.array([*self.codec.encode(letter * size), self.codec.eos])


class TestHeldOut:
    def test_stream(self):
        (text,) = held_out(Text(), Evaluation(factors=(1, 4), tokens=70))
        np.testing.assert_array_equal(text, [97] * 40 + [98] * 25)

    def test_lengths_in_tokens(self):
        (text,) = held_out(Text(), Evaluation(lengths=(2, 16), tokens=70))
        assert len(text) == 65
        assert Evaluation(lengths=(2, 16)).lengths_at(4) == (2, 16)
        assert Evaluation(factors=(1, 2)).lengths_at(4) == (4, 8)
        assert [Evaluation().stride_at(n) for n in (1, 40, 1024)] == [1, 20, 256]
        assert Evaluation(stride=7).stride_at(1024) == 7
        # The usual stride fits the shortest window, and one that does not is known before.
        assert Evaluation(lengths=(8, 32)).stride_at(32) == 8
        assert Evaluation(lengths=(8, 32), protocols=("disjoint",)).stride_at(32) == 16
        message = "stride = 3 exceeds the shortest window, of 2 tokens"
        with pytest.raises(ValueError, match=message):
            text_evaluation.check(Text(), Evaluation(lengths=(2, 16), tokens=70, stride=3))

    def test_a_validation_has_a_score(self):
        odd = Evaluation(factors=(3,), protocols=("disjoint",), tokens=24)
        text_evaluation.check(Text(), odd)
        odd = dataclasses.replace(odd, validation=True)
        message = "one of the scores perplexity_8x, .*; got only perplexity_3x"
        with pytest.raises(ValueError, match=message):
            text_evaluation.check(Text(), odd)
        text_evaluation.check(Text(), dataclasses.replace(odd, factors=(1, 3)))
        text_evaluation.check(Text(), dataclasses.replace(odd, passkey_lengths=(400,)))

    def test_documents(self):
        options = Evaluation(factors=(1, 2, 4), tokens=50, documents=True)
        texts = held_out(Text(), options)
        assert [(text[0], text[-1], len(text)) for text in texts] == [
            (ord("b"), ord("b"), 17),
            (ord("c"), Text.codec.eos, 17),
            (ord("d"), ord("d"), 17),
        ]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"tokens": 31}, "tokens = 31 is less than the longest window of 32"),
            ({"factors": (1, 32), "tokens": 200}, "no stretch of 129 tokens"),
            ({"factors": (1, 16), "documents": True}, "no document of 65 tokens"),
        ],
    )
    def test_too_little_text(self, options, message):
        with pytest.raises(ValueError, match=message):
            held_out(Text(), Evaluation(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factors": (2, 1)}, r"must be positive, ascend, and divide the last; got \(2, 1\)"),
        ({"factors": (2, 3)}, r"divide the last; got \(2, 3\)"),
        ({"protocols": ("sliding",)}, "unknown evaluation protocol 'sliding'"),
        ({"tokens": 0}, "tokens must be at least 1; got 0"),
        ({"passkey_lengths": (4, 2)}, r"lengths must be positive and ascend; got \(4, 2\)"),
        ({"passkey_lengths": (4,), "passkey_trials": 0}, "trials must be a positive integer"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Evaluation(**options)


def trained(kind="rope"):
    small = small_model(kind, num_layers=1)
    model = small.clone(config=dataclasses.replace(small.config, vocab_size=258))
    return TrainedRun(
        types.SimpleNamespace(model=model.config), 0, model, random_variables(model, std=0.5)
    )


class TestEvaluate:
    @pytest.mark.slow
    def test_perplexity_and_passkey(self):
        steps = []
        options = Evaluation(
            factors=(1, 2),
            protocols=("disjoint",),
            tokens=32,
            passkey_lengths=(230,),
            passkey_depths=2,
            passkey_trials=1,
        )
        model = trained()
        found = evaluate(Text(), model, options, lambda *step: steps.append(step))
        text = Text().evaluation_tokens(33)
        alone = measure(
            model.model,
            model.variables,
            [text],
            trained=4,
            lengths=(4, 8),
            protocols=("disjoint",),
            stride=2,
            text_bytes=32,
        )
        assert found.perplexity == alone
        assert found.passkey.columns == (230,)
        assert found.passkey.counts.tolist() == [[1], [1]]
        assert found.summary() == {
            **alone.summary(),
            "passkey_outside": 0.0,
            "passkey_57.5x": 0.0,
        }
        assert steps[-1] == (2000, 2000)
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        again = text_evaluation.read_result(json.loads(json.dumps(found.to_json())))
        assert again.table() == found.table()

    def test_bytes_of_text_leave_special_tokens_out(self):
        """Also of windows that are shorter than those of training."""
        options = Evaluation(lengths=(2, 16), tokens=50, documents=True, protocols=("disjoint",))
        found = evaluate(Text(), trained(), options).perplexity
        assert found.text_bytes == 47
        assert set(found.summary()) >= {"perplexity_0.5x", "perplexity_4x"}

    @pytest.mark.slow
    def test_samples(self):
        lines = text_evaluation.samples(Text(), trained(), Evaluation())
        assert [line.partition(" is continued with ")[0] for line in lines] == ["'aa'", "'aa'"]


def test_scores_are_in_the_summary():
    keys = {score.key for score in text_evaluation.scores()}
    protocols = tuple(PROTOCOLS)
    measurements = [Measurement(p, 2**n, (1.0,), (1.0,)) for p in protocols for n in range(7)]
    found = dataclasses.replace(
        result(1.0, 1.0, 1.0, 1.0), trained=8, measurements=tuple(measurements)
    )
    others = keys - found.summary().keys()
    assert {key.partition("_")[0] for key in others} == {"passkey"}
    assert {"perplexity_0.125x", "perplexity_overlapping_0.5x", "passkey_0.25x"} <= keys
