"""Perplexity by length against a token-by-token calculation, and what is made of it."""

import dataclasses
import functools
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import VOCAB, encoding, random_variables, small_model
from train import perplexity
from train.data import passkey, tokenizers
from train.perplexity import Evaluation, TextResult, evaluate, held_out, measure
from train.perplexity_result import Measurement, Perplexity
from train.runs import Trained

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
    @pytest.mark.parametrize("kind", ["tape", "alibi"])
    def test_from_the_definition(self, kind):
        model = small_model(kind, num_layers=2)
        variables, texts = random_variables(model, std=0.5), [draw(17), draw(9, seed=1)]
        options = Evaluation(factors=(1, 2), stride=2, batch_tokens=20)
        steps = []
        found = measure(
            model,
            variables,
            texts,
            trained=TRAINED,
            options=options,
            progress=lambda *step: steps.append(step),
        )
        assert found.targets == 24
        assert [(m.protocol, m.length) for m in found.measurements] == [
            (protocol, length) for protocol in perplexity.PROTOCOLS for length in (4, 8)
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
        assert steps[-1][0] == steps[-1][1]

    def test_same_text_has_the_same_perplexity_without_context(self):
        # Only the last norm and the head are not zero: every token has the same distribution.
        model = small_model("rope", num_layers=1)
        variables = jax.tree.map(jnp.zeros_like, random_variables(model))
        found = measure(model, variables, [draw(17)], trained=4, options=Evaluation(factors=(1, 4)))
        for value in found.summary().values():
            assert value == pytest.approx(VOCAB, rel=1e-5)
        assert {m.error for m in found.measurements if m.length == 16} != {0.0}, "one block only"

    def test_lengths_that_the_model_does_not_take(self):
        model = small_model(encoding("learned", size=8), num_layers=1)
        found = measure(
            model,
            random_variables(model),
            [draw(17)],
            trained=4,
            options=Evaluation(factors=(1, 2, 4), protocols=("disjoint",)),
            max_length=8,
        )
        assert list(found.summary()) == ["perplexity_1x", "perplexity_2x"]
        assert found.at("disjoint", 16).blocks == ()
        last = found.table().splitlines()[6]
        assert [c.strip() for c in last.strip("|").split("|")] == ["16", "4x", "-"]
        assert "A dash: the model does not take the length." in found.table()

    @pytest.mark.parametrize("sizes", [[], [8], [9, 10]])
    def test_texts_of_other_lengths(self, sizes):
        with pytest.raises(ValueError, match=r"expected texts of n x 8 \+ 1 tokens; got \["):
            measure(None, None, [draw(n) for n in sizes], trained=4, options=Evaluation((1, 2)))


def result(*losses, trained=4, **changes):
    """Perplexities of two blocks each at 1x and 2x in two ways."""
    measurements = [
        Measurement(protocol, length, (loss - 0.1, loss + 0.1), (loss,) * length)
        for (protocol, length), loss in zip(
            [("disjoint", 4), ("disjoint", 8), ("windowed", 4), ("windowed", 8)],
            losses,
            strict=True,
        )
    ]
    fields = {"stride": 2, "bin": 1, "targets": 16, "fingerprint": "a", "text_bytes": None}
    return Perplexity(trained=trained, measurements=tuple(measurements), **{**fields, **changes})


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

    def test_table(self):
        lines = result(1.0, 5.0, 1.0, math.log(3)).table().splitlines()
        rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines[2:6]]
        assert rows[0] == ["tokens", "of trained", "disjoint windows", "sliding attention window"]
        # exp(1) sinh(0.1) = 0.272, exp(5) sinh(0.1) = 14.9, 3 sinh(0.1) = 0.301
        assert rows[2] == ["4", "1x", "2.718 ± 0.272", "2.718 ± 0.272"]
        assert rows[3] == ["8", "2x", "148.4 ± 14.9", "3.000 ± 0.301"]

    def test_bits_per_byte(self):
        table = result(1.0, 2.0, 1.0, 2.0, text_bytes=8).table()
        # Two tokens for each byte: 2 / ln 2 = 2.885 and 4 / ln 2 = 5.771, and 0.2 / ln 2 = 0.289.
        assert table.index("Perplexity") < table.index("Bits per byte")
        assert table.count("2.885 ± 0.289") == table.count("5.771 ± 0.289") == 2

    def test_round_trip(self):
        found = result(1.0, 2.0, 3.0, 4.0)
        empty = dataclasses.replace(found.measurements[0], blocks=(), by_position=())
        holes = dataclasses.replace(found.measurements[1], by_position=(math.nan, 1.5))
        found = dataclasses.replace(found, measurements=(empty, holes))
        text = json.dumps(TextResult(found).to_json(), allow_nan=False)
        restored = perplexity.read_result(json.loads(text))
        np.testing.assert_equal(dataclasses.asdict(restored.perplexity), dataclasses.asdict(found))
        assert restored.passkey is None

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            (None, "expected the fields of a TextResult; got None"),
            ({"format": "x"}, "expected a record of format 'tape-jax evaluation of text.*got 'x'"),
            ({"format": perplexity.FORMAT, "perplexity": 1}, "TextResult has the fields"),
            (
                {"format": perplexity.FORMAT, "perplexity": 1, "passkey": None},
                "expected the fields of a Perplexity; got 1",
            ),
        ],
    )
    def test_other_records(self, record, message):
        with pytest.raises(ValueError, match=message):
            perplexity.read_result(record)


