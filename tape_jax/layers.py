"""The layers of a Llama-style decoder block, as Flax Linen modules.

Modules create parameters and call pure functions; what a position encoding does is its own affair.
Shapes: ``B`` stands for any batch axes, ``T`` for time, ``H`` for heads, ``D`` for the head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tape_jax import algebra
from tape_jax.attention import attention
from tape_jax.config import ModelConfig
from tape_jax.positions.protocol import Encoding, Param, State

Array = jax.Array


@flax.struct.dataclass
class LayerCache:
    """What one layer keeps of past tokens; slots not yet written are zero.

    Attributes:
      k: rotated keys ``[B, S, H_kv, D]`` (``M * R`` wide in tensor form).
      v: values ``[B, S, H_kv, D]``.
      e: position states, ``[B, S, H_kv, D]`` or ``[B, S, H_kv, M, L, R]``; None unless attended.
    """

    k: Array
    v: Array
    e: Array | None


@flax.struct.dataclass
class Context:
    """What all layers of one call share.

    Attributes:
      positions: of the keys, ``[..., S]`` or ``[..., S, n]``.
      segment_ids: integers ``[..., T]``, a pair (queries', keys'), or None.
      mask: booleans that broadcast to ``[..., H, T, S]``, or None.
      index: index of the first query among the keys.
      causal: whether queries see earlier keys only.
    """

    positions: Array
    segment_ids: Any
    mask: Array | None
    index: Array | int
    causal: bool = flax.struct.field(pytree_node=False)


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019), computed in at least float32."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), c.param_dtype)
        wide = x.astype(algebra.at_least_float32(x.dtype))
        inverse = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + c.norm_eps)
        return (wide * inverse * scale.astype(wide.dtype)).astype(c.dtype)


class Linear(nn.Module):
    """``x @ kernel`` over the last axis, without bias.

    Batch and time are flattened first: a weight gradient contracted over one axis is several times
    faster on a CPU than one contracted over two.
    """

    config: ModelConfig
    features: int
    residual: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        fan_in = x.shape[-1]
        std = fan_in**-0.5 if c.init_scale is None else c.init_scale
        if self.residual:
            std /= (2 * c.num_layers) ** 0.5
        kernel = self.param(
            "kernel", nn.initializers.normal(std), (fan_in, self.features), c.param_dtype
        )
        flat = x.reshape(-1, fan_in).astype(c.dtype)
        return (flat @ kernel.astype(c.dtype)).reshape(*x.shape[:-1], self.features)


class MLP(nn.Module):
    """Gated MLP (Shazeer 2020): ``down(silu(gate(x)) * up(x))``."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        gate = Linear(c, c.mlp_size, name="gate")(x)
        up = Linear(c, c.mlp_size, name="up")(x)
        return Linear(c, c.hidden_size, residual=True, name="down")(nn.silu(gate) * up)


class Attention(nn.Module):
    """Multi-head attention over values and, where asked, over position states.

    Where the collection ``maps`` is mutable, the attention maps ``[..., T, H, S]`` are sown there.

    Attributes:
      attend_state: whether the attended state ``a = A e`` is wanted.
    """

    config: ModelConfig
    encoding: Encoding
    attend_state: bool

    @nn.compact
    def __call__(
        self,
        x: Array,
        state: State,
        params: dict[str, Array],
        context: Context,
        cache: LayerCache | None,
    ) -> tuple[Array, Array | None, LayerCache | None]:
        c = self.config

        def heads(name: str, n: int) -> Array:
            return Linear(c, n * c.dim, name=name)(x).reshape(*x.shape[:-1], n, c.dim)

        q, k, v = heads("q", c.num_heads), heads("k", c.kv_heads), heads("v", c.kv_heads)
        query_state, e = self.encoding.rotation(state)
        options: dict[str, Any] = {}
        if cache is not None:
            if e is not None:
                k = algebra.rotate(k, e)
                options = {"keys_rotated": True}
            cache = _write(cache, context.index, k, v, e)
            k, v, e = cache.k, cache.v, cache.e
        options |= {
            "query_state": query_state,
            "query_offset": context.index,
            "causal": context.causal,
            "segment_ids": context.segment_ids,
            "mask": context.mask,
            "window": c.window,
            "bias": self._bias(params, context.positions),
        }
        out, attended = attention(
            q, k, v, e, attend_state=self.attend_state, implementation=c.attention, **options
        )
        if self.is_mutable_collection("maps") and not self.is_initializing():
            # Attention over one-hot values is the attention map itself.
            one_hot = jnp.broadcast_to(
                jnp.eye(k.shape[-3], dtype=q.dtype)[:, None], (*k.shape[:-1], k.shape[-3])
            )
            options |= {"attend_state": False, "implementation": "reference"}
            self.sow("maps", "probabilities", attention(q, k, one_hot, e, **options)[0])
        out = out.reshape(*x.shape[:-1], c.num_heads * c.dim)
        return Linear(c, c.hidden_size, residual=True, name="out")(out), attended, cache

    def _bias(self, params: dict[str, Array], positions: Array) -> Callable | None:
        if not self.encoding.biases:
            return None
        return lambda i, j: self.encoding.pair_bias(
            params, positions[..., i], positions[..., j], self.config
        )


