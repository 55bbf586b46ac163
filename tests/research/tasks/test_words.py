"""Groups against the axioms, words against products of permutations, and how they are judged."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.tasks.groups import GROUPS, multiplication_table
from research.tasks.words import HASHED, WordEvaluation, Words
from tests.train.small import Model
from train.tasks import get_task
from train.tasks.questions import Questions

ORDERS = {"Z60": 60, "A4xZ5": 60, "A5": 60, "S5": 120}
groups = pytest.mark.parametrize("name", GROUPS)


def generated(table, elements):
    """The subgroup that elements generate."""
    found = {0}
    while True:
        more = found | {int(table[a, b]) for a in found for b in elements}
        if more == found:
            return frozenset(found)
        found = more


def derived_series(table):
    """Orders of the group, of the subgroup of its commutators, and so on until they stay."""
    inverse = np.argmin(table, axis=1)
    group, orders = frozenset(range(len(table))), [len(table)]
    while True:
        commutators = {
            int(table[table[a, b], table[inverse[a], inverse[b]]])
            for a, b in itertools.product(group, group)
        }
        group = generated(table, commutators)
        if len(group) == orders[-1]:
            return orders
        orders.append(len(group))


def asked_of(task, length, samples):
    """Words of a length that may be asked."""
    return task.ask([length], samples).symbols[0]


def held_out(task, words):
    """Whether words are held out of training."""
    return task.is_held_out(Questions(words[None], np.full((1, len(words)), words.shape[1])))


class TestGroups:
    @groups
    def test_axioms(self, name):
        table = multiplication_table(name)
        every = np.arange(ORDERS[name])
        assert table.shape == (ORDERS[name], ORDERS[name])
        np.testing.assert_array_equal(table[0], every)
        np.testing.assert_array_equal(table[:, 0], every)
        for rows in (table, table.T):
            np.testing.assert_array_equal(np.sort(rows), np.broadcast_to(every, rows.shape))
        np.testing.assert_array_equal(table[table], table[:, table])

    @pytest.mark.parametrize(
        ("name", "orders"),
        [("Z60", [60, 1]), ("A4xZ5", [60, 4, 1]), ("A5", [60]), ("S5", [120, 60])],
    )
    def test_solvable(self, name, orders):
        """Solvable groups come down to one element by commutators: the first two do."""
        assert derived_series(multiplication_table(name)) == orders

    @groups
    def test_generators(self, name):
        """Two of them, or three, give all elements; runs know them by their numbers."""
        symbols = Words(name, 4, 3).symbols.tolist()
        fixed = {"Z60": [1, 5, 12], "A4xZ5": [21, 5, 15], "A5": [16, 15, 13], "S5": [33, 24, 3]}
        assert symbols == fixed[name]
        assert Words(name, 4, 2).symbols.tolist() == symbols[:2]
        assert len(generated(multiplication_table(name), symbols[:2])) == ORDERS[name]


class TestWords:
    def test_products(self):
        """Against permutations that are composed one after the other."""
        images = np.array(sorted(itertools.permutations(range(5))))
        task = get_task("words", group="S5", max_length=9)
        # What older runs were asked.
        words = asked_of(Words("A5", 4), 4, 3)
        assert words.tolist() == [[57, 17, 16, 24], [24, 53, 59, 56], [6, 41, 40, 37]]
        batch = task.batch(0, 0, 20)
        for word, targets in zip(batch["inputs"], batch["targets"], strict=True):
            product = np.arange(5)
            assert (word[0], targets[0]) == (120, 120)
            for element, target in zip(word[1:], targets[1:], strict=True):
                product = product[images[element]]
                np.testing.assert_array_equal(product, images[target])
        assert [x.dtype.name for x in batch.values()] == ["int32", "int32", "float32"]
        np.testing.assert_array_equal(batch["weights"], [[0] + [1] * 9] * 20)
        assert (task.vocab_size, task.sequence_length) == (121, 10)

    def test_words_of_generators(self):
        task = get_task("words", group="S5", max_length=12, generators=3)
        assert [Words("S5", 12, g).beginning for g in (None, 3, 2)] == [3, 9, 14]
        assert (task.vocab_size, task.sequence_length) == (121, 13)
        batch, asked = task.batch(0, 0, 2000), asked_of(task, 14, 2000)
        trained = batch["inputs"][:, 1:]
        images = np.array(sorted(itertools.permutations(range(5))))
        np.testing.assert_array_equal(images[task.symbols], GROUPS["S5"][:3])
        for words in (trained, asked):
            assert words.dtype == np.int32
            share = (words[..., None] == task.symbols).mean(axis=(0, 1))
            np.testing.assert_allclose(share, 1 / 3, atol=0.01)
        assert np.unique(batch["targets"][:, 1:]).size == 120
        beginnings = [{tuple(w) for w in words[:, :9].tolist()} for words in (trained, asked)]
        assert not beginnings[0] & beginnings[1]
        every = np.array(list(itertools.product(task.symbols, repeat=9)))
        assert abs(held_out(task, every).mean() - 0.1) < 0.01
        assert len({tuple(w[:8]) for w in asked_of(task, 8, 2000).tolist()}) > 1500

    def test_held_out(self):
        task = Words("A5", 4)
        trained = task.batch(0, 0, 5000)["inputs"][:, 1:]
        asked = asked_of(task, 6, 2000)
        assert not held_out(task, trained).any()
        assert held_out(task, asked).all()
        beginnings = [{tuple(w) for w in words[:, :HASHED].tolist()} for words in (trained, asked)]
        assert not beginnings[0] & beginnings[1]
        every = np.array(list(itertools.product(range(60), repeat=3)))
        assert abs(held_out(task, every).mean() - 0.1) < 0.005
        counts = np.bincount(trained.ravel(), minlength=60)
        assert np.all(np.abs(counts - 20_000 / 60) < 5 * (20_000 / 60) ** 0.5)
        assert asked_of(task, 2, 5).shape == (5, 2)

    def test_ordinary_writing(self):
        task = Words("Z60", 4)
        np.testing.assert_array_equal(task.question("1  0 59"), [60, 1, 0, 59])
        assert task.decode([60, 1, 0, 59]) == "<bos> 1 0 59"
        assert task.solve("7 9") == str(task.table[7, 9])
        for text in ("60", "", "-1"):
            with pytest.raises(ValueError, match="numbers from 0 to 59 of elements of Z60"):
                task.question(text)
        task = Words("A5", 4, 3)
        assert task.solve("16 15") == str(task.table[16, 15])
        with pytest.raises(
            ValueError, match=r"expected the numbers 16, 15, 13 of generators of A5, .*got '16 1'"
        ):
            task.question("16 1")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("A5", 4, 1), "generators must be 2 or 3.*got 1"),
            (("A5", 4, True), "generators must be 2 or 3.*got True"),
            (("B5",), "unknown group 'B5'"),
            (("A5", 0), "words: max_length must be a positive integer; got 0"),
        ],
    )
    def test_misuse(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            Words(*arguments)


def knowing(task, places):
    """A function from words to logits: right at the first ``places`` places, wrong after them."""
    table = jnp.asarray(task.table)

    def apply(variables, words):
        def step(product, element):
            product = table[product, element]
            return product, product

        _, products = jax.lax.scan(step, jnp.zeros(len(words), int), words[:, 1:].T)
        wrong = jnp.arange(words.shape[1] - 1) >= places
        right = jax.nn.one_hot((products.T + wrong) % len(table), len(table) + 1)
        return jnp.pad(right, ((0, 0), (1, 0), (0, 0)))

    return apply


class TestEvaluation:
    def test_counts(self):
        task, options = Words("A5", 3), WordEvaluation(samples=7, batch_size=4)
        steps = []
        result = task.evaluate(Model(knowing(task, 5)), options, lambda *x: steps.append(x))
        for grid in (result.words, result.products):
            np.testing.assert_array_equal(grid.counts, np.full((1, 12), 7))
            np.testing.assert_array_equal(grid.correct, [[7] * 5 + [0] * 7])
            np.testing.assert_array_equal(grid.shared, [[True] * 2 + [False] * 10])
        assert steps == [(4, 14), (7, 14), (11, 14), (14, 14)]
        assert result.summary() == {
            "words_inside": 1.0,
            "words_outside": 2 / 9,
            "products_inside": 1.0,
            "products_outside": 2 / 9,
        }
        assert {s.key for s in task.scores} == set(result.summary())
        read = task.read_result(json.loads(json.dumps(result.to_json())))
        assert read.table() == result.table()

    def test_shared_lengths(self):
        """Those of the trained range at which no word is held out."""
        for n, marked in ((4, 4), (12, 8)):
            task = Words("A5", n, 3)
            result = task.evaluate(Model(knowing(task, 5)), WordEvaluation(samples=2))
            np.testing.assert_array_equal(result.words.shared[0], np.arange(1, 4 * n + 1) <= marked)

    def test_one_wrong_product_spoils_the_word_only_from_there(self):
        task = Words("A5", 2)

        def apply(variables, words):
            logits = knowing(task, 99)(variables, words)
            return jnp.where((jnp.arange(words.shape[1]) == 5)[:, None], -logits, logits)

        result = task.evaluate(Model(apply), WordEvaluation(samples=3))
        assert result.words.correct.tolist() == [[3] * 4 + [0] * 4]
        assert result.products.correct.tolist() == [[3] * 4 + [0] + [3] * 3]

    def test_limited_model(self):
        task = Words("A5", 3)
        result = task.evaluate(Model(knowing(task, 9), max_length=6), WordEvaluation(samples=3))
        assert result.words.counts.tolist() == [[3] * 5 + [0] * 7]
        with pytest.raises(ValueError, match=r"of 6 elements have up to 7 tokens, .* accepts 6"):
            task.evaluate(Model(knowing(task, 9), max_length=6), WordEvaluation(longest=6))
        assert task.prepare(WordEvaluation(longest=6), 7) == "asked for 1 to 6 elements in the end"
