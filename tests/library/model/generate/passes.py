"""The models that decode, and three ways through one: whole, in chunks, and token by token."""

import functools

import jax.numpy as jnp
import numpy as np

from tape_jax import RopeScaling, Transformer, positions
from tape_jax._src.model.generate import extend, prefill
from tests.models import DIGITS, VOCAB, jit_quickly

tape = positions.Tape


CASES = {
    "tape": {"position": "tape", "num_layers": 2},
    "one group, dynamic scaling": {
        "position": tape(norm="rms", scaling=RopeScaling("dynamic", 2.0, original_length=4)),
        "num_heads": 4,
        "num_kv_heads": 1,
    },
    "not scanned": {"position": tape(layers=(1, 2)), "scan_layers": False, "tie_embeddings": True},
    "window": {"position": tape(), "local_window_size": 3},
    "a schedule": {"position": "tape+window/tape+window/tape/fox", "num_layers": 9},
    "a draw for each layer": {"position": positions.RandomRope(range=64, each_layer=True)},
}


LENGTHS = (5, 1, 3)  # lengths of the prompts
PADDED = max(LENGTHS)
NEW = 5  # tokens after each
CAPACITY = PADDED + NEW + 1
jit_model = functools.partial(jit_quickly, static_argnums=0)


@jit_model
def full_pass(model, variables, tokens):
    """Logits ``[B, T, vocab]`` of whole sequences."""
    return model.apply(variables, tokens, length=CAPACITY)


jit_prefill = jit_quickly(
    prefill,
    static_argnums=0,
    static_argnames=("capacity", "chunk"),
)

jit_extend = jit_model(extend)
jit_apply = jit_model(Transformer.apply)


def ragged_tokens():
    """The same tokens padded on the left and on the right, each time with digits."""
    generator = np.random.default_rng(0)
    left = np.full((len(LENGTHS), PADDED + NEW), DIGITS[0])
    right = np.full_like(left, DIGITS[1])
    for i, length in enumerate(LENGTHS):
        row = generator.integers(0, VOCAB, length + NEW)
        left[i, -row.size :] = row
        right[i, : row.size] = row
    return jnp.asarray(left, jnp.int32), jnp.asarray(right, jnp.int32)
