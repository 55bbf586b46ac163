"""A config of a training that takes a second."""

import pytest

import research  # noqa: F401 - it registers tasks, which the tests of all tasks know too.
from tests.train import small


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    return small.config(
        tmp_path_factory.mktemp("configs"),
        {"name": "addition", "max_digits": 2},
        {"max_length": 30},
        {"steps": 6, "save_every": 3},
        evaluation={"longest": 3, "samples_per_pair": 2},
    )
