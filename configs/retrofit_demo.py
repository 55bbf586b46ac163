"""A small model of bytes, retrofitted from 512 to 2,048 by rival methods, with all evaluations.

Claim: with five seeds LoRA, ALiBi beside the rotation and TAPE with ALiBi are best, with no
significant difference; plain TAPE is behind (benchmarks/results/2026-11-28-retrofit.md).
Cost: in processor time, 2.3 hours for the base, which --config.adapt.base=examples/byte_llama
saves. A training takes 9 to 22 minutes, an evaluation with RULER 6: about ten hours with five
seeds.
Command: make retrofit, which first trains the base, a RoPE model of two million parameters, on the
sources of installed packages and short passkeys,
    python -m train.main train --config=configs/retrofit_base.py --run=runs/short_base --resume
and then
    python -m train.main compare --config=configs/retrofit_demo.py --run=runs/retrofit \
        --methods=base,scaled,tape,lora,drope,\
rope+alibi:slopes=learned_from_zero,tape+alibi:slopes=learned_from_zero --seeds=5 \
        --suite=ruler:lengths=512,2048:form=short
All methods except base and drope use YaRN's scaling; drope trains at 512 bytes. Called again, the
command continues where it stopped.
"""

from ml_collections import ConfigDict

from configs import context_extension, retrofit_base


def get_config() -> ConfigDict:
    """Fields that differ from the defaults of :mod:`train.experiment`."""
    config = context_extension.get_config()
    config.name = "retrofit demo"
    base = retrofit_base.get_config()
    config.adapt.base = "runs/short_base"
    config.adapt.scaling = {"kind": "yarn", "factor": 4.0, "original_length": 512}
    config.task = {**base.task, "sequence_length": 2048}
    # As the base was trained; the shipped one is stored in bfloat16, which a CPU computes slowly.
    config.model = {"dtype": "float32"}
    config.train.update(
        {
            "steps": 200,
            "batch_size": 4,
            "accumulate": 1,
            "learning_rate": 1e-3,
            "schedule": "cosine",
            "save_every": 50,
        }
    )
    config.evaluation.update(
        {
            "lengths": (512, 2048),
            "stride": 512,
            "tokens": 65_536,
            "passkey_lengths": (512, 2048),
            "passkey_depths": 5,
            "passkey_trials": 10,
        }
    )
    return config
