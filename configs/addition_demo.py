"""Addition in a few minutes on a laptop: TAPE against RoPE, up to twice the trained length.

Claim: trained on sums of numbers with up to 5 digits, TAPE answers at least 99 % of unseen sums of
that size. The report shows what each does with longer ones. In research/evidence.md TAPE does not
differ clearly from any rival there: none exceeds 5 % on average. Learning rates were chosen by
those longer sums; with them most do not learn the trained lengths fully.
Cost: under 2 minutes for both trainings and evaluations on 2 idle cores, 3.5 minutes of processor
time; 6 minutes on cores that other work keeps busy.
Command: make addition-demo, which is
    python -m train.main compare --config=configs/addition_demo.py --run=runs/addition_demo \
        --encodings=tape,rope
"""

from typing import Any

from ml_collections import ConfigDict

# The size of configs/addition.py.
SCALES: dict[str, dict[str, Any]] = {
    "gpu": {
        "task.max_digits": 40,
        "model.hidden_size": 1024,
        "model.num_layers": 16,
        "model.num_heads": 16,
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
            "name": "addition demo",
            "seed": 0,
            "task": {"name": "addition", "max_digits": 5},
            "model": {
                "hidden_size": 64,
                "num_layers": 3,
                "num_heads": 4,
                "intermediate_size": 128,
                "position": {"kind": "tape"},
            },
            "train": {
                "steps": 3000,
                "batch_size": 64,
                "learning_rate": 3e-3,
                "schedule": "cosine",
                "warmup": 0.05,
                "save_every": 500,
            },
        }
    )
