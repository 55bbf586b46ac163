"""Attention over values and position states, with interchangeable implementations."""

from tape_jax._src.attention.api import (
    AttentionPlan,
    attention,
    attention_plan,
    recorded_plans,
)
from tape_jax._src.attention.choice import BACKENDS
from tape_jax._src.core.rows import AttentionRows

__all__ = [
    "BACKENDS",
    "AttentionPlan",
    "AttentionRows",
    "attention",
    "attention_plan",
    "recorded_plans",
]
