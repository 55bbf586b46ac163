"""Pre-training on C4 with the paper's recipe and size (TAPE, section 5.2 and Table 5).

Claim: with equal steps and data, TAPE reaches a lower perplexity than RoPE and the other encodings
do, at the trained length and beyond it. At the size of configs/bytes_demo.py TAPE does not differ
significantly from RoPE at the trained length, and is clearly worse at eight times that length. With
ALiBi's bias the claim is confirmed at the trained length, where TAPE is clearly below RoPE with
that bias too; at eight times that length the difference is not significant (research/evidence.md).
Cost: not measured.
Command:
    python -m train.main train --config=configs/c4_pretrain.py --run=runs/c4 --evaluate \
        --config.task.tokenizer=llama/tokenizer.model
One option chooses another encoding: --config.model.position.kind=alibi
You provide the tokenizer, a sentencepiece .model or a tokenizer.json of at most 32,000 tokens, such
as that of Llama 2. Prepare the corpus once, with TensorFlow and apache-beam installed:
    tfds build c4/en --file_format=array_record
or read the files that the Allen Institute for AI publishes:
    --config.task.source='c4/en/c4-train.000*.json.gz' \
    --config.task.held_out_source='c4/en/c4-validation.*.json.gz'
10,000 steps read 5.2 billion tokens; if the share of the corpus that is tokenised (train[:5%],
which is 18 million documents) holds fewer, they are read again.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Fields that differ from the defaults of :mod:`train.experiment`."""
    return ConfigDict(
        {
            "name": "c4",
            "seed": 0,
            "task": {
                "name": "text",
                "source": "tfds:c4/en:train[:5%]",
                "held_out_source": "tfds:c4/en:validation",
                "tokenizer": "tokenizer.model",
                "vocab_size": 32_000,
                "sequence_length": 1024,
            },
            "model": {
                "hidden_size": 768,
                "num_layers": 12,
                "num_heads": 12,
                "intermediate_size": 3072,
                "norm_eps": 1e-5,
                "tie_embeddings": False,
                "dtype": "bfloat16",
                "position": {"kind": "tape", "width": 48},
            },
            "train": {
                "steps": 10_000,
                "batch_size": 512,
                "learning_rate": 1e-4,
                "schedule": "linear",
                "warmup": 0.02,
                "weight_decay": 0.01,
            },
        }
    )
