"""What is kept of a training, and which scores its result may lack."""

from __future__ import annotations

import math
import re
from typing import Any

from train.compare import evaluations, sweep
from train.compare.processes import Ended
from train.evaluation import fits
from train.experiment import Experiment
from train.training import metrics
from train.training.signals import NON_FINITE_EXIT_CODE

# Losses of a run that a record keeps at most.
MOST_LOSSES = 50
# At the end of a score's key: at so many times the trained length.
TIMES = re.compile(r"_([\d.]+)x$")


def kept(ended: Ended, *, validated: bool) -> dict[str, Any]:
    """What is kept of a training, which was validated, or evaluated by the test."""
    folder = ended.job.folder
    lines = metrics.read(folder / "metrics.jsonl")
    every = max(1, -(-len(lines) // MOST_LOSSES))
    found: dict[str, Any] = {
        "result": None,
        "diverged": None,
        "losses": [[line["step"], line["loss"]] for line in lines[::-every][::-1]],
    }
    if ended.code == NON_FINITE_EXIT_CODE:
        return found | {"diverged": {"step": lines[-1]["step"] if lines else 0}}
    if validated:
        return found | {"result": sweep.validate(folder).to_json()}
    record = evaluations.saved(folder)
    assert record is not None
    return found | {"result": record["result"]}


def takes(e: Experiment, key: str) -> bool:
    """Whether a model takes the length of a score.

    Lengths beyond the trained one, of which a key says no more, begin before its double.
    """
    limits = (e.model.max_length, e.model.position.max_length())
    limit = min((one for one in limits if one is not None), default=None)
    found = TIMES.search(key)
    times = float(found[1]) if found else 2 if key.endswith("_outside") else 1
    return fits(math.ceil(times * e.task.sequence_length), limit)
