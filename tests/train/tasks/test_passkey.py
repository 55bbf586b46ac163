"""Passkey retrieval learned from nothing: its data, and how it is judged."""

import json

import numpy as np
import pytest

from tests.train.small import BYTES, trained
from train.compare.tasks import compare
from train.tasks import get_task
from train.tasks.passkey import Passkey


class TestTask:
    task = Passkey(sequence_length=40, digits=2)

    def test_examples(self):
        batch = self.task.batch(seed=1, index=2, size=50)
        assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
            "inputs": ((50, 40), np.int32),
            "targets": ((50, 40), np.int32),
            "weights": ((50, 40), np.float32),
        }
        np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
        held_out = set(self.task.keys(held_out=True))
        starts = set()
        for inputs, targets, weights in zip(*batch.values(), strict=True):
            answer = BYTES.decode(targets[weights == 1])
            np.testing.assert_array_equal(weights, [0] * 37 + [1] * 3)
            text = BYTES.decode(inputs)
            assert f" <key={answer} " in text
            assert text.endswith(f" <key={answer[:2]}")
            assert int(answer[:2]) not in held_out
            starts.add(text[:3])
        assert len(starts) > 20, "the filler begins anywhere"

    def test_keys(self):
        kept, out = (self.task.keys(held_out=x) for x in (False, True))
        assert sorted([*kept, *out]) == list(range(10, 100))
        assert 0.05 < len(out) / 90 < 0.15
        kept, out = (Passkey(digits=4).keys(held_out=x) for x in (False, True))
        assert 0.09 < len(out) / 9000 < 0.11
        assert len(set(out % 10)) == len(set(kept % 10)) == 10

    def test_only_held_out_keys_are_asked(self):
        held_out = set(self.task.keys(held_out=True))
        options = Passkey.Evaluation(factors=(1, 2), depths=2, trials=5)
        model = trained()
        asked = self.task._questions(options.factors, options.depths, options.trials, 0)
        for examples in asked:
            for tokens, start in zip(examples.tokens, examples.prompt_lengths, strict=True):
                assert int(BYTES.decode(tokens[start:-1])) in held_out
                assert BYTES.decode(tokens[-1:]) == ">"
        grid = self.task.evaluate(model, options)
        assert grid.columns == (40, 80)
        np.testing.assert_array_equal(grid.counts, np.full((2, 2), 5))
        again = self.task.read_result(json.loads(json.dumps(grid.to_json())))
        assert again.table() == grid.table()
        assert [score.key for score in self.task.scores] == list(grid.summary())[::-1]
        compared = compare(self.task, {"tape": [grid, again], "rope": [again, again]})
        assert "| up to 40 tokens" in compared.sections["Passkey retrieval"]
        assert list(compared.figures) == ["passkey.png"]

    @pytest.mark.slow
    def test_samples(self):
        """Those that are too long for the model are left out."""
        options = Passkey.Evaluation(factors=(1, 2))
        (line,) = self.task.samples(trained("learned", size=40), options)
        assert line.startswith("in 40 bytes: '")
        assert "(wrong: it is '" in line

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"sequence_length": 10}, "a length of 10 tokens is too small"),
            ({"digits": 1}, r"digits must be in 2\.\.6; got 1"),
            ({"digit": 3}, r"unknown field 'digit' of task 'passkey'.*did you mean 'digits'"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            get_task("passkey", **options)
        with pytest.raises(ValueError, match=r"lengths must be positive and ascend; got \(4, 2\)"):
            Passkey.Evaluation(factors=(4, 2))
