"""The training loop: one for all experiments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tape_jax import Transformer, recorded_plans
from tape_jax import tune as tuning
from tape_jax.sharding import Sharding
from train.checks import require
from train.evaluation import fits
from train.experiment import Experiment
from train.process import compile_in_turn
from train.tasks import Task
from train.training import changes, distributed, messages, runs
from train.training.checkpoint import Checkpoints, Report
from train.training.flops import peak, step_flops
from train.training.held_out import HeldOut
from train.training.metrics import Clock, Metrics, NonFiniteError, ProfilerTrace, Sums, Work
from train.training.signals import Signals, Stopped
from train.training.step import TrainState, all_finite, init_state, make_optimizer, make_step


def train(
    experiment: Experiment,
    folder: Path,
    *,
    resume: bool = False,
    profile: range | None = None,
    report: Report = print,
    clock: Clock | None = None,
    tune: bool = True,
) -> None:
    """Trains in a run folder until the last step.

    Several processes, joined by :func:`train.training.distributed.initialize`, all call it; the
    first writes files that only one may write.

    Args:
      experiment: what to train.
      folder: a new run folder, or that of a run without a step; with ``resume`` also one made by
        the same experiment.
      resume: continue from its newest intact checkpoint, bit for bit; start if there is none.
      profile: steps whose trace is written to the folder ``profile``.
      report: called with a sentence about each notable event.
      clock: began when the program did; None: the time begins now.
      tune: whether an accelerator without similar measurements measures attention first.

    Raises:
      Stopped: on SIGINT, SIGTERM or SIGHUP, after saving; or when the loss is not finite.
      ValueError: if the folder is unsuitable, or the mesh does not fit.
    """
    clock = clock or Clock()
    config, last = experiment.train, experiment.steps
    sharding = build_sharding(experiment, report)
    measure_attention(experiment, sharding, report, tune=tune)
    continued = resume and distributed.agreed(lambda: runs.exists(folder))
    if continued:
        distributed.agreed(lambda: changes.check_same(folder, experiment, changes.LONGER))
    else:
        distributed.agreed(lambda: runs.require_free(folder))
    begun = continued and distributed.agreed(lambda: runs.has_trained(folder))
    begin = runs.start(experiment, folder if continued else None, report, sharding, begun=begun)
    program = build_program(experiment, begin.params, sharding)
    data = open_data(experiment, sharding)
    read = prepared(experiment, strict=not continued)

    with abandonable(folder, experiment.task), contextlib.ExitStack() as stack:
        signals = Signals(
            lambda: messages.saving(folder),
            lambda: messages.abandoned(folder, experiment.task),
            as_preemption=jax.process_count() > 1,
        )
        stack.enter_context(signals)
        distributed.agreed(lambda: stack.enter_context(runs.guarded(folder)))
        open_folder(experiment, folder, begin, report, begun=begun if continued else None)
        checkpoints = stack.enter_context(runs.checkpoints(folder, keep=config.keep, report=report))
        saved = Resumable(checkpoints, data, Sums())
        start, state = saved.restore(program) if begun else saved.first(program, begin, experiment)
        if continued:
            distributed.agreed(lambda: changes.take_over(folder, experiment, start, report))
        if begun:
            report(f"continuing {folder} from step {start} of {last}")
        taken = range(start + 1, last + 1)
        begin = begin._replace(params=None)  # Else the first parameters would stay in memory.
        if start < last:
            report("\n".join([messages.begins(experiment, folder), *read]))
        metrics = stack.enter_context(open_metrics(experiment, folder, start, saved.sums))
        trace = stack.enter_context(open_trace(folder, profile, taken, report))
        clock.lap("to start")
        trainer = Trainer(experiment, folder, sharding, program.step, begin.frozen, saved, metrics)
        state = trainer.run(taken, state, trace, signals, report)
        clock.lap("to train")
        checkpoints.wait()
        if experiment.adapt and experiment.adapt.trains:
            report_adapter(folder, begin, state.params, report)
        clock.lap("to save")
        report(messages.ended(folder, last, metrics.last, clock))


def open_data(experiment: Experiment, sharding: Sharding | None) -> Any:
    """Opens the iterator of training batches, which gives each process its share.

    Raises:
      ValueError: if the processes do not read the same text.
    """
    share = (0, 1) if sharding is None else sharding.share()
    data = iter(experiment.task.dataset(experiment.seed, experiment.train.batch_size, *share))
    position = json.dumps(data.get_state())
    distributed.require_same(position, "not all processes would train on the same text")
    return data


def open_folder(
    experiment: Experiment, folder: Path, begin: runs.Start, report: Report, *, begun: bool | None
) -> None:
    """Makes the run's folder, or checks that it has not changed.

    Args:
      experiment: what is trained.
      folder: the run's, guarded.
      begin: where training begins.
      report: called with what was adapted.
      begun: whether the run that is there has trained; None: there is none.

    Raises:
      ValueError: if another process used it meanwhile, or not all see the same folder.
    """
    if begun is not None:
        distributed.agreed(lambda: runs.require_begun(folder, begun))
    else:
        made = begin.adapted.base if begin.adapted else None
        distributed.agreed(lambda: runs.create(folder, experiment, made))
        if begin.adapted:
            report(begin.describe())
    problem = f"not all processes have the same folder {folder}: it must be shared"
    distributed.require_same(runs.seen(folder), problem)


def open_trace(folder: Path, profile: range | None, taken: range, report: Report) -> ProfilerTrace:
    """Returns the trace of some steps; reports if none will be taken, as after a restart."""
    if profile and max(profile.start, taken.start) >= min(profile.stop, taken.stop):
        report(f"no trace: none of the steps {profile[0]} to {profile[-1]} will be taken")
    return ProfilerTrace(folder / "profile", profile)


class Resumable(NamedTuple):
    """The parts of a checkpoint besides the state, and where they are saved.

    Attributes:
      checkpoints: of the run.
      data: the iterator of batches.
      sums: of the next line of metrics.
    """

    checkpoints: Checkpoints
    data: Any
    sums: Sums

    def save(self, step: int, state: TrainState) -> None:
        """Saves in the background."""
        self.checkpoints.save(step, state, self.data, self.sums)

    def restore(self, program: StepProgram) -> tuple[int, TrainState]:
        """Restores the newest intact checkpoint's step and state; later ones no longer count."""
        start, state = self.checkpoints.restore(program.template, self.data, self.sums)
        self.checkpoints.forget_after(start)
        return start, state

    def first(
        self, program: StepProgram, begin: runs.Start, experiment: Experiment
    ) -> tuple[int, TrainState]:
        """Saves and returns step 0 and the state before training."""
        seed = np.asarray(jax.random.key_data(jax.random.key(experiment.seed)))
        compile_in_turn(program.initial.lower(begin.params, seed))
        state = program.initial(begin.params, seed)
        self.save(0, state)
        self.checkpoints.wait()  # From now on, a run without checkpoints has lost them.
        return 0, state


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The steps of a training.

    Attributes:
      experiment: what is trained.
      folder: the run's.
      sharding: of :func:`build_sharding`.
      step: one optimiser step (:func:`train.training.step.make_step`).
      frozen: the parameters that do not train, or None.
      saved: where checkpoints go, and the batches.
      metrics: where the numbers of each step go.
    """

    experiment: Experiment
    folder: Path
    sharding: Sharding | None
    step: jax.stages.Wrapped
    frozen: Any
    saved: Resumable
    metrics: Metrics

    def run(
        self,
        steps: range,
        state: TrainState,
        trace: ProfilerTrace,
        signals: Signals,
        report: Report,
    ) -> TrainState:
        """Takes all steps, saves during and after them, and returns the last state.

        Raises:
          Stopped: after saving, on a signal; or when a number is not finite.
        """
        checkpoints, save_every = self.saved.checkpoints, self.experiment.train.save_every
        held_out = None
        if steps:
            held_out = HeldOut.of(self.experiment, self.sharding, self.frozen, report)
        try:
            for step in steps:
                trace.before(step, state)
                batch = next(self.saved.data)
                if self.sharding is not None:
                    batch = self.sharding.place(batch)
                if step == steps.start:
                    self._compile(state, batch, report)
                state, values = self.step(state, batch, self.frozen)
                self.metrics.record(step, values)
                stop = signals.received or (signal.SIGTERM if distributed.preempted(step) else 0)
                if stop or step % save_every == 0 or step == steps[-1]:
                    self.metrics.flush()
                    if not all_finite(state):
                        raise NonFiniteError(step, "a parameter or its moments")
                    self.saved.save(step, state)
                    if held_out and not stop:
                        report(held_out.describe(step, state.params))
                if stop:
                    checkpoints.wait_for_all()
                    raise messages.interrupted(self.folder, self.experiment.task, step, stop)
        except NonFiniteError as error:
            checkpoints.wait_for_all()
            raise messages.diverged(self.folder, checkpoints.steps()[-1], error) from error
        return state

    def _compile(self, state: TrainState, batch: Any, report: Report) -> None:
        """Compiles the step, and reports its attention implementation."""
        with recorded_plans() as plans:
            lowered = self.step.lower(state, batch, self.frozen)
        report(messages.describe_attention(plans))
        compile_in_turn(lowered)


def report_adapter(folder: Path, begin: runs.Start, params: Any, report: Report) -> None:
    """Writes an adapted run's trained parameters, if safetensors is installed."""
    try:
        report(f"written: {runs.write_adapter(folder, begin, params)}")
    except NotImplementedError as reason:
        report(f"no adapter file: {reason}")


