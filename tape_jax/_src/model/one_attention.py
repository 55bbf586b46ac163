"""Attention of one layer as pure functions, for modules in other people's models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tape_jax._src.attention import attention
from tape_jax._src.core.checks import concrete, require
from tape_jax._src.core.explicit import automatic_inside, names_of
from tape_jax._src.core.segments import places
from tape_jax._src.model.attention_layer import prepared
from tape_jax._src.model.cache import LayerCache, check_shapes, layer_shapes
from tape_jax._src.model.config import ModelConfig
from tape_jax._src.model.inputs import Context, check_initial_state
from tape_jax._src.model.layers import normalized
from tape_jax._src.model.parameters import full_name, kernel_std
from tape_jax._src.positions.protocol import (
    Encoding,
    Param,
    State,
    as_positions,
    default_positions,
)

Array = jax.Array

ENCODING = "position"


def layer_config(hidden_size: int, num_heads: int, *, updates: bool, **options: Any) -> ModelConfig:
    """Return the checked configuration of one layer.

    Args:
      hidden_size: width of the residual stream.
      num_heads: query heads.
      updates: whether the module ``UpdateState`` follows.
      options: of :class:`ModelConfig`.

    Raises:
      ValueError: for incompatible sizes or options.
      NotImplementedError: for an encoding that also acts at the embeddings, and for an update that
        the modules do not have.
    """
    # Two layers: the last layer of a model updates no state.
    config = ModelConfig(
        1, hidden_size, num_layers=2, num_heads=num_heads, scan_layers=False, **options
    )
    encoding = config.position
    require(
        config.position.of_layers(1)[0].member is None,
        f"one layer has one encoding, not a schedule of several; got {encoding.kind!r}",
    )
    if "embedding" in encoding.acts_on or encoding.input_params(config.sizes):
        raise NotImplementedError(
            f"the encoding {encoding.kind!r} acts at the embeddings, which one layer does not "
            "see: use tape_jax.Transformer"
        )
    if _differs_by_layer(encoding, config):
        raise NotImplementedError(
            f"the encoding {encoding.kind!r}, with these options, treats layers differently, and "
            "one layer does not know its number: use tape_jax.Transformer"
        )
    if updates and (found := _beyond_the_update(encoding)):
        raise NotImplementedError(
            f"UpdateState, which follows one layer's attention, has no {found}: use "
            "tape_jax.Transformer"
        )
    if encoding.coordinate_axes > 1:
        raise NotImplementedError(
            f"Attention takes one position a token; {encoding.kind!r} has axes="
            f"{encoding.coordinate_axes}: call tape_jax.attention"
        )
    return config


def _differs_by_layer(encoding: Encoding, config: ModelConfig) -> bool:
    """Returns whether layers differ otherwise than by an update of TAPE's state."""
    if encoding.attends_state or encoding.update_implementations:
        return False
    names = [set(encoding.layer_params(config.sizes, updates=x)) for x in (False, True)]
    return encoding.updates(0, 2) or names[0] != names[1]


def _beyond_the_update(encoding: Encoding) -> str | None:
    """Returns what an encoding's update has and the module ``UpdateState`` has not, if anything."""
    if not encoding.updates(0, 2):
        return None
    if not encoding.update_implementations:
        return f"update of {encoding.kind!r}"
    usual = {"still_heads": 0, "learn_alpha": False}
    for member in filter(lambda x: x.update_implementations, encoding.members):
        for name, default in usual.items():
            if (given := getattr(member, name)) != default:
                return f"{name} = {given!r} of {member.kind!r}"
    return None


def attention_params(config: ModelConfig, *, qk_norm: bool) -> dict[str, Param]:
    """Return the parameters of one layer's attention by name; kernels are ``[in, out]``."""
    c, init = config, jax.nn.initializers
    q, kv = c.num_heads * c.dim, c.kv_heads * c.dim

    def kernel(fan_in: int, features: int, *axes: str) -> Param:
        return Param((fan_in, features), init.normal(kernel_std(c, fan_in)), axes)

    specs = {
        "q": kernel(c.hidden_size, q, "embed", "heads"),
        "k": kernel(c.hidden_size, kv, "embed", "kv_heads"),
        "v": kernel(c.hidden_size, kv, "embed", "kv_heads"),
        "out": kernel(c.attention_heads * c.dim, c.hidden_size, "heads", "embed"),
    }
    if qk_norm:
        specs |= {name: Param((c.dim,), init.ones, (None,)) for name in ("q_norm", "k_norm")}
    own = c.position.layer_params(c.sizes, updates=False)
    return specs | {full_name(ENCODING, name): spec for name, spec in own.items()}


def _explicit_axes(given: Mapping[str, Any], shapes: Any) -> Any:
    """Return the mesh axes of the results on a mesh with explicit axes."""
    _, attended, cache = shapes
    lead = names_of(given["x"])[:-1]
    if attended is not None:
        heads = names_of(given["params"]["q"])[-1]
        attended = (*lead, heads, *[None] * (attended.ndim - len(lead) - 1))
    if cache is not None:
        cache = jax.tree.map(lambda _, x: names_of(x), cache, given["cache"])
    return (*lead, None), attended, cache


