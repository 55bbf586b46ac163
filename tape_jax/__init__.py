"""TAPE, contextualized equivariant positional encoding (Zhu et al., ICML 2025), for JAX."""

from tape_jax import adapt, positions
from tape_jax.adapt import add_tape
from tape_jax.algebra import rotate, transform
from tape_jax.attention import attention, attention_plan
from tape_jax.config import Experts, ModelConfig, RopeScaling
from tape_jax.generate import generate
from tape_jax.model import Cache, States, Transformer, init_cache
from tape_jax.positions import init_update, rotary_state, tensor_state, update
from tape_jax.pretrained import from_pretrained, save_pretrained

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "Experts",
    "ModelConfig",
    "RopeScaling",
    "States",
    "Transformer",
    "adapt",
    "add_tape",
    "attention",
    "attention_plan",
    "from_pretrained",
    "generate",
    "init_cache",
    "init_update",
    "positions",
    "rotary_state",
    "rotate",
    "save_pretrained",
    "tensor_state",
    "transform",
    "update",
]
