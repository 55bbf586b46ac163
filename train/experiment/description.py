"""The description of an experiment: its model, its task, and its training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import optax

from tape_jax import ModelConfig
from tape_jax.sharding import ShardingConfig
from train.checks import choose, require
from train.experiment.adaptation import Adaptation
from train.tasks import Task, task_name

USUALLY_NOT_DECAYED = ("scale", "bias", "embedding", "position_table")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The options of a training: its steps, its batches, its optimiser and its schedule.

    Attributes:
      steps: number of optimiser steps.
      batch_size: examples per optimiser step.
      accumulate: number of equal parts a batch is computed in, to save memory.
      learning_rate: the largest learning rate.
      schedule: a decay of :data:`DECAYS`.
      warmup: share of the steps in which the learning rate rises linearly.
      final: the last learning rate as a share of the largest.
      power: exponent of the polynomial schedule.
      beta1, beta2, eps: of AdamW (Loshchilov and Hutter 2019).
      moment_dtype: type of AdamW's first moment, such as ``bfloat16``; None: that of the
        parameters. The second always has their type: its running mean changes by too little in a
        step for a shorter one.
      weight_decay: decoupled, multiplied by the learning rate.
      no_decay: parameters that are not decayed. Each entry is a whole component of their path, such
        as ``scale`` (norms), ``embedding`` or ``attention_norm``.
      clip: largest global norm of the gradient; None: no clipping.
      skip: how many bad steps in a row are skipped, without changing parameters and moments, before
        training stops; 0: the first stops it. A step is bad if its loss or its gradient is not
        finite.
      spike: with ``skip``, a step is also bad if its gradient's norm, before clipping, is this many
        times the mean of earlier steps; None: no limit.
      log_every: steps between two lines of metrics.
      save_every: steps between two checkpoints; the last step is always saved.
      keep: how many of the newest checkpoints are kept.
      initial: a run folder whose parameters training starts from, with a new optimiser;
        ``{encoding}`` in it stands for the name of the model's encoding. None: random parameters.
    """

    steps: int
    batch_size: int
    learning_rate: float
    accumulate: int = 1
    schedule: str = "cosine"
    warmup: float = 0.0
    final: float = 0.0
    power: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    moment_dtype: str | None = None
    weight_decay: float = 0.01
    no_decay: tuple[str, ...] = USUALLY_NOT_DECAYED
    clip: float | None = 1.0
    skip: int = 0
    spike: float | None = None
    log_every: int = 10
    save_every: int = 1000
    keep: int = 3
    initial: str | None = None

    def __post_init__(self):
        for name in ("steps", "batch_size", "accumulate", "log_every", "save_every", "keep"):
            value = getattr(self, name)
            require(value >= 1, f"train: {name} must be at least 1; got {value}")
        require(
            self.batch_size % self.accumulate == 0,
            f"train: batch_size = {self.batch_size} is not a multiple of accumulate = "
            f"{self.accumulate}",
        )
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"train: {name} must be in [0, 1); got {value}")
        choose("train moment_dtype", self.moment_dtype, (None, "float32", "bfloat16"))
        require(self.eps > 0, f"train: eps must be positive; got {self.eps}")
        require(
            0 <= self.weight_decay < math.inf,
            f"train: weight_decay must not be negative or infinite; got {self.weight_decay}",
        )
        require(
            self.clip is None or self.clip > 0,
            f"train: clip must be positive or None; got {self.clip}",
        )
        require(self.skip >= 0, f"train: skip must not be negative; got {self.skip}")
        require(
            self.spike is None or (self.spike > 1 and self.skip > 0),
            f"train: spike must exceed 1 and needs skip; got spike = {self.spike}, skip = "
            f"{self.skip}",
        )
        _ = self.learning_rates

    @property
    def learning_rates(self) -> Callable[[Any], Any]:
        """The learning rate as a function of the step."""
        return schedule(
            self.schedule,
            peak=self.learning_rate,
            steps=self.steps,
            warmup=self.warmup,
            final=self.final,
            power=self.power,
        )


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The complete description of a run's computation.

    Attributes:
      name: for tables and plots.
      seed: of the parameters, of the data and of encodings that draw random numbers.
      model: its ``position`` is always an encoding, its ``vocab_size`` at least the task's.
      task: the task to train and evaluate.
      train: how to train.
      evaluation: how to evaluate: an instance of the task's ``Evaluation``.
      adapt: the trained model to adapt, which determines ``model``; None: everything is trained,
        from random parameters or those of ``train.initial``.
      sharding: the mesh, and the rules for splitting over it; None: one device.
    """

    name: str
    seed: int
    model: ModelConfig
    task: Task
    train: TrainConfig
    evaluation: Any
    adapt: Adaptation | None = None
    sharding: ShardingConfig | None = None

    def __post_init__(self):
        wanted = type(self.task).Evaluation
        require(
            isinstance(self.evaluation, wanted),
            f"evaluation: the task {task_name(self.task)!r} takes {wanted.__qualname__}; got "
            f"{self.evaluation!r}",
        )
        tokenizer = getattr(self.task, "tokenizer", None)
        require(0 <= self.seed < 2**32, f"seed must be in [0, 2**32); got {self.seed}")
        require(
            self.model.vocab_size >= self.task.vocab_size,
            f"model.vocab_size = {self.model.vocab_size} is too small for the task, which has "
            f"{self.task.vocab_size} tokens"
            + (f", those of the tokenizer {tokenizer!r}" if tokenizer else ""),
        )
        require(
            self.adapt is None or self.train.initial is None,
            f"adapt.base = {self.adapt and self.adapt.base!r} and train.initial = "
            f"{self.train.initial!r} both say what to start from: give one of them",
        )

    @property
    def steps(self) -> int:
        """The number of optimiser steps: ``train.steps``, or 0 if nothing trains."""
        return self.train.steps if self.adapt is None or self.adapt.trains else 0

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Sequences per optimiser step, and tokens per sequence."""
        length = self.task.sequence_length
        short = getattr(self.task, "train_length", None) or length
        return self.train.batch_size * (length // short), short

    @property
    def label(self) -> str:
        """The name in comparisons: the method of adaptation, or the encoding."""
        if self.adapt is None or self.adapt.method == "encoding":
            return self.model.position.kind
        return self.adapt.method


DECAYS = ("constant", "linear", "polynomial", "cosine")


def schedule(
    kind: str,
    *,
    peak: float,
    steps: int,
    warmup: float = 0.0,
    final: float = 0.0,
    power: float = 1.0,
) -> optax.Schedule:
    """A schedule that rises linearly from 0 to ``peak`` and then decays to ``final * peak``.

    Args:
      kind: ``constant``, ``linear``, ``polynomial`` (``(1 - t) ** power``; power 1 is linear) or
        ``cosine``.
      peak: the largest learning rate.
      steps: number of optimiser steps of the whole run, warm-up included.
      warmup: share of ``steps`` spent rising, in [0, 1); rounded to whole steps.
      final: the last learning rate as a share of ``peak``; ``constant`` ignores it.
      power: exponent of ``polynomial``.

    Returns:
      A function from the step (0 for the first update) to the learning rate.

    Raises:
      ValueError: for an unknown ``kind`` or a number out of range.
    """
    choose("schedule", kind, DECAYS)
    require(
        0 < peak < math.inf,
        f"schedule: the peak learning rate must be a positive number; got {peak}",
    )
    require(steps > 0, f"schedule: steps must be positive; got {steps}")
    require(0 <= warmup < 1, f"schedule: warmup is a share of the steps in [0, 1); got {warmup}")
    require(0 <= final <= 1, f"schedule: final is a share of the peak in [0, 1]; got {final}")
    require(power > 0, f"schedule: power must be positive; got {power}")
    rise = round(warmup * steps)
    fall = max(steps - rise, 1)
    if kind == "constant":
        decay = optax.constant_schedule(peak)
    elif kind == "cosine":
        decay = optax.cosine_decay_schedule(peak, fall, alpha=final)
    else:
        exponent = 1.0 if kind == "linear" else power
        decay = optax.polynomial_schedule(peak, final * peak, exponent, fall)
    if not rise:
        return decay
    # The first update already moves: the ramp ends at `peak` on step `rise`, not on `rise - 1`.
    return optax.join_schedules([optax.linear_schedule(peak / rise, peak, rise - 1), decay], [rise])
