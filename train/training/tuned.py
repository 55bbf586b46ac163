"""Attention as fast as the machine allows: what a training measures before it begins."""

from __future__ import annotations

import jax

from tape_jax._src.attention.tuning import measure, records
from tape_jax._src.attention.tuning.records import CallShape
from tape_jax.sharding import Sharding
from train.experiment import Experiment
from train.training import distributed
from train.training.checkpoint import Report

SECONDS = 60
MEMORY = 16 * 2.0**30


def prepare(
    experiment: Experiment, sharding: Sharding | None, report: Report, *, tune: bool
) -> None:
    """Measures the shapes of a training on an accelerator that knows none like them.

    That takes a minute at most, apart from a compilation that was begun. All processes go by what
    the first has measured; on the same machine, what another process measures is waited for.

    Args:
      experiment: what is trained.
      sharding: of :func:`train.training.loop.build_sharding`.
      report: called with what is done.
      tune: whether to measure; if not, only what is known is shared.
    """
    if experiment.model.attention_implementation is not None:
        return
    if tune and jax.default_backend() != "cpu" and distributed.is_main():
        _measure(experiment, sharding, report)
    records.agree()


def _measure(experiment: Experiment, sharding: Sharding | None, report: Report) -> None:
    known = records.read()[0] or {}
    wanted = [shape for shape in shapes(experiment, sharding) if not _is_known(shape, known)]
    if not wanted:
        return
    report(
        f"nothing like this was measured on {records.device()}: attention is measured first, for a "
        "minute at most (--no-tune leaves it out; python -m tape_jax.tune does it thoroughly)"
    )
    limits, each = measure.Limits(memory=MEMORY), SECONDS / len(wanted)
    try:
        for shape in wanted:
            measure.tune([shape], seconds=each, limits=limits, say=report)
    except OSError as error:
        report(f"what was measured cannot be kept: {error}")


def shapes(experiment: Experiment, sharding: Sharding | None) -> list[CallShape]:
    """What one device computes in a step, with a state and without.

    Both, whatever the encoding: trainings of one comparison then need the same.
    """
    model, train = experiment.model, experiment.train
    parts = {"batch": 1, "heads": 1}
    if sharding is not None:
        parts = {name: sharding.shards(name) for name in parts}
    heads = max(1, model.num_heads // parts["heads"])
    return [
        CallShape(
            model.dim,
            experiment.task.sequence_length,
            model.dtype,
            state,
            max(1, train.batch_size // train.accumulate // parts["batch"]),
            heads,
            max(1, heads * model.kv_heads // model.num_heads),
        )
        for state in (True, False)
    ]


def _is_known(shape: CallShape, known: records.Table) -> bool:
    """Whether there is a measurement of this head dimension at about this length."""
    near = records.nearest(shape, known)
    return (
        near is not None
        and near.head_dim == shape.head_dim
        and max(near.length, shape.length) <= 2 * min(near.length, shape.length)
    )
