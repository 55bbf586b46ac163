"""Addition with the paper's recipe and size (TAPE, section 5.1 and Table 5).

Claim: TAPE generalises better than RoPE, random RoPE, FIRE and no encoding to operands longer than
those of training. The paper's figures come from code in which position states do not reach the
output (docs/differences.md); this is the experiment that the paper describes. At the size of
configs/addition_demo.py TAPE does not differ clearly from any rival (research/evidence.md).
Cost: not measured.
Command:
    python -m train.main train --config=configs/addition.py --run=runs/addition --evaluate
The published data has operands of up to 20 digits, but the paper's title for it says 40:
    --config.task.max_digits=20
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Fields that differ from the defaults of :mod:`train.experiment`."""
    return ConfigDict(
        {
            "name": "addition",
            "seed": 0,
            "task": {"name": "addition", "max_digits": 40},
            "model": {
                "hidden_size": 1024,
                "num_layers": 16,
                "num_heads": 16,
                "intermediate_size": 2048,
                "dtype": "bfloat16",
                "position": {"kind": "tape", "width": 64},
            },
            "train": {
                "steps": 20_000,
                "batch_size": 512,
                "learning_rate": 1e-4,
                "schedule": "linear",
                "warmup": 0.02,
                "weight_decay": 0.01,
                "log_every": 20,
            },
        }
    )
