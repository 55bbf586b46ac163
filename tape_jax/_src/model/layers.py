"""The layers of a Llama-style decoder block, as Flax Linen modules.

Modules create parameters and call pure functions; what a position encoding does is its own affair.
Shapes: ``B`` stands for any batch axes, ``T`` for time, ``H`` for heads, ``D`` for the head
dimension.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

from tape_jax._src.attention import attention
from tape_jax._src.attention.shifted_groups import shifted_group_attention
from tape_jax._src.attention.zigzag import from_zigzag, to_zigzag
from tape_jax._src.core import algebra
from tape_jax._src.core.checks import require
from tape_jax._src.core.sharding import Axes, Sharding, constrain
from tape_jax._src.model import experts
from tape_jax._src.model.cache import Cache, LayerCache, entries, with_entries, write_cache
from tape_jax._src.model.config import Lora, ModelConfig, kinds_by_pairs
from tape_jax._src.model.parameters import (
    create,
    declare,
    gathered_product,
    kernel_std,
    lora_params,
)
from tape_jax._src.positions.layer import Layer, Order
from tape_jax._src.positions.protocol import Encoding, Param, State
from tape_jax._src.positions.tape.mixing import SUM_OVER_DEVICES

Array = jax.Array
# Layers, at most, that are compiled one by one where a loop over them is slower.
MOST_UNROLLED = 8


@flax.struct.dataclass
class Context:
    """What all layers of one call share.

    Attributes:
      positions: of the keys, ``[..., S]`` or ``[..., S, n]``.
      segment_ids: integers ``[..., T]``, a pair (queries', keys'), or None.
      mask: booleans that broadcast to ``[..., H, T, S]``, or None.
      index: index of the first query among the keys.
      is_causal: whether queries see earlier keys only.
    """

    positions: Array
    segment_ids: Any
    mask: Array | None
    index: Array | int
    is_causal: bool = flax.struct.field(pytree_node=False)


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019), computed in at least float32."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        spec = Param((x.shape[-1],), nn.initializers.ones, (None,))
        scale = create(self, "scale", spec, c.param_dtype, role="norms")
        wide = x.astype(algebra.at_least_float32(x.dtype))
        inverse = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + c.norm_eps)
        return (wide * inverse * scale.astype(wide.dtype)).astype(c.dtype)


class Linear(nn.Module):
    """``x @ kernel`` over the last axis, without bias; with a low-rank term if asked for.

    Batch and time are flattened first: a weight gradient contracted over one axis is several times
    faster on a CPU than one contracted over two. On a mesh they are not, since they may be split
    over different axes of it.

    A kernel that ``fsdp`` splits is gathered here, and again in the backward pass.

    Attributes:
      features: size of the last axis of what it returns.
      kernel_axes: logical axes of the kernel ``[in, features]``.
      residual: whether what it returns is added to a stream, which lowers the initial scale.
      lora: the low-rank term, if any.
      role: of the kernel, as in ``ParameterSpec``.
    """

    config: ModelConfig
    features: int
    kernel_axes: Axes
    residual: bool = False
    lora: Lora | None = None
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
        return out.reshape(*x.shape[:-1], self.features)


def projection(
    config: ModelConfig, name: str, features: int, kernel_axes: Axes, **options: Any
) -> Linear:
    """A block's projection, with a low-rank term if it is among the targets of ``config.lora``."""
    lora = config.lora if config.lora and name in config.lora.targets else None
    return Linear(config, features, kernel_axes, lora=lora, name=name, **options)


class MLP(nn.Module):
    """Gated MLP (Shazeer 2020): ``down(silu(gate(x)) * up(x))``."""

    config: ModelConfig
    sharding: Sharding | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        linear = functools.partial(projection, c, sharding=self.sharding)
        gate = linear("gate", c.mlp_size, ("embed", "mlp"))(x)
        up = linear("up", c.mlp_size, ("embed", "mlp"))(x)
        wide = constrain(self.sharding, experts.gated(gate, up), "batch", "sequence", "mlp")
        return linear("down", c.hidden_size, ("mlp", "embed"), residual=True)(wide)


