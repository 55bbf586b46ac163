"""The problems of the length suite against plain Python, and what is trained and asked."""

import dataclasses
import json

import numpy as np
import pytest

from research.tasks.algorithms import PROBLEMS, Algorithm, AlgorithmEvaluation
from tests.models import random_variables, small_model
from tests.train.small import Model
from train.compare.tasks import compare
from train.evaluation.exact_match import answer, exact_match
from train.tasks import get_task
from train.tasks.digits import VOCABULARY

ORACLES = {
    "multiply": lambda text: str(int(text.split("x")[0]) * int(text.split("x")[1])),
    "copy": lambda text: text,
    "reverse": lambda text: text[::-1],
    "sort": lambda text: "".join(sorted(text)),
    "parity": lambda text: str(text.count("1") % 2),
    "majority": lambda text: str(int(text.count("1") > text.count("0"))),
    "modular_sum": lambda text: str(sum(map(int, text)) % 5),
}


problems = pytest.mark.parametrize("problem", PROBLEMS)


def examples_of(batch):
    """(prompt, answer) of each example of a batch as text, padding dropped."""
    for inputs, targets, weights in zip(*batch.values(), strict=True):
        text = VOCABULARY.decode([*inputs, targets[-1]]).rstrip("<pad>") + ">"
        prompt, _, _ = text.partition("=")
        assert VOCABULARY.decode(targets[weights > 0]) == text.partition("=")[2]
        yield prompt.removeprefix("<bos>"), text.partition("=")[2].removesuffix("<eos>")


def ordinary(problem, prompt, answer):
    """Question and answer as they are usually written."""
    if problem != "multiply":
        return prompt, answer
    number, factor = prompt.split("x")
    return f"{number[::-1]}x{factor}", answer[::-1]


@problems
def test_training(problem):
    """Right answers to words of every length, none of them longer or held out; exactly fits."""
    task = get_task("algorithm", problem=problem, max_length=7)
    seen = {}
    batch = task.batch(5, 0, 1024)
    assert [x.shape for x in batch.values()] == [(1024, task.sequence_length)] * 3
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    for prompt, reply in examples_of(batch):
        question, result = ordinary(problem, prompt, reply)
        assert result == ORACLES[problem](question) == task.solve(question)
        seen.setdefault(len(question.split("x")[0]), set()).add(question)
    assert set(seen) == set(range(1, 8))
    assert all(weights[-1] == 0 or weights.any() for weights in batch["weights"])
    assert any(inputs[-1] != 0 for inputs in batch["inputs"]) or problem == "multiply"
    for length in range(1, 8):
        number = task.number(length)
        asked = set(task.ordinary(task.ask([length], 2000, 0)))
        if task.is_shared(length):
            assert len(asked) == number < task.smallest_split
            assert asked & seen[length]
        else:
            assert len(asked) == 2000 or abs(len(asked) / number - 0.1) < 0.02
            assert not asked & seen[length]


@pytest.mark.parametrize("problem", ["multiply", "parity"])
def test_lengths_are_equally_likely(problem):
    task = Algorithm(problem, 4)
    counts = [0] * 4
    for prompt, _ in examples_of(task.batch(0, 0, 4000)):
        counts[len(prompt.split("x")[0]) - 1] += 1
    assert all(abs(count - 1000) < 5 * 1000**0.5 for count in counts)


@problems
def test_questions(problem):
    """Evaluation asks in the form of training; ordinary writing goes there and back."""
    task = Algorithm(problem, 5)
    asked = task.examples([2, 9, 4], samples=30, seed=1)
    assert [np.sum(asked.cells[:, 1] == i) for i in range(3)][1] == 30
    for tokens, start, end in zip(asked.tokens, asked.prompt_lengths, asked.lengths, strict=True):
        prompt, reply = (
            VOCABULARY.decode(tokens[1 : start - 1]),
            VOCABULARY.decode(tokens[start:end]),
        )
        question, result = ordinary(problem, prompt, reply.removesuffix("<eos>"))
        assert result == ORACLES[problem](question)
        np.testing.assert_array_equal(task.question(question), tokens[:start])
        assert task.read_answer(tokens[start:]) == result
        assert end - start <= task.longest_answer(question) <= end - start + len(question)
        assert not tokens[end:].any()
    alone = task.examples([9], samples=30, seed=1).tokens
    np.testing.assert_array_equal(alone, asked.tokens[asked.cells[:, 1] == 1][:, : alone.shape[1]])
    assert len({tuple(row) for row in alone.tolist()}) == 30
    assert task.question_example == task.unseen(0)[0]


def test_products_without_leading_zeros():
    task = Algorithm("multiply", 3)
    for text, product in {"0x7": "0", "99x0": "0", "0407x3": "1221", "999 x 9 =": "8991"}.items():
        assert task.solve(text) == product
    assert VOCABULARY.decode(task.question("407x3")) == "<bos>704x3="
    assert task.sequence_length == len("B999x9=8991E") - 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get_task("algorithm", problem="sorting"), "unknown problem 'sorting'"),
        (lambda: Algorithm("parity", 0), "max_length must be a positive integer; got 0"),
        (lambda: Algorithm("parity").question("0121"), "expected a word of digits from 0 to 1"),
        (lambda: Algorithm("copy").question("12a"), "character 'a' at position 2"),
        (lambda: Algorithm("multiply").question("40x33"), "expected a number and a digit such as"),
    ],
)
def test_misuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_evaluation():
    """A model that knows the answer to some words; what is too long for it is not asked."""
    task = Algorithm("parity", 3)
    model = small_model("rope", vocab_size=task.vocab_size, max_length=8)
    variables = random_variables(model)
    trained = Model(model.apply, variables, max_length=8)
    options = AlgorithmEvaluation(samples_per_length=5, batch_size=16)
    grid = task.evaluate(trained, options)
    # <bos>, five bits, = and the answer are eight tokens.
    np.testing.assert_array_equal(grid.counts, [[2, 4, 5, 5, 5, 0]])
    np.testing.assert_array_equal(grid.shared, [[True] * 3 + [False] * 3])
    assert (grid.rows, grid.columns, grid.trained) == ((1,), (1, 2, 3, 4, 5, 6), 3)
    right = exact_match(trained.apply, variables, task.examples([1, 2, 3, 4, 5], samples=5))
    assert grid.correct.sum() == right.sum()
    read = task.read_result(json.loads(json.dumps(grid.to_json())))
    np.testing.assert_array_equal(read.correct, grid.correct)
    # Four bits are asked, five are too many with both tokens of the answer.
    assert len(task.samples(trained, options)) == 3
    reply = answer(trained.apply, variables, task, "101", max_length=8)
    assert (reply.question, reply.solution) == ("101", "0")

    perfect = dataclasses.replace(grid, correct=grid.counts)
    compared = compare(task, {"one": [grid, perfect], "other": [perfect, perfect]})
    assert "A guess is right in 50 % of cases." in compared.introduction
    assert "100 [" in compared.sections["Exact match"]
