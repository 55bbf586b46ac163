"""What tasks of answers at places share, and that each of them tells the truth."""

import numpy as np
import pytest

from tests.selection import mostly_slow
from train.data.held_out import ONE_IN
from train.tasks import TASKS, get_task, task_type
from train.tasks.places import HASHED, PAD, PlaceTask, tokens_before

SMALL = {
    "address": {"offsets": 3, "symbols": 12, "shortest": 4, "longest": 6, "questions": 4},
    "counting": {"shortest": 12, "longest": 14, "questions": 4},
    "flip_flop": {"shortest": 6, "longest": 10, "questions": 4, "writes": 0.3},
    "line_numbers": {"lines": 3, "places": 3, "shortest": 3, "longest": 5, "questions": 4},
    "navigation": {"shortest": 4, "longest": 7},
    "recall": {"symbols": 12, "shortest": 4, "longest": 6, "questions": 4},
    "selective_copy": {"letters": 4, "shortest": 5, "longest": 8},
    "table": {"rows": 3, "columns": 3, "questions": 4},
}
# Tokens of a question.
PARTS = dict.fromkeys(SMALL, 2) | dict.fromkeys(
    ("counting", "flip_flop", "navigation", "recall", "selective_copy"), 1
)
# Those that are asked anywhere, not after all that they are asked about. Their hash is of the
# tokens before a question.
ANYWHERE = {"counting", "flip_flop", "navigation"}
# Texts that are so alike that the same tokens come before many questions.
ALIKE = {
    "counting": {
        **{"variables": 1, "shortest": 12, "longest": 16, "questions": 1},
        **{"passes": 0.4, "sets": 0.05},
    },
    "flip_flop": {"shortest": 14, "longest": 16, "questions": 1, "writes": 0.0},
    "navigation": {"dimensions": 1, "shortest": 4, "longest": 14},
    "selective_copy": {"letters": 2, "shortest": 3, "longest": 4},
}


@pytest.fixture(params=[name for name in TASKS if issubclass(task_type(name), PlaceTask)])
def task(request):
    return get_task(request.param, **SMALL[request.param])


def solved(kind, words):
    """The answer to a question, by its words."""
    if kind == "flip_flop":
        return [word for word in words if word[0] == "w"][-1][1]
    if kind == "navigation":
        moves = words[1::2]
        sums = [complex(0)]
        for move in moves:
            sums.append(sums[-1] + {"L": -1, "R": 1, "D": -1j, "U": 1j}[move])
        return words[2 * sums.index(sums[-1])]
    if kind == "counting":
        value = 0
        for word in words[:-1]:
            if word[0] == words[-1][0]:
                value = 0 if word.endswith("=0") else value + word.endswith("+")
        return str(value % 10)
    *body, first, second = words
    if kind == "recall":
        body = words[:-1]
        return body[body.index(second[:-1]) + 1]
    if kind == "selective_copy":
        return [word for word in words[:-1] if word != "."][int(second[1:]) - 1]
    if kind == "address":
        return body[body.index(second[:-1]) + int(first)]
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
        parts = PARTS[task.kind]
        body = words[: len(words) - 4 * parts]
        places = np.flatnonzero(targets)
        after = range(len(body) + parts - 1, len(words), parts)
        sign = "r" if task.kind == "flip_flop" else "?"
        reads = [place for place, word in enumerate(words) if word.endswith(sign)]
        assert places.tolist() == [*(reads if task.kind in ANYWHERE else after)]
        assert set(np.flatnonzero(weights)) <= set(places)
        for place in places:
            front = words[:place] if task.kind in ANYWHERE else body
            question = " ".join([*front, *words[place + 1 - parts : place + 1]])
            expected = task.decode([targets[place]])
            assert expected == task.solve(question) == solved(task.kind, question.split())


def test_a_tenth_is_held_out_and_every_length_trained(task):
    batch = task.batch(seed=0, index=1, size=2000)
    share = 1 - batch["weights"].sum() / np.count_nonzero(batch["targets"])
    assert abs(share - 1 / ONE_IN) < 0.06
    ends = (batch["inputs"] != 0).sum(1)
    assert ends.max() == task.widest(task.trained_length) == task.sequence_length
    assert ends.min() <= task.widest(task.trained[1][0]) < ends.max()


def hashed(task, tokens, places, answers):
    """By what a hash decides, of texts [B, W] with an answer [B] each, read off the texts."""
    if task.kind in ANYWHERE:
        return set(map(tuple, tokens_before(tokens, places[:, None])[:, 0].tolist()))
    found = set()
    for text, place, answer in zip(tokens, places, answers, strict=True):
        words = [task.names[token] for token in text]
        asked = words[place + 1 - PARTS[task.kind] : place + 1]
        if task.kind == "line_numbers":
            line = " ".join(words).split("|")[int(asked[0][1:]) - 1].split()
            asked.append([*line, "|"][int(asked[1])])
        elif task.kind == "selective_copy":
            letters = [n for n, word in enumerate(words) if word.isalpha()]
            at = letters[int(asked[0][1:]) - 1]
            asked += [str(at), *words[max(at + 1 - HASHED, 0) : at + 1]]
        found.add((task.names[answer], *asked))
    return found


