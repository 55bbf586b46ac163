"""Asking a model: what is kept, what is gone on with, what is refused."""

import json
import types

import numpy as np
import pytest

from tests.models import random_variables, small_model
from train.data import tokenizers
from train.suites import SuiteQuestion, evaluation, get_suite
from train.suites.evaluation import Answers, SuiteOptions, evaluate, score, tokenizer_of
from train.suites.results import SuiteResult

BYTES = tokenizers.load("bytes")
OPTIONS = {"suite": "ruler", "lengths": (300, 400), "tasks": ("vt", "fwe"), "samples": 3}
MORE = {"form": "short", "batch_size": 2, "chunk": 128}


@pytest.fixture(scope="module")
def trained():
    model = small_model("rope", num_layers=1, vocab_size=258)
    fields = {"model": model, "variables": random_variables(model), "max_length": 400}
    return types.SimpleNamespace(**fields)


@pytest.fixture
def background(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("A sentence of some ordinary words follows another one. \n" * 40)
    return str(path)


def asked(trained, path, background, **options):
    chosen = SuiteOptions(**OPTIONS | MORE | {"background": background} | options)
    calls = []
    given = {"step": 7, "checkpoint": "a", "trained_length": 128}
    given["progress"] = lambda *call: calls.append(call)
    return evaluate(trained, BYTES, chosen, path, **given), calls


@pytest.mark.slow
def test_a_killed_evaluation_goes_on(trained, tmp_path, background, monkeypatch):
    """With half a line of answers on the disk; what is there is not asked again."""
    whole, calls = asked(trained, tmp_path / "whole.jsonl", background)
    assert calls[-1] == (12, 12)
    path = tmp_path / "answers.jsonl"
    lines = (tmp_path / "whole.jsonl").read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:3], lines[3][:20]]))
    again, calls = asked(trained, path, background)
    assert calls[0][0] > 4
    assert again.scores == whole.scores
    assert sorted(path.read_bytes().split(b"\n")) == sorted(lines)
    done, calls = asked(trained, path, background)
    assert (done.scores, calls) == (whole.scores, [])
    assert done.speed == "nothing was left to ask"
    more, calls = asked(trained, path, background, samples=4)
    assert len(calls) == 4
    assert more.scores["vt"][400][:3] == whole.scores["vt"][400]


@pytest.mark.slow
def test_a_file_of_questions_is_added_and_not_exchanged(trained, tmp_path, background):
    path = tmp_path / "answers.jsonl"
    asked(trained, path, background)
    for number in range(2):
        context = f"Paragraph {number} of a few words."
        qas = [{"question": "Which?", "answers": [{"text": "few"}]}]
        paragraphs = [{"context": f"{context} {i}" * 3, "qas": qas} for i in range(9)]
        content = {"data": [{"paragraphs": paragraphs}]}
        (tmp_path / f"{number}.json").write_text(json.dumps(content))
    tasks = ("vt", "qa_1")
    added, calls = asked(trained, path, background, tasks=tasks, squad=str(tmp_path / "0.json"))
    assert len(calls) == 4
    assert calls[-1] == (12, 12)
    assert list(added.scores) == list(tasks)
    assert asked(trained, path, background)[1] == []
    with pytest.raises(ValueError, match=r"answers to other questions \(squad was \w+, and is"):
        asked(trained, path, background, tasks=tasks, squad=str(tmp_path / "1.json"))


def test_answers_of_another_checkpoint_are_forgotten(tmp_path, background):
    """Also of the same step; files that lack the checkpoint are read."""
    path, known = tmp_path / "answers.jsonl", about(background) | {"checkpoint": "a"}
    Answers(path, about(background)).add([("vt", 300, 0)], ["x"])
    assert Answers(path, known | {"step": 8}).texts == {}
    answers = Answers(path, known)
    assert answers.texts == {("vt", 300, 0): "x"}
    answers.add([("vt", 300, 1)], ["y"])
    assert len(Answers(path, known).texts) == 2
    assert Answers(path, known | {"checkpoint": "b"}).texts == {}