class Text:
    """A task with a fixed text."""

    codec = tokenizers.load("bytes")
    sequence_length = TRAINED
    passkeys_asked = passkey.FORMS["long"]

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
        ({"factors": ()}, r"got \(\)"),
        ({"lengths": (64, 96)}, r"lengths must be positive, ascend, .* got \(64, 96\)"),
        ({"protocols": ("sliding",)}, "unknown evaluation protocol 'sliding'"),
        ({"protocols": ("disjoint",) * 2}, "each once; got"),
        ({"tokens": 0}, "tokens must be at least 1; got 0"),
        ({"stride": 0}, "stride must be at least 1; got 0"),
        ({"passkey_lengths": (4, 2)}, r"lengths must be positive and ascend; got \(4, 2\)"),
        ({"passkey_lengths": (4,), "passkey_trials": 0}, "trials must be a positive integer"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Evaluation(**options)


def test_stride():
    assert [Evaluation().stride_at(n) for n in (1, 40, 512, 1024)] == [1, 20, 256, 256]
    assert Evaluation(stride=7).stride_at(1024) == 7


def trained(kind="rope"):
    small = small_model(kind, num_layers=1)
    model = small.clone(config=dataclasses.replace(small.config, vocab_size=258))
    return Trained(
        types.SimpleNamespace(model=model.config), 0, model, random_variables(model, std=0.5)
    )


class TestEvaluate:
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
            model.model, model.variables, [text], trained=4, options=options, text_bytes=32
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
        again = perplexity.read_result(json.loads(json.dumps(found.to_json())))
        assert again.table() == found.table()

    def test_shorter_than_trained(self):
        options = Evaluation(lengths=(2, 4), protocols=("disjoint",), tokens=32)
        found = evaluate(Text(), trained(), options).perplexity
        assert set(found.summary()) >= {"perplexity_0.5x", "perplexity_1x"}
        assert "|      2 |       0.5x |" in found.table()

    def test_bytes_of_text_leave_special_tokens_out(self):
        options = Evaluation(factors=(1, 2, 4), tokens=50, documents=True, protocols=("disjoint",))
        assert evaluate(Text(), trained(), options).perplexity.text_bytes == 47

    def test_samples(self):
        lines = perplexity.samples(Text(), trained(), Evaluation())
        assert [line.partition(" is continued with ")[0] for line in lines] == ["'aa'", "'aa'"]


class TestCompare:
    def test_sections_and_figures(self):
        results = {
            "tape": [TextResult(result(x, 1.0, 1.0, 1.0)) for x in (math.log(10), math.log(20))],
            "rope": [TextResult(result(x, 2.0, 1.0, 1.0)) for x in (math.log(30), math.log(30))],
        }
        compared = perplexity.compare(Text(), results)
        rows = compared.sections["Perplexity, disjoint windows"].splitlines()
        cells = [[c.strip() for c in row.strip("|").split("|")] for row in rows]
        assert cells[0] == ["tokens", "of trained", "tape", "rope"]
        assert cells[2] == ["4", "1x", "15.00 ± 7.07", "30.00 ± 0.00"]
        assert (
            "± is the standard deviation over seeds." in compared.sections["Perplexity by length"]
        )
        assert list(compared.figures) == ["perplexity.png", "loss_by_position.png"]
        disjoint, windowed = compared.figures["perplexity.png"].axes
        assert disjoint.get_title() == "disjoint windows"
        assert windowed.get_title() == "sliding attention window"
        line = disjoint.lines[0]
        np.testing.assert_allclose(line.get_xydata(), [[4, 15], [8, math.e]])
        assert "trained length" in {h.get_label() for h in disjoint.lines}

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"fingerprint": "b"}, "'a' and 'b' were not judged alike: fingerprint is a and b"),
            ({"trained": 2}, "trained is 4 and 2"),
            ({"stride": 3}, "stride is 2 and 3"),
        ],
    )
    def test_other_targets(self, changes, message):
        other = TextResult(result(1.0, 1.0, 1.0, 1.0, **changes))
        with pytest.raises(ValueError, match=message):
            perplexity.compare(
                Text(), {"a": [TextResult(result(1.0, 1.0, 1.0, 1.0))], "b": [other]}
            )

    def test_scores_are_in_the_summary(self):
        keys = {score.key for score in perplexity.scores()}
        protocols = tuple(perplexity.PROTOCOLS)
        measurements = [Measurement(p, 2**n, (1.0,), (1.0,)) for p in protocols for n in range(7)]
        found = dataclasses.replace(
            result(1.0, 1.0, 1.0, 1.0), trained=8, measurements=tuple(measurements)
        )
        others = keys - found.summary().keys()
        assert {key.partition("_")[0] for key in others} == {"passkey"}
        assert {"perplexity_0.125x", "perplexity_overlapping_0.5x", "passkey_0.25x"} <= keys
