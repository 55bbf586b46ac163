"""Training steps of several models, in turns in one process: their time and memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from research.inside.memory import Memory
from tape_jax import ModelConfig, Transformer
from tape_jax._src.core.timing import Timing, take_turns
from train.experiment import TrainConfig
from train.process import keep_freed_memory
from train.training.step import TrainState, make_optimizer, make_step


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """A training step of a model on batches of one shape.

    Attributes:
      config: of the model.
      batch, length: shape of the batch, in sequences and tokens.
    """

    config: ModelConfig
    batch: int
    length: int

    @property
    def function(self) -> Any:
        """The step, jitted: ``(state, batch) -> (state, metrics)``; the state is donated."""
        return make_step(Transformer(self.config), make_optimizer(self._training), self._training)

    @property
    def _training(self) -> TrainConfig:
        return TrainConfig(steps=10_000, batch_size=self.batch, learning_rate=1e-4, warmup=0.02)

    def inputs(self) -> tuple[TrainState, dict[str, jax.Array]]:
        """A fresh state and a batch of random tokens."""
        return jax.jit(self._inputs)()

    def shapes(self) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct]]:
        """Shapes and types of :meth:`inputs`; nothing is computed."""
        return jax.eval_shape(self._inputs)

    def _inputs(self) -> tuple[TrainState, dict[str, jax.Array]]:
        keys = jax.random.split(jax.random.key(0), 3)
        shape = (self.batch, self.length + 1)
        tokens = jax.random.randint(keys[0], shape, 0, self.config.vocab_size, jnp.int32)
        batch = {
            "inputs": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weights": jnp.ones((self.batch, self.length), jnp.float32),
        }
        params = Transformer(self.config).init(keys[1], batch["inputs"])["params"]
        moments = make_optimizer(self._training).init(params)
        return TrainState(params, moments, jnp.int32(0), jax.random.key_data(keys[2])), batch


class Runner:
    """A compiled :class:`TrainingStep` that goes on training each time that it is called."""

    def __init__(self, step: TrainingStep):
        keep_freed_memory()
        self._state, self._batch = step.inputs()
        self._program = step.function.lower(self._state, self._batch).compile()
        self.memory = Memory.of(self._program)

    def __call__(self) -> Any:
        """One step; returns its metrics."""
        self._state, metrics = self._program(self._state, self._batch)
        return metrics


@dataclasses.dataclass(frozen=True)
class StepMeasurement:
    """One row at one length."""

    timing: Timing
    memory: Memory | None


def again(name: str) -> str:
    """The name under which a row is measured a second time."""
    return f"{name}, again"


def measure(
    configs: dict[str, ModelConfig], batch: int, length: int, *, repeats: int
) -> tuple[dict[str, StepMeasurement], dict[str, str]]:
    """Times the steps of models in turns.

    Args:
      configs: the models by the names of their rows.
      batch, length: shape of the batch.
      repeats: timed steps of each.

    Returns:
      Measurements by row, those of the first row a second time as :func:`again`; and the reasons
      why other rows cannot be measured here.
    """
    runners: dict[str, Runner] = {}
    skipped = {}
    for name, config in configs.items():
        try:
            runners[name] = Runner(TrainingStep(config, batch, length))
        except NotImplementedError as error:
            skipped[name] = str(error)
    if runners:
        first = next(iter(runners))
        runners[again(first)] = runners[first]
    timings = take_turns(runners, repeats=repeats)
    found = {
        name: StepMeasurement(timings[name], runner.memory) for name, runner in runners.items()
    }
    return found, skipped
