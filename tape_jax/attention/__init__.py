"""Attention over values and position states, with interchangeable implementations."""

from tape_jax.attention.api import AttentionPlan, attention, attention_plan

__all__ = ["AttentionPlan", "attention", "attention_plan"]