@pytest.mark.parametrize("kind", SMALL)
def test_what_is_asked_is_not_trained(kind):
    """Inside the trained range and beyond it, though much of what is drawn there is."""
    task = get_task(kind, **{**SMALL[kind], **ALIKE.get(kind, {})})
    batch = task.batch(seed=0, index=0, size=4000)
    rows, places = np.nonzero(batch["weights"])
    inputs, targets = batch["inputs"][rows], batch["targets"][rows, places]
    trained = hashed(task, inputs, places, targets)
    for longer in (0, 1):
        cell = [task.trained[0][-1], task.trained_length + longer]
        (asked,) = task.ask(cell, 100).symbols
        ends = (asked != PAD).sum(1) - 1
        assert not trained & hashed(task, asked, ends - 1, asked[np.arange(100), ends])
        row, column = (np.full(500, number) for number in cell)
        drawn = task.texts(np.random.default_rng(0), column, row)
        due = drawn.answers[:, -1] != PAD
        ends = drawn.places[due, -1]
        found = hashed(task, drawn.tokens[due], ends, drawn.answers[due, -1])
        assert len(trained & found) > len(found) / 5


def test_asks_what_is_wanted(task):
    for cell in ([task.trained[0][0], task.trained_length], [2, task.trained_length + 2]):
        found = task.ask(cell, 10)
        for text in task.ordinary(found):
            assert task.read(text).lengths.ravel().tolist() == cell
            assert task.decode(task.question(text)) == text
            assert len(task.question(text)) < task.width(*cell)
    np.testing.assert_array_equal(task.ask(cell, 10).symbols, found.symbols)
    # Those that people see are of several rows, and one is long.
    shown = [task.read(text).lengths.ravel().tolist() for text in task.unseen(3)]
    assert [column for _, column in shown] == [task.trained_length] * 2 + [task.longest_column]
    assert len({row for row, _ in shown}) >= 2


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("counting", "x=0 x+ . y?", "y has not been set to zero in 'x=0 x\\+ .'"),
        ("counting", "x=0 x+", "of which the last is a read"),
        ("flip_flop", "w1 i0", "the first is a write and the last r; got 'w1 i0'"),
        ("line_numbers", "a b | c | #3 +1", r"there is no line 3 in 'a b \| c \|'"),
        ("line_numbers", "a b | c | #2 +2", r"line 2 has no token 2 in 'a b \| c \|'"),
        ("line_numbers", "a b c d | #1 +1", "expected lines of 1 to 3 letters"),
        ("navigation", "c R a L b R ?", "a known place is asked for, and a new one has a landmark"),
        ("navigation", "c R a L", "expected a landmark from a to z, then moves of L, R, D, U"),
        ("recall", "a 1 b 2 a 3 b?", "keys are distinct; got 'a 1 b 2 a 3 b\\?'"),
        ("recall", "a 1 b 2 c?", "there is no key c in"),
        ("recall", "a 1 b 12 a?", "'12' is no symbol of this task: .* from 0 to 11"),
        ("selective_copy", ". a . b . #3", r"there is no letter 3 in '\. a"),
        ("selective_copy", "#1", "expected letters from a to z among fillers"),
        ("table", "A B a 1 2 b 3 a? B?", "every row has a digit for each of the 2 columns"),
        ("table", "A B a 1 2 b 3 4 a? C?", "there is no column C in"),
        ("table", "A B a 1 2 a 3 4 a? A?", "the names of rows are distinct"),
    ],
)
def test_what_is_no_question(kind, text, message):
    task = get_task(kind, **SMALL[kind])
    with pytest.raises(ValueError, match=message):
        task.question(text)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("counting", {"variables": 7}, "expected at most 6 variables"),
        ("counting", {"questions": 11}, "room for them and the questions, or 10 instructions"),
        ("counting", {"passes": 0.95}, "probabilities of at most 1 together; got 0.95 and 0.1"),
        ("flip_flop", {"questions": 6}, "expected questions < shortest <= longest"),
        ("flip_flop", {"writes": 1.5}, "writes must be a probability; got 1.5"),
        ("line_numbers", {"lines": 4}, "expected lines <= shortest <= longest"),
        ("navigation", {"dimensions": 3}, "expected 1 or 2 dimensions"),
        ("navigation", {"shortest": 1, "undo": True}, "2 <= shortest <= longest"),
        ("recall", {"longest": 13}, "expected shortest <= longest <= symbols <= 52"),
        ("selective_copy", {"letters": 6}, "expected letters <= shortest <= longest"),
        ("table", {"rows": 14}, "rows must be from 2 to 13, .* got 14"),
    ],
)
def test_options_are_checked(kind, options, message):
    with pytest.raises(ValueError, match=message):
        get_task(kind, **{**SMALL[kind], **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"longest": "a"}, "evaluation: longest must be a positive integer or None; got 'a'"),
        ({"samples": 0}, "evaluation: samples must be a positive integer; got 0"),
        ({"seed": -1}, "evaluation: seed must be an integer from 0 on; got -1"),
        ({"longest": 2}, "evaluation.longest: from 4 to 12 pairs can be asked for; got 2"),
        ({"longest": 13}, "evaluation.longest: from 4 to 12 pairs can be asked for; got 13"),
    ],
)
def test_evaluations_are_checked(options, message):
    task = get_task("recall", **SMALL["recall"])
    with pytest.raises(ValueError, match=message):
        task.axes(task.Evaluation(**options))


