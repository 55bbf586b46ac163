"""Context extension in minutes on a laptop: bytes and passkeys from 64 to 128 tokens.

Claim: 150 steps of any method bring perplexity at twice the base's length below that of the base
and of the base with scaled frequencies. At four times its length, only the larger rotary base
keeps it. TAPE is not ahead at this size. Measured, perplexity at 64, 128 and 256 bytes, mean of
three seeds, TAPE with attention_mix="head_scale": base 4.05, 10.83, 16.00; scaled 7.29, 7.39,
14.00; TAPE 5.50, 5.53, 10.59; LoRA 4.58, 4.61, 15.51; LongLoRA 4.69, 4.76, 15.58; theta 4.79, 4.82,
5.04; full 4.51, 4.54, 17.03. docs/experiments.md has the passkeys, and says what one base and one
learning rate for all can and cannot show. From five bases, with tuned rates (research/evidence.md),
the claim is contradicted: perplexity at 128 bytes TAPE 5.04, with the published code's mixing 5.01,
LoRA 4.33, LongLoRA 4.52, theta 4.48, full 4.20; passkeys there show no clear difference.
Cost: 16 minutes of processor time for the base and the 21 runs, on cores that other work kept busy.
Command: first the base, a RoPE model that learns Python source and short passkeys side by side,
    python -m train.main train --config=configs/bytes_demo.py --run=runs/short \
        --config.model.position.kind=rope --config.task.sequence_length=64 \
        --config.task.passkeys=0.5 --config.task.passkey_form=short \
        --config.train.steps=1200 --config.train.batch_size=32
and then
    python -m train.main compare --config=configs/context_extension_demo.py --run=runs/longer_demo \
        --methods=base,scaled,tape,lora,longlora,theta,full --seeds=3
"""

from typing import Any

from ml_collections import ConfigDict

from configs import context_extension

# From 512 to 1,024 bytes.
SCALES: dict[str, dict[str, Any]] = {
    "gpu": {
        "task.sequence_length": 1024,
        "train.steps": 1000,
        "train.batch_size": 64,
        "train.save_every": 250,
        "evaluation.lengths": (512, 1024, 2048),
        "evaluation.stride": 256,
        "evaluation.tokens": 262_144,
        "evaluation.passkey_lengths": (512, 1024, 2048),
    }
}


def get_config() -> ConfigDict:
    """Fields that differ from the defaults of :mod:`train.experiment`."""
    config = context_extension.get_config()
    config.name = "context extension demo"
    config.adapt.base = "runs/short"
    config.task = {
        "name": "text",
        "source": "stdlib",
        "sequence_length": 128,
        "passkeys": 0.5,
        "passkey_form": "short",
    }
    config.model = {}
    config.train.update(
        {"steps": 150, "batch_size": 16, "accumulate": 1, "learning_rate": 1e-3, "save_every": 150}
    )
    config.evaluation.update(
        {
            "lengths": (64, 128, 256),
            "stride": 32,
            "tokens": 16_384,
            "passkey_lengths": (64, 128, 256),
            "passkey_trials": 10,
        }
    )
    return config
