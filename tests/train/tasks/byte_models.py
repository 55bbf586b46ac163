"""Small models of bytes, for the tests of passkey retrieval."""

import types

from tape_jax import ModelConfig, Transformer
from tests.models import encoding, random_variables
from train.data import tokenizers
from train.training.runs import TrainedRun

BYTES = tokenizers.load("bytes")


def trained(kind="rope", **options):
    config = ModelConfig(
        BYTES.vocab_size,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        position=encoding(kind, **options),
    )
    model = Transformer(config)
    variables = random_variables(model, std=0.7)
    return TrainedRun(types.SimpleNamespace(model=config), 0, model, variables)
