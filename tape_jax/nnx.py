"""Flax NNX modules for models of your own: :class:`UpdateState` and :class:`Attention`.

``import tape_jax`` does not load this module, since ``flax.nnx`` loads optax.
"""

from tape_jax._src.model.nnx import Attention, UpdateState

__all__ = ["Attention", "UpdateState"]
