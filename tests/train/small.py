"""Small runs, models and results, for the tests of whatever reads, judges or shows one."""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tape_jax import ModelConfig, Transformer
from tests.models import encoding, random_variables
from train.data import tokenizers
from train.evaluation.grids import Grid
from train.evaluation.perplexity import Measurement, Perplexity
from train.main import main
from train.tasks.arithmetic import Addition
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


def train(folder: Path, config: str) -> Path:
    """The run of a config file with this content, trained."""
    (folder / "small.py").write_text(config)
    assert main(["train", f"--config={folder / 'small.py'}", f"--run={folder / 'run'}"]) == 0
    return folder / "run"


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
