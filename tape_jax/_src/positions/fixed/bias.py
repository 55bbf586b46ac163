"""Encodings that bias the attention logits: ALiBi, KERPLE, FIRE, T5."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.core import algebra
from tape_jax._src.core.checks import choose, require
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Param, check_indices
from tape_jax._src.positions.some_heads import SomeHeads

zeros = jax.nn.initializers.zeros
ones = jax.nn.initializers.ones


def alibi_slopes(num_heads: int) -> np.ndarray:
    """ALiBi's slopes ``[H]`` (Press et al. 2022, section 3).

    ``2^(-8 (i + 1) / H)`` for a power of two; otherwise those of the next lower power of two,
    followed by every second slope of twice that.
    """
    lower = 2 ** int(math.log2(num_heads))
    slopes = 2.0 ** (-8.0 * np.arange(1, lower + 1) / lower)
    between = 2.0 ** (-8.0 * np.arange(1, 2 * lower + 1, 2) / (2 * lower))
    return np.concatenate([slopes, between])[:num_heads]


def distances(query: jax.Array, key: jax.Array) -> jax.Array:
    """``|i - j|`` of positions ``[..., Q]`` and ``[..., K]``; unsigned for integers, up to 2^32."""
    query, key = query[..., :, None], key[..., None, :]
    if jnp.issubdtype(query.dtype, jnp.floating):
        return jnp.abs(query - key)
    apart = jnp.where(query > key, query - key, key - query)
    return apart.astype(f"uint{8 * apart.dtype.itemsize}")


SLOPES = ("fixed", "learned", "learned_from_zero")


@dataclasses.dataclass(frozen=True)
class Alibi(SomeHeads):
    """Attention with linear biases (Press et al. 2022): ``-slope_h |i - j|``.

    Under the causal rule this is a decay, ``F_i - F_j`` with ``F_t = -slope_h t``, which fused
    kernels and rings of devices support too. Positions must not decrease along a segment. ``F``
    counts from the first token, in at least float32: distances are right to 6e-8 of how far it is.

    Attributes:
      slopes: ``fixed``, as in the paper; ``learned``, starting from these; ``learned_from_zero``,
        so that a model that gets the bias beside its own encoding starts unchanged.
      on_heads: number of query heads, the first ones, with the bias, and with the slopes of a model
        of so many heads; None: all.

    Raises:
      ValueError: for unknown slopes; for ``on_heads`` out of range.
    """

    kind: ClassVar[str] = "alibi"
    acts_on: ClassVar[tuple[str, ...]] = ("decay", "bias")

    slopes: str = "fixed"

    def __post_init__(self):
        choose("alibi slopes", self.slopes, SLOPES)

    def head_params(self, sizes: Sizes):
        if self.slopes == "fixed":
            return {}

        def init(key, shape, dtype):
            if self.slopes == "learned_from_zero":
                return jnp.zeros(shape, dtype)
            return jnp.asarray(alibi_slopes(sizes.num_heads), dtype)

        return {"slopes": Param((sizes.num_heads,), init, ("heads",))}

    def _slopes(self, params, sizes: Sizes):
        slopes = params.get("slopes", alibi_slopes(sizes.num_heads))
        return jnp.asarray(slopes, algebra.at_least_float32(sizes.dtype))

    def pair_bias(self, params, query, key, sizes: Sizes):
        slopes = self._slopes(params, sizes)
        distance = distances(query, key).astype(slopes.dtype)
        return -slopes[:, None, None] * distance[..., None, :, :]

    def head_terms(self, params, layer: Layer) -> Terms:
        if not layer.is_causal:
            return super().head_terms(params, layer)
        slopes = self._slopes(params, layer.sizes)
        first = layer.first_positions()

        def decay(positions: jax.Array, first: jax.Array) -> jax.Array:
            return -slopes * (positions - first).astype(slopes.dtype)[..., None]

        of_queries = layer.of_new_tokens(first) if first.shape[-1] > 1 else first
        queries = decay(layer.query_positions, of_queries)
        return Terms(log_decay=(queries, decay(layer.positions, first)))


FORMS = ("log", "power")


@dataclasses.dataclass(frozen=True)
class Kerple(SomeHeads):
    """KERPLE (Chi et al. 2022, section 4): learned kernels of distance, two numbers per head.

    ``-r1 log(1 + r2 |i - j|)``, or ``-r1 |i - j|^r2``. Numbers below 0.01, and powers above 2, are
    clipped to these bounds and have no gradient there.

    Attributes:
      form: ``log`` or ``power``.
      on_heads: how many query heads, the first ones, have the bias; None: all.

    Raises:
      ValueError: for an unknown form; for ``on_heads`` out of range.
    """

    kind: ClassVar[str] = "kerple"
    acts_on: ClassVar[tuple[str, ...]] = ("bias",)

    form: str = "log"

    def __post_init__(self):
        choose("kerple form", self.form, FORMS)

    def head_params(self, sizes: Sizes):
        # Upper bounds of the uniform draws, as in the published code.
        highest = {"log": (2.0, 1.0), "power": (1.0, 2.0)}[self.form]
        return {
            name: Param((sizes.num_heads,), jax.nn.initializers.uniform(most), ("heads",))
            for name, most in zip(("r1", "r2"), highest, strict=True)
        }

    def pair_bias(self, params, query, key, sizes: Sizes):
        compute = algebra.at_least_float32(sizes.dtype)
        r1, r2 = (
            jnp.maximum(params[name].astype(compute), 0.01)[:, None, None] for name in ("r1", "r2")
        )
        distance = distances(query, key).astype(compute)[..., None, :, :]
        if self.form == "log":
            return -r1 * jnp.log1p(r2 * distance)
        # The derivative of a power of 0 is not a number.
        apart = distance > 0
        powers = jnp.where(apart, distance, 1) ** jnp.minimum(r2, 2)
        return -r1 * jnp.where(apart, powers, 0)


ACTIVATIONS = {"relu": jax.nn.relu, "leaky_relu": jax.nn.leaky_relu}


@dataclasses.dataclass(frozen=True)
class Fire(SomeHeads):
    """FIRE (Li et al. 2024, equation 4): an MLP of log distance over log query position.

    ``bias_h(i, j) = MLP(log(|c (i - j)| + 1) / (log(|c max(i, L)| + 1) + eps))_h`` with a learned
    threshold ``L = |multiplier * threshold|``.

    Attributes:
      width: hidden units of the MLP.
      threshold: initial threshold in tokens.
      c: initial scale of the logarithm.
      eps: guards the division.
      activation: of the MLP, ``relu`` or, with a slope of 0.01, ``leaky_relu``.
      on_heads: how many query heads, the first ones, have the bias; None: all.

    Raises:
      ValueError: for a width that is not positive, an unknown activation, ``on_heads`` out of
        range.
    """

    kind: ClassVar[str] = "fire"
    acts_on: ClassVar[tuple[str, ...]] = ("bias",)

    width: int = 32
    threshold: float = 512.0
    c: float = 0.1
    eps: float = 1e-6
    activation: str = "relu"

    def __post_init__(self):
        require(self.width > 0, f"fire: width must be positive; got {self.width}")
        choose("fire activation", self.activation, ACTIVATIONS)

    def head_params(self, sizes: Sizes):
        normal = jax.nn.initializers.lecun_normal()
        constant = jax.nn.initializers.constant
        return {
            "w1": Param((1, self.width), normal, (None, None)),
            "b1": Param((self.width,), zeros, (None,)),
            "w2": Param((self.width, sizes.num_heads), normal, (None, "heads")),
            "b2": Param((sizes.num_heads,), zeros, ("heads",)),
            "c": Param((), constant(self.c), ()),
            "multiplier": Param((), ones, ()),
        }

    def pair_bias(self, params, query, key, sizes: Sizes):
        compute = algebra.at_least_float32(sizes.dtype)
        p = {name: value.astype(compute) for name, value in params.items()}
        distance = distances(query, key).astype(compute)
        query = query.astype(compute)
        threshold = jnp.abs(p["multiplier"] * self.threshold)
        near = jnp.log(jnp.abs(p["c"] * distance) + 1)
        far = jnp.log(jnp.abs(p["c"] * jnp.maximum(query, threshold)) + 1) + self.eps
        x = (near / far[..., :, None])[..., None]
        hidden = ACTIVATIONS[self.activation](x * p["w1"][0] + p["b1"])
        return jnp.moveaxis(hidden @ p["w2"] + p["b2"], -1, -3)


@dataclasses.dataclass(frozen=True)
class T5Bias(SomeHeads):
    """T5's relative position bias (Raffel et al. 2020): a learned scalar per head and bucket.

    Attributes:
      buckets: number of buckets; the first half are exact distances, the rest logarithmic.
      max_distance: distance in tokens from which all share the last bucket.
      on_heads: how many query heads, the first ones, have the bias; None: all.

    Raises:
      ValueError: for options out of range; for positions that are not integers.
    """

    kind: ClassVar[str] = "t5"
    takes_drawn: ClassVar[tuple[str, ...]] = ("spaced", "shifted")
    acts_on: ClassVar[tuple[str, ...]] = ("bias",)

    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self):
        require(
            self.buckets >= 2 and self.max_distance > self.buckets // 2,
            f"t5: expected buckets >= 2 and max_distance > buckets // 2; got buckets = "
            f"{self.buckets}, max_distance = {self.max_distance}",
        )

    def head_params(self, sizes: Sizes):
        normal = jax.nn.initializers.normal(0.02)
        return {"table": Param((self.buckets, sizes.num_heads), normal, (None, "heads"))}

    def bucket(self, distance: jax.Array) -> jax.Array:
        """Bucket of each distance (query position minus key position), in tokens."""
        exact = self.buckets // 2
        distance = jnp.maximum(distance, 0)
        ratio = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(self.max_distance / exact)
        coarse = exact + (ratio * (self.buckets - exact)).astype(jnp.int32)
        return jnp.where(distance < exact, distance, jnp.minimum(coarse, self.buckets - 1))

    def pair_bias(self, params, query, key, sizes: Sizes):
        for positions in (query, key):
            check_indices(f"{self.kind}: positions", positions)
        later = key[..., None, :] > query[..., :, None]
        bucket = self.bucket(jnp.where(later, 0, distances(query, key)))
        table = params["table"].astype(algebra.at_least_float32(sizes.dtype))
        return jnp.moveaxis(table[bucket.astype(jnp.int32)], -1, -3)
