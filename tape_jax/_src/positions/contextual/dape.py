"""Data-adaptive biases: an MLP over the heads sees each logit with its bias."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from tape_jax._src.core.checks import positive, require, set_field
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
    number for each head. Logits are rotated if another encoding rotates, and are not masked.

    The MLP's hidden numbers are ``width / heads`` times as many as the logits of a block of rows.

    Attributes:
      width: hidden units of the MLP.

    Raises:
      ValueError: for a width that is not positive.
    """

    acts_on: ClassVar[tuple[str, ...]] = ("logits",)
    # Prefix of the names of the bias's parameters.
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
            return logits + bias + self.network(params, logits, bias, rows, layer)

        return Terms(logits_fn=logits_fn)

    def network(self, params, logits: Array, bias: Array, rows: Any, layer: Layer) -> Array:
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
    additive: ClassVar[Encoding] = Kerple()


@dataclasses.dataclass(frozen=True)
class DapeAlibi(Dape):
    """DAPE over the bias of ALiBi; see :class:`Dape`.

    Raises:
      ValueError: for a width that is not positive.
    """

    kind: ClassVar[str] = "dape_alibi"
    additive: ClassVar[Encoding] = Alibi()


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


@dataclasses.dataclass(frozen=True)
class DapeV2(Dape):
    """DAPE v2 (Zheng et al. 2024, arXiv:2410.04798): ``s + b + Conv(leaky_relu(Conv([s, b])))``.

    Two convolutions along the keys that a query sees, in their order, replace the MLP of
    :class:`Dape`: ``h_j = leaky_relu(b1 + sum_t c_{j + t - n // 2} W1[t])`` and ``e_j = b2 + sum_t
    h_{j + t - n // 2} W2[t]``. ``c``, the logits and biases, is 0 where there is no such key.

    ``h`` goes on behind the query, ``n // 2`` places of zeros, where published code has them end
    with the text. So its last ``n // 2`` rows change when the text grows; here none does.

    Attributes:
      width: hidden channels.
      taps: of each convolution, ``n``; odd.
      published: rows near the end of the text are those of the published code. This needs passes of
        whole texts: it cannot decode.

    Raises:
      ValueError: for options out of range; if tokens see later ones; for a cached call that should
        be as published.
    """

    taps: int = 3
    published: bool = False

    def __post_init__(self):
        super().__post_init__()
        set_field(self, "taps", positive(f"{self.kind}: taps", self.taps))
        require(self.taps % 2 == 1, f"{self.kind}: taps must be odd; got {self.taps}")

    def layer_params(self, sizes: Sizes, *, updates: bool):
        def with_taps(name: str, param: Param) -> Param:
            if name not in ("w1", "b1", "w2", "b2"):
                return param
            fan_in = self.taps * (2 * sizes.num_heads if name.endswith("1") else self.width)
            taps = (self.taps,) if name.startswith("w") else ()
            axes = (*(None for _ in taps), *param.axes)
            return Param((*taps, *param.shape), _uniform(fan_in**-0.5), axes)

        params = super().layer_params(sizes, updates=updates)
        return {name: with_taps(name, param) for name, param in params.items()}

    def layer_terms(self, params, layer: Layer) -> Terms:
        layer.require_causal(self.kind, "it is of the keys up to the query")
        require(
            not self.published or layer.kept is None,
            f"{self.kind}: published=True changes rows near the end when the text grows, so it "
            "takes whole texts; a call with a cache needs published=False",
        )
        return super().layer_terms(params, layer)

    def network(self, params, logits: Array, bias: Array, rows: Any, layer: Layer) -> Array:
        """The convolutions of logits and biases ``[B, H, Q, K]``, as many numbers."""
        w1, b1, w2, b2 = (params[n].astype(logits.dtype) for n in ("w1", "b1", "w2", "b2"))
        ids, key_ids = layer.ids()
        visible, order = rows.visible, None
        if key_ids is not None:
            # Keys of a segment side by side, as a query sees them.
            order = jnp.argsort(key_ids[:, : logits.shape[-1]], axis=-1, stable=True)
            order = order[:, None, None]
            logits, bias, visible = (
                jnp.take_along_axis(x, order, axis=-1) for x in (logits, bias, visible)
            )
        side, keys = self.taps // 2, logits.shape[-1]
        places = jnp.arange(keys + side, dtype=jnp.int32)
        # Hidden units are of all heads.
        seen = visible.any(1, keepdims=True)
        is_hidden = places < jnp.argmax(seen, axis=-1, keepdims=True)
        if self.published:
            last = keys - 1 - jnp.argmax(seen[..., ::-1], axis=-1, keepdims=True)
            is_hidden = is_hidden | (places > last + _later(rows, ids, layer.time))
        of_logits, of_bias = jnp.split(w1, 2, axis=1)
        hidden = b1[:, None, None] + sum(
            _convolved(jnp.where(visible, x, 0), w, (side, 2 * side))
            for x, w in ((logits, of_logits), (bias, of_bias))
        )
        hidden = jnp.where(is_hidden, 0, jax.nn.leaky_relu(hidden, 0.01))
        found = _convolved(hidden, w2, (side, 0)) + b2[:, None, None]
        if order is None:
            return found
        return jnp.take_along_axis(found, jnp.argsort(order, axis=-1), axis=-1)


