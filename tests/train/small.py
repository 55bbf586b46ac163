"""Small runs, models and results, for the tests of whatever reads, judges or shows one."""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tape_jax import ModelConfig, Transformer
from tests.models import encoding, random_variables
from train import experiment
from train.data import tokenizers
from train.evaluation.grids import Grid
from train.evaluation.perplexity import Measurement, Perplexity
from train.tasks.arithmetic import Addition
from train.training import runs
from train.training.runs import TrainedRun

BYTES = tokenizers.load("bytes")


class Model(NamedTuple):
    """What evaluation needs of a trained model."""

    apply: Callable
    variables: Any = None
    max_length: int | None = None
    model: Any = None


def result(*losses, trained=4, **changes):
    """Perplexities of two blocks each at 1x and 2x in two ways."""
    measurements = [
        Measurement(protocol, length, (loss - 0.1, loss + 0.1), (loss,) * length)
        for (protocol, length), loss in zip(
            [("disjoint", 4), ("disjoint", 8), ("windowed", 4), ("windowed", 8)],
            losses,
            strict=True,
        )
    ]
    fields = {"stride": 2, "bin": 1, "targets": 16, "fingerprint": "a", "text_bytes": None}
    return Perplexity(trained=trained, measurements=tuple(measurements), **{**fields, **changes})


def sum_grid(rows, columns, correct, counts, shared, trained) -> Grid:
    """A grid of operand lengths ``rows`` and ``columns``, trained with up to ``trained`` digits."""
    lengths = np.maximum.outer(rows, columns)
    wording = Addition(trained).wording
    return Grid(rows, columns, lengths, correct, counts, shared, trained, wording)


def config(folder: Path, task: dict, model: Any = (), train: Any = (), **others: Any) -> Path:
    """A config file of a small experiment in a folder.

    Args:
      folder: where it is written.
      task: its section.
      model, train: what differs in these sections from those of a small model and a short training.
      **others: further sections; in capital letters what stands beside the config.
    """
    sections = {
        "task": task,
        "model": {"hidden_size": 8, "num_heads": 2, "num_layers": 2, **dict(model)},
        "train": {"steps": 2, "batch_size": 4, "learning_rate": 1e-3, **dict(train)},
        **{name: section for name, section in others.items() if not name.isupper()},
    }
    beside = [f"{name} = {others[name]!r}" for name in others if name.isupper()]
    lines = [
        "from ml_collections import ConfigDict",
        *beside,
        "def get_config():",
        f"    return ConfigDict({sections!r})",
    ]
    path = folder / "small.py"
    path.write_text("\n".join(lines))
    return path


def saved(folder: Path, task: dict, step: int = 2, **sections: Any) -> Path:
    """The run of such an experiment after ``step`` steps, with random parameters."""
    wanted = experiment.from_file(config(folder, task, **sections))
    return save_run(folder / "run", wanted, step)


def save_run(folder: Path, wanted: experiment.Experiment, *steps: int) -> Path:
    """A run with a checkpoint at each of these steps, of random parameters by seeds from 0 on."""
    runs.create(folder, wanted)
    model = Transformer(wanted.model)
    with runs.checkpoints(folder) as checkpoints:
        for seed, step in enumerate(steps):
            checkpoints.save(step, {"params": random_variables(model, seed)["params"]})
    return folder


def trained(kind="rope", **options) -> TrainedRun:
    """A small model of bytes, with random parameters."""
    config = ModelConfig(
        BYTES.vocab_size,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        position=encoding(kind, **options),
    )
    model = Transformer(config)
    variables = random_variables(model, std=0.7)
    return TrainedRun(types.SimpleNamespace(model=config), 0, model, variables)
