"""The fields that may change when a run is continued, and what a change means."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tape_jax.positions import Encoding
from train.checks import require
from train.experiment import Experiment, changed_fields, differences
from train.training import runs
from train.training.checkpoint import Report

# A run's name, evaluation, devices, and when it writes what: no trained number depends on these
# fields.
FREE = (
    *("name", "evaluation", "sharding", "task.cache"),
    *("train.log_every", "train.save_every", "train.keep", "adapt.replace_scaling"),
)
LONGER = (*FREE, "train.steps")
# These belong to a call, not to the run.
NOT_KEPT = ("evaluation", "sharding")


def check_same(folder: Path, experiment: Experiment, free: Sequence[str] = FREE) -> None:
    """Raises ValueError, naming fields and values, unless a run has this experiment.

    Args:
      folder: of the run.
      experiment: as it is to be continued.
      free: fields, or groups of them, that may differ.
    """
    before = runs.load(folder)
    different = [
        difference
        for name, difference in zip(
            changed_fields(before, experiment), differences(before, experiment), strict=True
        )
        if not _within(name, free)
    ]
    require(
        not different,
        f"the run {folder} was started with another experiment ({'; '.join(different)}). Of a run "
        f"that is continued, {', '.join(free)} may change; leave the rest as it was, or choose "
        "another --run",
    )


def describe(before: Experiment, now: Experiment, step: int) -> list[str]:
    """Describes the changes, and the effect of a different number of steps on the learning rate.

    Args:
      before: the experiment as the run has recorded it.
      now: as it is continued.
      step: at which.

    Raises:
      ValueError: the run has gone further than it is to go.
    """
    require(
        now.steps >= step,
        f"train.steps = {now.steps}: the run has already taken {step} steps",
    )
    changed = _kept(before, now)
    lines = [f"from step {step} on: {name} {a!r} -> {b!r}" for name, (a, b) in changed.items()]
    if "train.steps" in changed:
        old, new = before.train.learning_rates, now.train.learning_rates
        taken = np.arange(step + 1)
        then, since = (np.broadcast_to(rate(taken), taken.shape) for rate in (old, new))
        if np.array_equal(then, since):
            lines.append("the learning rate has been that of a training of so many steps")
        else:
            lines.append(
                f"the schedule {now.train.schedule!r} now spans {now.train.steps} steps: the "
                f"learning rate goes from {then[-1]:.3g} to {since[-1]:.3g} here, and a training "
                "of so many steps would have had another one before"
            )
        for encoding in now.model.position.members:
            if type(encoding).loss is not Encoding.loss:
                lines.append(
                    f"what {encoding.kind!r} adds to the loss may depend on the share of steps "
                    f"done, now of {now.train.steps}"
                )
    return lines


def take_over(folder: Path, now: Experiment, step: int, report: Report) -> None:
    """Records the fields that differ from this step on in a run's record.

    Args:
      folder: of the run, which passes :func:`check_same`.
      now: the experiment as it is continued.
      step: at which.
      report: called with a sentence about each change.

    Raises:
      ValueError: the run has gone further than it is to go.
    """
    before = runs.load(folder)
    for line in describe(before, now, step):
        report(line)
    changed = _kept(before, now)
    if changed:
        kept = {name: getattr(before, name) for name in NOT_KEPT}
        runs.rewrite(folder, dataclasses.replace(now, **kept), {"step": step, **changed})


def _kept(before: Experiment, now: Experiment) -> dict[str, tuple]:
    """Returns the differing fields that the run takes over, with both values."""
    found = changed_fields(before, now)
    return {name: values for name, values in found.items() if not _within(name, NOT_KEPT)}


def _within(name: str, groups: Sequence[str]) -> bool:
    return any(name == group or name.startswith(f"{group}.") for group in groups)
