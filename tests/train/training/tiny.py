"""Trainings of a model that compiles in no time, and what they leave."""

from pathlib import Path

import flax.linen as nn
import jax

from tape_jax._src.model.config import ModelConfig
from train import experiment
from train.training import metrics, runs
from train.training import step as training_step


class Tiny(nn.Module):
    """A model that compiles in no time: embedding, noise while training, norm, projection."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens, **_):
        x = nn.Embed(self.config.vocab_size, self.config.hidden_size)(tokens)
        if self.has_rng("positions"):
            x += 0.1 * jax.random.normal(self.make_rng("positions"), x.shape)
        return nn.Dense(self.config.vocab_size)(nn.LayerNorm()(x))


def an_experiment(task=None, sharding=None, **train):
    return experiment.from_mapping(
        {
            "name": "test",
            "seed": 3,
            "task": task or {"name": "addition", "max_digits": 2},
            "sharding": sharding,
            "model": {"hidden_size": 8, "num_heads": 2, "num_layers": 1},
            "train": {
                **{"steps": 12, "batch_size": 8, "accumulate": 2, "learning_rate": 0.01},
                **{"save_every": 4, "log_every": 2, "warmup": 0.2},
                **train,
            },
        }
    )


def final_state(folder: Path, of=None):
    wanted = of or runs.load(folder)
    template = jax.eval_shape(
        lambda: training_step.init_state(wanted, training_step.make_optimizer(wanted.train))
    )
    with runs.checkpoints(folder) as checkpoints:
        return checkpoints.restore(template)


def numbers(folder: Path):
    """The lines of metrics, but for what depends on the time that it took."""
    lines = metrics.read(folder / "metrics.jsonl")
    return [{k: v for k, v in x.items() if k not in ("time", "tokens_per_second")} for x in lines]
