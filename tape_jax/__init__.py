"""TAPE, contextualized equivariant positional encoding (Zhu et al., ICML 2025), for JAX.

The public API is here and in the modules beside this file; ``_src`` may change at any time.
"""

from tape_jax import adapt, losses, positions, sharding
from tape_jax._src.adapt.methods import add_tape
from tape_jax._src.attention import (
    AttentionPlan,
    AttentionRows,
    attention,
    attention_plan,
    recorded_plans,
)
from tape_jax._src.core.algebra import rotate, transform
from tape_jax._src.model.cache import Cache, grow_cache, init_cache
from tape_jax._src.model.config import Experts, Lora, ModelConfig
from tape_jax._src.model.decoder import States, Transformer
from tape_jax._src.model.generate import (
    decode,
    extend,
    generate,
    pad_prompts,
    prefill,
    sample_logits,
)
from tape_jax._src.model.linen import UpdateState
from tape_jax._src.positions import init_update, rotary_state, tensor_state, update_state
from tape_jax._src.positions.drawing import RandomPositions
from tape_jax._src.positions.fixed.frequencies import RopeScaling
from tape_jax._src.positions.fixed.pairs import halves_from_pairs
from tape_jax._src.pretrained.loading import from_pretrained
from tape_jax._src.pretrained.saving import save_pretrained

__version__ = "0.3.0.dev0"

__all__ = [
    "AttentionPlan",
    "AttentionRows",
    "Cache",
    "Experts",
    "Lora",
    "ModelConfig",
    "RandomPositions",
    "RopeScaling",
    "States",
    "Transformer",
    "UpdateState",
    "adapt",
    "add_tape",
    "attention",
    "attention_plan",
    "decode",
    "extend",
    "from_pretrained",
    "generate",
    "grow_cache",
    "halves_from_pairs",
    "init_cache",
    "init_update",
    "losses",
    "pad_prompts",
    "positions",
    "prefill",
    "recorded_plans",
    "rotary_state",
    "rotate",
    "sample_logits",
    "save_pretrained",
    "sharding",
    "tensor_state",
    "transform",
    "update_state",
]