def about(background):
    """What the first line of a file of answers says."""
    step = {"suite": "ruler", "step": 7, "form": "short", "seed": 0}
    known = {"tokenizer": BYTES.fingerprint[:16]}
    return step | {"background": evaluation.read(background).fingerprint} | known


def test_right_answers_score(trained, tmp_path, background):
    """With answers on the disk that are right, right in part, and wrong."""
    path = tmp_path / "answers.jsonl"
    answers = Answers(path, about(background))
    tasks = get_suite("ruler", OPTIONS["tasks"])
    for task in tasks:
        for length in OPTIONS["lengths"]:
            right = [
                evaluation.ask(
                    task, tasks[task], BYTES, evaluation.read(background), length, i, form="short"
                ).question.references
                for i in range(3)
            ]
            given = [" ".join(right[0]).lower(), right[1][0], "nothing"]
            answers.add([(task, length, number) for number in range(3)], given)
    result, _ = asked(trained, path, background)
    assert result.scores == {task: dict.fromkeys((300, 400), (1, 1 / 3, 0)) for task in tasks}
    assert result.about == about(background) | {"checkpoint": "a"}
    assert result.mean(300) == pytest.approx(4 / 9)
    assert "| vt   | 44.4 ± 29.4 | 44.4 ± 29.4 |" in result.table()
    assert SuiteResult.from_json(json.loads(json.dumps(result.to_json()))) == result
    (panel,) = result.figure().axes
    np.testing.assert_allclose(panel.lines[0].get_xydata(), [[300, 400 / 9], [400, 400 / 9]])


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("mine\n", {}, "was not written by this program: it is left alone"),
        (None, {"seed": 1}, r"answers to other questions \(seed was 0, and is 1\): move it"),
        (None, {"lengths": (300, 800)}, "takes at most 400 tokens: a length of 800 cannot be"),
        (None, {"lengths": (20, 400)}, "20 tokens leaves no room"),
        (None, {"lengths": (400, 300)}, "lengths must ascend"),
        (None, {"samples": 0}, "samples must be a positive integer"),
        (None, {"tasks": ("niah_multivalue",)}, "different words of four to eight letters"),
        (None, {"background": "nowhere.txt"}, r"there is no 'nowhere.txt'"),
    ],
)
def test_what_is_refused_leaves_the_answers_alone(
    trained, tmp_path, background, content, options, message
):
    path = tmp_path / "answers.jsonl"
    if content is None:
        Answers(path, about(background)).add([("vt", 300, 0)], ["x"])
    else:
        path.write_text(content)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        asked(trained, path, **{"background": background} | options)
    assert path.read_bytes() == before


def test_a_tokenizer_that_cannot_write_the_answers(trained, tmp_path, background):
    class Deaf(tokenizers.ByteTokenizer):
        def _decode(self, ids):
            return "?" * len(ids)

    options = SuiteOptions(**OPTIONS | MORE | {"background": background})
    with pytest.raises(ValueError, match=r"'bytes' writes '[A-Z]{3}', which vt asks for, as '\?"):
        evaluate(trained, Deaf(), options, tmp_path / "answers.jsonl")
    assert not (tmp_path / "answers.jsonl").exists()
    with pytest.raises(ValueError, match="sums was trained on a task without a tokenizer"):
        tokenizer_of(object(), "sums")


NUMBERS = SuiteQuestion("", ("12", "34", "56"))
LABEL = SuiteQuestion("", ("yes",), ("yes", "no"))


@pytest.mark.parametrize(
    ("rule", "question", "answer", "wanted"),
    [
        ("all", NUMBERS, " 12, 34 and 56.", 1),
        ("all", NUMBERS, "34", 1 / 3),
        ("all", SuiteQuestion("", ("ABCDE",)), "abcde", 1),
        ("part", NUMBERS, "the 56", 1),
        ("part", NUMBERS, "the 5", 0),
        ("label", LABEL, " Yes.", 1),
        ("label", LABEL, "yes, she is\nNo.", 1),
        ("label", LABEL, "yes or no", 0),
        ("label", LABEL, "", 0),
    ],
)
def test_scores(rule, question, answer, wanted):
    assert score(rule, answer, question) == wanted
