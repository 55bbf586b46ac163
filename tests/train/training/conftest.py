import functools

import pytest

from tests.train.training.tiny import Tiny
from train.training import loop, runs
from train.training import step as training_step


@functools.cache
def compiled_once(model, config, make_step=training_step.make_step):
    return make_step(model, training_step.make_optimizer(config), config)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(loop, "Transformer", Tiny)
    monkeypatch.setattr(runs, "Transformer", Tiny)
    monkeypatch.setattr(
        loop, "make_step", lambda model, _, config, places: compiled_once(model, config)
    )