def measure_attention(
    experiment: Experiment, sharding: Sharding | None, report: Report, *, tune: bool
) -> None:
    """Measures attention on an accelerator without measurements for a training's calls.

    That takes a minute at most, apart from a compilation that was begun. It is measured with and
    without a state for every encoding, so that trainings of one comparison need the same. All
    processes use the first one's measurements.

    Args:
      experiment: what is trained.
      sharding: of :func:`build_sharding`.
      report: called with each action.
      tune: whether to measure; if not, only known measurements are shared.
    """
    model, train = experiment.model, experiment.train
    if model.attention_implementation is not None:
        return
    if tune and jax.default_backend() != "cpu" and distributed.is_main():
        copies, parts = (1, 1) if sharding is None else map(sharding.shards, ("batch", "heads"))
        heads = max(1, model.num_heads // parts)
        rows, length = experiment.batch_shape
        tuning.prepare(
            head_dim=model.dim,
            length=length,
            dtype=model.dtype,
            batch=max(1, rows // train.accumulate // copies),
            num_heads=heads,
            num_kv_heads=max(1, heads * model.kv_heads // model.num_heads),
            report=report,
        )
    tuning.agree()


def open_metrics(experiment: Experiment, folder: Path, start: int, sums: Sums) -> Metrics:
    """Opens the outputs of a training that continues from a step."""
    return Metrics(
        folder,
        experiment.steps,
        start,
        describe_work(experiment),
        experiment.train.log_every,
        sums=sums,
        write=distributed.is_main(),
        patience=experiment.train.skip,
    )


@contextlib.contextmanager
def abandonable(folder: Path, task: Task) -> Iterator[None]:
    """Reports what is saved if Ctrl-C ends a training at once, after this block's cleanup."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(messages.abandoned(folder, task), 128 + signal.SIGINT) from None


def prepared(experiment: Experiment, *, strict: bool) -> list[str]:
    """Returns the line on what the task will read or ask, if there is one.

    Args:
      experiment: what is trained.
      strict: whether it is an error if something is missing; if not, the line says so.

    Raises:
      ValueError: if something is missing that training or evaluation needs, or the model does not
        take it.
    """
    longest, limit = experiment.task.sequence_length, runs.max_length(experiment.model)
    require(
        experiment.steps == 0 or fits(longest, limit),
        f"the training sequences have {longest} tokens, but the model accepts at most {limit}: "
        "its max_length, or what its position encoding is made for, must be greater, or the task "
        "smaller",
    )
    prepare = getattr(experiment.task, "prepare", None)
    if prepare is None:
        return []
    try:
        return [prepare(experiment.evaluation, limit)]
    except ValueError as error:
        if strict:
            raise
        return [f"it cannot be evaluated: {error}"]


class StepProgram(NamedTuple):
    """The jitted functions of a training, and the template of its state.

    Attributes:
      initial: the state before the first step, from the parameters that train (None: random ones)
        and a raw random key.
      step: one optimiser step (:func:`train.training.step.make_step`).
      template: shapes, types and places of a state.
    """

    initial: jax.stages.Wrapped
    step: jax.stages.Wrapped
    template: Any


def build_program(experiment: Experiment, params: Any, sharding: Sharding | None) -> StepProgram:
    """Builds the jitted functions that train an experiment, and the template of its state.

    Args:
      experiment: what is trained.
      params: those that train, or their shapes; None: random ones.
      sharding: of :func:`build_sharding`.
    """
    optimizer = make_optimizer(experiment.train)
    initial = functools.partial(init_state, experiment, optimizer)
    template = jax.eval_shape(initial, params)
    model, places = Transformer(experiment.model), None
    if sharding is not None:
        model = Transformer(experiment.model, sharding=sharding)
        places = sharding.of(model, template)
        template = runs.placed(template, places)
    step = make_step(model, optimizer, experiment.train, places)
    return StepProgram(jax.jit(initial, out_shardings=places), step, template)


def build_sharding(experiment: Experiment, report: Report) -> Sharding | None:
    """Builds an experiment's mesh on the devices of this machine; None: one device.

    Raises:
      ValueError: if it does not fit the devices, the model or the batch.
    """
    count = jax.device_count()
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
    rows, length = experiment.batch_shape
    size = rows // experiment.train.accumulate
    sharding.check(Transformer(experiment.model), batch_size=size, length=length)
    return sharding


def describe_work(experiment: Experiment) -> Work:
    """Returns the work of a step, and the peak rate of the devices that train."""
    rate = peak(jax.devices()[0].device_kind, experiment.model.dtype)
    count = jax.device_count() if experiment.sharding else 1
    return Work(
        experiment.train.batch_size * experiment.task.sequence_length,
        step_flops(experiment),
        rate and rate * count,
    )
