"""What the updates of a trained TAPE are for: how far states move, what is lost without them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tape_jax._src.core.checks import require
from tape_jax._src.model.decoder import Transformer
from train.analysis.inspection import examples
from train.evaluation import Trained
from train.evaluation.inside import look, untrained
from train.training import runs
from train.training.step import Batch, weighted_loss

# Examples of the task, drawn with a seed of their own: for losses, and to look at.
EXAMPLES, LOOKED_AT = 64, 8
SIZES = {"examples": EXAMPLES, "looked_at": LOOKED_AT}


def measure(folder: Path) -> dict[str, Any]:
    """What the updates of a finished run are for, in JSON types.

    Args:
      folder: of the run.

    Returns:
      ``moved``: how far the states that enter each layer are from their start, over its norm.
      ``without``: the scores with every update as before training. ``loss``, ``loss_without``: in
      nats, as trained and so. ``lost``: by layer that updates, by how much the loss rises without
      its update alone.

    Raises:
      ValueError: its encoding has learned nothing.
    """
    trained = runs.restore_for_evaluation(folder)
    e, variables = trained.experiment, trained.variables
    batch = examples(e, EXAMPLES)
    tokens = np.asarray(batch["inputs"])[:LOOKED_AT]
    inside = look(trained.model, variables, tokens, [[""] * tokens.shape[1]] * len(tokens))
    without = untrained(trained)
    require(without is not None, f"{folder}: its encoding has learned no update")
    assert without is not None
    loss = functools.partial(_loss, trained, batch=batch)
    as_trained = loss(variables)
    cut_off = e.task.evaluate(without, e.evaluation).summary()
    return {
        "moved": inside.moved.tolist(),
        "without": finite(cut_off),
        "loss": as_trained,
        "loss_without": loss(without.variables),
        "lost": [
            loss(without_layer(trained.model, variables, n, without.variables)) - as_trained
            for n in updating(trained.model)
        ],
    }


def without_layer(model: Transformer, variables: Any, layer: int, before: Any) -> Any:
    """The variables of a model, with one layer as in others, from before training."""
    start = next(first for first, last, _ in model.blocks if first <= layer < last)
    block, params = f"layers_{start}", variables["params"]
    ours, theirs = params[block], before["params"][block]
    if model.config.scan_layers:
        here = layer - start
        theirs = jax.tree.map(lambda x, y: x.at[here].set(y[here]), ours, theirs)
    return {**variables, "params": {**params, block: theirs}}


def updating(model: Transformer) -> list[int]:
    """The layers of a model that update states."""
    return [n for first, last, updates in model.blocks if updates for n in range(first, last)]


def finite(summary: Mapping[str, float]) -> dict[str, float]:
    """Those scores that are numbers."""
    return {key: x for key, x in summary.items() if math.isfinite(x)}


def _loss(trained: Trained, variables: Any, *, batch: Batch) -> float:
    """The mean loss over the tokens that count, in nats."""
    logits: Any = trained.apply(variables, batch["inputs"])
    total = weighted_loss(logits, batch["targets"], batch["weights"])
    return float(total / batch["weights"].sum())
