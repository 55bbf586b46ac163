"""The attention layer: projections, the encoding's terms, and the cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from tape_jax._src.attention import attention
from tape_jax._src.attention.shifted_groups import shifted_group_attention
from tape_jax._src.attention.zigzag import from_zigzag, to_zigzag
from tape_jax._src.core import algebra
from tape_jax._src.core.checks import require
from tape_jax._src.core.sharding import Sharding, constrain, splits_sequence
from tape_jax._src.model.cache import Cache, LayerCache, entries, with_entries, write_cache
from tape_jax._src.model.config import ModelConfig
from tape_jax._src.model.inputs import Context
from tape_jax._src.model.layers import Norm, projection
from tape_jax._src.positions.layer import Layer, Order, Terms
from tape_jax._src.positions.protocol import Encoding, State

Array = jax.Array


class Seen(NamedTuple):
    """Keys, values and states that the queries of one call see.

    Attributes:
      k, v, e: ``[B, S, H_kv, ...]``; ``e`` is None if no state is attended or rotates.
      keys_rotated: whether ``k`` is rotated already.
      cache: what the layer returns as its cache.
    """

    k: Array
    v: Array
    e: Array | None
    keys_rotated: bool = False
    cache: LayerCache | None = None


class Attention(nn.Module):
    """Multi-head attention over values and, if asked, over position states.

    Given a cache, it returns the new one or, inside a scan over layers, the entries of the new
    tokens, ``[B, H_kv, T, ...]`` each, but all keys if the encoding rewrites them.

    If the collection ``maps`` is mutable, the attention maps ``[..., T, H, S]`` are sown there.

    Attributes:
      attend_state: whether the attended state ``a = A e`` is wanted.
      sharding: a mesh and rules, or None. If it splits sequences, tokens come in the order of
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
            flat = linear(name, n * c.dim, ("embed", axis))(x)
            if c.qk_norm == "full" and name != "v":
                flat = Norm(c, name=f"{name}_norm")(flat)
            split = flat.reshape(*x.shape[:-1], n, c.dim)
            return constrain(self.sharding, split, "batch", "sequence", axis)

        q = heads("q", c.num_heads, "heads")
        k, v = (heads(name, c.kv_heads, "kv_heads") for name in ("k", "v"))
        if c.qk_norm == "head":
            q, k = Norm(c, name="q_norm")(q), Norm(c, name="k_norm")(k)
        q, seen, options = prepared(
            c, self.encoding, params, x, (q, k, v), state, context, cache, self.sharding
        )
        out, attended = self._attend(q, seen, cache is not None, options)
        if attended is not None:
            attended = constrain(self.sharding, attended, "batch", "sequence", "heads")
        out = constrain(self.sharding, out, "batch", "sequence", "heads")
        out = out.reshape(*x.shape[:-1], -1)
        out = linear("out", c.hidden_size, ("heads", "embed"), residual=True)(out)
        return out, attended, seen.cache

    @nn.nowrap
    def _attend(
        self, q: Array, seen: Seen, cached: bool, options: dict[str, Any]
    ) -> tuple[Array, Array | None]:
        """Attend by the config's implementation, and sow attention maps if wanted."""
        c = self.config
        maps = self.is_mutable_collection("maps") and not self.is_initializing()
        groups = None if self.is_initializing() else c.shifted_groups
        attend: Callable[..., tuple[Array, Array | None]] = attention
        if groups is not None:
            require(
                not cached and not maps,
                f"shifted_groups = {groups} is for training: caches and attention maps need full "
                "attention, shifted_groups=None",
            )
            attend = functools.partial(shifted_group_attention, groups=groups)
        by: dict[str, Any] = {"implementation": c.attention_implementation}
        if splits_sequence(self.sharding):
            by = self._ring(full=not cached and not maps)
        try:
            out, attended = attend(
                q, seen.k, seen.v, state=seen.e, attend_state=self.attend_state, **by, **options
            )
        except NotImplementedError as error:
            raise NotImplementedError(f"the encoding {self.encoding.kind!r}: {error}") from error
        if maps:
            self.sow("maps", "probabilities", _maps(q, seen, options))
        return out, attended

    @nn.nowrap
    def _ring(self, *, full: bool) -> dict[str, Any]:
        """The keywords of attention on a mesh that splits sequences.

        Raises:
          ValueError: if the call is not a full pass, or the config names another implementation.
        """
        c = self.config
        require(
            full and c.shifted_groups is None,
            "a mesh that splits sequences takes full passes: no cache, no attention maps, no "
            "shifted_groups",
        )
        named = c.attention_implementation
        names = named if isinstance(named, tuple) else (named,)
        require(
            None in names or "ring" in names,
            f"a mesh that splits sequences needs attention_implementation=None or 'ring'; got "
            f"{named!r}",
        )
        return {
            "implementation": "ring",
            "sharding": self.sharding,
            "options": {"order": "zigzag"},
        }


