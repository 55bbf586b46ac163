"""The training loop: one for all experiments.

Names of arrays end in their axes: B examples, T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tape_jax.algebra import at_least_float32
from tape_jax.attention import AttentionPlan, recorded_plans
from tape_jax.config import require
from tape_jax.model import Transformer
from train import runs
from train.checkpoint import Report
from train.experiment import USUALLY_NOT_DECAYED, Experiment, TrainConfig
from train.metrics import Metrics, NonFiniteError

Array = jax.Array
Batch = dict[str, Array]
NON_FINITE_EXIT_CODE = 3


class State(NamedTuple):
    """Everything that a step changes, and the random key.

    Attributes:
      params: of the model.
      opt_state: of the optimiser.
      step: optimiser steps taken, int32.
      key: raw random key, uint32; each step folds its number into it.
    """

    params: Any
    opt_state: Any
    step: Array
    key: Array


class Stopped(Exception):
    """Training ended early, on purpose.

    Attributes:
      exit_code: for the shell: 128 + signal number, or 3 for a number that is not finite.
    """

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


def train(
    experiment: Experiment, folder: Path, *, resume: bool = False, report: Report = print
) -> None:
    """Trains in a run folder until the last step.

    Args:
      experiment: what to train.
      folder: a new run folder; with ``resume`` one made by the same experiment.
      resume: continue from its newest intact checkpoint, bit for bit.
      report: called with a sentence about each notable event.

    Raises:
      Stopped: on SIGINT, SIGTERM or SIGHUP, after saving; or when the loss is not finite.
      ValueError: if the folder is not as it should be.
    """
    config = experiment.train
    if resume:
        runs.check_same(folder, experiment)
    optimizer = make_optimizer(config)
    initial = jax.jit(lambda params=None: init_state(experiment, optimizer, params))
    template = jax.eval_shape(initial)
    params = runs.initial_params(experiment, report) if config.initial and not resume else None
    step_fn = make_step(Transformer(experiment.model), optimizer, config)
    share = jax.process_index(), jax.process_count()
    data = iter(experiment.task.dataset(experiment.seed, config.batch_size, *share))

    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(Signals())
        if not resume:
            runs.create(folder, experiment)
        stack.enter_context(runs.guarded(folder))
        checkpoints = stack.enter_context(runs.checkpoints(folder, keep=config.keep, report=report))
        if resume:
            start, state = checkpoints.restore(template, data)
            checkpoints.forget_after(start)
            report(f"continuing {folder} from step {start} of {config.steps}")
        else:
            start, state = 0, initial(params)
            checkpoints.save(0, state, data)
        tokens_per_step = config.batch_size * experiment.task.sequence_length
        metrics = stack.enter_context(
            Metrics(folder, config.steps, start, tokens_per_step, config.log_every)
        )
        try:
            for step in range(start + 1, config.steps + 1):
                with recorded_plans() as plans:
                    state, values = step_fn(state, next(data))
                if step == start + 1:
                    report(describe_attention(plans))
                metrics.record(step, values)
                stop = signals.received
                if stop or step % config.save_every == 0 or step == config.steps:
                    metrics.flush()
                    if not all_finite(state):
                        raise NonFiniteError(step, "a parameter or its moments")
                    checkpoints.save(step, state, data)
                if stop:
                    checkpoints.wait()
                    raise Stopped(
                        f"stopped by {signal.Signals(stop).name} after step {step}, which is "
                        f"saved; to continue:\n"
                        f"  python -m train.main train --run={folder} --resume",
                        128 + stop,
                    )
        except NonFiniteError as error:
            checkpoints.wait()
            raise Stopped(
                f"{error}. The last good checkpoint of {folder} is that of step "
                f"{checkpoints.steps()[-1]}. Try a new run with a smaller "
                "--config.train.learning_rate, a longer --config.train.warmup, a smaller "
                "--config.train.clip, --config.model.dtype=float32 or, with TAPE, "
                "--config.model.position.norm=rms",
                NON_FINITE_EXIT_CODE,
            ) from error


def describe_attention(plans: Sequence[AttentionPlan]) -> str:
    """Which implementations of attention the plans of a step name, and why no other."""
    rejected = {plan.implementation: plan.rejected for plan in plans}
    lines = [f"attention: {', '.join(map(str, rejected))}"]
    reasons = {name: why for others in rejected.values() for name, why in others.items()}
    lines += [f"  not {name}: {why}" for name, why in reasons.items() if name not in rejected]
    return "\n".join(lines)


def init_state(
    experiment: Experiment, optimizer: optax.GradientTransformation, params: Any = None
) -> State:
    """The state before the first step; to be traced by ``jax.jit``.

    Args:
      experiment: what is trained.
      optimizer: of :func:`make_optimizer`.
      params: to start from; None: random ones.
    """
    if params is None:
        params = runs.init_variables(experiment)["params"]
    key = jax.random.key_data(jax.random.fold_in(jax.random.key(experiment.seed), 1))
    return State(params, optimizer.init(params), jnp.int32(0), key)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW after clipping, with the schedule of ``config``."""
    adamw = optax.adamw(
        config.learning_rates,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=lambda params: decay_mask(params, config.no_decay),
    )
    if config.clip is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw)


