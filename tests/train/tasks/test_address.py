"""Addressing, against a reader that knows nothing of arrays."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import random_variables, small_model
from tests.train.small import Model
from train.compare.tasks import compare, inside
from train.evaluation.inside import before_training
from train.tasks import get_task
from train.tasks.address import SIGNS, Address, AddressEvaluation

SMALL = {"offsets": 3, "symbols": 8, "shortest": 4, "longest": 6, "questions": 5}


@pytest.fixture
def task():
    return get_task("address", **SMALL)


def solved(words):
    """The answers to a text, by its words: each place at which one is due, and the token."""
    listed = [word for word in words if word.isalpha()]
    answers = {}
    for place, word in enumerate(words):
        if word.endswith("?") and len(word) > 1:
            answers[place] = listed[listed.index(word[:-1]) + int(words[place - 1])]
    return answers


def test_lists_after_distractors_and_before_a_gap():
    task = get_task("address", **SMALL, distractors=4, gap=3)
    batch = task.batch(seed=1, index=0, size=64)
    lengths, before, between = set(), set(), set()
    for inputs, targets, weights in zip(*batch.values(), strict=True):
        words = [word for word in task.decode(inputs).split() if word != "<pad>"]
        answers = solved(words)
        assert len(answers) == 5
        assert set(np.flatnonzero(weights)) <= answers.keys()
        assert all(task.decode([targets[place]]) == answers[place] for place in answers)
        kinds = ["l" if w.isalpha() else "s" if w in SIGNS else "q" for w in words]
        start, end = kinds.index("l"), kinds.index("q")
        lengths.add(kinds.count("l"))
        before.add(start)
        between.add(end - start - kinds.count("l"))
    assert (lengths, before, between) == ({4, 5, 6}, {*range(5)}, {*range(4)})
    assert batch["inputs"].shape == (64, task.sequence_length)
    assert task.sequence_length == 6 + 2 * 5 + 4 + 3


class TestQuestions:
    def test_in_words(self, task):
        assert task.solve("h c b a +2 c?") == "a"
        np.testing.assert_array_equal(task.question("c a b +1 a?"), [3, 1, 2, 2 * 8 + 1, 8 + 1])
        assert task.decode(task.question("- ! c a b . +1 a?")) == "- ! c a b . +1 a?"
        assert task.longest_answer("c a b +1 a?") == 1

    def test_are_what_is_asked(self, task):
        for rows, cell in (("offset", [3, 5]), ("gap", [2, 5]), ("distractors", [4, 8])):
            asked = Address(**SMALL, gap=3, distractors=3, rows=rows)
            for text in asked.ordinary(asked.ask(cell, 20)):
                read = asked.read(text)
                assert read.lengths.ravel().tolist() == cell
                assert asked.solve(text) == solved(text.split())[len(text.split()) - 1]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a b c +1 z?", "'z\\?' is no symbol of this task: expected up to 8 distinct tokens"),
            ("a b c +4 a?", r"'\+4' is no symbol .* an offset from \+1 to \+3"),
            ("a b c +1", "expected up to 8 distinct tokens from a to h"),
            ("a b a +1 b?", "the tokens of a list are distinct; got 'a b a'"),
            ("a b c +1 d?", "d is not in the list 'a b c'"),
            ("a b c +2 b?", r"nothing stands 2 places after b in the list 'a b c'"),
        ],
    )
    def test_that_are_none(self, task, text, message):
        with pytest.raises(ValueError, match=message):
            task.question(text)


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"offsets": 4}, "offsets < shortest <= longest <= symbols, .* got offsets = 4"),
            ({"symbols": 3000}, "names for 2,756 symbols; got symbols = 3,000"),
            ({"gap": -1}, "address: gap must be an integer from 0 on; got -1"),
            ({"rows": "gap"}, r"a grid by gap needs some in training: task.gap is 0"),
            ({"rows": "gaps"}, r"unknown rows of address 'gaps': .* \(did you mean 'gap'\?\)"),
        ],
    )
    def test_are_checked(self, options, message):
        with pytest.raises(ValueError, match=message):
            Address(**{**SMALL, **options})

    def test_of_evaluation(self, task):
        assert task.axes(AddressEvaluation()) == (range(1, 4), range(4, 9))
        gaps = Address(**SMALL, gap=3, rows="gap")
        assert gaps.axes(AddressEvaluation()) == ([1, 2, 3, 4, 5, 6], range(4, 9))
        assert [gaps.counted(*cell) for cell in ((3, 5), (4, 5), (6, 8))] == [5, 7, 9]


def knowing(variables, tokens, length):
    """Adds the offset to the place of the token that is asked for; for ``SMALL``."""
    offsets = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1] - 16
    found = jnp.argmax(tokens[:, None, :] == tokens[:, :, None] - 8, axis=-1)
    answer = jnp.take_along_axis(tokens, jnp.clip(found + offsets, 0, tokens.shape[1] - 1), axis=1)
    return jax.nn.one_hot(answer, 40)


class TestJudging:
    def test_by_what_the_rows_are(self, monkeypatch):
        monkeypatch.setattr(Address, "pointing", lambda *_: None)
        task = Address(**SMALL, gap=1)
        model = Model(knowing, max_length=9, model=small_model("rope", vocab_size=task.vocab_size))
        result = task.evaluate(model, AddressEvaluation(samples=3, rows="gap"))
        assert result.rows == "gap"
        assert result.grid.rows == (1, 2)
        # With a list of 8 tokens and a gap of 2 it is too long for this model.
        assert result.grid.counts.tolist() == [[3, 3, 3, 0, 0], [3, 3, 0, 0, 0]]

    @pytest.mark.parametrize(
        ("options", "rows", "message"),
        [
            ({}, "gap", r"needs some in training: task\.gap is 0"),
            # Rows of the task itself would be lost.
            ({"gap": 1, "rows": "gap"}, "offset", "give evaluation.rows=gap, not task.rows"),
        ],
    )
    def test_what_cannot_be_asked_is_said_before_training(self, options, rows, message):
        task, evaluation = Address(**SMALL, **options), AddressEvaluation(rows=rows)
        for call in (task.prepare, functools.partial(task.evaluate, Model(knowing, max_length=9))):
            with pytest.raises(ValueError, match=message):
                call(evaluation)

    @pytest.mark.slow
    def test_a_result_is_read_back_and_drawn(self, task):
        model = small_model("tape", vocab_size=task.vocab_size)
        trained = Model(model.apply, random_variables(model), model=model)
        result = task.evaluate(trained, AddressEvaluation(samples=2))
        again = task.read_result(json.loads(json.dumps(result.to_json())))
        np.testing.assert_array_equal(result.grid.correct, again.grid.correct)
        np.testing.assert_allclose(result.pointing.states, again.pointing.states, atol=1e-4)
        assert result.summary() == again.summary()
        assert {"exact_match_inside", "exact_match_inside_untrained"} <= result.summary().keys()
        # Attention to a list that the question follows is less than one in all.
        assert result.pointing.attention.shape == (*result.pointing.states.shape,)
        assert np.nansum(result.pointing.attention, -1).max() < 6 * 1.01
        compared = compare(task, {"tape": [result, again], "rope": [again, again]})
        assert "tape, encoding as before training" in compared.sections["Exact match"]
        assert list(compared.figures) == ["exact_match.png"]
        drawn = inside(task, trained)["pointing.png"]
        titles = [panel.get_title() for panel in drawn.axes]
        assert titles[:3] == [f"attention of layer {n}" for n in (1, 2, 3)]
        assert titles[3] == "state entering layer 1"
        assert inside(task, trained._replace(max_length=7)) == {}

    @pytest.mark.slow
    def test_states_of_a_schedule_are_of_the_layers_that_read_them(self, task):
        model = small_model("rope/tape/tape", vocab_size=task.vocab_size)
        trained = Model(model.apply, random_variables(model), model=model)
        found = task.pointing(trained, 0, samples=1)
        assert [bool(np.isnan(layer).all()) for layer in found.states] == [True, False, False]
        assert len(found.attention) == 3
        titles = [panel.get_title() for panel in inside(task, trained)["pointing.png"].axes]
        assert titles[3:6] == [f"state entering layer {n}" for n in (1, 2, 3)]

    @pytest.mark.slow
    def test_points_at_what_attention_says(self, task):
        model = small_model("tape", vocab_size=task.vocab_size)
        variables = random_variables(model)
        trained = Model(model.apply, variables, model=model)
        one = task.pointing(trained, 0, samples=1)
        tokens = task.ask([2, 6], 1, 0).symbols[0][:, :8]
        place = tokens[0].tolist().index(tokens[0, -1] - 8)
        _, maps = model.apply(variables, tokens, mutable="maps")
        first = np.reshape(jax.tree.leaves(maps["maps"])[0], (-1, 1, 8, 2, 8))[0, 0, -1]
        zero = one.places.tolist().index(0)
        np.testing.assert_allclose(one.attention[0, :, 1, zero], first[:, place], atol=1e-6)
        np.testing.assert_allclose(one.attention[0, :, 1, zero + 2], first[:, place + 2], atol=1e-6)
        untouched = task.pointing(trained._replace(variables=before_training(model, variables)), 0)
        np.testing.assert_allclose(untouched.states[0], untouched.states[-1], atol=1e-5)
