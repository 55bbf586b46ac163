"""The training loop: one for all experiments."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from tape_jax.attention import AttentionPlan, recorded_plans
from tape_jax.config import require
from tape_jax.model import Transformer
from tape_jax.sharding import Sharding
from train import distributed, runs
from train.checkpoint import Report
from train.experiment import Experiment
from train.flops import peak
from train.metrics import Metrics, NonFiniteError, Trace, Work
from train.step import (
    all_finite,
    init_state,
    make_optimizer,
    make_step,
    step_flops,
)

NON_FINITE_EXIT_CODE = 3


class Stopped(Exception):
    """Training ended early, on purpose.

    Attributes:
      exit_code: for the shell: 128 + signal number, or 3 for a number that is not finite.
    """

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


def train(
    experiment: Experiment,
    folder: Path,
    *,
    resume: bool = False,
    profile: range | None = None,
    report: Report = print,
) -> None:
    """Trains in a run folder until the last step.

    Several processes, joined by :func:`train.distributed.initialize`, call it alike; the first
    writes what only one may write.

    Args:
      experiment: what to train.
      folder: a new run folder; with ``resume`` also one made by the same experiment.
      resume: continue from its newest intact checkpoint, bit for bit; start where there is none.
      profile: steps of which a trace is written to the folder ``profile``.
      report: called with a sentence about each notable event.

    Raises:
      Stopped: on SIGINT, SIGTERM or SIGHUP, after saving; or when the loss is not finite.
      ValueError: if the folder is not as it should be, or the mesh does not fit.
    """
    config, last = experiment.train, experiment.steps
    sharding = build_sharding(experiment, report)
    continued = resume and distributed.agreed(lambda: runs.exists(folder))
    if continued:
        distributed.agreed(lambda: runs.check_same(folder, experiment))
    optimizer = make_optimizer(config)
    begin = runs.start(experiment, folder if continued else None, report, sharding)
    initial = functools.partial(init_state, experiment, optimizer)
    template = jax.eval_shape(initial, begin.params)
    model, places = Transformer(experiment.model), None
    if sharding is not None:
        model = Transformer(experiment.model, sharding=sharding)
        places = sharding.of(model, template)
        template = runs.placed(template, places)
    step_fn = make_step(model, optimizer, config, places)
    share = (0, 1) if sharding is None else sharding.share()
    data = iter(experiment.task.dataset(experiment.seed, config.batch_size, *share))

    with contextlib.ExitStack() as stack:
        # Several processes must stop after the same step: distributed.preempted sees to that.
        alone = jax.process_count() == 1
        signals = stack.enter_context(Signals()) if alone else Signals()
        if not continued:
            made = begin.adapted.base if begin.adapted else None
            distributed.agreed(lambda: runs.create(folder, experiment, made))
            if begin.adapted:
                report(begin.describe())
        distributed.agreed(lambda: stack.enter_context(runs.guarded(folder)))
        checkpoints = stack.enter_context(runs.checkpoints(folder, keep=config.keep, report=report))
        if continued and distributed.agreed(lambda: runs.has_trained(folder)):
            start, state = checkpoints.restore(template, data)
            checkpoints.forget_after(start)
            report(f"continuing {folder} from step {start} of {last}")
        else:
            start, state = 0, jax.jit(initial, out_shardings=places)(begin.params)
            checkpoints.save(0, state, data)
            checkpoints.wait()  # From here on a run without checkpoints has lost them.
        begin = begin._replace(params=None)  # Else the first parameters would stay in memory.
        metrics = stack.enter_context(
            Metrics(
                folder,
                last,
                start,
                describe_work(experiment),
                config.log_every,
                write=distributed.is_main(),
                patience=config.skip,
            )
        )
        trace = stack.enter_context(Trace(folder / "profile", profile))
        try:
            for step in range(start + 1, last + 1):
                trace.before(step, state)
                batch = next(data)
                if sharding is not None:
                    batch = sharding.place(batch)
                with recorded_plans() as plans:
                    state, values = step_fn(state, batch, begin.frozen)
                if step == start + 1:
                    report(describe_attention(plans))
                metrics.record(step, values)
                stop = signals.received or (signal.SIGTERM if distributed.preempted(step) else 0)
                if stop or step % config.save_every == 0 or step == last:
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
                "--config.train.clip, --config.train.skip=10 to leave out bad steps, "
                "--config.model.dtype=float32 or, with TAPE, --config.model.position.norm=rms",
                NON_FINITE_EXIT_CODE,
            ) from error
        if experiment.adapt and experiment.adapt.trains:
            checkpoints.wait()
            try:
                report(f"written: {runs.write_adapter(folder, begin, state.params)}")
            except NotImplementedError as reason:
                report(f"no adapter file: {reason}")


def build_sharding(experiment: Experiment, report: Report) -> Sharding | None:
    """The mesh of an experiment on the devices that are here; None: one device.

    Raises:
      ValueError: if it does not fit the devices, the model or the batch.
    """
    config, count = experiment.train, jax.device_count()
    if experiment.sharding is None:
        require(
            jax.process_count() == 1,
            f"{jax.process_count()} processes need a mesh: give --config.sharding.data=-1, "
            "--config.sharding.fsdp=-1 or another",
        )
        if count > 1 and jax.default_backend() != "cpu":
            report(f"{count} devices are here and 1 is used: --config.sharding.data=-1 uses all")
        return None
    sharding = experiment.sharding.build()
    sharding.check(
        Transformer(experiment.model),
        batch_size=config.batch_size // config.accumulate,
        length=experiment.task.sequence_length,
    )
    return sharding


def describe_work(experiment: Experiment) -> Work:
    """What a step does, and what the devices that train can do."""
    rate = peak(jax.devices()[0].device_kind, experiment.model.dtype)
    count = jax.device_count() if experiment.sharding else 1
    return Work(
        experiment.train.batch_size * experiment.task.sequence_length,
        step_flops(experiment),
        rate and rate * count,
    )


def describe_attention(plans: Sequence[AttentionPlan]) -> str:
    """Which implementations of attention the plans of a step name, and why no other."""
    rejected = {plan.implementation: plan.rejected for plan in plans}
    lines = [f"attention: {', '.join(map(str, rejected))}"]
    reasons = {name: why for others in rejected.values() for name, why in others.items()}
    lines += [f"  not {name}: {why}" for name, why in reasons.items() if name not in rejected]
    return "\n".join(lines)


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
