"""Questions of people about paragraphs, from files of two formats."""

import json
import re

import pytest

from train.data import tokenizers
from train.suites import FORMS, get_suite
from train.suites.background import Background
from train.suites.evaluation import score
from train.suites.questions import ask
from train.suites.reading import Reading, read

BYTES = tokenizers.load("bytes")


def paragraph(topic, number):
    """About 160 characters, with a fact that no other paragraph has."""
    return f"The {topic} of part {number} is v{topic}{number}. " + f"More of the {topic}. " * 6


def squad(articles=12, paragraphs=4):
    def about(a, p):
        texts = (f"vtopic{a}{p}", f"vtopic{a}{p}", f"the vtopic{a}{p}")
        answers = [{"text": text, "answer_start": 0} for text in texts]
        question = {"id": f"{a}-{p}", "question": f" What is the topic{a} of part {p}?"}
        qas = [question | {"answers": answers}, {"id": "no", "question": "Why?", "answers": []}]
        return {"context": paragraph(f"topic{a}", p), "qas": qas}

    data = [
        {"title": f"t{a}", "paragraphs": [about(a, p) for p in range(paragraphs)]}
        for a in range(articles)
    ]
    return {"version": "1.1", "data": data}


def hotpotqa(count=30):
    def context(number):
        titles = [f"first{number}", f"second{number}", *(f"other{number}-{i}" for i in range(3))]
        return [[title, [f"It is {title}. ", "And so on. " * 8]] for title in titles]

    return [
        {
            "_id": f"{number}",
            "question": f"What are both of {number}?",
            "answer": "yes",
            "supporting_facts": [[f"second{number}", 0], [f"first{number}", 0]] * 2,
            "context": context(number),
        }
        for number in range(count)
    ]


@pytest.fixture
def files(tmp_path):
    made = {"squad": squad(), "hotpotqa": hotpotqa()}
    for name, content in made.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return {name: str(tmp_path / f"{name}.json") for name in made}


def asked_of(files, name, length=2048, index=0, form="long", codec=BYTES):
    task = get_suite("ruler", [name], files)[name]
    return ask(name, task, codec, Background("", ""), length, index, form=form)


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
@pytest.mark.parametrize("form", FORMS)
def test_fits_and_repeats(files, name, form):
    prompts = set()
    for length in (1024, 4096):
        for index in range(3):
            asked = asked_of(files, name, length, index, form)
            left = length - 32 - len(asked.tokens)
            assert 0 <= left < 230, "less than a paragraph"
            assert asked_of(files, name, length, index, form).question == asked.question
            prompts.add(asked.question.prompt)
    assert len(prompts) == 6


def test_questions_that_do_not_fit_are_not_asked(tmp_path):
    content = squad()
    content["data"][0]["paragraphs"][0]["context"] *= 20
    (tmp_path / "squad.json").write_text(json.dumps(content))
    files = {"squad": str(tmp_path / "squad.json")}
    asked = [asked_of(files, "qa_1", 1024, index).question.prompt for index in range(100)]
    assert not any("topic0 of part 0?" in prompt for prompt in asked)
    long = [asked_of(files, "qa_1", 4096, index).question.prompt for index in range(100)]
    assert any("topic0 of part 0?" in prompt for prompt in long)
    with pytest.raises(ValueError, match="characters are too few for a question"):
        asked_of(files, "qa_1", 256)


def test_squad(files):
    """Its own paragraph, those of its article before any other, and each at most once."""
    places = []
    for index in range(40):
        question = asked_of(files, "qa_1", 2048, index).question
        texts = re.findall(r"Document \d+:\n(.*)\n", question.prompt)
        numbers = re.findall(r"Document (\d+):", question.prompt)
        assert list(map(int, numbers)) == list(range(1, len(texts) + 1))
        assert len(set(texts)) == len(texts)
        topic, part = re.search(r"What is the topic(\d+) of part (\d)\?", question.prompt).groups()
        own = paragraph(f"topic{topic}", part)
        near = [paragraph(f"topic{topic}", p) for p in range(4)]
        assert {own, *near} <= set(texts)
        assert question.references == (f"vtopic{topic}{part}", f"the vtopic{topic}{part}")
        assert score("part", f" VTOPIC{topic}{part}.", question) == 1
        assert score("part", "none", question) == 0
        places.append(texts.index(own) / len(texts))
    assert min(places) < 0.2
    assert max(places) > 0.7


def test_hotpotqa(files):
    question = asked_of(files, "qa_2", 2048).question
    number = re.search(r"What are both of (\d+)\?", question.prompt)[1]
    own = ("first", "second", "other")
    titles = re.findall(r"Document \d+:\n(\S+)\n", question.prompt)
    assert {f"first{number}", f"second{number}", f"other{number}-2"} < set(titles)
    assert len(titles) == len(set(titles)) > 5
    assert question.references == ("yes",)
    # Where not all of its own fit, those of the supporting facts do.
    short = asked_of(files, "qa_2", 700).question.prompt
    titles = re.findall(r"Document \d+:\n(\S+)\n", short)
    assert {f"{name}{re.search(r'both of (.*)[?]', short)[1]}" for name in own[:2]} <= set(titles)
    assert len(titles) < 5


def test_the_tasks_need_their_files(files, tmp_path):
    assert "qa_1" not in get_suite("ruler")
    assert "qa_2" not in get_suite("ruler", files={"squad": files["squad"], "hotpotqa": None})
    assert list(get_suite("ruler", files=files))[-2:] == ["qa_1", "qa_2"]
    with pytest.raises(ValueError, match=r"qa_1 asks what is in a file .* with --squad=FILE$"):
        get_suite("ruler", ["vt", "qa_1"], {"hotpotqa": files["hotpotqa"]})
    with pytest.raises(ValueError, match=r"qa_1, 200 tokens: .* are too few for a question"):
        asked_of(files, "qa_1", 200)
    with pytest.raises(ValueError, match=r"together are shorter than the 16,35\d characters"):
        asked_of(files, "qa_1", 16384)
    other = tmp_path / "other.json"
    other.write_text(json.dumps(squad(13)))
    a, b = Reading("squad", files["squad"]), Reading("squad", str(other))
    assert a.fingerprint != b.fingerprint


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (None, "squad", "there is no file .* with questions of SQuAD v1.1"),
        ("{", "squad", "is no file of SQuAD v1.1, an object with data"),
        ('{"data": [{"paragraphs": [{"context": "x"}]}]}', "squad", r"KeyError: 'qas'"),
        ('{"data": []}', "squad", "has no question with an answer"),
        (json.dumps(squad()), "hotpotqa", "is no file of HotpotQA, a list of question, answer"),
    ],
)
def test_files_that_are_something_else(tmp_path, content, kind, message):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        read(str(path), kind)
    assert "\n" not in str(error.value)
