r"""Tasks in which a place must be found by content, at one size for every encoding.

Each is trained on short texts and asked about texts of up to twice the length; the texts of
train/tasks say what an encoding would need for it.

Claim: none beforehand. research/protocol.md says how encodings are compared, research/places.md
what came out.
Cost: about a minute of one core for a training with its evaluation, as judged there; PaTH and CoPE
take twice as long.
Command: for all tasks that are judged, make evidence-places, which is
    python -m research.main evidence --suite=places
and for one task (address, counting, flip_flop, line_numbers, navigation, recall,
selective_copy or table, with its own default size) and some encodings
    python -m research.main compare --config=research/configs/places.py --run=runs/table_demo \
        --encodings=tape+alibi,rope+alibi --config.task.name=table
and for what may help TAPE beyond the trained lengths
    python -m research.main compare --config=research/configs/places.py --run=runs/remedies \
        --variants=all --config.task.name=counting
"""

from typing import Any

from ml_collections import ConfigDict

# By name, the options of the tasks that research/protocol.md judges, if they are not the
# defaults.
TASKS: dict[str, dict[str, Any]] = {
    # As in configs/addressing_demo.py.
    "address": {"offsets": 8, "symbols": 32, "shortest": 10, "longest": 16, "questions": 16},
    "table": {"rows": 4, "columns": 4},
    "navigation": {},
    "line_numbers": {},
    "flip_flop": {},
    "recall": {},
    "counting": {},
    "selective_copy": {},
}

# The form of make demo, and what may help it beyond the trained lengths, one at a time; one is
# chosen by tasks other than those above (research/protocol.md).
_BASE: dict[str, Any] = {
    "model.position.kind": "tape+alibi",
    "model.position.attention_mix": "heads",
    "model.position.alpha": 8.0,
    "model.position.norm": "rms",
}
_DRAWN = {"model.random_positions.range": 256}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": _BASE,
    "plain": {**_BASE, "model.position.alpha": 1.0, "model.position.norm": "none"},
    "no_bias": {**_BASE, "model.position.kind": "tape"},
    "fire": {**_BASE, "model.position.kind": "tape+fire"},
    "fox": {**_BASE, "model.position.kind": "tape+fox"},
    "on_heads": {**_BASE, "model.position.on_heads": 2},
    "partial": {**_BASE, "model.position.partial_rotary_factor": 0.5},
    "still_heads": {**_BASE, "model.position.still_heads": 2},
    "head_shift": {**_BASE, "model.position.head_shift": 1.0},
    "degree": {**_BASE, "model.position.degree": 3},
    "shift_degree": {**_BASE, "model.position.head_shift": 1.0, "model.position.degree": 3},
    "spaced": {**_BASE, "model.random_positions.kind": "spaced", **_DRAWN},
    "stretched": {**_BASE, "model.random_positions.kind": "stretched", **_DRAWN},
    # Without the update.
    "rope": {"model.position.kind": "rope+alibi"},
}
# The best of them beyond the trained lengths, and the same without any update.
CHOSEN: dict[str, Any] = VARIANTS["stretched"]
NO_UPDATE: dict[str, Any] = {
    **CHOSEN,
    "model.position.attention_mix": "none",
    "model.position.mlp_mix": False,
    "model.position.degree": 1,
}

# Not run yet.
SCALES: dict[str, dict[str, Any]] = {
    "gpu": {
        "model.hidden_size": 512,
        "model.num_layers": 6,
        "model.num_heads": 8,
        "model.intermediate_size": 2048,
        "model.dtype": "bfloat16",
        "train.steps": 20_000,
        "train.batch_size": 512,
        "train.save_every": 1000,
    }
}


def get_config() -> ConfigDict:
    """Fields that differ from the defaults of :mod:`train.experiment`."""
    return ConfigDict(
        {
            "name": "places",
            "seed": 0,
            "task": {"name": "address"},
            "model": {
                "hidden_size": 64,
                "num_layers": 3,
                "num_heads": 4,
                "intermediate_size": 128,
                "position": {"kind": "tape"},
            },
            "train": {
                "steps": 1000,
                "batch_size": 32,
                "learning_rate": 3e-3,
                # As for the demo of addressing: high until shortly before the end.
                "schedule": "polynomial",
                "power": 0.3,
                "warmup": 0.05,
                "beta2": 0.95,
                "weight_decay": 0.1,
                "save_every": 1000,
            },
        }
    )