@pytest.mark.parametrize(
    ("kind", "columns"), [("flip_flop", [6, 8, 16, 20]), ("recall", [*range(4, 13)])]
)
def test_powers_of_two_are_asked_for(kind, columns):
    """As far back as a text goes."""
    task = get_task(kind, **SMALL[kind])
    rows, found = task.axes(task.Evaluation())
    assert list(found) == columns
    assert rows == [1, 2, 4, 8, 16][: len(rows)]
    assert rows[-1] <= columns[-1] < 2 * rows[-1]
    examples = task.examples(rows, found, samples=3)
    asked = {(rows[r], found[c]) for r, c in examples.cells}
    longest = {"flip_flop": -1, "recall": 0}[kind]
    assert asked == {(r, c) for r in rows for c in found if r <= c + longest}
    with pytest.raises(ValueError, match=f"{kind}: there are no questions of"):
        task.examples([9], [8], samples=1)


@pytest.mark.parametrize(
    ("kind", "cell", "message"),
    [
        (
            "address",
            (4, 6),
            r"length of the list, tokens \(4, 6\): expected an offset of at most 3",
        ),
        ("address", (3, 3), "expected a list of more than 3 tokens"),
        ("address", (4, 13), "expected at most 12 tokens and an offset of at most 3$"),
        ("counting", (9, 11), "expected at least 12 instructions"),
        ("flip_flop", (9, 9), "expected more than 9 instructions"),
        ("line_numbers", (4, 5), "expected a line of at most 3"),
        ("line_numbers", (3, 2), "expected a text of at least 3 lines"),
        ("navigation", (3, 7), "expected at most 2 dimensions"),
        ("navigation", (1, 2048), "expected at most 2047 moves"),
        ("recall", (1, 13), "expected at most 12 pairs"),
        ("selective_copy", (5, 8), "expected a letter of at most 4"),
        ("table", (2, 7), "expected at most 6 columns"),
        (
            "table",
            (2,),
            "expected a length for each of 2, rows of the table and columns of the table",
        ),
    ],
)
def test_a_cell_that_does_not_exist(kind, cell, message):
    with pytest.raises(ValueError, match=f"{kind}: .*{message}"):
        get_task(kind, **SMALL[kind]).ask(cell, 1)


@pytest.mark.parametrize("kind", mostly_slow(SMALL, "address", "line_numbers", "table"))
def test_every_cell_has_the_questions_that_it_says(kind):
    """At all corners of what exists."""
    task = get_task(kind, **SMALL[kind])
    cells = [cell for cell in np.ndindex(9, 20) if all(cell) and task.exists(*cell)]
    refused = []
    for cell in cells:
        try:
            found = task.ordinary(task.ask(cell, 3))
        except ValueError as error:
            refused.append(str(error))
        else:
            for text in found:
                assert task.read(text).lengths.ravel().tolist() == [*cell]
    assert all("none may be asked about" in error for error in refused)
    assert len(refused) < 0.2 * len(cells)


def test_a_move_that_takes_back_the_last_is_not_asked_about():
    for undo in (False, True):
        task = get_task("navigation", **SMALL["navigation"], undo=undo)
        texts = [text for row in (1, 2) for text in task.ordinary(task.ask([row, 7], 50))]
        last = [text.split()[-4::2] for text in texts]
        assert undo == any({*pair} in ({"L", "R"}, {"U", "D"}) for pair in last)


def test_what_is_counted_is_set_to_zero_again():
    task = get_task("counting", **SMALL["counting"])
    texts = [text for row in range(1, 4) for text in task.ordinary(task.ask([row, 14], 20))]
    again = [text.split()[2:].count(f"{text[-2]}=0") for text in texts]
    assert np.mean(np.array(again) > 0) > 0.5


def test_where_all_is_trained_on():
    task = get_task("recall", symbols=2, shortest=1, longest=2)
    with pytest.raises(ValueError, match=r"recall: of .* texts none may be asked about where"):
        task.prepare(task.Evaluation())
