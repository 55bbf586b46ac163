"""What tasks of answers at places share, and that each of them tells the truth."""

import numpy as np
import pytest

from train.data.held_out import ONE_IN
from train.tasks import TASKS, get_task, task_type
from train.tasks.places import PlaceTask

SMALL = {
    "address": {"offsets": 3, "symbols": 12, "shortest": 4, "longest": 6},
    "chains": {"hops": 3, "symbols": 12, "shortest": 4, "longest": 6},
    "line_numbers": {"lines": 3, "places": 3, "shortest": 3, "longest": 5},
    "table": {"rows": 3, "columns": 3},
}


@pytest.fixture(params=[name for name in TASKS if issubclass(task_type(name), PlaceTask)])
def task(request):
    return get_task(request.param, **SMALL[request.param], questions=4)


def solved(kind, words):
    """The answer to a question, by its words."""
    *body, first, second = words
    if kind == "address":
        return body[body.index(second[:-1]) + int(first)]
    if kind == "chains":
        follows = {key[:-1]: value for key, value in zip(body[::2], body[1::2], strict=True)}
        reached = second[:-1]
        for _ in range(int(first[1:])):
            reached = follows[reached]
        return reached
    if kind == "line_numbers":
        lines = " ".join(body).split("|")
        return lines[int(first[1:]) - 1].split()[int(second) - 1]
    header = [word for word in body if word.isupper()]
    row = body.index(first[:-1])
    return body[row + 1 + header.index(second[:-1])]


def test_answers_are_right(task):
    """Of every text the body with each of its questions alone."""
    batch = task.batch(seed=1, index=0, size=60)
    assert batch["inputs"].shape == (60, task.sequence_length)
    for inputs, targets, weights in zip(*batch.values(), strict=True):
        words = task.decode(inputs[inputs != 0]).split()
        body = words[: len(words) - 2 * 4]
        places = np.flatnonzero(targets)
        assert places.tolist() == [*range(len(body) + 1, len(words), 2)]
        assert set(np.flatnonzero(weights)) <= set(places)
        for place in places:
            question = " ".join([*body, *words[place - 1 : place + 1]])
            expected = task.decode([targets[place]])
            assert expected == task.solve(question) == solved(task.kind, question.split())


def test_a_tenth_is_held_out(task):
    batch = task.batch(seed=0, index=0, size=2000)
    share = 1 - batch["weights"].sum() / np.count_nonzero(batch["targets"])
    assert abs(share - 1 / ONE_IN) < 0.06

    def questions(tokens, places, answers):
        rows = np.arange(len(tokens))
        told = (tokens[rows, places - 1], tokens[rows, places], answers)
        return set(map(tuple, np.stack(told, 1).tolist()))

    rows, places = np.nonzero(batch["weights"])
    inputs, targets = batch["inputs"][rows], batch["targets"][rows, places]
    trained = questions(inputs, places, targets)
    for longer in (0, 1):
        cell = [task.trained[0][-1], task.trained_length + longer]
        (asked,) = task.ask(cell, 100).symbols
        ends = (asked != 0).sum(1) - 1
        assert not trained & questions(asked, ends - 1, asked[np.arange(100), ends])


def test_asks_what_is_wanted(task):
    for cell in ([task.trained[0][0], task.trained_length], [2, task.trained_length + 2]):
        found = task.ask(cell, 10)
        for text in task.ordinary(found):
            assert task.read(text).lengths.ravel().tolist() == cell
            assert task.decode(task.question(text)) == text
            assert len(task.question(text)) < task.width(*cell)
    np.testing.assert_array_equal(task.ask(cell, 10).symbols, found.symbols)


def test_every_length_is_trained(task):
    longest = task.widest(task.trained_length)
    ends = (task.batch(seed=0, index=1, size=500)["inputs"] != 0).sum(1)
    assert ends.max() == longest == task.sequence_length
    shortest = task.widest(task.trained[1][0])
    assert ends.min() <= shortest < longest
    assert len(task.unseen(0)) == 3


def test_streams(task):
    first, again, other = (task.batch(seed, 3, 16)["inputs"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("chains", "a: b b: a ^4 a?", r"'\^4' is no symbol .* hops from \^1 to \^3"),
        ("chains", "a: b b: b ^1 a?", "every token leads to one, and is led to by one"),
        ("chains", "a: b b: a ^1 c?", "nothing follows c in"),
        ("chains", "a: ^1 a?", "expected pairs such as 'c: a'"),
        ("line_numbers", "a b | c | #3 +1", r"there is no line 3 in 'a b \| c \|'"),
        ("line_numbers", "a b | c | #2 +2", r"line 2 has no token 2 in 'a b \| c \|'"),
        ("line_numbers", "a b c d | #1 +1", "expected lines of 1 to 3 letters"),
        ("line_numbers", "a b | #1 +4", r"'\+4' is no symbol of this task"),
        ("table", "A B a 1 2 b 3 a? B?", "every row has a digit for each of the 2 columns"),
        ("table", "A B a 1 2 b 3 4 a? C?", "there is no column C in"),
        ("table", "A B a 1 2 b 3 4 c? A?", "there is no row c in"),
        ("table", "A A a 1 2 b 3 4 a? A?", "the names of columns are distinct"),
        ("table", "A B a 1 2 a 3 4 a? A?", "the names of rows are distinct"),
        ("table", "A B a 1 2 A? a?", "expected names of columns from A to F"),
    ],
)
def test_what_is_no_question(kind, text, message):
    task = get_task(kind, **SMALL[kind])
    with pytest.raises(ValueError, match=message):
        task.question(text)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("chains", {"hops": 4}, "expected hops < shortest <= longest <= symbols <= 52"),
        ("chains", {"symbols": 53}, "symbols are letters; got"),
        ("line_numbers", {"lines": 4}, "expected lines <= shortest <= longest"),
        ("table", {"rows": 14}, "rows must be from 2 to 13, .* got 14"),
        ("table", {"columns": 1}, "columns must be from 2 to 13, .* got 1"),
        ("table", {"questions": 0}, "questions must be a positive integer; got 0"),
    ],
)
def test_options_are_checked(kind, options, message):
    with pytest.raises(ValueError, match=message):
        get_task(kind, **{**SMALL[kind], **options})


@pytest.mark.parametrize(("kind", "longest"), [("chains", 13), ("line_numbers", 2), ("table", 7)])
def test_what_cannot_be_asked_for(kind, longest):
    task = get_task(kind, **SMALL[kind])
    with pytest.raises(ValueError, match=f"evaluation.longest: .* got {longest}"):
        task.axes(task.Evaluation(longest=longest))
