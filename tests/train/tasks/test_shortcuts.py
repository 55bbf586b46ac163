"""How far rules get that look for no place: what a score is to be measured by (experiments.md)."""

import itertools
import re
from collections import Counter

import numpy as np
import pytest

from research.configs.places import TASKS
from tests.paths import ROOT
from tests.selection import mostly_slow
from train import tasks
from train.tasks import get_task, task_type
from train.tasks.places import PlaceTask


def last_of_the_list(words):
    return words[-3]


def most_frequent_of_the_row(words):
    *table, row, _ = words
    columns = sum(word.isupper() for word in table)
    at = table.index(row[:-1])
    return Counter(table[at + 1 : at + 1 + columns]).most_common(1)[0][0]


def every_increment(words):
    return str(words.count(words[-1][0] + "+") % 10)


def last_bit(words):
    return words[-2][1]


def usual_place(words):
    *text, line, place = words
    at = int((int(line[1:]) - 1) * 3.5 + int(place) - 1)
    return next((word for word in text[at:] if word != "|"), None)


def third_last_landmark(words):
    landmarks = [word for word in words[::2] if word != "?"]
    return landmarks[-3] if len(landmarks) > 2 else None


def last_value(words):
    return words[-2]


def nearest_letter(words):
    *text, number = words
    letters = [at for at, word in enumerate(text) if word != "."]
    about = (int(number[1:]) - 0.5) / len(letters) * len(text)
    return text[min(letters, key=lambda at: abs(at - about))]


# By task: a rule, and what it gets at the trained lengths and beyond, in per cent.
RULES = {
    "address": (last_of_the_list, 13, 5),
    "table": (most_frequent_of_the_row, 48, 37),
    "line_numbers": (usual_place, 42, 42),
    "selective_copy": (nearest_letter, 52, 50),
    "flip_flop": (last_bit, 58, 52),
    "counting": (every_increment, 74, 56),
    "navigation": (third_last_landmark, 28, 23),
    "recall": (last_value, 27, 22),
}
DOCS = ROOT / "docs" / "experiments.md"


def found(rule, name):
    """What a rule gets at the trained lengths and beyond, in per cent."""
    task = get_task(name, **TASKS.get(name, {}))
    right = {True: [], False: []}
    rows, columns = task.axes(task.Evaluation())
    for row, column in itertools.product(rows, columns):
        if not task.exists(row, column):
            continue
        asked = task.ask([row, column], 20)
        tokens, starts, _ = task.write(asked, task.width(row, column))
        for text, start in zip(tokens, starts, strict=True):
            said = rule([task.names[token] for token in text[:start]])
            is_inside = task.counted(row, column) <= task.trained_length
            right[is_inside].append(said == task.names[text[start]])
    return [round(100 * np.mean(right[where])) for where in (True, False)]


def test_every_task_of_places_has_a_rule():
    of_places = {name for name in tasks.TASKS if issubclass(task_type(name), PlaceTask)}
    assert of_places == RULES.keys()


@pytest.mark.parametrize("name", mostly_slow(RULES, "address", "recall"))
def test_rule(name):
    rule, *expected = RULES[name]
    assert found(rule, name) == expected
    inside, beyond = expected
    assert re.search(rf"\| `{name}` \| .+ \| {inside} \| {beyond} \|\n", DOCS.read_text())
