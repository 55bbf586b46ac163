"""A config of a training that takes a second."""

import pytest

import research  # noqa: F401 - it registers tasks, which the tests of all tasks know too.

CONFIG = """
from ml_collections import ConfigDict

def get_config():
    return ConfigDict({
        "task": {"name": "addition", "max_digits": 2},
        "model": {"hidden_size": 8, "num_heads": 2, "num_layers": 2, "max_length": 30},
        "train": {"steps": 6, "batch_size": 4, "learning_rate": 1e-3, "save_every": 3},
        "evaluation": {"longest": 3, "samples_per_pair": 2},
    })
"""


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "small.py"
    path.write_text(CONFIG)
    return path
