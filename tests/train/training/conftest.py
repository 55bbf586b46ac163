import dataclasses
import functools

import pytest

from tests.train.training.tiny import Tiny
from train.training import loop, runs
from train.training import step as training_step

INITIAL = {}


@functools.cache
def compiled_once(model, config, make_step=training_step.make_step):
    return make_step(model, training_step.make_optimizer(config), config)


def computed(config):
    """What a program depends on: not on when something is saved or logged."""
    return dataclasses.replace(config, save_every=1, log_every=1)


@pytest.fixture
def tiny(monkeypatch):
    """Trains a tiny model; equal programs are compiled once."""
    build = loop.build_program

    def make_step(model, _, config, places):
        return compiled_once(model, computed(config))

    def build_program(experiment, *args):
        program = build(experiment, *args)
        key = experiment.model, computed(experiment.train)
        return program._replace(initial=INITIAL.setdefault(key, program.initial))

    monkeypatch.setattr(loop, "Transformer", Tiny)
    monkeypatch.setattr(runs, "Transformer", Tiny)
    monkeypatch.setattr(loop, "make_step", make_step)
    monkeypatch.setattr(loop, "build_program", build_program)
