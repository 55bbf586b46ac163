"""Encodings that make further queries and keys, which attend without any state."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from tape_jax._src.core.algebra import rotate
from tape_jax._src.positions.fixed.rotary import Rope
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import State

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class RopePP(Rope):
    """RoPE++ (Liu et al. 2025, arXiv:2512.07525): the imaginary part attends by heads of its own.

    RoPE's logit is the real part of ``q conj(k)``, with its rotations. Two heads attend for each
    query head, and read the same key/value head: ``2h`` is rotated as in RoPE, ``2h + 1`` by a
    quarter turn less, so that its logit is the imaginary part. The output projection has twice as
    many inputs. (In the paper this is ``EC``; ``EH`` is the same with half of all heads.)

    Raises:
      ValueError: as :class:`Rope` does.
    """

    kind: ClassVar[str] = "rope_pp"
    heads_per_query: ClassVar[int] = 2

    def rotation(self, state: State):
        # Queries and keys are rotated here already.
        return None, None

    def layer_terms(self, params, layer: Layer) -> Terms:
        assert layer.q is not None
        assert layer.k is not None
        real, imaginary = jnp.split(layer.state, 2, axis=-1)
        behind = jnp.concatenate([imaginary, -real], axis=-1)
        both = jnp.stack([rotate(layer.q, e) for e in (layer.state, behind)], axis=-2)
        q = both.reshape(*both.shape[:-3], -1, both.shape[-1])
        return Terms(features=(q, rotate(layer.k, layer.state)))
