"""What every task of questions and answers shares, by a small task of its own."""

import dataclasses
import json
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.small import Model
from train import tasks
from train.compare.tasks import compare
from train.evaluation.grids import Wording
from train.tasks import get_task
from train.tasks.arithmetic import Addition, AdditionEvaluation
from train.tasks.digits import VOCABULARY, DigitQuestions, read_operands, write
from train.tasks.questions import VALIDATION_SEED, Options, Questions, scores_by_range


@dataclasses.dataclass(frozen=True)
class Few(Options):
    samples: int = 5
    shapes: int = 1


@dataclasses.dataclass(frozen=True)
class LastDigit(DigitQuestions):
    """What is the last digit of a word?"""

    kind: ClassVar[str] = "last_digit"
    Evaluation: ClassVar[type] = Few

    max_length: int = 3

    @property
    def trained_length(self):
        return self.max_length

    def width(self, *lengths):
        return sum(lengths) + 4

    def number(self, *lengths):
        (length,) = lengths
        return 10.0**length

    def every(self, *lengths):
        (n,) = lengths
        words = np.indices([10] * n, np.uint8).reshape(1, n, -1).swapaxes(1, 2)
        return Questions(words, np.full((1, 10**n), n))

    def draw(self, rng, lengths, longest):
        shape = (*lengths.shape, lengths[0, 0])
        return Questions(rng.integers(0, 10, shape, np.uint8), lengths)

    def hashed(self, questions):
        return questions.symbols + 1

    def write(self, questions, width):
        zero, equals = VOCABULARY.encode("0=")
        words = questions.symbols[0] + np.uint8(zero)
        prompt = [VOCABULARY.BOS, words, equals]
        return write(prompt, [words[:, -1:], VOCABULARY.EOS], width)

    def ordinary(self, questions):
        return ["".join(map(str, word)) for word in questions.symbols[0].tolist()]

    def read(self, text):
        word = read_operands(text, "([0-9]+)", "a word of digits")[1]
        return Questions(np.array([[[int(c) for c in word]]], np.uint8), np.array([[len(word)]]))

    @property
    def scores(self):
        return scores_by_range({"exact_match": ""}, f"{self.max_length} digits")

    @property
    def wording(self):
        return Wording("Last digits", "", "digits", "digits", "words", "lengths", "few digits")

    @property
    def heading(self):
        return "Last digits"

    def introduction(self, grid):
        return f"Asked for {grid.counts.sum()} last digits."


def knowing(variables, tokens, length):
    """Says the last digit after ``=``, and the end after that."""
    before = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    equals = VOCABULARY.encode("=")[0]
    return jax.nn.one_hot(jnp.where(tokens == equals, before, VOCABULARY.EOS), VOCABULARY.size)


class TestANewTask:
    """One file and one line in the registry are all that it takes."""

    @pytest.fixture
    def task(self, monkeypatch):
        monkeypatch.setitem(tasks.TASKS, "last_digit", f"{__name__}:LastDigit")
        return get_task("last_digit")

    def test_trains(self, task):
        batch = next(iter(task.dataset(seed=1, batch_size=400)))
        trained = {}
        for inputs, targets, weights in zip(*batch.values(), strict=True):
            word, _, rest = VOCABULARY.decode([*inputs, targets[-1]])[5:].partition("=")
            assert VOCABULARY.decode(targets[weights > 0]) == f"{word[-1]}<eos>"
            assert rest.startswith(f"{word[-1]}<eos>")
            trained.setdefault(len(word), set()).add(word)
        assert trained.keys() == {1, 2, 3}
        assert not trained[3] & set(task.ordinary(task.ask([3], 1000)))
        assert task.sequence_length == batch["inputs"].shape[1] == len("B123=3E") - 1

    def test_asks(self, task):
        assert len(task.ordinary(task.ask([2], 1000))) == 100, "shared, and all there are"
        assert 70 < len(task.ordinary(task.ask([3], 1000))) < 130, "held out"
        assert len(set(task.ordinary(task.ask([4], 500)))) == 500, "beyond the trained range"
        assert [task.is_shared(n) for n in (1, 2, 3, 4)] == [True, True, False, False]

    def test_is_judged_and_reported(self, task):
        grid = task.evaluate(Model(knowing), task.Evaluation())
        np.testing.assert_array_equal(grid.counts, [[5] * 6])
        np.testing.assert_array_equal(grid.correct, grid.counts)
        assert {score.key for score in task.scores} == set(grid.summary())
        read = task.read_result(json.loads(json.dumps(grid.to_json())))
        compared = compare(task, {"one": [grid, read], "other": [grid, grid]})
        assert compared.title == "Last digits"
        assert compared.introduction.startswith(
            "Asked for 60 last digits. Inside the trained range"
        )
        assert "100 [" in compared.sections["Exact match"]
        assert list(compared.figures) == ["exact_match.png"]

    def test_answers(self, task):
        lines = task.samples(Model(knowing), task.Evaluation())
        assert len(lines) == 3
        assert all(line.endswith("(right)") for line in lines)
        assert len(task.samples(Model(knowing, max_length=6), task.Evaluation())) == 2, (
            "four digits are long"
        )
        assert task.solve(" 407 = ") == "7"
        assert task.longest_answer("407") == 2
        np.testing.assert_array_equal(task.encode("407"), task.question("407"))
        assert task.decode(task.encode("407")) == "<bos>407="
        with pytest.raises(ValueError, match="expected a word of digits; got '4x7'"):
            task.question("4x7")
        assert task.validation(Few(seed=3)) == Few(seed=3 + VALIDATION_SEED)


class TestTooLong:
    def test_is_not_asked(self):
        # A sum of numbers of 3 and 1 digits has up to 11 tokens to be read, of 3 and 2: 12.
        options = AdditionEvaluation(samples_per_pair=2)
        grid = Addition(2).evaluate(Model(knowing, max_length=11), options)
        expected = [[2, 2, 2, 0], [2, 2, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0]]
        np.testing.assert_array_equal(grid.counts, expected)
        said = Addition(2).prepare(options, 11)
        assert said == "asked for 1 to 3 digits in the end, as far as 11 tokens reach"
        assert Addition(2).prepare(options, 99) == "asked for 1 to 4 digits in the end"

    def test_is_refused_if_it_was_named(self):
        options = AdditionEvaluation(samples_per_pair=2, longest=3)
        message = "longest: questions of 3 digits have up to 13 tokens, but the model accepts 12"
        for ask in (
            lambda: Addition(2).evaluate(Model(knowing, max_length=12), options),
            lambda: Addition(2).prepare(options, 12),
        ):
            with pytest.raises(ValueError, match=message):
                ask()
        assert Addition(2).prepare(options, 13) == "asked for 1 to 3 digits in the end"
        with pytest.raises(ValueError, match="last_digit: the model accepts 3 tokens: too few"):
            LastDigit().evaluate(Model(knowing, max_length=3), Few())


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([[1], [1]], {"samples": 0}, "addition: samples must be a positive integer; got 0"),
        ([[1], [1]], {"seed": -1}, "addition: seed must be an integer from 0"),
        ([[0], [1]], {}, "addition: length must be a positive integer; got 0"),
        ([[1], []], {}, r"addition: expected lengths of 2 operands; got \(\[1\], \[\]\)"),
    ],
)
def test_bad_arguments(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        Addition(3).examples(*lengths, **{"samples": 5, **options})