def decay_mask(params: Any, no_decay: tuple[str, ...]) -> Any:
    """For each parameter whether weight decay applies.

    Args:
      params: pytree of parameters.
      no_decay: whole components of the paths of those to which it does not.

    Raises:
      ValueError: for an entry that matches nothing, unless it is one of the usual ones.
    """
    paths = [
        {str(getattr(entry, "key", entry)) for entry in path}
        for path, _ in jax.tree.leaves_with_path(params)
    ]
    for name in set(no_decay) - set(USUALLY_NOT_DECAYED):
        require(
            any(name in path for path in paths),
            f"train.no_decay: no parameter's path has the component {name!r}; components: "
            f"{', '.join(sorted(set().union(*paths)))}",
        )
    mask = [path.isdisjoint(no_decay) for path in paths]
    return jax.tree.unflatten(jax.tree.structure(params), mask)


def make_step(
    model: nn.Module, optimizer: optax.GradientTransformation, config: TrainConfig
) -> Callable[[State, Batch], tuple[State, dict[str, Array]]]:
    """One compiled optimiser step; its state argument is donated.

    The batch is computed in ``config.accumulate`` parts, one after another, whose gradients are
    summed in at least float32; the result is that of the whole batch.
    """

    def loss_fn(params: Any, part: Batch, key: Array) -> Array:
        logits: Any = model.apply(
            {"params": params},
            part["inputs"],
            positions=part.get("positions"),
            segment_ids=part.get("segment_ids"),
            rngs={"positions": key},
        )
        return weighted_loss(logits, part["targets"], part["weights"])

    def step(state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        parts = jax.tree.map(lambda x: jnp.reshape(x, (config.accumulate, -1, *x.shape[1:])), batch)
        step_key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        keys = jax.random.split(step_key, config.accumulate)

        def add(sums: Any, part: tuple[Batch, Array]) -> tuple[Any, None]:
            value = jax.value_and_grad(loss_fn)(state.params, *part)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, value), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, at_least_float32(x.dtype)), state.params)
        (loss, grads), _ = jax.lax.scan(add, (jnp.float32(0), zeros), (parts, keys))
        weight = jnp.maximum(batch["weights"].sum(), 1e-9)
        loss, grads = jax.tree.map(lambda x: x / weight, (loss, grads))
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = {
            "loss": loss,
            "gradient_norm": optax.tree.norm(grads),
            "learning_rate": config.learning_rates(state.step),
        }
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state, state.step + 1, state.key), metrics

    return jax.jit(step, donate_argnums=0)


def weighted_loss(logits_BxTxV: Array, targets_BxT: Array, weights_BxT: Array) -> Array:
    """Cross entropy in nats, weighted and summed, in float32."""
    log_p_BxTxV = jax.nn.log_softmax(logits_BxTxV.astype(jnp.float32))
    log_p_BxT = jnp.take_along_axis(log_p_BxTxV, targets_BxT[..., None], axis=-1)[..., 0]
    return -(log_p_BxT * weights_BxT).sum()


@jax.jit
def all_finite(tree: Any) -> Array:
    """Whether every floating-point number of a pytree is finite."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in floats]))


class Signals:
    """Remembers SIGINT, SIGTERM and SIGHUP while a step finishes; a second signal acts at once.

    A signal that is ignored already, as SIGHUP is under ``nohup``, stays so.

    Attributes:
      received: number of the first signal, or 0.
    """

    def __init__(self) -> None:
        self.received = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())