@dataclasses.dataclass(frozen=True)
class DapeV2Kerple(DapeV2):
    """DAPE v2 over the logarithmic bias of KERPLE; see :class:`DapeV2`.

    Raises:
      ValueError: as :class:`DapeV2` does.
    """

    kind: ClassVar[str] = "dapev2_kerple"
    additive: ClassVar[Encoding] = Kerple()


@dataclasses.dataclass(frozen=True)
class DapeV2Alibi(DapeV2):
    """DAPE v2 over the bias of ALiBi; see :class:`DapeV2`.

    Raises:
      ValueError: as :class:`DapeV2` does.
    """

    kind: ClassVar[str] = "dapev2_alibi"
    additive: ClassVar[Encoding] = Alibi()


def _convolved(x: Array, weights: Array, pads: tuple[int, int]) -> Array:
    """``sum_t x_{j + t} W[t]`` of ``x [B, C, Q, K]``, padded with zeros, and ``W [n, C, M]``.

    One product for all taps, of whichever has fewer channels moved along the keys.
    """
    taps, channels, out = weights.shape
    length = x.shape[-1] + sum(pads) - taps + 1

    def moved(x: Array) -> list[Array]:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [pads])
        return [lax.slice_in_dim(x, t, t + length, axis=-1) for t in range(taps)]

    if channels <= out:
        return _pairwise(jnp.concatenate(moved(x), axis=1), weights.reshape(-1, out))
    every = _pairwise(x, jnp.concatenate(list(weights), axis=1))
    parts = [
        lax.slice_in_dim(y, t * out, (t + 1) * out, axis=1) for t, y in enumerate(moved(every))
    ]
    return functools.reduce(operator.add, parts)


def _later(rows: Any, ids: Array | None, time: int) -> Array:
    """Counts the tokens of its segment that come after each query, ``[B|1, 1, Q, 1]``."""
    keys = jnp.arange(time, dtype=jnp.int32)
    later = keys > rows.queries[:, None]
    if ids is not None:
        own = jnp.take(ids, rows.queries, axis=1)
        later = later & (own[..., None] == ids[:, None])
    return jnp.atleast_2d(later.sum(-1))[:, None, :, None]


def _pairwise(x: Array, weights: Array) -> Array:
    """Products of ``[B, C, Q, S]`` with ``[C, M]`` for each pair of tokens: ``[B, M, Q, S]``.

    One product for each of the batch: pairs stay the last axis, and no transpose is needed.
    """
    flat = x.reshape(*x.shape[:2], -1)
    each = jnp.broadcast_to(weights, (x.shape[0], *weights.shape))
    return jnp.einsum("bcm,bcp->bmp", each, flat).reshape(x.shape[0], -1, *x.shape[2:])


def _uniform(most: float) -> Any:
    """Returns an initializer, uniform between ``-most`` and ``most``."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return jax.random.uniform(key, shape, dtype, -most, most)

    return init
