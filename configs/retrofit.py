"""Puts TAPE into a trained Llama that otherwise stays unchanged: no scaling, its own tokenizer.

Claim: before the first step the model computes what its base does. Only the update of the
position states, the norms, the embeddings and the output projection train.
Cost: not measured for a large base. Trained parameters are kept in float32 with two moments, all
others in the base's dtype, without gradients.
Command:
    python -m train.main train --config=configs/retrofit.py --run=runs/tape \
        --config.adapt.base=checkpoints/llama-2-7b --config.task.source='books/**/*.txt'
The base is a Hugging Face folder of Llama or a run; its sizes, its tokenizer and its scaling are
read from it. For sequences longer than the base was trained on: configs/context_extension.py.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Fields that differ from the defaults of :mod:`train.experiment`."""
    return ConfigDict(
        {
            "name": "retrofit",
            "seed": 0,
            "adapt": {"base": "checkpoints/llama-2-7b", "method": "tape"},
            "task": {"name": "text", "source": "books/**/*.txt", "sequence_length": 1024},
            "model": {"dtype": "bfloat16", "remat": "full"},
            "train": {
                "steps": 1000,
                "batch_size": 16,
                "accumulate": 16,
                "learning_rate": 1e-4,
                "schedule": "cosine",
                "warmup": 0.05,
                "weight_decay": 0.0,
                "save_every": 250,
            },
            "evaluation": {"factors": (1, 2), "protocols": ("disjoint",)},
        }
    )
