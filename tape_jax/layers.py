"""The layers of a Llama-style decoder block, as Flax Linen modules.

Modules create parameters and call pure functions; what a position encoding does is its own affair.
Shapes: ``B`` stands for any batch axes, ``T`` for time, ``H`` for heads, ``D`` for the head
dimension.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tape_jax import algebra, experts
from tape_jax.attention import attention
from tape_jax.config import ModelConfig, require
from tape_jax.positions.protocol import Encoding, Param, State
from tape_jax.sharding import Axes, Sharding, constrain

Array = jax.Array

# Logical axes of the kernel of each projection, by its name.
KERNEL_AXES: dict[str | None, Axes] = {
    "q": ("embed", "heads"),
    "k": ("embed", "kv_heads"),
    "v": ("embed", "kv_heads"),
    "out": ("heads", "embed"),
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "head": ("embed", "vocab"),
}


@flax.struct.dataclass
class LayerCache:
    """What one layer keeps of past tokens; slots not yet written are zero.

    Heads come before time: so the products of a single query read it as it is.

    Attributes:
      k: rotated keys ``[B, H_kv, S, D]`` (``M * R`` wide in tensor form).
      v: values ``[B, H_kv, S, D]``.
      e: position states, ``[B, H_kv, S, D]`` or ``[B, H_kv, S, M, L, R]``; None unless attended.
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
        spec = Param((x.shape[-1],), nn.initializers.ones, (None,))
        scale = create(self, "scale", spec, c.param_dtype)
        wide = x.astype(algebra.at_least_float32(x.dtype))
        inverse = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + c.norm_eps)
        return (wide * inverse * scale.astype(wide.dtype)).astype(c.dtype)


class Linear(nn.Module):
    """``x @ kernel`` over the last axis, without bias; with a low-rank term where the config asks.

    Batch and time are flattened first: a weight gradient contracted over one axis is several times
    faster on a CPU than one contracted over two. On a mesh they are not, since they may be split
    over different axes of it.

    A kernel that ``fsdp`` splits is gathered here, and again in the backward pass.
    """

    config: ModelConfig
    features: int
    residual: bool = False
    sharding: Sharding | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        fan_in = x.shape[-1]
        std = kernel_std(c, fan_in, residual=self.residual)
        axes = KERNEL_AXES.get(self.name, (None, None))
        spec = Param((fan_in, self.features), nn.initializers.normal(std), axes)
        kernel = create(self, "kernel", spec, c.param_dtype).astype(c.dtype)
        flat = (x if self.sharding else x.reshape(-1, fan_in)).astype(c.dtype)
        if self.sharding is None or self.sharding.shards("embed") == 1:
            out = flat @ kernel
        else:
            out = gathered_product(self.sharding, axes, flat, kernel)
        if c.lora is not None and self.name in c.lora.targets:
            specs = lora_params(fan_in, self.features, c.lora.rank, axes)
            factors = declare(self, "lora", specs, c.param_dtype, self.sharding)
            low = flat @ factors["a"].astype(c.dtype)
            out = out + (low * c.lora.scale) @ factors["b"].astype(c.dtype)
        return out.reshape(*x.shape[:-1], self.features)


def kernel_std(config: ModelConfig, fan_in: int, *, residual: bool = False) -> float:
    """Standard deviation of an initial kernel; ``residual``: what it gives is added to a stream."""
    std = fan_in**-0.5 if config.init_scale is None else config.init_scale
    return std / (2 * config.num_layers) ** 0.5 if residual else std


def lora_params(
    fan_in: int, features: int, rank: int, axes: Axes = (None, None)
) -> dict[str, Param]:
    """Low-rank factors of a kernel (Hu et al. 2021, section 4.1): ``A`` normal, ``B`` zero.

    ``axes`` are the logical axes of the kernel.
    """
    return {
        "a": Param((fan_in, rank), nn.initializers.normal(fan_in**-0.5), (axes[0], None)),
        "b": Param((rank, features), nn.initializers.zeros, (None, axes[1])),
    }


class MLP(nn.Module):
    """Gated MLP (Shazeer 2020): ``down(silu(gate(x)) * up(x))``."""

    config: ModelConfig
    sharding: Sharding | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        linear = functools.partial(Linear, c, sharding=self.sharding)
        gate = linear(c.mlp_size, name="gate")(x)
        up = linear(c.mlp_size, name="up")(x)
        wide = constrain(self.sharding, nn.silu(gate) * up, "batch", "sequence", "mlp")
        return linear(c.hidden_size, residual=True, name="down")(wide)


class Kernel(nn.Module):
    """A kernel by itself, ``[..., fan_in, features]``."""

    config: ModelConfig
    spec: Param

    @nn.compact
    def __call__(self) -> Array:
        return create(self, "kernel", self.spec, self.config.param_dtype)


