"""Which function speaks of which task."""

from train import tasks
from train.compare.tasks import compare


class Plain:
    """A task of which nothing special is said."""


def test_a_task_without_a_comparison(monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "plain", f"{__name__}:Plain")
    compared = compare(Plain(), {"tape": [None]})
    assert compared.title == "Plain"
    assert not compared.sections
    assert not compared.figures