class Kernel(nn.Module):
    """A kernel by itself, ``[..., fan_in, features]``."""

    config: ModelConfig
    spec: Param

    @nn.compact
    def __call__(self) -> Array:
        return create(self, "kernel", self.spec, self.config.param_dtype)


class ExpertMLP(nn.Module):
    """A mixture of gated MLPs, ``config.experts`` (see ``experts``).

    Where the collection ``losses`` is mutable, the router's losses are sown there.
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
        out, chosen = experts.mixture(x, logits, kernels, c.experts, self.sharding)
        if self.is_mutable_collection("losses") and not self.is_initializing():
            losses = experts.router_losses(logits, chosen, segment_ids)
            for name, value in losses.items():
                self.sow("losses", name, value)
        return out


class Attention(nn.Module):
    """Multi-head attention over values and, where asked, over position states.

    Given a cache, it returns the new one or, inside a scan over layers, what the new tokens add to
    it, ``[B, H_kv, T, ...]`` each, but all keys where the encoding rewrites them.

    Where the collection ``maps`` is mutable, the attention maps ``[..., T, H, S]`` are sown there.

    Attributes:
      attend_state: whether the attended state ``a = A e`` is wanted.
      sharding: a mesh and rules, or None. Where it splits sequences, tokens come in the order of
        ``zigzag.to_zigzag``.
    """

    config: ModelConfig
    encoding: Encoding
    attend_state: bool
    sharding: Sharding | None = None

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
        linear = functools.partial(projection, c, sharding=self.sharding)

        def heads(name: str, n: int, axis: str) -> Array:
            split = linear(name, n * c.dim, ("embed", axis))(x).reshape(*x.shape[:-1], n, c.dim)
            return constrain(self.sharding, split, "batch", "sequence", axis)

        q = heads("q", c.num_heads, "heads")
        k, v = (heads(name, c.kv_heads, "kv_heads") for name in ("k", "v"))
        layer = entered_layer(context, c, x, self.sharding, cache, q=q, k=k, state=state)
        terms = self.encoding.layer_terms(params, layer)
        rotations = self.encoding.rotation(state)
        query_state, e = rotations if terms.state is None else (terms.state, terms.state)
        options: dict[str, Any] = {}
        if cache is not None:
            if e is not None:
                k = algebra.rotate(k, e)
                options = {"keys_rotated": True}
            new = entries(cache, k, v, e, terms.kept or {})
            write = with_entries if c.scan_layers else write_cache
            seen = write(cache, new, context.index)
            rewritten = seen
            if terms.rewritten_keys is not None:
                keys = terms.rewritten_keys(seen.k)
                rewritten, new = (dataclasses.replace(one, k=keys) for one in (seen, new))
                seen = rewritten if terms.logits_fn is None else seen
            # Returned from a scan, the cache would be copied as a whole.
            cache = new if c.scan_layers else rewritten
            seen = jax.tree.map(lambda x: x.swapaxes(1, 2), seen)
            k, v = seen.k, seen.v
            # The attended state is to have the type of the states, whatever that of the cache.
            e = None if e is None or seen.e is None else seen.e.astype(e.dtype)
        options |= {
            "query_state": query_state,
            # Inside of nn.remat the index is no longer known to be 0.
            "query_offset": 0 if cache is None else context.index,
            "is_causal": context.is_causal,
            "segment_ids": context.segment_ids,
            "mask": context.mask,
            "local_window_size": c.local_window_size,
            **terms.keywords(),
        }
        attend: Callable[..., tuple[Array, Array | None]] = attention
        wants_maps = self.is_mutable_collection("maps") and not self.is_initializing()
        if c.shifted_groups is not None and not self.is_initializing():
            require(
                cache is None and not wants_maps,
                f"shifted_groups = {c.shifted_groups} is for training: caches and attention maps "
                "need full attention, shifted_groups=None",
            )
            attend = functools.partial(shifted_group_attention, groups=c.shifted_groups)
        implementation, split = c.attention_implementation, {}
        if splits_sequence(self.sharding):
            require(
                cache is None and not wants_maps and c.shifted_groups is None,
                "a mesh that splits sequences takes full passes: no cache, no attention maps, no "
                "shifted_groups",
            )
            names = implementation if isinstance(implementation, tuple) else (implementation,)
            require(
                None in names or "ring" in names,
                f"a mesh that splits sequences needs attention_implementation=None or 'ring'; got "
                f"{implementation!r}",
            )
            implementation = "ring"
            split = {"sharding": self.sharding, "options": {"order": "zigzag"}}
        try:
            out, attended = attend(
                q, k, v, state=e, attend_state=self.attend_state, implementation=implementation,
                **options, **split,
            )  # fmt: skip
        except NotImplementedError as error:
            raise NotImplementedError(f"the encoding {self.encoding.kind!r}: {error}") from error
        if attended is not None:
            attended = constrain(self.sharding, attended, "batch", "sequence", "heads")
        if wants_maps:
            # Attention over one-hot values is the attention map itself.
            one_hot = jnp.broadcast_to(
                jnp.eye(k.shape[-3], dtype=q.dtype)[:, None], (*k.shape[:-1], k.shape[-3])
            )
            options |= {"attend_state": False, "implementation": "reference"}
            self.sow("maps", "probabilities", attention(q, k, one_hot, state=e, **options)[0])
        out = constrain(self.sharding, out, "batch", "sequence", "heads")
        out = out.reshape(*x.shape[:-1], c.num_heads * c.dim)
        out = linear("out", c.hidden_size, ("heads", "embed"), residual=True)(out)
        return out, attended, cache


def entered_layer(
    context: Context,
    config: ModelConfig,
    x: Array,
    sharding: Sharding | None,
    cache: LayerCache | Cache | None,
    q: Array | None = None,
    k: Array | None = None,
    state: State = None,
) -> Layer:
    """What an encoding is given of a layer that ``x`` enters, with what ``cache`` keeps of it."""
    order = None
    if sharding is not None and splits_sequence(sharding):
        order = Order(*(functools.partial(f, sharding) for f in (from_zigzag, to_zigzag)))
    return Layer(
        x,
        context.positions,
        context.segment_ids,
        context.is_causal,
        config,
        q=q,
        k=k,
        state=state,
        kept=None if cache is None else cache.kept,
        cached_keys=getattr(cache, "k", None),
        index=context.index,
        order=order,
    )


@flax.struct.dataclass
class PackedState:
    """A position state between two layers, where ``remat`` keeps it for the backward pass.

    A TPU fills up the last two axes of an array to tiles of 8 x 128, which for 12 heads of 64
    numbers takes 2.7 times the memory. So the axes behind time are one.

    Attributes:
      flat: the state with arrays ``[B, T, N]``.
      tails: of each array the axes that became one.
    """

    flat: State
    tails: tuple[tuple[int, ...], ...] = flax.struct.field(pytree_node=False)

    def unpack(self) -> State:
        """The state with arrays ``[B, T, H, ...]``."""
        arrays, tree = jax.tree.flatten(self.flat)
        pairs = zip(arrays, self.tails, strict=True)
        heads = [x.reshape(*x.shape[:-1], *tail) if tail else x for x, tail in pairs]
        return jax.tree.unflatten(tree, heads)


def pack_state(state: State, axes: int) -> PackedState:
    """Packs a state, of whose arrays the first ``axes`` axes are left as they are."""
    arrays, tree = jax.tree.flatten(state)
    flat = [x.reshape(*x.shape[:axes], -1) if x.ndim > axes else x for x in arrays]
    return PackedState(jax.tree.unflatten(tree, flat), tuple(x.shape[axes:] for x in arrays))


class Block(nn.Module):
    """One decoder block: attention, MLP, and the update of the position state between them.

    Attributes:
      updates: whether this layer updates the state; if not, it hands it on unchanged.
      record: whether the hidden and position states that enter are returned.
      sharding: a mesh and rules, or None.
    """

    config: ModelConfig
    encoding: Encoding
    updates: bool
    record: bool = False
    sharding: Sharding | None = None

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
        packed = isinstance(state, PackedState)
        if packed:
            state = state.unpack()
        if not self.updates:
            state = fixed_state
        entered = (h, state) if self.record else None
        specs = encoding.layer_params(c, updates=self.updates)
        params = declare(self, "position", specs, c.param_dtype, self.sharding)
        attends_state = self.updates and encoding.attends_state
        out, attended, cache = Attention(
            c, encoding, attend_state=attends_state, sharding=self.sharding, name="attention"
        )(RMSNorm(c, name="attention_norm")(h), state, params, context, cache)
        h = self._residual(h + out)
        x = self._residual(self._mlp(RMSNorm(c, name="mlp_norm")(h), context))
        if self.updates:
            options: dict[str, Any] = {} if self.sharding is None else {"sharding": self.sharding}
            if c.update_implementation is not None:
                options["implementation"] = c.update_implementation
            state = encoding.update_state(params, state, attended, x, **options)
            state = pack_state(state, x.ndim - 1) if packed else state
            state = constrain_state(self.sharding, state)
        return (h + x, state if self.updates else None), (cache, entered)

    @nn.nowrap
    def _mlp(self, x: Array, context: Context) -> Array:
        if self.config.experts is None:
            return MLP(self.config, self.sharding, name="mlp")(x)
        ids = context.segment_ids
        ids = ids[0] if isinstance(ids, tuple) else ids
        return ExpertMLP(self.config, self.sharding, name="mlp")(x, ids)

    def _residual(self, h: Array) -> Array:
        return constrain(self.sharding, h, "batch", "sequence", "hidden")


def constrain_state(sharding: Sharding | None, state: State) -> State:
    """Position states ``[B, T, H_kv, ...]`` kept where the rules put them."""

    def keep(x: Array) -> Array:
        # Beside states there may be the number of a layer.
        return constrain(sharding, x, "batch", "sequence", "kv_heads") if x.ndim else x

    return jax.tree.map(keep, state)


def splits_sequence(sharding: Sharding | None) -> bool:
    """Whether the mesh splits sequences."""
    return sharding is not None and sharding.shards("sequence") > 1


def remat_policy(name: str) -> Callable | None:
    """The policy of ``jax.checkpoint`` that ``ModelConfig.remat`` names."""
    policies = jax.checkpoint_policies
    dots = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable,
        policies.save_only_these_names(experts.PRODUCT, SUM_OVER_DEVICES),
    )
    return {"dots": dots, "full": None, "groups": None}[name]


def unrolls(config: ModelConfig) -> bool:
    """Whether the program has each layer by itself where a training step would loop over them.

    On a CPU a sixth of a step goes into zeroing, writing and reading the stacks in which a loop
    keeps activations. Without it a program compiles for longer and keeps a quarter more memory; up
    to three times as much, for less time or none, where pairs of tokens are looked at.
    """
    few = config.num_layers <= MOST_UNROLLED and config.remat == "none"
    by_pairs = kinds_by_pairs(config.position)
    return few and not by_pairs and jax.default_backend() == "cpu"


def runs(flags: Sequence[Any]) -> list[tuple[int, int, Any]]:
    """Maximal runs ``(start, stop, flag)`` of equal neighbours: one scan each."""
    edges = [i for i in range(len(flags)) if i == 0 or flags[i] != flags[i - 1]]
    return [(a, b, flags[a]) for a, b in zip(edges, [*edges[1:], len(flags)], strict=True)]


def in_groups(block: Block, params: Any, carry: Any, fixed: State, context: Context) -> Any:
    """What leaves a run of like layers, of which the backward pass keeps what enters every n-th.

    From there it makes what enters the layers of a group, and then each layer, again.
    """
    layers = jax.tree.leaves(params)[0].shape[0]
    size = math.isqrt(layers - 1) + 1

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(carry: Any, params: Any) -> tuple[Any, None]:
        out: Any = block.apply({"params": params}, carry, fixed, context, None)
        return out[0], None

    @jax.checkpoint
    def group(carry: Any, params: Any) -> Any:
        return jax.lax.scan(layer, carry, params)[0]

    for first in range(0, layers, size):
        carry = group(carry, jax.tree.map(lambda x, i=first: x[i : i + size], params))
    return carry
