"""Python source as bytes, in minutes on a laptop: perplexity to eight times the trained length.

Claim: trained on 128 bytes, ALiBi keeps its perplexity of held-out text at 1,024; those of TAPE and
RoPE, lower than its at the trained length, rise beyond it unless attention is limited to 128 bytes.
After so short a training TAPE is not better than RoPE (one seed).
Cost: 19 minutes of processor time for four trainings and evaluations, shared by two cores.
Command:
    python -m train.main compare --config=configs/bytes_demo.py --run=runs/bytes_demo \
        --encodings=tape,rope,alibi,sinusoidal
The text is the Python standard library of the interpreter that runs it; any other is one option:
    --config.task.source='books/**/*.txt'
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Fields that differ from the defaults of :mod:`train.experiment`."""
    return ConfigDict(
        {
            "name": "bytes demo",
            "seed": 0,
            "task": {"name": "text", "source": "stdlib", "sequence_length": 128},
            "model": {
                "hidden_size": 128,
                "num_layers": 3,
                "num_heads": 4,
                "intermediate_size": 256,
                "position": {"kind": "tape"},
            },
            "train": {
                "steps": 1000,
                "batch_size": 16,
                "learning_rate": 2e-3,
                "schedule": "cosine",
                "warmup": 0.05,
                "save_every": 500,
            },
            "evaluation": {"tokens": 32_768},
        }
    )
