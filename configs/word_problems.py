r"""How deep must a model be to follow a group? Minutes on a laptop for each group and depth.

Words of three generators of Z60, A4xZ5, A5 or S5, trained to 12 and asked to 48.

Claim: every group is learned at short lengths, and for all but Z60 more layers follow longer words;
which encoding needs fewer is for the report to show. Measured with one seed, too few to tell
differences from chance: the greatest length at which at least 90 % of the words are followed to
their end. With one layer TAPE is RoPE.
    layers          1           2           3           4
                  both  TAPE RoPE   TAPE RoPE   TAPE RoPE
    Z60             12    12   12      -    -     12   12
    A4xZ5            6     7    7      7    8      8    8
    A5               5     7    7     10    9     12   12
    S5               6     8    8     10   10     11   11
Of 13 elements, one more than trained, at most 77 % are followed (A5, TAPE, 4 layers), of 18 or more
next to none. Up to 8 elements there are too few words to hold any out of training.
Cost: in seconds of one core, with evaluation, 25 for one layer; for two to four, TAPE 40 to 120 and
RoPE 50 to 75. Other work kept the cores busy.
Command: for each group and depth
    python -m train.main compare --config=configs/word_problems.py --run=runs/words/A5-4 \
        --encodings=tape,rope --seeds=3 --config.task.group=A5 --config.model.num_layers=4
and then the smallest depth that follows each length:
    python -c "from pathlib import Path; from train.results import smallest_depths; \
        print(smallest_depths(Path('runs/words')))"
"""

from typing import Any

from ml_collections import ConfigDict

# Not run yet.
SCALES: dict[str, dict[str, Any]] = {
    "gpu": {
        "task.max_length": 32,
        "model.hidden_size": 512,
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
            "name": "word problems",
            "seed": 0,
            "task": {"name": "words", "group": "A5", "max_length": 12, "generators": 3},
            "model": {
                "hidden_size": 64,
                "num_layers": 4,
                "num_heads": 4,
                "intermediate_size": 128,
                "position": {"kind": "tape"},
            },
            "train": {
                "steps": 2000,
                "batch_size": 128,
                "learning_rate": 3e-3,
                "schedule": "cosine",
                "warmup": 0.05,
                "save_every": 500,
            },
        }
    )
