"""A suite of one small study."""

import pytest

from research.records import Store
from research.study import Place
from research.trainings import Trainings
from tests.research.results import BEYOND, INSIDE, MADE
from tests.train import small


@pytest.fixture
def config(tmp_path):
    return small.config(
        tmp_path,
        {"name": "algorithm", "problem": "copy", "max_length": 3},
        {"num_heads": 1, "num_layers": 1},
        name="small",
        evaluation={"longest": 4, "samples_per_length": 5},
        SCALES={"gpu": {"task.max_length": 6}},
    )


@pytest.fixture
def design(config):
    """A study of three rivals."""
    return Trainings(
        name="copying",
        config=config,
        rivals={name: {"model.position.kind": name} for name in ("tape", "rope", "none")},
        scores=(BEYOND,),
        shown=(INSIDE,),
        minutes=1.0,
        quick=("tape", "rope"),
    )


@pytest.fixture
def place(tmp_path, monkeypatch):
    """One that makes its results by the code of :data:`MADE`."""
    for module in ("study", "trainings"):
        monkeypatch.setattr(f"research.{module}.describe_source", lambda: MADE.code)
    return Place(Store(tmp_path / "results"), tmp_path / "runs")
