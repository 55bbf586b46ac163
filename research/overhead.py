"""Compares the cost of encodings: time and memory of a step, parameters, operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from research import protocol
from research.records import Item, Record
from research.study import Fields, Measurements, Place, options
from tape_jax import ModelConfig, Transformer
from tape_jax.tune import Timing, take_turns
from train import experiment
from train.checks import require
from train.evaluation.grids import text_table
from train.experiment import TrainConfig
from train.process import keep_freed_memory
from train.statistics import estimate
from train.training import runs
from train.training.flops import model_flops
from train.training.step import TrainState, make_optimizer, make_step

# Every measurement has these; it has memory if the compiler reports it.
MEASURED = ("length", "milliseconds", "time", "noise", "parameters", "operations")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a compiled program, by the compiler's plan.

    Attributes:
      arguments, outputs: what it is given and returns.
      shared: part of the outputs that overwrites arguments.
      temporary: needed in between.
    """

    arguments: int
    outputs: int
    shared: int
    temporary: int

    @property
    def moved(self) -> int:
        """The minimum that is read and written: arguments and outputs, once each."""
        return self.arguments + self.outputs

    @property
    def total(self) -> int:
        """All memory in use while the program runs."""
        return self.moved - self.shared + self.temporary

    @classmethod
    def of(cls, program: jax.stages.Compiled) -> Memory | None:
        """Returns a compiled program's plan; None if the backend has none."""
        plan = program.memory_analysis()
        if plan is None:
            return None
        return cls(
            plan.argument_size_in_bytes,
            plan.output_size_in_bytes,
            plan.alias_size_in_bytes,
            plan.temp_size_in_bytes,
        )


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
        """Returns a fresh state and a batch of random tokens."""
        return jax.jit(self._inputs)()

    def shapes(self) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct]]:
        """Returns the shapes and dtypes of :meth:`inputs`, without computing."""
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
    """A compiled :class:`TrainingStep` that takes another training step on each call."""

    def __init__(self, step: TrainingStep):
        keep_freed_memory()
        self._state, self._batch = step.inputs()
        self._program = step.function.lower(self._state, self._batch).compile()
        self.memory = Memory.of(self._program)

    def __call__(self) -> Any:
        """Takes one step; returns its metrics."""
        self._state, metrics = self._program(self._state, self._batch)
        return metrics


@dataclasses.dataclass(frozen=True)
class StepMeasurement:
    """The measurement of one row at one length."""

    timing: Timing
    memory: Memory | None


def again(name: str) -> str:
    """Returns the name of a row's second measurement."""
    return f"{name}, again"


