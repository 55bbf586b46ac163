"""Attention over values and position states, with interchangeable implementations."""

from tape_jax._src.attention.api import (
    BACKENDS,
    AttentionPlan,
    attention,
    attention_plan,
    recorded_plans,
)
from tape_jax._src.core.rows import AttentionRows

__all__ = [
    "BACKENDS",
    "AttentionPlan",
    "AttentionRows",
    "attention",
    "attention_plan",
    "recorded_plans",
]
