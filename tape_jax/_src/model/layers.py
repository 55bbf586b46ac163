"""Norms, projections and MLPs of a Llama-style decoder, as Flax Linen modules.

Modules create parameters and call pure functions. Shapes: ``B`` stands for any batch axes, ``T``
for time, ``H`` for heads, ``D`` for the head dimension.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from tape_jax._src.core import algebra
from tape_jax._src.core.sharding import Axes, Sharding, constrain
from tape_jax._src.model import experts
from tape_jax._src.model.config import Lora, ModelConfig
from tape_jax._src.model.parameters import (
    create,
    declare,
    gathered_product,
    kernel_std,
    lora_params,
)
from tape_jax._src.positions.protocol import Param

Array = jax.Array


def normalized(x: Array, scale: Array, eps: float, *, centred: bool = False) -> Array:
    """``x`` over its root mean square, times ``scale``; ``centred``: LayerNorm's, without bias.

    Args:
      x: ``[..., D]``.
      scale: ``[D]``.
      eps: added to the mean square.
      centred: whether the mean is subtracted first.

    Returns:
      ``[..., D]``, in at least float32.
    """
    wide = x.astype(algebra.at_least_float32(x.dtype))
    if centred:
        wide = wide - wide.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return wide * inverse * scale.astype(wide.dtype)


class Norm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019) or LayerNorm without bias, as configured.

    Computed in at least float32.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        init = nn.initializers.zeros if c.zero_centered_norms else nn.initializers.ones
        spec = Param((x.shape[-1],), init, (None,))
        scale = create(self, "scale", spec, c.param_dtype, role="norms")
        if c.zero_centered_norms:
            scale = scale.astype(algebra.at_least_float32(x.dtype)) + 1
        return normalized(x, scale, c.norm_eps, centred=c.norm == "layer").astype(c.dtype)


class Linear(nn.Module):
    """``x @ kernel`` over the last axis, with a bias or a low-rank term if asked for.

    Batch and time are flattened first: a weight gradient contracted over one axis is several times
    faster on a CPU than one contracted over two. On a mesh they are not, since they may be split
    over different axes of it.

    A kernel that ``fsdp`` splits is gathered here, and again in the backward pass.

    Attributes:
      features: size of the last axis of the result.
      kernel_axes: logical axes of the kernel ``[in, features]``.
      residual: whether the result is added to a stream, which lowers the initial scale.
      lora: the low-rank term, if any.
      bias: whether a bias is added.
      role: of the kernel, as in ``ParameterSpec``.
    """

    config: ModelConfig
    features: int
    kernel_axes: Axes
    residual: bool = False
    lora: Lora | None = None
    bias: bool = False
    role: str | None = None
    sharding: Sharding | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        fan_in = x.shape[-1]
        std = kernel_std(c, fan_in, residual=self.residual)
        spec = Param((fan_in, self.features), nn.initializers.normal(std), self.kernel_axes)
        kernel = create(self, "kernel", spec, c.param_dtype, role=self.role).astype(c.dtype)
        flat = (x if self.sharding else x.reshape(-1, fan_in)).astype(c.dtype)
        if self.sharding is None or self.sharding.shards("embed") == 1:
            out = flat @ kernel
        else:
            out = gathered_product(self.sharding, self.kernel_axes, flat, kernel)
        if self.lora is not None:
            specs = lora_params(fan_in, self.features, self.lora.rank, self.kernel_axes)
            factors = declare(self, "lora", specs, c.param_dtype, self.sharding)
            low = flat @ factors["a"].astype(c.dtype)
            out = out + (low * self.lora.scale) @ factors["b"].astype(c.dtype)
        if self.bias:
            spec = Param((self.features,), nn.initializers.zeros, self.kernel_axes[1:])
            out = out + create(self, "bias", spec, c.param_dtype).astype(out.dtype)
        return out.reshape(*x.shape[:-1], self.features)


def projection(
    config: ModelConfig, name: str, features: int, kernel_axes: Axes, **options: Any
) -> Linear:
    """A block's projection, with the bias and the low-rank term that the config gives it."""
    lora = config.lora if config.lora and name in config.lora.targets else None
    bias = name in config.biases
    return Linear(config, features, kernel_axes, lora=lora, bias=bias, name=name, **options)


class MLP(nn.Module):
    """Gated MLP (Shazeer 2020): ``down(activation(gate(x)) * up(x))``."""

    config: ModelConfig
    sharding: Sharding | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        linear = functools.partial(projection, c, sharding=self.sharding)
        gate = linear("gate", c.mlp_size, ("embed", "mlp"))(x)
        up = linear("up", c.mlp_size, ("embed", "mlp"))(x)
        wide = experts.gated(gate, up, c.activation)
        wide = constrain(self.sharding, wide, "batch", "sequence", "mlp")
        return linear("down", c.hidden_size, ("mlp", "embed"), residual=True)(wide)


class Kernel(nn.Module):
    """A kernel parameter only, ``[..., fan_in, features]``."""

    config: ModelConfig
    spec: Param

    @nn.compact
    def __call__(self) -> Array:
        return create(self, "kernel", self.spec, self.config.param_dtype)


class ExpertMLP(nn.Module):
    """A mixture of gated MLPs, ``config.experts`` (see ``experts``).

    If the collection ``losses`` is mutable, the router's losses are sown there.
    """

    config: ModelConfig
    sharding: Sharding | None = None

    @nn.compact
    def __call__(self, x: Array, segment_ids: Array | None = None) -> Array:
        c = self.config
        assert c.experts is not None

        def kernel(name: str, *shape: int, residual: bool = False) -> Array:
            init = nn.initializers.normal(kernel_std(c, shape[-2], residual=residual))
            return Kernel(c, Param(shape, init, experts.KERNEL_AXES[name]), name=name)()

        count, width, inner = c.experts.count, x.shape[-1], c.mlp_size
        logits = experts.router_logits(x, kernel("router", width, count), self.sharding)
        kernels = {
            "gate": kernel("gate", count, width, inner).astype(c.dtype),
            "up": kernel("up", count, width, inner).astype(c.dtype),
            "down": kernel("down", count, inner, width, residual=True).astype(c.dtype),
        }
        out, chosen = experts.mixture(x, logits, kernels, c.experts, self.sharding, c.activation)
        if self.is_mutable_collection("losses") and not self.is_initializing():
            losses = experts.router_losses(logits, chosen, segment_ids)
            for name, value in losses.items():
                self.sow("losses", name, value)
        return out
