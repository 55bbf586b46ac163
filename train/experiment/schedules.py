"""Learning-rate schedules by name: a linear warm-up, then one of four decays."""

from __future__ import annotations

import optax

from train.checks import choose, require

DECAYS = ("constant", "linear", "polynomial", "cosine")


def create(
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
    require(peak > 0, f"schedule: the peak learning rate must be positive; got {peak}")
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
