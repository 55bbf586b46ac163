"""Flax Linen modules for models of your own: :class:`UpdateState` and :class:`Attention`."""

from tape_jax._src.model.linen import Attention, UpdateState

__all__ = ["Attention", "UpdateState"]
