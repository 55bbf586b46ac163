r"""How deep must a model be to follow a group? Minutes on a laptop for each group and depth.

Words of three generators of Z60, A4xZ5, A5 or S5, trained to 12 and asked to 48.

Claim: every group is learned at short lengths, and for all but Z60 more layers follow longer
words; whether one encoding needs fewer was left open. Measured with three seeds: the greatest
length at which the best seed follows at least 90 % of the words to their end, TAPE with
attention_mix="head_scale". With one layer it is RoPE.
    layers          1              2                   4
                RoPE none     TAPE RoPE none     TAPE RoPE none
    Z60          12   12       12   12   12       12   12   13
    A4xZ5         6    2        7    7    6        8    9    8
    A5            6    2        7    7    6       13   13    8
    S5            6    2        8    9    8       12   12   10
Models follow next to none of the words of 18 elements or more. Up to 8 elements there are too few
words to hold any out of training.
Cost: in seconds of one core, with evaluation, for one, two and four layers: TAPE 22, 40 and 73,
RoPE 20, 33 and 57, none 20, 31 and 55.
Command: for each group and depth
    python -m research.main compare --config=research/configs/word_problems.py \
        --run=runs/words/A5-4 \
        --encodings=tape,rope --seeds=3 --config.task.group=A5 --config.model.num_layers=4
These numbers are from before research/protocol.md; all are in research/records_before.jsonl.
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