@automatic_inside(_explicit_axes)
def attend(
    config: ModelConfig,
    params: dict[str, Array],
    x: Array,
    state: State,
    *,
    updates: bool,
    positions: Array | None,
    segment_ids: Any,
    mask: Array | None,
    is_causal: bool,
    cache: LayerCache | None,
    index: Array | int,
) -> tuple[Array, Array | None, LayerCache | None]:
    """Attend in one layer: projections, the encoding's terms, and the cache.

    Returns:
      The addition to the residual stream, the attended state or None, and the new cache.
    """
    c, encoding = config, config.position
    require(
        x.ndim >= 2 and x.shape[-1] == c.hidden_size and x.size > 0,
        f"x must have shape [..., T, {c.hidden_size}] and not be empty; got {x.shape}",
    )
    check_initial_state(encoding, state)
    if cache is not None:
        _check_cache(c, x, cache, index, updates=updates)
    context = _context(c, x, positions, segment_ids, mask, is_causal, cache, index)
    if state is None and encoding.reads_start:
        time, length = x.shape[-2], context.positions.shape[-1]
        new = context.positions
        if cache is not None:
            new = jax.lax.dynamic_slice_in_dim(new, index, time, axis=1)
        if encoding.starts_by_head or 1 < new.ndim < x.ndim - 1:
            new = jnp.broadcast_to(new, x.shape[:-1])
        state = encoding.start(new, c.sizes, length=length, dtype=c.carried_dtype)
    if updates:
        state = encoding.carry(state, x.shape[:-1], c.sizes)

    def heads(name: str, n: int) -> Array:
        kernel = params[name].astype(c.dtype)
        split = (x.astype(c.dtype) @ kernel).reshape(*x.shape[:-1], n, c.dim)
        scale = params.get(f"{name}_norm")
        if scale is None:
            return split
        return normalized(split, scale, c.norm_eps).astype(split.dtype)

    q, k, v = heads("q", c.num_heads), heads("k", c.kv_heads), heads("v", c.kv_heads)
    prefix = full_name(ENCODING, "")
    own = {name.removeprefix(prefix): p for name, p in params.items() if name.startswith(prefix)}
    q, seen, options = prepared(c, encoding, own, x, (q, k, v), state, context, cache)
    out, attended = attention(
        q,
        seen.k,
        seen.v,
        state=seen.e,
        attend_state=updates and encoding.attends_state,
        implementation=c.attention_implementation,
        **options,
    )
    out = out.reshape(*x.shape[:-1], -1) @ params["out"].astype(c.dtype)
    if cache is not None:
        # Beyond the last slot, writes would go to the last ones.
        fits = index + x.shape[-2] <= cache.k.shape[2]
        out, attended = jax.tree.map(lambda y: jnp.where(fits, y, jnp.nan), (out, attended))
    return out, attended, seen.cache


def _check_cache(
    config: ModelConfig, x: Array, cache: LayerCache, index: Array | int, *, updates: bool
) -> None:
    """Raises ValueError unless tokens can be written into a cache from ``index`` on."""
    batch, slots, time = cache.k.shape[0], cache.k.shape[-2], x.shape[-2]
    require(
        x.ndim == 3 and x.shape[0] == batch and time <= slots,
        f"with a cache of {batch} sequences and {slots} slots, x must have shape [{batch}, T, "
        f"{config.hidden_size}] with T <= {slots}; got {x.shape}",
    )
    expected = layer_shapes(config, batch, slots, updates=updates)
    check_shapes(cache, expected, "layer: it has {}; this one's has {}")
    shape, dtype = jnp.shape(index), jnp.result_type(index)
    require(
        shape == () and jnp.issubdtype(dtype, jnp.integer),
        f"index must be an integer, of all rows; got {dtype} of shape {shape}",
    )
    used = concrete(index)
    require(
        used is None or 0 <= int(used) <= slots - time,
        f"{time} tokens do not fit into a cache of capacity {slots} with {used} in use",
    )


def _context(
    config: ModelConfig,
    x: Array,
    positions: Array | None,
    segment_ids: Any,
    mask: Array | None,
    is_causal: bool,
    cache: LayerCache | None,
    index: Array | int,
) -> Context:
    """Return the call's inputs about its tokens, in the model's form."""
    time, counts = x.shape[-2], None
    slots = time if cache is None else cache.k.shape[2]
    if cache is not None:
        if segment_ids is None:
            # Slots behind the new tokens belong to no segment.
            written = (jnp.arange(slots) < index + time).astype(jnp.int32)
            keys = jnp.broadcast_to(written, (x.shape[0], slots))
            segment_ids = (jnp.ones((x.shape[0], time), jnp.int32), keys)
        require(
            isinstance(segment_ids, tuple) and len(segment_ids) == 2,
            "with a cache, segment_ids are a pair: of the new tokens [B, T], of all slots [B, S]",
        )
    positions = default_positions(slots) if positions is None else as_positions(positions)
    require(
        positions.shape[-1] == slots,
        f"positions must be those of all keys, [..., {slots}]; got {positions.shape}",
    )
    if cache is not None:
        positions = jnp.broadcast_to(positions, (x.shape[0], slots))
    if config.has_window and segment_ids is not None:
        if cache is None:
            pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids,) * 2
            counts = (places(pair[0]), places(pair[1]))
        else:
            every = places(segment_ids[1])
            counts = jax.lax.dynamic_slice_in_dim(every, index, time, axis=1), every
    return Context(positions, segment_ids, mask, index, is_causal, counts)