def measure_steps(
    configs: dict[str, ModelConfig], batch: int, length: int, *, repeats: int
) -> tuple[dict[str, StepMeasurement], dict[str, str]]:
    """Times the steps of models in turns.

    Args:
      configs: the models by the names of their rows.
      batch, length: shape of the batch.
      repeats: timed steps of each.

    Returns:
      Measurements by row, with the first row's second one under :func:`again`, and the reasons why
      other rows cannot be measured here.
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


@dataclasses.dataclass(frozen=True)
class Cost:
    """Times training steps of two encodings in turns, several times, in one process.

    Attributes:
      name: a word, fit for a folder.
      config: the config file.
      fields: by scale, the fields in which the models differ from it.
      lengths: by scale, of the sequences.
      tokens: by scale, in a batch.
      rivals: by name, config fields of the encodings whose cost is measured.
      reference: the encoding that they are measured against.
      seeds: each gives a measurement of every rival and length.
      repeats: timed steps of a measurement.
      minutes: how long a measurement takes, for plans.
    """

    name: str
    config: Path
    fields: Mapping[str, Fields]
    lengths: Mapping[str, Sequence[int]]
    tokens: Mapping[str, int]
    rivals: Mapping[str, Fields]
    reference: str = "rope"
    seeds: Sequence[int] = protocol.REPORTING
    repeats: int = 20
    minutes: float = 1.5

    def at(self, place: Place) -> PlannedCost:
        """Returns the study at a place."""
        return PlannedCost(self, place)


class PlannedCost(Measurements):
    """A study of cost at a place."""

    def __init__(self, design: Cost, place: Place):
        self.name = design.name
        self.design, self.place, self.minutes = design, place, design.minutes
        described = {
            "version": protocol.VERSION,
            "reference": design.reference,
            "repeats": design.repeats,
        }
        self._items = [
            Item(
                self.name,
                f"{rival}-{length}-seed{seed}",
                rival,
                self._experiment(length, seed, fields),
                protocol=described,
            )
            for rival, fields in design.rivals.items()
            for length in design.lengths[place.scale]
            for seed in design.seeds
        ]

    def _experiment(self, length: int, seed: int, encoding: Fields) -> experiment.Experiment:
        design, scale = self.design, self.place.scale
        fields = {
            **design.fields.get(scale, {}),
            **encoding,
            "task.sequence_length": length,
            "train.batch_size": max(1, design.tokens[scale] // length),
            "seed": seed,
        }
        given = (*self.place.overrides, *options(fields))
        return experiment.from_file(design.config, given, lambda _: None)

    @property
    def size(self) -> str:
        """The size of its runs, in words."""
        return (
            f"`{self.design.config}`: {len(self.design.seeds)} measurements of "
            f"{self.design.repeats} steps in turns, at each length"
        )

    def measure(self, item: Item) -> dict[str, Any]:
        """Measures ratios of the encoding to the reference, and of the reference to itself."""
        mine, (length, batch) = item.experiment, self._shape(item)
        reference = {"model.position.kind": self.design.reference}
        theirs = self._experiment(length, mine.seed, reference)
        models = {self.design.reference: theirs.model, item.rival: mine.model}
        found, _ = measure_steps(models, batch, length, repeats=self.design.repeats)
        first, second = found[self.design.reference], found[item.rival]
        noise = found[again(self.design.reference)].timing.ratio(first.timing)
        ratios = {
            "length": length,
            "milliseconds": 1e3 * second.timing.median,
            "time": second.timing.ratio(first.timing),
            "noise": noise,
            "parameters": runs.count_parameters(mine)[0] / runs.count_parameters(theirs)[0],
            "operations": model_flops(mine.model, batch, length)
            / model_flops(theirs.model, batch, length),
        }
        if first.memory is not None and second.memory is not None:
            ratios["memory"] = second.memory.total / first.memory.total
        return ratios

    def _shape(self, item: Item) -> tuple[int, int]:
        return item.experiment.task.sequence_length, item.experiment.train.batch_size

    def check(self, record: Record) -> None:
        """Raises ValueError unless this is a measurement of cost."""
        missing = [name for name in MEASURED if name not in record.found]
        require(not missing, f"a measurement without {', '.join(missing)}")

    def measured(self, rival: str) -> dict[int, list[Mapping[str, float]]]:
        """Returns the measurements of a rival so far, by length."""
        found: dict[int, list[Mapping[str, float]]] = {}
        for item in self.items:
            if item.rival == rival and (record := self.recorded(item)):
                found.setdefault(int(record.found["length"]), []).append(record.found)
        return found

    def tables(self) -> Iterator[str]:
        """Yields multiples of the reference's cost, a row for each rival and length."""
        keys = ("time", "noise", "memory", "parameters", "operations")
        rows = []
        for rival in self.design.rivals:
            for length, found in self.measured(rival).items():
                if len(found) < len(self.design.seeds):
                    continue
                cells = [
                    str(estimate([x[key] for x in found])) if key in found[0] else "-"
                    for key in keys
                ]
                rows.append([rival, f"{length:,}", *cells])
        if rows:
            header = ["", "tokens", "time of a step", "RoPE against itself"]
            table = text_table([*header, "memory of a step", "parameters", "operations"], rows)
            yield f"Multiples of {self.design.reference}, mean and 95 % interval:\n\n{table}"
