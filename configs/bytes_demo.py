"""Python source as bytes, in minutes on a laptop: perplexity up to eight times the trained length.

Claim: trained on 128 bytes, ALiBi has the lowest perplexity of held-out text at 1,024 bytes. TAPE
and RoPE are lower at the trained length, and rise beyond it unless attention is limited to 128
bytes. After this short training TAPE and RoPE do not differ significantly. Measured, mean of three
seeds at 128 and 1,024 bytes, TAPE with attention_mix="head_scale": TAPE 4.47 and 10.4, RoPE 4.50
and 9.9, ALiBi 4.93 and 4.86, sinusoidal 7.29 and 31.5. All share one learning rate, and training is
too short to tell encodings apart. With four times the steps, tuned learning rates and five seeds
(research/protocol.md, research/evidence.md) TAPE with ALiBi's bias has the lowest perplexity at the
trained length, 3.208: RoPE with that bias 3.222, TAPE 3.294, RoPE 3.309, ALiBi 3.493. Without that
bias TAPE does not differ significantly from RoPE. At eight times that length, with rates chosen
there, TAPE with the bias has 3.250 and RoPE with it 3.307, no significant difference; ALiBi 3.369,
RoPE 10.6, and TAPE 11.3, clearly worse than RoPE.
Cost: 10.6 minutes on 2 idle cores for the twelve trainings and evaluations.
Command: make compare-demo, which is
    python -m train.main compare --config=configs/bytes_demo.py --run=runs/bytes_demo \
        --encodings=tape,rope,alibi,sinusoidal --seeds=3
The text is the running interpreter's standard library; one option changes it:
    --config.task.source='books/**/*.txt'
"""

from typing import Any

from ml_collections import ConfigDict

SCALES: dict[str, dict[str, Any]] = {
    "gpu": {
        "task.sequence_length": 1024,
        "model.hidden_size": 768,
        "model.num_layers": 12,
        "model.num_heads": 12,
        "model.intermediate_size": 3072,
        "model.dtype": "bfloat16",
        "train.steps": 10_000,
        "train.batch_size": 64,
        "train.save_every": 1000,
        "evaluation.tokens": 262_144,
    }
}


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
                "steps": 350,
                "batch_size": 16,
                "learning_rate": 2e-3,
                "schedule": "cosine",
                "warmup": 0.05,
                "save_every": 175,
            },
            "evaluation": {"tokens": 16_384},
        }
    )
