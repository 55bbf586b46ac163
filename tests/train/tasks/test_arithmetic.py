"""The addition data against Python's integers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.evaluation.exact_match import Examples
from train.tasks import TASKS, get_task
from train.tasks.arithmetic import Addition, add
from train.tasks.digits import VOCABULARY
from train.tasks.questions import Questions

TASK = Addition(3)


def pairs_of(values, width):
    """Pairs of the given (a, b)."""
    digits = np.zeros((2, len(values), width), np.uint8)
    lengths = np.zeros((2, len(values)), np.int64)
    for row, pair in enumerate(values):
        for side, value in enumerate(pair):
            text = str(value)[::-1]
            digits[side, row, : len(text)] = [int(c) for c in text]
            lengths[side, row] = len(text)
    return Questions(digits, lengths)


def sums_of(batch):
    """(a, b, answer) of each example of a training batch, as text in ordinary writing."""
    rows = []
    for inputs, target in zip(batch["inputs"], batch["targets"][:, -1], strict=True):
        text = VOCABULARY.decode([*inputs, target])
        body = text.removeprefix("<bos>").replace("<pad>", "")
        assert body.endswith("<eos>")
        a, _, rest = body.removesuffix("<eos>").partition("+")
        b, _, answer = rest.partition("=")
        rows.append((a[::-1], b[::-1], answer[::-1]))
    return rows


class TestNumbers:
    @settings(max_examples=30, deadline=None)
    @given(
        st.lists(
            st.tuples(st.integers(0, 10**130 - 1), st.integers(0, 10**130 - 1)),
            min_size=1,
            max_size=5,
        )
    )
    def test_add(self, values):
        digits, lengths = add(pairs_of(values, 130))
        for (a, b), row, length in zip(values, digits.tolist(), lengths, strict=True):
            assert row[:length] == [int(c) for c in str(a + b)[::-1]]
            assert not any(row[length:])

    def test_draw_is_uniform_without_leading_zeros(self):
        lengths = np.repeat([[1, 2, 7], [3, 1, 2]], 20_000, axis=1)
        pairs = TASK.draw(np.random.default_rng(0), lengths, 8)
        for side in range(2):
            for length in np.unique(lengths[side]):
                digits = pairs.symbols[side][lengths[side] == length]
                assert not digits[:, length:].any()
                for place in range(length):
                    counts = np.bincount(digits[:, place], minlength=10)
                    lowest = 1 if place == length - 1 > 0 else 0
                    assert counts[:lowest].sum() == 0
                    expected = len(digits) / (10 - lowest)
                    assert np.all(np.abs(counts[lowest:] - expected) < 5 * np.sqrt(expected))

    def test_too_few_sums(self):
        lengths = np.arange(1, 6)
        few = ~TASK.is_divided(lengths[:, None], lengths)
        assert np.argwhere(few).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0]]
        assert TASK.number(1, 3) == 9000 < TASK.smallest_split
        assert np.isfinite(TASK.number(1000, 1000))
        # They are shared, but only inside the trained range.
        shared = [Addition(n).is_shared(1, 3) for n in (2, 3)]
        assert shared == [False, True]
        assert not Addition(9).is_shared(2, 3)


class TestHeldOut:
    def test_fixed(self):
        # The held-out pairs define the task: changing the hash invalidates every stored result.
        values = [(a, b) for a in range(1000, 1010) for b in range(2000, 2010)]
        found = np.flatnonzero(TASK.is_held_out(pairs_of(values, 4)))
        assert found.tolist() == [22, 29, 31, 54, 55, 69, 88, 89, 93]

    def test_training_and_evaluation_are_disjoint(self):
        task = Addition(3)
        trained = set()
        for index in range(20):
            for a, b, _ in sums_of(task.batch(seed=5, index=index, size=512)):
                trained |= {(a, b), (b, a)}
        grid = task.examples(range(1, 4), range(1, 4), samples=2000)
        asked = {}
        for row, (i, j) in zip(grid.tokens, grid.cells.tolist(), strict=True):
            a, b = VOCABULARY.decode(row).removeprefix("<bos>").split("=")[0].split("+")
            asked.setdefault((i + 1, j + 1), set()).add((a[::-1], b[::-1]))
        assert len(trained) > 10_000
        for lengths, sums in asked.items():
            if task.is_shared(*lengths):
                assert len(sums) == min(2000, TASK.number(*lengths))
                assert sums & trained
            else:
                assert len(sums) == 2000 or abs(len(sums) / TASK.number(*lengths) - 0.1) < 0.01
                assert not sums & trained


class TestTokens:
    def test_form(self):
        tokens, prompt, length = TASK.write(pairs_of([(407, 85), (0, 9), (99, 1)], 5), 16)
        assert [VOCABULARY.decode(row).replace("<pad>", "") for row in tokens] == [
            "<bos>704+58=294<eos>",
            "<bos>0+9=9<eos>",
            "<bos>99+1=001<eos>",
        ]
        assert prompt.tolist() == [8, 5, 6]
        assert length.tolist() == [12, 7, 10]
        assert not tokens[0, 12:].any()

    def test_ids(self):
        """Models on record know them."""
        assert VOCABULARY.encode("09+-x= ") == [4, 13, 14, 15, 16, 17, 18]
        assert VOCABULARY.decode([2, 5, 14, 4, 17, 3, 0, 1]) == "<bos>1+0=<eos><pad><unk>"
        assert VOCABULARY.decode(np.array([19, 400, -1])) == "<unk>" * 3, "a wider model's"


class TestTraining:
    @pytest.mark.parametrize("max_digits", [1, 3, 110])
    def test_sums_are_right(self, max_digits):
        task = Addition(max_digits)
        batch = task.batch(seed=0, index=0, size=64)
        for name, dtype in (("inputs", np.int32), ("targets", np.int32), ("weights", np.float32)):
            assert batch[name].shape == (64, task.sequence_length)
            assert batch[name].dtype == dtype
        np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
        if max_digits == 3:
            assert task.sequence_length == len("B999+999=8991E") - 1
        sums = sums_of(batch)
        for a, b, answer in sums:
            assert str(int(a) + int(b)) == answer
            assert str(int(a)) == a
            assert max(len(a), len(b)) <= max_digits
        for row, (*_, answer) in enumerate(sums):
            weighed = batch["targets"][row][batch["weights"][row] > 0]
            assert VOCABULARY.decode(weighed) == answer[::-1] + "<eos>"
            assert set(batch["weights"][row].tolist()) <= {0.0, 1.0}

    def test_length_pairs_are_equally_likely(self):
        counts, size = np.zeros((4, 4)), 8192
        for a, b, _ in sums_of(Addition(4).batch(seed=1, index=0, size=size)):
            counts[len(a) - 1, len(b) - 1] += 1
        expected = size / 16
        assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected))


class TestGrid:
    def test_cells(self):
        task = Addition(2)
        grid = task.examples([1, 3], [2, 12, 4], samples=20, seed=4)
        assert isinstance(grid, Examples)
        assert len(grid) == 6 * 20
        seen = set()
        for tokens, prompt, length, (i, j) in zip(
            grid.tokens, grid.prompt_lengths, grid.lengths, grid.cells, strict=True
        ):
            question = VOCABULARY.decode(tokens[1 : prompt - 1])
            a, b = (x[::-1] for x in question.split("+"))
            assert (len(a), len(b)) == ([1, 3][i], [2, 12, 4][j])
            answer = VOCABULARY.decode(tokens[prompt:length])
            assert answer == str(int(a) + int(b))[::-1] + "<eos>"
            assert not tokens[length:].any()
            seen.add(question)
        assert len(seen) == len(grid)

    def test_independent_of_the_other_lengths(self):
        task = Addition(3)
        alone = task.examples([3], [2], samples=10, seed=1)
        beside = task.examples([1, 3], [2, 30], samples=10, seed=1)
        rows = np.flatnonzero((beside.cells == [1, 0]).all(axis=1))
        np.testing.assert_array_equal(alone.tokens, beside.tokens[rows, : alone.tokens.shape[1]])
        assert not beside.tokens[rows, alone.tokens.shape[1] :].any()


class TestQuestions:
    @pytest.mark.parametrize("text", [" 407 + 85 = ", "0407+085"])
    def test_prompt(self, text):
        task = Addition(3)
        prompt = task.question(text)
        assert prompt.dtype == np.int32
        assert VOCABULARY.decode(prompt) == "<bos>704+58="
        assert task.solve(text) == "492"
        assert task.longest_answer(text) == len("2940E")

    def test_read_answer(self):
        task = Addition(3)
        assert task.read_answer([*VOCABULARY.encode("294"), 3, 7, 0]) == "492"
        assert task.read_answer([*VOCABULARY.encode("290"), 3]) == "092"
        for tokens in ([3], [4, 5], [4, 17, 3], [0, 3]):
            with pytest.raises(ValueError, match="not a number followed by <eos>"):
                task.read_answer(tokens)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("4o7+85", "character 'o' at position 1 of '4o7\\+85' is not in the vocabulary"),
            ("٤+1", "is not in the vocabulary"),
            ("407+", "expected a sum of two numbers such as '407\\+85'; got '407\\+'"),
            ("1+2+3", "expected a sum"),
            ("4 7+85", "expected a sum"),
        ],
    )
    def test_bad_questions(self, text, message):
        with pytest.raises(ValueError, match=message):
            Addition(3).question(text)


def test_all_tasks_load():
    for name in TASKS:
        task = get_task(name)
        assert task.vocab_size > 0
        assert task.sequence_length > 0
    for wrong in (0, 2.0, True):
        with pytest.raises(ValueError, match="max_digits must be a positive integer"):
            get_task("addition", max_digits=wrong)


def test_shapes_of_examples_are_checked():
    tokens, ones, twos = np.zeros((2, 4), int), np.ones(2, int), np.full(2, 2)
    with pytest.raises(ValueError, match=r"shapes .*expected"):
        Examples(tokens, ones, twos, np.zeros((3, 2), int))
    with pytest.raises(ValueError, match="prompt_lengths < lengths <= 4"):
        Examples(tokens, twos, ones, np.zeros((2, 2), int))
