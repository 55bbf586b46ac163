import dataclasses
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

    def make_step(model, _, config, places):
        # When something is saved or logged is not the step's concern.
        return compiled_once(model, dataclasses.replace(config, save_every=1, log_every=1))

    monkeypatch.setattr(loop, "make_step", make_step)
