"""The messages of a training: what it is about to do, how it ended, and how to go on."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from tape_jax import AttentionPlan
from train import tasks
from train.experiment import Experiment
from train.tasks import Task
from train.training import runs
from train.training.metrics import Clock, NonFiniteError
from train.training.signals import NON_FINITE_EXIT_CODE, Stopped


def program(task: Task) -> str:
    """Returns the command line for a task, from this folder in this Python."""
    main = tasks.program(task)
    if shutil.which("python") == sys.executable:
        return f"python -m {main}"
    path = Path(sys.executable)
    near = path.is_relative_to(Path.cwd())
    return f"{shlex.quote(str(path.relative_to(Path.cwd()) if near else path))} -m {main}"


def begins(experiment: Experiment, folder: Path) -> str:
    """Returns the line that announces a training: model, steps, tokens, devices and folder."""
    parameters, trained = runs.count_parameters(experiment)
    size = f"{parameters:,} parameters"
    if trained < parameters:
        size += f", of which {trained:,} train"
    count = jax.device_count() if experiment.sharding else 1
    device = jax.devices()[0]
    rows, length = experiment.batch_shape
    return (
        f"{experiment.label}: {size}; {experiment.steps:,} steps of {rows:,} x "
        f"{length:,} tokens on {count} x {device.device_kind}, in {folder}"
    )


def ended(folder: Path, steps: int, values: Mapping[str, float], clock: Clock) -> str:
    """Returns the line that reports a finished training."""
    loss = f", loss {values['loss']:.4f}" if "loss" in values else ""
    return f"{folder}: {steps:,} steps done{loss}, in {clock}"


def next_commands(folder: Path, experiment: Experiment, *, evaluated: bool = False) -> str:
    """Returns the next commands for a trained run."""
    task = experiment.task
    calls = [] if evaluated else [f"{program(task)} eval --run={_quoted(folder)}"]
    if asking := ask(folder, task):
        calls.append(asking)
    elif hasattr(task, "codec"):
        calls.append(generate(folder, task, "Once upon a time"))
    return "\n".join(["go on with", *(f"  {call}" for call in calls)])


def ask(folder: Path, task: Any) -> str | None:
    """Returns the command that asks a run a question; None if its task takes none."""
    example = getattr(task, "question_example", None)
    return example and f"{program(task)} ask --run={_quoted(folder)} {shlex.quote(example)}"


def generate(folder: Path, task: Task, prompt: str) -> str:
    """Returns the command that continues a prompt."""
    return f"{program(task)} generate --run={_quoted(folder)} --prompt {shlex.quote(prompt)}"


def interrupted(folder: Path, task: Task, step: int, number: int) -> Stopped:
    """Returns the exception for a saved training that a signal has stopped."""
    return Stopped(
        f"stopped by {signal.Signals(number).name} after step {step}, which is saved; to "
        f"continue:\n{_resume(folder, task)}",
        128 + number,
    )


def saving(folder: Path) -> str:
    """Returns the immediate message for a signal that asks a training to end."""
    return f"saving; again to abandon the steps since {_newest(folder)}"


def abandoned(folder: Path, task: Task) -> str:
    """Returns the message on what remains of a training that did not wait for its save."""
    return (
        f"the steps since {_newest(folder)} are abandoned; that step of {folder} is saved, to "
        f"continue:\n{_resume(folder, task)}"
    )


def diverged(folder: Path, saved: int, error: NonFiniteError) -> Stopped:
    """Returns the exception for a number that is not finite; step ``saved`` is the last good."""
    return Stopped(
        f"{error}. The last good checkpoint of {folder} is that of step {saved}. Try a new run "
        "with a smaller --config.train.learning_rate, a longer --config.train.warmup, a smaller "
        "--config.train.clip, --config.train.skip=10 to leave out bad steps, "
        "--config.model.dtype=float32 or, with TAPE, --config.model.position.norm=rms",
        NON_FINITE_EXIT_CODE,
    )


def describe_attention(plans: Sequence[AttentionPlan]) -> str:
    """Names the implementations of attention in the plans of a step, and how they were chosen."""
    taken = {f"{plan.implementation}{_keywords(plan.options)}": plan.basis for plan in plans}
    bases = "; ".join(sorted(set(taken.values()) - {"named", ""}))
    return f"attention: {', '.join(taken)}" + (f" ({bases})" if bases else "")


def _keywords(options: Mapping[str, Any]) -> str:
    """Returns an implementation's options as text after its name."""
    return "".join(f" {name}={value}" for name, value in options.items())


def _newest(folder: Path) -> int:
    """Returns the last saved step; the start can be recomputed."""
    return max(runs.saved_steps(folder), default=0)


def _resume(folder: Path, task: Task) -> str:
    several = "  # in each process, with --distributed as before" if jax.process_count() > 1 else ""
    return f"  {program(task)} train --run={_quoted(folder)} --resume{several}"


def _quoted(folder: Path) -> str:
    return shlex.quote(str(folder))
