"""Llama 2 7B from 4,096 to 8,192 tokens with the paper's recipe (TAPE, Table 5).

Claim: tuned for 1,000 steps on sequences of twice the trained length, the model with TAPE in place
of RoPE has a lower perplexity up to 8,192 tokens than the one with LoRA, LongLoRA or another rotary
base, and finds more passkeys. At the size of
configs/context_extension_demo.py perplexity contradicts it (research/evidence.md).
Cost: not measured; the recipe has not been run here.
Command:
    python -m train.main compare --config=configs/context_extension.py --run=runs/longer \
        --methods=base,tape,lora,longlora,theta --config.adapt.base=llama-2-7b \
        --config.task.source='redpajama/**/*.jsonl' \
        --config.task.held_out_source='tokens:pg19_test.bin'
The base is a Hugging Face folder of Llama or a run; sizes and tokenizer are read from it. The texts
are yours: RedPajama to train on, PG19 to test on. To test a run on another text, such as
proof-pile:
    python -m train.main eval --run=runs/longer/tape \
        --config.evaluation.source='tokens:proof_pile_test.bin'
The same in minutes on a CPU: configs/context_extension_demo.py.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Fields that differ from the defaults of :mod:`train.experiment`."""
    return ConfigDict(
        {
            "name": "context extension",
            "seed": 0,
            "adapt": {
                "base": "llama-2-7b",
                "method": "tape",
                "scaling": {"kind": "linear", "factor": 2.0},
            },
            "task": {
                "name": "text",
                "source": "redpajama/**/*.jsonl",
                "held_out_source": "tokens:pg19_test.bin",
                "sequence_length": 8192,
            },
            "model": {"dtype": "bfloat16", "remat": "full"},
            "train": {
                "steps": 1000,
                "batch_size": 64,
                "accumulate": 64,
                "learning_rate": 2e-5,
                "schedule": "constant",
                "warmup": 0.05,
                "weight_decay": 0.0,
                "save_every": 250,
            },
            "evaluation": {
                "lengths": (1024, 2048, 4096, 8192),
                "protocols": ("overlapping",),
                "stride": 256,
                "tokens": 1_048_576,
                "passkey_lengths": (1024, 2048, 4096, 8192),
                "passkey_depths": 10,
                "passkey_trials": 2,
            },
        }
    )
