"""Data-adaptive biases: an MLP over the heads sees each logit with its bias."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tape_jax._src.core.checks import positive, set_field
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.fixed.bias import Alibi, Fire, Kerple
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
    # What the names of the bias's parameters begin with, if not with nothing.
    prefix: ClassVar[str] = ""

    width: int = 32

    def __post_init__(self):
        set_field(self, "width", positive(f"{self.kind}: width", self.width))

    @property
    def additive(self) -> Encoding:
        """The bias ``b``."""
        raise NotImplementedError

    def layer_params(self, sizes: Sizes, *, updates: bool):
        heads = sizes.num_heads

        def linear(inputs: int, *shape: int, axes: tuple[str | None, ...]) -> Param:
            return Param(shape, _uniform(inputs**-0.5), axes)

        bias = self.additive.layer_params(sizes, updates=updates)
        return {
            **{self.prefix + name: param for name, param in bias.items()},
            "w1": linear(2 * heads, 2 * heads, self.width, axes=(None, None)),
            "b1": linear(2 * heads, self.width, axes=(None,)),
            "w2": linear(self.width, self.width, heads, axes=(None, "heads")),
            "b2": linear(self.width, heads, axes=("heads",)),
        }

    def layer_terms(self, params, layer: Layer) -> Terms:
        positions, keys = layer.query_positions, layer.positions
        names = self.additive.layer_params(layer.sizes, updates=True)
        of_bias = {name: params[self.prefix + name] for name in names}

        def logits_fn(logits: Array, rows: Any) -> Array:
            queries = jnp.take(positions, rows.queries, axis=-1)
            seen = keys[..., : logits.shape[-1]]
            bias = self.additive.pair_bias(of_bias, queries, seen, layer.sizes)
            if bias.ndim > 3:
                bias = jnp.broadcast_to(bias, (*layer.x.shape[:-2], *logits.shape[1:]))
            bias = bias.reshape(-1, *logits.shape[1:]).astype(logits.dtype)
            return logits + bias + self.network(params, logits, bias)

        return Terms(logits_fn=logits_fn)

    def network(self, params, logits: Array, bias: Array) -> Array:
        """The MLP of logits and biases ``[B, H, Q, K]``, as many numbers."""
        w1, b1, w2, b2 = (params[n].astype(logits.dtype) for n in ("w1", "b1", "w2", "b2"))
        of_logits, of_bias = jnp.split(w1, 2)
        hidden = _pairwise(logits, of_logits) + _pairwise(bias, of_bias) + b1[:, None, None]
        return _pairwise(jax.nn.leaky_relu(hidden, 0.01), w2) + b2[:, None, None]


@dataclasses.dataclass(frozen=True)
class DapeKerple(Dape):
    """DAPE over the logarithmic bias of KERPLE; see :class:`Dape`.

    Raises:
      ValueError: for a width that is not positive.
    """

    kind: ClassVar[str] = "dape_kerple"

    @property
    def additive(self) -> Encoding:
        return Kerple()


@dataclasses.dataclass(frozen=True)
class DapeAlibi(Dape):
    """DAPE over the bias of ALiBi; see :class:`Dape`.

    Raises:
      ValueError: for a width that is not positive.
    """

    kind: ClassVar[str] = "dape_alibi"

    @property
    def additive(self) -> Encoding:
        return Alibi()


@dataclasses.dataclass(frozen=True)
class DapeFire(Dape):
    """DAPE over the bias of FIRE, whose MLP has ``leaky_relu`` here too; see :class:`Dape`.

    Attributes:
      width: hidden units of DAPE's MLP.
      fire_width, threshold, c: as ``width``, ``threshold`` and ``c`` of :class:`Fire`.

    Raises:
      ValueError: for a width that is not positive.
    """

    kind: ClassVar[str] = "dape_fire"
    prefix: ClassVar[str] = "fire_"

    fire_width: int = 32
    threshold: float = 512.0
    c: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        set_field(self, "fire_width", positive("dape_fire: fire_width", self.fire_width))

    @property
    def additive(self) -> Encoding:
        return Fire(self.fire_width, self.threshold, self.c, activation="leaky_relu")


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
