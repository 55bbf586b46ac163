"""A suite of one small study."""

import pytest

from tests.train.evidence.results import BEYOND, INSIDE
from train.evidence.records import Store
from train.evidence.studies import Place
from train.evidence.trainings import Trainings

CONFIG = """
from ml_collections import ConfigDict

SCALES = {"gpu": {"task.max_length": 6}}

def get_config():
    return ConfigDict({
        "name": "small",
        "task": {"name": "algorithm", "problem": "copy", "max_length": 3},
        "model": {"hidden_size": 8, "num_heads": 1, "num_layers": 1},
        "train": {"steps": 2, "batch_size": 4, "learning_rate": 1e-3},
        "evaluation": {"longest": 4, "samples_per_length": 5},
    })
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def design(config):
    """A study of three rivals with two settings and three seeds."""
    return Trainings(
        name="copying",
        section="claims",
        config=config,
        rivals={name: {"model.position.kind": name} for name in ("tape", "rope", "none")},
        sweep={"cpu": ("train.learning_rate=1e-3,3e-3",)},
        scores=(BEYOND, INSIDE),
        quick=("tape", "rope"),
    )


@pytest.fixture
def place(tmp_path):
    return Place(Store(tmp_path / "results"), tmp_path / "runs")
