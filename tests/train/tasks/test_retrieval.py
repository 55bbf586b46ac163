"""Passkey retrieval: questions to the token, and answers against generation."""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest

from tape_jax import generate
from tests.train import tokenizer_files
from tests.train.small import BYTES, trained
from train.data import tokenizers
from train.evaluation.exact_match import AtPlaces, Examples, exact_match
from train.tasks import retrieval
from train.tasks.retrieval import LONG, SHORT, compose, filler_tokens, pieces, questions


@pytest.fixture(scope="module", params=["bytes", "hugging_face", "sentencepiece"])
def codec(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("codec")
    if request.param == "bytes":
        return BYTES
    if request.param == "hugging_face":
        return tokenizers.load(str(tokenizer_files.hugging_face(folder / "tokenizer.json")))
    return tokenizers.load(str(tokenizer_files.sentencepiece_model(folder / "tokenizer.model")))


class TestQuestions:
    def test_exactly_as_long_as_wanted(self, codec):
        lengths = (400, 650)
        for length, asked in zip(
            lengths, questions(codec, lengths, depths=3, trials=4), strict=True
        ):
            assert asked.tokens.shape == (12, length + 1)
            np.testing.assert_array_equal(asked.lengths, length + 1)
            for tokens, start in zip(asked.tokens, asked.prompt_lengths, strict=True):
                prompt, key = codec.decode(tokens[:start]), codec.decode(tokens[start:]).strip()
                assert codec.bos is None or tokens[0] == codec.bos
                assert LONG.announcement.strip() in prompt
                assert prompt.endswith("What is the pass key? The pass key is")
                assert f"The pass key is {key}. Remember it: {key} is the pass key." in prompt
                assert 1 <= int(key) <= 50_000

    def test_places_lie_in_their_part(self):
        (asked,) = questions(BYTES, (1000,), depths=4, trials=25)
        places = []
        for tokens in asked.tokens:
            filler = BYTES.decode(tokens).split(LONG.announcement)[1].split("\nWhat is")[0]
            before, _, after = filler.partition("\nThe pass key is ")
            after = after.split("the pass key.\n")[1]
            assert retrieval.FILLER.startswith((before + after)[: len(retrieval.FILLER)])
            places.append(len(before) / len(before + after))
        places = np.reshape(places, (4, 25))
        bounds = np.arange(4)[:, None] / 4
        assert np.all((places > bounds - 1e-3) & (places < bounds + 0.25 + 1e-3))
        assert np.all(np.ptp(places, axis=1) > 0.1)
        np.testing.assert_array_equal(asked.cells, [(d, 0) for d in range(4) for _ in range(25)])

    def test_lengths_do_not_depend_on_each_other(self):
        (alone,) = questions(BYTES, (300,), depths=2, trials=2, seed=5)
        _, together, _ = questions(BYTES, (250, 300, 600), depths=2, trials=2, seed=5)
        np.testing.assert_array_equal(alone.tokens, together.tokens)
        (other,) = questions(BYTES, (300,), depths=2, trials=2, seed=6)
        assert not np.array_equal(alone.tokens, other.tokens)

    def test_least_length(self):
        parts = pieces(BYTES, SHORT, "123")
        # " <key=123>  <key=123>", of which the last byte is not read.
        assert parts.size == 11 + 6 + 4 - 1
        text = compose(parts, filler_tokens(BYTES, SHORT.filler, 5), 20, 0.5)
        assert BYTES.decode(text) == " <key=123>  <key=123>"
        with pytest.raises(
            ValueError, match="19 tokens is too small; without any filler it takes 20"
        ):
            compose(parts, filler_tokens(BYTES, SHORT.filler, 5), 19, 0.5)

    def test_joined_tokens_belong_to_the_answer(self):
        joining = types.SimpleNamespace(bos=None, encode=lambda text: text.split("-"))
        form = dataclasses.replace(SHORT, question="which-is", answer="{key}-end")
        parts = pieces(joining, form, "7")
        assert (parts.question, parts.answer) == (["which"], ["is7", "end"])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"lengths": ()}, r"lengths must be positive and ascend; got \(\)"),
            ({"depths": 0}, "depths must be a positive integer; got 0"),
            ({"lengths": (100,)}, "a length of 100 tokens is too small"),
        ],
    )
    def test_bad_arguments(self, options, message):
        with pytest.raises(ValueError, match=message):
            questions(BYTES, **{"lengths": (300,), **options})


def answered(model, lengths, depths=2, trials=3):
    """Questions whose answers are the model's own in every second row, and wrong in one token."""
    asked = []
    for examples in questions(BYTES, lengths, depths=depths, trials=trials):
        tokens = examples.tokens.copy()
        for row, start in enumerate(examples.prompt_lengths):
            count = tokens.shape[1] - start
            written = generate(model.model, model.variables, tokens[row : row + 1, :start], count)
            tokens[row] = np.asarray(written)[0]
            if row % 2:
                tokens[row, start + row % count] ^= 1
        rest = {name: getattr(examples, name) for name in ("prompt_lengths", "lengths", "cells")}
        asked.append(Examples(tokens, **rest))
    return asked


class TestRetrieve:
    @pytest.mark.slow
    def test_right_is_what_is_generated(self):
        model = trained()
        asked = answered(model, (230, 240))
        steps = []
        grid = retrieval.retrieve(
            model,
            asked,
            trained_length=235,
            batch_tokens=500,
            progress=lambda *step: steps.append(step),
        )
        # Rows 0, 2 and 4 of six; the first three are of the first depth.
        np.testing.assert_array_equal(grid.correct, [[2, 2], [1, 1]])
        np.testing.assert_array_equal(grid.counts, [[3, 3], [3, 3]])
        assert (grid.rows, grid.columns, grid.trained) == ((25, 75), (230, 240), 235)
        np.testing.assert_array_equal(grid.is_inside, [[True, False]] * 2)
        found = {"passkey_inside": 0.5, "passkey_outside": 0.5}
        assert retrieval.summary(grid) == found | {
            "passkey_0.978723x": 0.5,
            "passkey_1.02128x": 0.5,
        }
        assert steps[-1] == (12, 12)
        dense = exact_match(model.apply, model.variables, asked[0], batch_size=2)
        np.testing.assert_array_equal(dense, [True, False] * 3)

    def test_what_is_too_long_is_not_asked(self):
        model = trained("learned", size=230)
        grid = retrieval.retrieve(
            model, questions(BYTES, (230, 240), depths=2, trials=2), trained_length=230
        )
        np.testing.assert_array_equal(grid.counts, [[2, 0], [2, 0]])
        assert list(retrieval.summary(grid)) == ["passkey_inside", "passkey_1x"]

    def test_logits_of_the_prompt_are_never_made(self):
        model = trained()
        given = model.variables, np.zeros((2, 50), np.int32), np.zeros((2, 3), np.int32)
        logits = functools.partial(AtPlaces(model.model), length=np.full(2, 50))
        assert jax.eval_shape(logits, *given).shape == (2, 3, BYTES.vocab_size)
        text = jax.jit(logits).lower(*given)
        assert "2x50x258" not in text.as_text()
        assert "258" in text.as_text()