class ExpertMLP(nn.Module):
    """A mixture of gated MLPs, ``config.experts`` (see :mod:`tape_jax.experts`).

    Where the collection ``losses`` is mutable, the router's losses are sown there.
    """

    config: ModelConfig
    sharding: Sharding | None = None

    @nn.compact
    def __call__(self, x: Array, segment_ids: Array | None = None) -> Array:
        c = self.config
        assert c.experts is not None

        def kernel(name: str, fan_in: int, features: int, *stack: int) -> Array:
            std = kernel_std(c, fan_in, residual=name == "down")
            shape, axes = (*stack, fan_in, features), experts.KERNEL_AXES[name]
            return Kernel(c, Param(shape, nn.initializers.normal(std), axes), name=name)()

        count, width, inner = c.experts.count, x.shape[-1], c.mlp_size
        logits = experts.router_logits(x, kernel("router", width, count), self.sharding)
        kernels = {
            "gate": kernel("gate", width, inner, count).astype(c.dtype),
            "up": kernel("up", width, inner, count).astype(c.dtype),
            "down": kernel("down", inner, width, count).astype(c.dtype),
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
    it, ``[B, H_kv, T, ...]`` each.

    Where the collection ``maps`` is mutable, the attention maps ``[..., T, H, S]`` are sown there.

    Attributes:
      attend_state: whether the attended state ``a = A e`` is wanted.
      sharding: a mesh and rules, or None. Where it splits sequences, tokens come in the order of
        :func:`tape_jax.attention.zigzag.to_zigzag`.
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
        linear = functools.partial(Linear, c, sharding=self.sharding)

        def heads(name: str, n: int) -> Array:
            split = linear(n * c.dim, name=name)(x).reshape(*x.shape[:-1], n, c.dim)
            axis = "heads" if name == "q" else "kv_heads"
            return constrain(self.sharding, split, "batch", "sequence", axis)

        q, k, v = heads("q", c.num_heads), heads("k", c.kv_heads), heads("v", c.kv_heads)
        query_state, e = self.encoding.rotation(state)
        options: dict[str, Any] = {}
        if cache is not None:
            if e is not None:
                k = algebra.rotate(k, e)
                options = {"keys_rotated": True}
            new = _entries(cache, k, v, e)
            seen = _with_entries(cache, new, context.index)
            # Returned from a scan, the cache would be copied as a whole.
            cache = new if c.scan_layers else seen
            seen = jax.tree.map(lambda x: x.swapaxes(1, 2), seen)
            k, v, e = seen.k, seen.v, seen.e
        options |= {
            "query_state": query_state,
            # Inside of nn.remat the index is no longer known to be 0.
            "query_offset": 0 if cache is None else context.index,
            "causal": context.causal,
            "segment_ids": context.segment_ids,
            "mask": context.mask,
            "window": c.window,
            "bias": self._bias(params, context.positions),
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
        implementation, split = c.attention, {}
        if splits_sequence(self.sharding):
            require(
                cache is None and not wants_maps and c.shifted_groups is None,
                "a mesh that splits sequences takes full passes: no cache, no attention maps, no "
                "shifted_groups",
            )
            require(
                implementation in (None, "ring"),
                f"a mesh that splits sequences needs attention=None or 'ring'; got "
                f"{implementation!r}",
            )
            implementation = "ring"
            split = {"sharding": self.sharding, "options": {"order": "zigzag"}}
        out, attended = attend(
            q, k, v, e, attend_state=self.attend_state, implementation=implementation,
            **options, **split,
        )  # fmt: skip
        if attended is not None:
            attended = constrain(self.sharding, attended, "batch", "sequence", "heads")
        if wants_maps:
            # Attention over one-hot values is the attention map itself.
            one_hot = jnp.broadcast_to(
                jnp.eye(k.shape[-3], dtype=q.dtype)[:, None], (*k.shape[:-1], k.shape[-3])
            )
            options |= {"attend_state": False, "implementation": "reference"}
            self.sow("maps", "probabilities", attention(q, k, one_hot, e, **options)[0])
        out = constrain(self.sharding, out, "batch", "sequence", "heads")
        out = out.reshape(*x.shape[:-1], c.num_heads * c.dim)
        return linear(c.hidden_size, residual=True, name="out")(out), attended, cache

    def _bias(self, params: dict[str, Array], positions: Array) -> Callable | None:
        if not self.encoding.biases:
            return None
        return lambda i, j: self.encoding.pair_bias(
            params, positions[..., i], positions[..., j], self.config
        )


def shifted_group_attention(
    q: Array,
    k: Array,
    v: Array,
    e: Array | None,
    *,
    groups: int,
    query_state: Array | None = None,
    segment_ids: Array | None = None,
    **options: Any,
) -> tuple[Array, Array | None]:
    """Attention inside groups of the sequence (shifted sparse attention, LongLoRA, section 3.2).

    The first half of the heads attends inside ``groups`` groups of ``T / groups`` tokens. In the
    second half the groups begin half a group earlier, so that neighbouring groups overlap. What
    then sticks out at the beginning, and what is left over at the end, are groups of their own:
    joined into one, they would let the first tokens see the last.

    Args:
      q, k, v, e, query_state: as in :func:`tape_jax.attention`, of one length ``T``; states have
        one head or as many as ``k``.
      groups: number of groups.
      segment_ids: integers ``[..., T]``, or None.
      **options: further keywords of :func:`tape_jax.attention`, except ``mask`` and ``bias``.

    Returns:
      ``o [..., T, H, Dv]`` and ``a [..., T, H, ...]`` or None, as :func:`tape_jax.attention`.

    Raises:
      ValueError: if ``T`` is not a multiple of ``2 * groups``, or a mask or bias is given.
    """
    time, batch = q.shape[-3], q.ndim - 3
    require(
        time % (2 * groups) == 0,
        f"shifted_groups = {groups} needs a length that is a multiple of {2 * groups}; got {time}",
    )
    for name in ("mask", "bias"):
        require(
            options.get(name) is None,
            f"shifted_groups = {groups} needs an encoding and a call without {name}; got one",
        )
    half = time // groups // 2

    def grouped(x: Array) -> Array:
        """``[batch..., T, H, ...]`` to ``[2, batch..., groups, T / groups, H / 2, ...]``."""
        first, second = (x, x) if x.shape[batch + 1] == 1 else jnp.split(x, 2, axis=batch + 1)
        x = jnp.stack([first, jnp.roll(second, -half, axis=batch)])
        return x.reshape(*x.shape[: batch + 1], groups, 2 * half, *x.shape[batch + 2 :])

    def joined(x: Array) -> Array:
        """Inverse of ``grouped``."""
        x = x.reshape(*x.shape[: batch + 1], time, *x.shape[batch + 3 :])
        return jnp.concatenate([x[0], jnp.roll(x[1], half, axis=batch)], axis=batch + 1)

    def with_batch(x: Array, ndim: int) -> Array:
        return x.reshape((1,) * (ndim - x.ndim) + x.shape)

    def grouped_state(x: Array | None) -> Array | None:
        if x is None:
            return None
        tail = 5 if algebra.is_tensor_form(x, k) else 3
        return grouped(with_batch(algebra.align_state(x, k), batch + tail))

    ids = jnp.zeros(time, jnp.int32) if segment_ids is None else jnp.asarray(segment_ids)
    ids = 2 * with_batch(ids.astype(jnp.promote_types(ids.dtype, jnp.int32)), batch + 1)
    # Rolled around, the first half group shares the last group with tokens that it must not see.
    ids = jnp.stack([ids, ids + (jnp.arange(time) < half)], axis=-1)
    out, attended = attention(
        grouped(q),
        grouped(k),
        grouped(v),
        grouped_state(e),
        query_state=grouped_state(query_state),
        segment_ids=grouped(ids)[..., 0],
        **options,
    )
    return joined(out), None if attended is None else joined(attended)


def _entries(cache: LayerCache, k: Array, v: Array, e: Array | None) -> LayerCache:
    """Keys, values and states of new tokens ``[B, T, H, ...]`` in the form of a cache."""

    def like(old: Array, new: Array) -> Array:
        new = jnp.swapaxes(new, -old.ndim + 1, -old.ndim + 2)
        shape = (*old.shape[:2], new.shape[-old.ndim + 2], *old.shape[3:])
        return jnp.broadcast_to(new, shape).astype(old.dtype)

    state = None if cache.e is None or e is None else like(cache.e, e)
    return LayerCache(k=like(cache.k, k), v=like(cache.v, v), e=state)


def _with_entries(cache: LayerCache, new: LayerCache, index: Array | int) -> LayerCache:
    """The cache of one layer with new tokens in the slots from ``index`` on."""
    slots, time = cache.k.shape[2], new.k.shape[2]
    if time > 1:
        return write_cache(cache, new, index)
    here = jnp.arange(slots) == index

    def choose_slot(old: Array, new: Array) -> Array:
        # One pass that can be fused with what comes before, unlike a copy and an update.
        return jnp.where(here.reshape(-1, *(1,) * (old.ndim - 3)), new, old)

    return jax.tree.map(choose_slot, cache, new)


def write_cache(
    cache: LayerCache, new: LayerCache, index: Array | int, *, axis: int = 2
) -> LayerCache:
    """The cache with the slots from ``index`` on, along ``axis``, overwritten by ``new``."""

    def put(old: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new, index, axis=axis)

    return jax.tree.map(put, cache, new)


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
        m = self._residual(self._mlp(RMSNorm(c, name="mlp_norm")(h), context))
        if self.updates:
            options = {} if self.sharding is None else {"sharding": self.sharding}
            state = encoding.update(params, state, attended, m, **options)
            state = pack_state(state, m.ndim - 1) if packed else state
            state = constrain_state(self.sharding, state)
        return (h + m, state if self.updates else None), (cache, entered)

    @nn.nowrap
    def _mlp(self, x: Array, context: Context) -> Array:
        if self.config.experts is None:
            return MLP(self.config, self.sharding, name="mlp")(x)
        ids = context.segment_ids
        ids = ids[0] if isinstance(ids, tuple) else ids
        return ExpertMLP(self.config, self.sharding, name="mlp")(x, ids)

    def _residual(self, h: Array) -> Array:
        return constrain(self.sharding, h, "batch", "sequence", "hidden")


def declare(
    module: nn.Module,
    prefix: str,
    params: dict[str, Param],
    dtype: Any,
    sharding: Sharding | None = None,
) -> dict[str, Array]:
    """Creates in ``module`` the parameters that an encoding asks for, each ``prefix_name``.

    They are returned as they are used: what ``fsdp`` splits is gathered.
    """
    return {
        name: gathered(sharding, create(module, f"{prefix}_{name}", spec, dtype), spec.axes)
        for name, spec in params.items()
    }


def create(module: nn.Module, name: str, spec: Param, dtype: Any) -> Array:
    """Creates a parameter in ``module``; :func:`declared_axes` notes its logical axes."""
    if (record := _declared.get()) is not None:
        record["/".join((*module.path, name))] = spec.axes
    return module.param(name, spec.init, spec.shape, jnp.dtype(dtype))


@contextlib.contextmanager
def declared_axes() -> Iterator[dict[str, Axes]]:
    """Collects by path the logical axes of all parameters created, or traced, inside."""
    record: dict[str, Axes] = {}
    token = _declared.set(record)
    try:
        yield record
    finally:
        _declared.reset(token)


_declared: contextvars.ContextVar[dict[str, Axes] | None] = contextvars.ContextVar(
    "declared", default=None
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gathered_product(sharding: Sharding, axes: Axes, x: Array, kernel: Array) -> Array:
    """``x @ kernel``, of which only the split kernel is kept for the backward pass.

    Left to itself, a scan over layers would keep the gathered kernels of all of them.
    """
    return x @ gathered(sharding, kernel, axes)


def _gathered_product(sharding: Sharding, axes: Axes, x: Array, kernel: Array) -> tuple[Array, Any]:
    # Not by calling gathered_product, inside of which a remat policy sees no product.
    return x @ gathered(sharding, kernel, axes), (x, kernel)


def _gathered_product_gradient(sharding: Sharding, axes: Axes, saved: Any, d_out: Array) -> Any:
    # Without the barrier the first gathering would be shared, and its result kept.
    (x, kernel), d_out = jax.lax.optimization_barrier((saved, d_out))
    _, pull = jax.vjp(jnp.matmul, x, gathered(sharding, kernel, axes))
    d_x, d_kernel = pull(d_out)
    return d_x, constrain(sharding, d_kernel, *axes)


gathered_product.defvjp(_gathered_product, _gathered_product_gradient)


def gathered(sharding: Sharding | None, x: Array, axes: Axes) -> Array:
    """A parameter whole along the width of the residual stream, as products need it."""
    return constrain(sharding, x, *(None if axis == "embed" else axis for axis in axes))


def constrain_state(sharding: Sharding | None, state: State) -> State:
    """Position states ``[B, T, H_kv, ...]`` kept where the rules put them."""
    keep = functools.partial(constrain, sharding)
    return jax.tree.map(lambda x: keep(x, "batch", "sequence", "kv_heads"), state)


def splits_sequence(sharding: Sharding | None) -> bool:
    """Whether the mesh splits sequences."""
    return sharding is not None and sharding.shards("sequence") > 1


def remat_policy(name: str) -> Callable | None:
    """The policy of ``jax.checkpoint`` that ``ModelConfig.remat`` names."""
    policies = jax.checkpoint_policies
    dots = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable,
        policies.save_only_these_names(experts.PRODUCT),
    )
    return {"dots": dots, "full": None}[name]


def runs(flags: Sequence[Any]) -> list[tuple[int, int, Any]]:
    """Maximal runs ``(start, stop, flag)`` of equal neighbours: one scan each."""
    edges = [i for i in range(len(flags)) if i == 0 or flags[i] != flags[i - 1]]
    return [(a, b, flags[a]) for a, b in zip(edges, [*edges[1:], len(flags)], strict=True)]


def default_positions(length: int) -> Array:
    """``0 .. length - 1``."""
    return jnp.asarray(np.arange(length, dtype=np.int32))
