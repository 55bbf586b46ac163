"""Every task at several lengths, with two tokenizers: fits, repeats, and is what it says it is."""

import hashlib
import re
from collections import Counter

import numpy as np
import pytest

from tests.train import tokenizer_files
from train.data import tokenizers
from train.suites import FORMS, SUITES, get_suite
from train.suites.background import Background
from train.suites.evaluation import score
from train.suites.questions import ask
from train.tasks.retrieval import FILLER

TASKS = {name: task for suite in SUITES for name, task in get_suite(suite).items()}
LISTS = ("niah_multikey_2", "niah_multikey_3", "cwe", "fwe")
BYTES = tokenizers.load("bytes")


def words(rng):
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    return ["".join(rng.choice(letters, rng.integers(4, 9))) for _ in range(3000)]


def made():
    """Lines and sentences of made-up words."""
    rng = np.random.default_rng(0)
    known = words(rng)
    sentences = [" ".join(rng.choice(known, 8)) + (". ", ".\n")[i % 2] for i in range(2000)]
    return Background("made up", "".join(sentences))


BACKGROUND = made()


def question(name, length=2048, index=0, codec=BYTES, **options):
    return ask(name, TASKS[name], codec, BACKGROUND, length, index, **options)


@pytest.mark.parametrize("name", TASKS)
def test_fits_and_repeats(name):
    for form, length in (("short", 512), ("long", 2048)):
        asked = question(name, length, form=form)
        room = length - TASKS[name].answer_tokens[form]
        # Of a list, the last word may not fit: at most three times a numbered word.
        assert room - (220 if name in LISTS else 2) <= len(asked.tokens) <= room
        assert BYTES.decode(asked.tokens) == asked.question.prompt
        again = question(name, length, form=form)
        assert again.question == asked.question
        others = [question(name, length, 1, form=form), question(name, length, seed=1, form=form)]
        assert len({x.question.prompt for x in (asked, *others)}) == 3


def test_questions_are_those_of_results_on_record():
    """Whoever changes a question makes another suite of it."""
    prompts = [tuple(question(name, 2048, form=form).question) for name in TASKS for form in FORMS]
    assert hashlib.sha256(repr(prompts).encode()).hexdigest()[:16] == "42223bcb32213759"


@pytest.mark.parametrize("name", ["niah_multikey_1", "vt", "cwe", "fwe", "qa3"])
def test_other_tokenizers_fill_their_room(name, tmp_path):
    codec = tokenizers.load(str(tokenizer_files.hugging_face(tmp_path / "tokenizer.json")))
    asked = question(name, 4096, codec=codec)
    room = 4096 - TASKS[name].answer_tokens["long"]
    assert asked.tokens[0] == codec.bos
    assert 0.9 * room < len(asked.tokens) <= room
    assert asked.tokens[1:].tolist() == codec.encode(asked.question.prompt)


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("niah")])
@pytest.mark.parametrize("form", ["long", "short"])
def test_needles_state_what_is_right(name, form):
    """Read back with a pattern: each key's values are those hidden, and no others."""
    task = TASKS[name]
    asked = question(name, 4096, form=form).question
    pattern = r"for (\S+) is: (\S+)\." if form == "long" else r"<(\S+)=(\S+)>"
    text, end = asked.prompt.rsplit("\n", 1)
    found = re.findall(pattern, text)
    keys = [key for key in dict.fromkeys(k for k, _ in found) if re.search(rf"\b{key}\b", end)]
    assert len(keys) == task.queries
    right = sorted(value for key, value in found if key in keys)
    assert right == sorted(asked.references)
    hidden = task.keys * task.values
    assert len(found) == hidden if task.haystack != "needles" else len(found) > 20
    assert (FILLER[:40] in text) == (task.haystack == "noise")


def test_variables_are_a_chain_in_order():
    asked = question("vt", 2048).question
    chain = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", asked.prompt)
    value = re.search(r"have the value (\d+)", asked.prompt)[1]
    assert [b for _, b in chain] == [value, *asked.references[:-1]]
    assert [a for a, _ in chain] == list(asked.references)
    assert len(chain) == 5


