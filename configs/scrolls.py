"""Fine-tuning on SCROLLS with the paper's recipe (TAPE, section 5.2 and Table 5).

Claim: after equal pre-training and fine-tuning, TAPE answers questions about documents better than
RoPE and the other encodings do.
Cost: not measured.
Command:
    python -m train.main train --config=configs/scrolls.py --run=runs/qasper --evaluate \
        --config.task.tokenizer=llama/tokenizer.model
It starts from a run of configs/c4_pretrain.py, runs/c4, with the same tokenizer. The data are the
benchmark's archives (github.com/tau-nlp/scrolls has the links) in the folder scrolls/. One option
chooses another subset: --config.task.subset=contract_nli
To compare encodings, pre-train them with the command compare in runs/c4, and then give it this
config with --config.train.initial=runs/c4/{encoding}. This works for plain names only: the folders
of encodings with options and of schedules have other names.
"""

from ml_collections import ConfigDict

from configs import c4_pretrain


def get_config() -> ConfigDict:
    """Fields that differ from the defaults of :mod:`train.experiment`."""
    pretraining = c4_pretrain.get_config()
    return ConfigDict(
        {
            "name": "scrolls",
            "seed": 0,
            "task": {
                "name": "scrolls",
                "subset": "qasper",
                "data": "scrolls",
                "tokenizer": pretraining.task.tokenizer,
                "vocab_size": pretraining.task.vocab_size,
                "sequence_length": 1024,
            },
            "model": pretraining.model,
            "train": {
                "initial": "runs/c4",
                "steps": 1000,
                "batch_size": 64,
                "learning_rate": 1e-5,
                "schedule": "linear",
                "warmup": 0.1,
                "weight_decay": 0.01,
            },
        }
    )
