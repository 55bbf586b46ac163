"""Reports the loss of held-out text during training."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp

from tape_jax import Transformer
from tape_jax.adapt import merge
from tape_jax.sharding import Sharding
from train.experiment import Experiment
from train.training.checkpoint import Report
from train.training.step import part_loss


class HeldOut:
    """Reports how well a model in training predicts held-out text, and when it gets worse.

    It affects nothing that is trained or saved.
    """

    def __init__(self, experiment: Experiment, sharding: Sharding | None, frozen: Any = None):
        """
        Args:
          experiment: what is trained; its task may have ``held_out_batch(size)``, a batch, and
            ``training_sequences``, the number of sequences in an epoch.
          sharding: where the batch goes; None: the first device.
          frozen: the parameters that do not train, or None.
        """
        train, task = experiment.train, cast(Any, experiment.task)
        model = Transformer(experiment.model, sharding=sharding)
        self._batch_size, self._epoch = train.batch_size, task.training_sequences
        # Devices have equal numbers of rows; those that the text has not weigh 0.
        parts = 1 if sharding is None else sharding.shards("batch")
        rows = train.batch_size // train.accumulate
        batch = task.held_out_batch(rows + -rows % parts)
        self._batch = batch if batch is None or sharding is None else sharding.place(batch)
        self._frozen = frozen
        self._best: tuple[float, int] | None = None

        @jax.jit
        def loss(params: Any, frozen: Any, batch: Any) -> jax.Array:
            variables = {"params": params if frozen is None else merge(params, frozen)}
            _, losses = part_loss(model, variables, batch, jax.random.key(0), jnp.float32(0))
            return losses["loss"] / batch["weights"].sum()

        self._loss = loss

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        sharding: Sharding | None,
        frozen: Any = None,
        report: Report = print,
    ) -> HeldOut | None:
        """Makes an instance; None for a task without held-out batches, or several processes.

        It is also None if the text is missing: a continued run goes on without it and says so.
        """
        if jax.process_count() > 1 or not hasattr(experiment.task, "held_out_batch"):
            return None
        try:
            return cls(experiment, sharding, frozen)
        except ValueError as error:
            report(f"no held-out loss will be said: {error}")
            return None

    def describe(self, step: int, params: Any) -> str:
        """Describes the epochs and held-out loss after a step, and whether it was lower before."""
        epochs = f"{step * self._batch_size / self._epoch:.3g} epochs"
        if self._batch is None:
            return f"step {step:,}: {epochs}; too little text is held out to say a loss of it"
        loss = float(self._loss(params, self._frozen, self._batch))
        said = f"step {step:,}: {epochs}, held-out loss {loss:.4f}"
        if self._best is not None and loss > self._best[0]:
            lowest, at = self._best
            again = step * self._batch_size > self._epoch
            by_heart = ": the model learns its text by heart" if again else ""
            return f"{said}, up from {lowest:.4f} at step {at:,}{by_heart}"
        self._best = loss, step
        return said