@pytest.mark.parametrize(("length", "form"), [(2048, "long"), (512, "short")])
def test_common_words_are_the_most_common(length, form):
    asked = question("cwe", length, form=form).question
    listed = re.findall(r"\d+\. ([a-z]+)", asked.prompt)
    counts = Counter(listed).most_common()
    right = set(asked.references)
    assert {word for word, _ in counts[: len(right)]} == right
    assert {n for word, n in counts if word not in right} < set(range(counts[0][1]))
    assert [int(n) for n in re.findall(r"(\d+)\. [a-z]", asked.prompt)] == [
        *range(1, len(listed) + 1)
    ]


@pytest.mark.parametrize("length", [512, 2048])
def test_frequent_words_follow_the_law(length):
    """The k-th of N words stands N k^-2 / zeta(2) times, of which dots are the first."""
    asked = question("fwe", length).question
    listed = asked.prompt.split("\n")[1].split(" ")
    counts = Counter(listed).most_common()
    assert counts[0][0] == "......"
    assert tuple(word for word, _ in counts[1:4]) == asked.references
    wanted = [int(len(listed) * 6 / np.pi**2 / k**2) for k in (2, 3, 4)]
    assert [n for _, n in counts[1:4]] == wanted
    assert len(counts) == 4 or counts[4][1] < wanted[-1]


def replay(prompt):
    """Places of people, who carries what, and where things have been, read from the text."""
    at, held, seen = {}, {}, {}
    pattern = r"(\w+) (?:went to the (\w+)|took the (\w+)|put the (\w+) down)\. "
    for person, place, taken, put in re.findall(pattern, prompt):
        if place:
            at[person] = place
            for thing in (x for x, who in held.items() if who == person):
                seen[thing].append(place)
        elif taken:
            held[taken] = person
            seen.setdefault(taken, [at[person]])
        else:
            del held[put]
    return at, held, seen


@pytest.mark.parametrize("name", SUITES["babilong"])
def test_facts_decide(name):
    answers = Counter()
    for index in range(40):
        asked = question(name, 2048, index).question
        at, held, seen = replay(asked.prompt)
        words = re.search(r"Question: (.*?)\?", asked.prompt)[1].split()
        right = {
            "qa1": lambda w=words, at=at: at[w[2]],
            "qa2": lambda w=words, seen=seen: seen[w[3]][-1],
            "qa3": lambda w=words, seen=seen: seen[w[3]][-2],
            "qa6": lambda w=words, at=at: "yes" if at[w[1]] == w[4] else "no",
            "qa7": lambda w=words, held=held: ("none", "one", "two", "three")[
                list(held.values()).count(w[4])
            ],
        }[name]()
        assert asked.references == (right,)
        assert right in asked.labels
        # An answer may repeat the question.
        assert score("label", f"{' '.join(words)}: {right}", asked) == 1
        answers[right] += 1
    assert max(answers.values()) < 30


@pytest.mark.parametrize(
    ("name", "length", "background", "message"),
    [
        ("niah_single_1", 100, BACKGROUND, "100 tokens leaves no room .* its answer may take 128"),
        ("vt", 200, BACKGROUND, r"vt, 200 tokens: 160 characters are too few"),
        ("cwe", 400, BACKGROUND, "too few for a question about the words"),
        ("qa1", 2048, Background("'x'", "A few words. " * 9), "has 117 characters"),
        ("niah_single_2", 2048, Background("'x'", "A b c. " * 900), "has 0 different words"),
        ("cwe", 16384, Background("'x'", BACKGROUND.text[:900]), "too few for a list of 16,264"),
    ],
)
def test_what_cannot_be_asked(name, length, background, message):
    with pytest.raises(ValueError, match=message):
        ask(name, TASKS[name], BYTES, background, length, 0)
    with pytest.raises(ValueError, match=r"unknown task of ruler 'cw'.*did you mean 'cwe'"):
        get_suite("ruler", ["vt", "cw"])
