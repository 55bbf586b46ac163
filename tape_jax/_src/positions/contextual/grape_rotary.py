"""Multiplicative GRAPE: RoPE by a clock that runs as the content says."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from tape_jax._src.core.checks import choose, require
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.fixed.rotary import content_state, frequencies
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Encoding, Param

STEPS = ("softplus", "sigmoid")


@dataclasses.dataclass(frozen=True)
class GrapeMultiplicative(Encoding):
    """Contextual multiplicative GRAPE (Zhang et al. 2025, arXiv:2512.07805): RoPE by content.

    The phase of a token is the sum of ``softplus(x W + b)`` over the tokens before it, itself not
    among them; frequencies are learned, from RoPE's. Every layer has phases of its own. Positions
    are not read. As in the published code, ``m-ctx``, the rotation goes backwards, which no logit
    shows.

    Attributes:
      base: of the initial frequencies.
      per_head: each key/value head has a phase; else one for all.
      frequencies_per_head: each key/value head has frequencies; else they share them.
      initial_step: ``softplus(b)`` at the start, ``W`` being 0.
      step: ``softplus``; or ``sigmoid``, of ``(x W + b) / sigmoid_scale``, as the published code
        has it: with the same ``b`` its model starts with steps of 0.39.
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
        bias = jax.nn.initializers.constant(math.log(math.expm1(self.initial_step)))
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
