"""GRAPE: gated linear biases, biases summed along the path, and RoPE by a clock of the content."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.core.checks import choose, require
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.contextual import rows as by_rows
from tape_jax._src.positions.fixed.bias import alibi_slopes, distances
from tape_jax._src.positions.fixed.frequencies import frequencies
from tape_jax._src.positions.fixed.rotary import content_state, turned
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Encoding, Param

Array = jax.Array

STEPS = ("softplus", "sigmoid")
GATES = ("query_key", "key")
# Directions are divided by their norm, or by this if it is larger.
SHORTEST = 1e-6


@dataclasses.dataclass(frozen=True)
class GrapeAdditive(Encoding):
    """GRAPE-A (Zhang et al. 2025, arXiv:2512.07805): ALiBi with gates of the query and of the key.

    ``b_ij = -|i - j| slope_h softplus(omega_h) (softplus(q_i . v_h / sqrt(D)) + softplus(k_j . u_h
    / sqrt(D)))``, with ALiBi's slopes and unit vectors ``u``, ``v`` for each query head. Gates see
    queries and keys before any rotation.

    Attributes:
      gate: ``query_key``, or ``key``: only the second gate; in the published code
        ``a-querykeygated`` and ``a-keygated``.

    Raises:
      ValueError: for an unknown gate.
    """

    kind: ClassVar[str] = "grape_additive"
    acts_on: ClassVar[tuple[str, ...]] = ("bias",)

    gate: str = "query_key"

    def __post_init__(self):
        choose("grape_additive gate", self.gate, GATES)

    def layer_params(self, sizes: Sizes, *, updates: bool):
        heads = sizes.num_heads
        # The softplus of this is 1.
        one = jax.nn.initializers.constant(math.log(math.e - 1))
        normal = jax.nn.initializers.normal(sizes.head_dim**-0.5)
        direction = Param((heads, sizes.head_dim), normal, ("heads", None))
        params = {"omega": Param((heads,), one, ("heads",)), "key_direction": direction}
        return params if self.gate == "key" else {**params, "query_direction": direction}

    def layer_terms(self, params, layer: Layer) -> Terms:
        sizes, p = layer.sizes, layer.positions
        assert layer.q is not None
        assert layer.k is not None
        slopes = jnp.asarray(alibi_slopes(sizes.num_heads), layer.dtype)
        slopes = slopes * jax.nn.softplus(params["omega"].astype(layer.dtype))
        own_keys = _gate(layer.k, params["key_direction"], layer.dtype)
        keys = layer.of_all_keys("gate", own_keys)
        queries = None
        if self.gate == "query_key":
            queries = _gate(layer.q, params["query_direction"], layer.dtype)

        def bias(i: Array, j: Array) -> Array:
            distance = distances(p[..., i], p[..., j])
            gates = jnp.moveaxis(keys[..., j, :], -1, -2)[..., None, :]
            if queries is not None:
                own = queries[..., i - layer.index, :]
                gates = gates + jnp.moveaxis(own, -1, -2)[..., None]
            slope = slopes[:, None, None] * gates
            return -distance[..., None, :, :].astype(layer.dtype) * slope

        return Terms(bias=bias, kept={"gate": own_keys})


def _gate(x: Array, direction: Array, dtype: Any) -> Array:
    """``softplus(x . direction / sqrt(D))``, ``[..., T, Hq]``, for a direction of each query head.

    Args:
      x: ``[..., T, H, D]``; its head ``h`` is that of query heads ``h G`` to ``h G + G - 1``.
      direction: ``[Hq, D]``, of any length.
      dtype: of the result.
    """
    direction = direction.astype(dtype)
    square = jnp.sum(direction**2, axis=-1, keepdims=True)
    unit = direction / jnp.sqrt(jnp.maximum(square, SHORTEST**2))
    heads, dim = x.shape[-2:]
    unit = unit.reshape(heads, -1, dim)
    along = jnp.einsum("...hd,hgd->...hg", x.astype(dtype), unit)
    return jax.nn.softplus(along.reshape(*x.shape[:-2], -1) * dim**-0.5)


@dataclasses.dataclass(frozen=True)
class GrapePath(Encoding):
    """GRAPE-AP (Zhang et al. 2025, arXiv:2512.07805): a bias summed from the key to the query.

    ``b_ij = sum_{j < l <= i} slope_h log sigmoid(p_i . rot(n_l) / d)`` over the keys ``l`` that the
    query sees, with ALiBi's slopes; ``p = x W`` of the layer's input, ``d`` wide in each head, ``n
    = p / rms(p)``, and ``rot`` the rotation by ``-l`` radians of every pair of coordinates ``(c, c
    + d / 2)``, with position ``l``. Only one side is rotated, as in the published code, ``ap-v1``,
    so that biases depend on where positions start.

    Attributes:
      width: ``d``, even; None: the head dimension.

    Raises:
      ValueError: for a width out of range; if tokens see later ones, to which no path leads.
    """

    kind: ClassVar[str] = "grape_path"
    acts_on: ClassVar[tuple[str, ...]] = ("logits",)

    width: int | None = None

    def __post_init__(self):
        require(
            self.width is None or (self.width > 0 and self.width % 2 == 0),
            f"grape_path: width must be positive and even, or None; got {self.width}",
        )

    def _width(self, sizes: Sizes) -> int:
        return sizes.head_dim if self.width is None else self.width

    def layer_params(self, sizes: Sizes, *, updates: bool):
        shape = (sizes.hidden_size, sizes.num_heads * self._width(sizes))
        normal = jax.nn.initializers.normal(0.02)
        return {"path_kernel": Param(shape, normal, ("embed", "heads"))}

    def layer_terms(self, params, layer: Layer) -> Terms:
        layer.require_causal(self.kind, "it sums from a key up to the query")
        width = self._width(layer.sizes)
        own = layer.product(params["path_kernel"])
        own = own.reshape(*own.shape[:-1], layer.sizes.num_heads, width)
        rotated = _rotated(own, layer.query_positions)
        keys = layer.of_all_keys("path", rotated).astype(own.dtype)
        slopes = jnp.asarray(alibi_slopes(layer.sizes.num_heads), own.dtype)

        def logits_fn(logits: Array, rows: Any) -> Array:
            sides = by_rows.of_queries(own, rows), by_rows.of_keys(keys, rows)
            along = by_rows.products(*sides, own.dtype) / width
            steps = slopes[:, None, None] * jax.nn.log_sigmoid(along)
            steps = jnp.where(rows.visible, steps, 0)
            return logits + by_rows.sums_behind(steps).astype(logits.dtype)

        return Terms(logits_fn=logits_fn, kept={"path": rotated})


def _rotated(p: Array, positions: Array) -> Array:
    """``p / rms(p)``, ``[..., T, H, d]``, rotated by minus its position."""
    mean = jnp.mean(p**2, axis=-1, keepdims=True)
    p = p * jax.lax.rsqrt(mean + jnp.finfo(p.dtype).eps)
    angle = turned(positions, np.ones(1), p.dtype)[..., None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(p, 2, axis=-1)
    return jnp.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)


@dataclasses.dataclass(frozen=True)
class GrapeMultiplicative(Encoding):
    """Contextual multiplicative GRAPE (Zhang et al. 2025, arXiv:2512.07805): RoPE by content.

    The phase of a token is the sum of ``softplus(x W + b)`` over the tokens before it, excluding
    itself; frequencies are learned, starting from RoPE's. Every layer has phases of its own.
    Positions are not read. As in the published code, ``m-ctx``, the rotation goes backwards, which
    changes no logit.

    Attributes:
      base: of the initial frequencies.
      per_head: one phase per key/value head; else one for all.
      frequencies_per_head: each key/value head has its own; else they share them.
      initial_step: ``softplus(b)`` at the start, ``W`` being 0.
      step: ``softplus``; or ``sigmoid``, of ``(x W + b) / sigmoid_scale``, as in the published
        code: with the same ``b`` its model starts with steps of 0.39.
      sigmoid_scale: see ``step``.

    Raises:
      ValueError: for options out of range.
    """

    kind: ClassVar[str] = "grape_m_ctx"
    acts_on: ClassVar[tuple[str, ...]] = ("state",)
    reads_positions: ClassVar[bool] = False

    base: float = 10_000.0
    per_head: bool = False
    frequencies_per_head: bool = False
    initial_step: float = 1e-3
    step: str = "softplus"
    sigmoid_scale: float = 16.0

    def __post_init__(self):
        require(self.base > 1, f"{self.kind}: the rotary base must exceed 1; got {self.base}")
        choose(f"{self.kind} step", self.step, STEPS)
        for name in ("initial_step", "sigmoid_scale"):
            value = getattr(self, name)
            require(value > 0, f"{self.kind}: {name} must be positive; got {value}")

    def layer_params(self, sizes: Sizes, *, updates: bool):
        phases = sizes.num_kv_heads if self.per_head else 1
        axis = "kv_heads" if self.per_head else None
        # The inverse of softplus.
        start = self.initial_step + math.log(-math.expm1(-self.initial_step))
        bias = jax.nn.initializers.constant(start)
        shape: tuple[int, ...] = (sizes.head_dim // 2,)
        axes: tuple[str | None, ...] = (None,)
        if self.frequencies_per_head:
            shape, axes = (sizes.num_kv_heads, *shape), ("kv_heads", None)

        def log_frequencies(key, shape, dtype):
            rope = jnp.log(jnp.asarray(frequencies(sizes.head_dim, self.base)))
            return jnp.broadcast_to(rope, shape).astype(dtype)

        zeros = jax.nn.initializers.zeros
        return {
            "step_kernel": Param((sizes.hidden_size, phases), zeros, ("embed", axis)),
            "step_bias": Param((phases,), bias, (axis,)),
            "log_frequencies": Param(shape, log_frequencies, axes),
        }

    def layer_terms(self, params, layer: Layer) -> Terms:
        steps = layer.product(params["step_kernel"])
        steps = steps + params["step_bias"].astype(layer.dtype)
        if self.step == "softplus":
            steps = jax.nn.softplus(steps)
        else:
            steps = jax.nn.sigmoid(steps / self.sigmoid_scale)
        total = layer.running_sum("phase", steps)
        turns = jnp.exp(params["log_frequencies"].astype(layer.dtype))
        state = content_state(-(total - steps)[..., None] * turns)
        return Terms(state=state, kept={"phase": total})
