"""Exact match against token-by-token generation and against counts by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import RopeScaling, positions
from tests.models import VOCAB, random_variables, small_model
from tests.train.small import Model
from train.evaluation.exact_match import AtPlaces, Examples, answer, exact_match, greedy
from train.tasks.arithmetic import Addition, AdditionEvaluation
from train.tasks.digits import VOCABULARY

WEIGHTS = np.random.default_rng(0).integers(1, 2**31, 64, dtype=np.int32)


def recall(variables, tokens, length=None):
    """A causal model, which knows what follows some beginnings; [B, T] -> [B, T, V]."""
    beginnings = jnp.cumsum(tokens * WEIGHTS[: tokens.shape[1]], axis=1, dtype=jnp.int32)
    found = jnp.searchsorted(variables["beginnings"], beginnings)
    found = jnp.minimum(found, len(variables["next"]) - 1)
    return jax.nn.one_hot(variables["next"][found], VOCABULARY.size)


def half_known(examples):
    """Variables of ``recall``: what follows all beginnings, but wrong once in every third row.

    After their ends no padding follows, which nothing should ask for.
    """
    rng, following = np.random.default_rng(0), examples.tokens[:, 1:].copy()
    following[np.arange(following.shape[1]) >= examples.lengths[:, None] - 1] = 3
    for row in range(0, len(following), 3):
        place = rng.integers(examples.prompt_lengths[row] - 1, examples.lengths[row] - 1)
        following[row, place] = 4 if following[row, place] == 3 else 3
    hashes = examples.tokens * WEIGHTS[: examples.tokens.shape[1]]
    hashes = np.cumsum(hashes, axis=1).astype(np.int32)[:, :-1].ravel()
    order = np.argsort(hashes, kind="stable")
    return {"beginnings": jnp.asarray(hashes[order]), "next": jnp.asarray(following.ravel()[order])}


def generated_right(variables, examples):
    """Exact match by generation, compared token by token in numpy."""
    places = np.arange(examples.tokens.shape[1])
    prompts = np.where(places < examples.prompt_lengths[:, None], examples.tokens, 0)
    prompts = prompts.astype(np.int32)
    out = greedy(recall, variables, prompts, examples.prompt_lengths, examples.lengths)
    same = np.asarray(out) == examples.tokens
    return np.all(same | (places >= examples.lengths[:, None]), axis=1)


class TestExactMatch:
    def test_batches_do_not_matter(self):
        examples = Addition(2).examples([1, 2], [1, 2], samples=15)
        variables = half_known(examples)
        expected = exact_match(recall, variables, examples, batch_size=60, shapes=1)
        right = exact_match(recall, variables, examples, batch_size=50, shapes=3)
        np.testing.assert_array_equal(right, expected)

    def test_every_answer_token_counts_and_no_other(self):
        # Prompt of 2 tokens, answer of 2, padding; the logits are given as the variables.
        tokens = np.array([[5, 6, 7, 3, 0]])
        examples = Examples(tokens, np.array([2]), np.array([4]), np.zeros((1, 2), int))

        def right(*predicted):
            logits = jax.nn.one_hot(jnp.array([predicted]), 10)
            return exact_match(given_logits, logits, examples)[0]

        assert right(6, 7, 3)
        assert right(9, 7, 3)
        assert not right(6, 8, 3)
        assert not right(6, 7, 4)
        assert not exact_match(given_logits, jnp.full((1, 3, 10), jnp.nan), examples)[0]

    def test_compiles_once_for_each_shape(self):
        shapes = []

        def apply(variables, tokens, length):
            shapes.append(tokens.shape)
            return jnp.zeros((*tokens.shape, VOCABULARY.size))

        examples = Addition(3).examples(range(1, 7), range(1, 7), samples=3)
        for _ in range(2):
            exact_match(apply, None, examples, batch_size=16, shapes=3)
        assert len(shapes) == len(set(shapes)) == 3
        assert {rows for rows, _ in shapes} == {16}
        assert max(width for _, width in shapes) == examples.lengths.max() - 1

    @pytest.mark.slow
    @pytest.mark.parametrize(("position", "dense"), [("random_rope", False), ("dynamic", True)])
    def test_padding_is_no_length(self, position, dense):
        """Draws and scaling by the length are those of each row alone, as wide as its batch is."""
        if position == "dynamic":
            position = positions.Rope(scaling=RopeScaling("dynamic", 2.0, original_length=4))
        model = small_model(position, num_layers=1)
        variables, prompts = random_variables(model, std=1.0), np.repeat([2, 6, 30], 6)
        count, alone = len(prompts), jax.jit(model.apply)
        tokens = np.random.default_rng(0).integers(0, VOCAB, (count, prompts[-1] + 1))
        for row, prompt in zip(tokens, prompts, strict=True):
            row[prompt] = alone(variables, jnp.asarray(row[:prompt]))[-1].argmax()
            row[prompt + 1 :] = 0
        examples = Examples(tokens, prompts, prompts + 1, np.zeros((count, 2), int))
        apply = model.apply if dense else AtPlaces(model)
        for shapes in (1, 3):
            assert exact_match(apply, variables, examples, shapes=shapes).all()


def given_logits(variables, tokens, length):
    return variables[:, : tokens.shape[1]]


def uniform(variables, tokens, length):
    return jnp.zeros((*tokens.shape, VOCABULARY.size))


class TestGrid:
    def test_counts(self):
        task, options = Addition(2), AdditionEvaluation(samples_per_pair=60, longest=3)
        examples = task.examples([1, 2, 3], [1, 2, 3], samples=60)
        variables = half_known(examples)
        grid = task.evaluate(Model(recall, variables), options)
        right = generated_right(variables, examples)
        assert 0.15 < right.mean() < 0.85, "right and wrong, for this to mean much"
        for i in range(3):
            for j in range(3):
                cell = (examples.cells == [i, j]).all(axis=1)
                assert grid.counts[i, j] == cell.sum() == 60
                assert grid.correct[i, j] == right[cell].sum()
        assert grid.trained == 2
        assert grid.rows == grid.columns == (1, 2, 3)
        np.testing.assert_array_equal(grid.lengths, [[1, 2, 3], [2, 2, 3], [3, 3, 3]])
        np.testing.assert_array_equal(grid.shared, [[1, 1, 0], [1, 1, 0], [0, 0, 0]])


class TestGreedy:
    @pytest.mark.slow
    def test_padding_is_no_length(self):
        model = small_model("random_rope", num_layers=1)
        variables, lengths = random_variables(model, std=1.0), jnp.array([5, 6])
        prompts = jnp.array([[3, 4, 0, 0, 0, 0], [9, 8, 7, 6, 0, 0]])
        narrow = greedy(model.apply, variables, prompts, jnp.array([2, 4]), lengths)
        wide = jnp.pad(prompts, ((0, 0), (0, 9)))
        wide = greedy(model.apply, variables, wide, jnp.array([2, 4]), lengths)
        for row, same, length in zip(narrow, wide, lengths, strict=True):
            np.testing.assert_array_equal(same[:length], row[:length])

    def test_answers_agree_with_exact_match(self):
        task = Addition(2)
        examples = task.examples([1, 2], [1, 2], samples=5)
        variables = half_known(examples)
        right = exact_match(recall, variables, examples)
        verdicts = []
        for tokens, prompt in zip(examples.tokens, examples.prompt_lengths, strict=True):
            a, b = VOCABULARY.decode(tokens[1 : prompt - 1]).split("+")
            found = answer(recall, variables, task, f"{a[::-1]}+{b[::-1]}")
            assert found.solution == str(int(a[::-1]) + int(b[::-1]))
            verdicts.append(found.right)
        np.testing.assert_array_equal(verdicts, right)

    def test_limit(self):
        task = Addition(3)
        # 8 tokens of prompt, then at most 4 digits and the end, which is not fed back.
        assert answer(uniform, None, task, "407+85", max_length=12).solution == "492"
        with pytest.raises(
            ValueError, match=r"'407\+85' with its answer needs 12 tokens.*at most 11"
        ):
            answer(uniform, None, task, "407+85", max_length=11)