def _write(cache: LayerCache, index: Array | int, k: Array, v: Array, e: Array | None):
    """The cache with the slots from ``index`` on overwritten."""

    def put(old: Array, new: Array) -> Array:
        new = jnp.broadcast_to(new, (old.shape[0], new.shape[-old.ndim + 1], *old.shape[2:]))
        return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), index, axis=1)

    state = cache.e if cache.e is None or e is None else put(cache.e, e)
    return LayerCache(k=put(cache.k, k), v=put(cache.v, v), e=state)


class Block(nn.Module):
    """One decoder block: attention, MLP, and the update of the position state between them.

    Attributes:
      updates: whether this layer updates the state; if not, it hands it on unchanged.
      record: whether the hidden and position states that enter are returned.
    """

    config: ModelConfig
    encoding: Encoding
    updates: bool
    record: bool = False

    @nn.compact
    def __call__(
        self,
        carry: tuple[Array, State],
        fixed_state: State,
        context: Context,
        cache: LayerCache | None,
    ) -> tuple[tuple[Array, State], tuple[LayerCache | None, Any]]:
        c, encoding = self.config, self.encoding
        h, state = carry
        if not self.updates:
            state = fixed_state
        entered = (h, state) if self.record else None
        params = declare(
            self, "position", encoding.layer_params(c, updates=self.updates), c.param_dtype
        )
        out, attended, cache = Attention(
            c, encoding, attend_state=self.updates and encoding.attends_state, name="attention"
        )(RMSNorm(c, name="attention_norm")(h), state, params, context, cache)
        h = h + out
        m = MLP(c, name="mlp")(RMSNorm(c, name="mlp_norm")(h))
        if self.updates:
            state = encoding.update(params, state, attended, m)
        return (h + m, state if self.updates else None), (cache, entered)


def declare(
    module: nn.Module, prefix: str, params: dict[str, Param], dtype: Any
) -> dict[str, Array]:
    """Creates in ``module`` the parameters that an encoding asks for, each ``prefix_name``."""
    return {
        name: module.param(f"{prefix}_{name}", spec.init, spec.shape, jnp.dtype(dtype))
        for name, spec in params.items()
    }


def remat_policy(name: str) -> Callable | None:
    """The policy of ``jax.checkpoint`` that ``ModelConfig.remat`` names."""
    policies = jax.checkpoint_policies
    return {"dots": policies.dots_with_no_batch_dims_saveable, "full": None}[name]


def runs(flags: Sequence[Any]) -> list[tuple[int, int, Any]]:
    """Maximal runs ``(start, stop, flag)`` of equal neighbours: one scan each."""
    edges = [i for i in range(len(flags)) if i == 0 or flags[i] != flags[i - 1]]
    return [(a, b, flags[a]) for a, b in zip(edges, [*edges[1:], len(flags)], strict=True)]


def default_positions(length: int) -> Array:
    """``0 .. length - 1``."""
    return jnp.asarray(np.arange(length, dtype=np.int32))
