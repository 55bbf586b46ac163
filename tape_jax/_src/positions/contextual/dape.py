"""Data-adaptive biases: an MLP over the heads sees each logit with its bias."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tape_jax._src.core.checks import positive, set_field
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.fixed.bias import Alibi, Kerple
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Encoding, Param

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Dape(Encoding):
    """DAPE (Zheng et al. 2024, section 3): ``s + b + MLP([s, b])`` for logits ``s`` and a bias.

    ``MLP(c) = leaky_relu(c W1 + b1) W2 + b2``, with a slope of 0.01, is applied to each pair of
    tokens: it is given the logits of all heads and then the biases of all heads, and returns a
    number for each head. Logits come rotated where another encoding rotates, and are not masked.

    The MLP's hidden numbers are ``width / heads`` times as many as the logits of a block of rows.

    Attributes:
      width: hidden units of the MLP.

    Raises:
      ValueError: for a width that is not positive.
    """

    acts_on: ClassVar[tuple[str, ...]] = ("logits",)
    # The bias ``b``.
    additive: ClassVar[Encoding]

    width: int = 32

    def __post_init__(self):
        set_field(self, "width", positive(f"{self.kind}: width", self.width))

    def layer_params(self, sizes: Sizes, *, updates: bool):
        heads = sizes.num_heads

        def linear(inputs: int, *shape: int, axes: tuple[str | None, ...]) -> Param:
            return Param(shape, _uniform(inputs**-0.5), axes)

        return {
            **self.additive.layer_params(sizes, updates=updates),
            "w1": linear(2 * heads, 2 * heads, self.width, axes=(None, None)),
            "b1": linear(2 * heads, self.width, axes=(None,)),
            "w2": linear(self.width, self.width, heads, axes=(None, "heads")),
            "b2": linear(self.width, heads, axes=("heads",)),
        }

    def layer_terms(self, params, layer: Layer) -> Terms:
        positions, keys = layer.query_positions, layer.positions

        def logits_fn(logits: Array, rows: Any) -> Array:
            queries = jnp.take(positions, rows.queries, axis=-1)
            seen = keys[..., : logits.shape[-1]]
            bias = self.additive.pair_bias(params, queries, seen, layer.sizes)
            if bias.ndim > 3:
                bias = jnp.broadcast_to(bias, (*layer.x.shape[:-2], *logits.shape[1:]))
            bias = bias.reshape(-1, *logits.shape[1:]).astype(logits.dtype)
            w1, b1, w2, b2 = (params[n].astype(logits.dtype) for n in ("w1", "b1", "w2", "b2"))
            of_logits, of_bias = jnp.split(w1, 2)
            hidden = _pairwise(logits, of_logits) + _pairwise(bias, of_bias) + b1[:, None, None]
            more = _pairwise(jax.nn.leaky_relu(hidden, 0.01), w2)
            return logits + bias + more + b2[:, None, None]

        return Terms(logits_fn=logits_fn)


@dataclasses.dataclass(frozen=True)
class DapeKerple(Dape):
    """DAPE over the logarithmic bias of KERPLE; see :class:`Dape`.

    Raises:
      ValueError: for a width that is not positive.
    """

    kind: ClassVar[str] = "dape_kerple"
    additive: ClassVar[Encoding] = Kerple()


@dataclasses.dataclass(frozen=True)
class DapeAlibi(Dape):
    """DAPE over the bias of ALiBi; see :class:`Dape`.

    Raises:
      ValueError: for a width that is not positive.
    """

    kind: ClassVar[str] = "dape_alibi"
    additive: ClassVar[Encoding] = Alibi()


def _pairwise(x: Array, weights: Array) -> Array:
    """Products of ``[B, C, Q, S]`` with ``[C, M]`` for each pair of tokens: ``[B, M, Q, S]``.

    One product for each of the batch: pairs stay the last axis, and no transpose is needed.
    """
    flat = x.reshape(*x.shape[:2], -1)
    each = jnp.broadcast_to(weights, (x.shape[0], *weights.shape))
    return jnp.einsum("bcm,bcp->bmp", each, flat).reshape(x.shape[0], -1, *x.shape[2:])


def _uniform(most: float) -> Any:
    """Between ``-most`` and ``most``."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return jax.random.uniform(key, shape, dtype, -most, most)

    return init
