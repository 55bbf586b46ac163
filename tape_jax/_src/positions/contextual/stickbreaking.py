"""Stick-breaking attention: replaces the softmax by shares of what nearer keys leave."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tape_jax._src.core.checks import choose
from tape_jax._src.positions.contextual import rows as by_rows
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Encoding

Array = jax.Array

REMAINDERS = ("none", "value")


@dataclasses.dataclass(frozen=True)
class StickBreaking(Encoding):
    """Stick-breaking attention (Tan et al. 2024, section 2): the nearest keys take first.

    The weight of key ``j`` is ``z_ij prod_{j < l < i} (1 - z_il)``, with ``z`` the sigmoid of the
    logits, over the keys ``l`` before the query that it sees. So weights sum to 1 at most, the
    order of keys matters, and there are no parameters.

    Attributes:
      current: whether the query's own token takes part, first.
      remainder: ``none``, or ``value``: what is left, ``prod_l (1 - z_il)``, is the weight of the
        query's own token.

    Raises:
      ValueError: for an unknown remainder; if tokens see later ones, which get no share.
    """

    kind: ClassVar[str] = "stickbreaking"
    acts_on: ClassVar[tuple[str, ...]] = ("weights",)
    reads_positions: ClassVar[bool] = False

    current: bool = False
    remainder: str = "none"

    def __post_init__(self):
        choose("stickbreaking remainder", self.remainder, REMAINDERS)

    def layer_terms(self, params, layer: Layer) -> Terms:
        layer.require_causal(self.kind, "keys take their shares from the query back")
        return Terms(weights_fn=self.weights)

    def weights(self, logits: Array, rows: Any) -> Array:
        """Weights ``[B, H, Q, S]`` of logits, -inf where a key is not visible."""
        keys = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        places = jnp.atleast_2d(rows.places)[:, None, :, None]
        seen = logits != -jnp.inf
        takes = seen & (keys <= places if self.current else keys < places)
        safe = jnp.where(takes, logits, 0)
        # Logarithms of 1 - z and of z: each is right where the other rounds to 0 or 1.
        left = jnp.where(takes, jax.nn.log_sigmoid(-safe), 0)
        shares = jax.nn.log_sigmoid(safe) + by_rows.sums_behind(left)
        weights = jnp.where(takes, jnp.exp(shares), 0)
        if self.remainder == "none":
            return weights
        rest = jnp.exp(left.sum(-1, keepdims=True))
        return weights + jnp.where(seen & (keys == places), rest, 0)
