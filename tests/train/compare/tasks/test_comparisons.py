"""Which function speaks of which task."""

from train import tasks
from train.compare.tasks import COMPARISONS, compare
from train.tasks import TASKS, task_type
from train.tasks.places import PlaceTask
from train.tasks.questions import QuestionTask


class Plain:
    """A task of which nothing special is said."""


def test_a_task_without_a_comparison(monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "plain", f"{__name__}:Plain")
    compared = compare(Plain(), {"tape": [None]})
    assert compared.title == "Plain"
    assert not compared.sections
    assert not compared.figures


def test_every_task_has_one():
    asked = {name for name in TASKS if issubclass(task_type(name), QuestionTask)}
    places = {name for name in asked if issubclass(task_type(name), PlaceTask)}
    assert asked - places == {"addition", "algorithm", "words"}
    assert {"address", "table"} < places
    assert COMPARISONS.keys() | asked == TASKS.keys()