def prepared(
    config: ModelConfig,
    encoding: Encoding,
    params: dict[str, Array],
    x: Array,
    projected: tuple[Array, Array, Array],
    state: State,
    context: Context,
    cache: LayerCache | None,
    sharding: Sharding | None = None,
) -> tuple[Array, Seen, dict[str, Any]]:
    """Return the queries of a layer, what they see, and the keywords of attention.

    Args:
      config: the model's.
      encoding: of its positions.
      params: of the encoding, for this layer.
      x: what enters the layer ``[..., T, hidden]``.
      projected: its queries, keys and values, not rotated.
      state: the position state that enters.
      context: of the call.
      cache: of the layer, or None.
      sharding: a mesh and rules, or None.
    """
    q, k, v = projected
    layer = entered_layer(context, config, x, sharding, cache, q=q, k=k, state=state)
    terms = encoding.layer_terms(params, layer)
    if terms.features is not None:
        q, k = terms.features
    rotations = encoding.rotation(state)
    query_state, e = rotations if terms.state is None else (terms.state, terms.state)
    seen = Seen(k, v, e)
    if cache is not None:
        seen = _with_cache(config, seen, cache, terms, context)
    scale = encoding.logits_scale(config.sizes)
    scale = config.query_scale if scale is None else scale
    if scale is None and terms.features is not None:
        # Features may be wider than a head.
        scale = config.dim**-0.5
    options: dict[str, Any] = {
        "scale": scale,
        "keys_rotated": seen.keys_rotated,
        "query_state": query_state,
        # Inside of nn.remat the index is no longer known to be 0.
        "query_offset": 0 if cache is None else context.index,
        "is_causal": context.is_causal,
        "segment_ids": context.segment_ids,
        "mask": context.mask,
        "local_window_size": config.window_of(encoding),
        "window_positions": None if config.shifted_groups else context.counts,
        **terms.keywords(),
    }
    if config.logit_softcap is not None:
        options["logit_softcap"] = config.logit_softcap
    return q, seen, options


def _with_cache(
    config: ModelConfig,
    fresh: Seen,
    cache: LayerCache,
    terms: Terms,
    context: Context,
) -> Seen:
    """Write new keys, values and states into a cache, and return all that it holds.

    Args:
      config: the model's.
      fresh: keys, not rotated, values and states of the new tokens.
      cache: of the layer.
      terms: of the layer: they may rewrite all keys, and hold other kept arrays of new tokens.
      context: of the call.
    """
    k, v, e, *_ = fresh
    if e is not None:
        k = algebra.rotate(k, e)
    new = entries(cache, k, v, e, terms.kept or {})
    write = with_entries if config.scan_layers else write_cache
    seen = rewritten = write(cache, new, context.index)
    if terms.rewritten_keys is not None:
        keys = terms.rewritten_keys(seen.k)
        rewritten, new = (dataclasses.replace(one, k=keys) for one in (seen, new))
        seen = rewritten if terms.logits_fn is None else seen
    by_time = jax.tree.map(lambda x: x.swapaxes(1, 2), seen)
    # The attended state has the type of the states, whatever that of the cache.
    state = None if e is None or by_time.e is None else by_time.e.astype(e.dtype)
    # Returned from a scan, the cache would be copied as a whole.
    kept = new if config.scan_layers else rewritten
    return Seen(by_time.k, by_time.v, state, e is not None, kept)


def _maps(q: Array, seen: Seen, options: dict[str, Any]) -> Array:
    """Return the attention maps ``[..., T, H, S]``: attention over one-hot values."""
    length = seen.k.shape[-3]
    one_hot = jnp.broadcast_to(
        jnp.eye(length, dtype=q.dtype)[:, None], (*seen.k.shape[:-1], length)
    )
    options = {**options, "attend_state": False, "implementation": "reference"}
    return attention(q, seen.k, one_hot, state=seen.e, **options)[0]


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
    """Return the layer that ``x`` enters, as encodings see it, with its part of ``cache``."""
    order = None
    if sharding is not None and splits_sequence(sharding):
        order = Order(*(functools.partial(f, sharding) for f in (from_zigzag, to_zigzag)))
    return Layer(
        x,
        context.positions,
        context.segment_ids,
        context.is_causal,
        config.sizes,
        q=q,
        k=k,
        state=state,
        kept=None if cache is None else cache.kept,
        cached_keys=getattr(cache, "k", None),
        index=context.index,
        order=order,
    )
