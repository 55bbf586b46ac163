"""The cache of decoding: what it keeps of past tokens, and how new ones are written into it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax
import jax
import jax.numpy as jnp

from tape_jax._src.core import algebra
from tape_jax._src.core.checks import (
    FLOATS,
    positive,
    require,
    require_x64,
    type_name,
    typed,
)
from tape_jax._src.core.padding import pad_to
from tape_jax._src.core.segments import PADDING, places, without_padding
from tape_jax._src.core.sharding import Model
from tape_jax._src.model.config import LayerStack, ModelConfig
from tape_jax._src.positions.layer import Layer
from tape_jax._src.positions.protocol import (
    Encoding,
    OfLayer,
    Param,
    as_length,
    default_positions,
    on_axes,
)

Array = jax.Array


@flax.struct.dataclass
class LayerCache:
    """The cache of one layer, which holds past tokens; slots not yet written are zero.

    Heads come before time, so that products of a single query read it as is.

    Attributes:
      k: rotated keys ``[B, H_kv, S, D]`` (``M * R`` wide in tensor form), or features of keys; in
        at least float32 if the encoding rewrites them.
      v: values ``[B, H_kv, S, D]``.
      e: position states, ``[B, H_kv, S, D]`` or ``[B, H_kv, S, M, L, R]``; None unless attended.
      kept: what else the encoding keeps of each token, by name, ``[B, heads, S, ...]``.
    """

    k: Array
    v: Array
    e: Array | None
    kept: dict[str, Array] = flax.struct.field(default_factory=dict)


@flax.struct.dataclass
class Cache:
    """Everything that cached decoding keeps of the tokens it has seen; see :func:`init_cache`.

    ``S`` is the capacity in tokens, ``n`` the number of layers of a run of like layers.

    Attributes:
      index: number of slots written, int32.
      tokens: ``[B, S]`` int32; all integers here are int64 if 64-bit types are enabled.
      positions: ``[B, S]``, or ``[B, S, n]``, integers or of the floating type given to
        :func:`init_cache`.
      segment_ids: ``[B, S]`` int32; 0 is padding, or not yet written.
      layers: per block (see :attr:`Transformer.blocks`) a ``LayerCache`` with
        a leading axis ``n``, the number of its layers.
      key: random key of the encoding's draw, or None for its fixed draw.
      length: int32 ``[B]``, number of tokens of each sequence for which random positions are drawn
        and dynamic scaling is fixed, or None for the capacity.
      kept: what the encoding keeps of each token's embedding, by name, ``[B, heads, S, ...]``.
      encoding: the encoding whose keys these are.
    """

    index: Array
    tokens: Array
    positions: Array
    segment_ids: Array
    layers: tuple[LayerCache, ...]
    key: Array | None = None
    length: Array | None = None
    kept: dict[str, Array] = flax.struct.field(default_factory=dict)
    encoding: Encoding = flax.struct.field(pytree_node=False, default=Encoding())

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.tokens.shape[-1]

    @property
    def nbytes(self) -> int:
        """Size of everything that grows with the capacity, in bytes."""
        arrays = (self.tokens, self.positions, self.segment_ids, self.layers, self.kept)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


@typed
def init_cache(
    model: Model,
    batch_size: int,
    capacity: int,
    *,
    dtype: Any = None,
    state_dtype: Any = None,
    key: Array | None = None,
    length: int | Array | None = None,
    position_dtype: Any = jnp.int32,
) -> Cache:
    """Returns an empty cache for decoding ``batch_size`` sequences of up to ``capacity`` tokens.

    Args:
      model: the model that will use it.
      batch_size: number of sequences ``B``.
      capacity: number of slots ``S``.
      dtype: type of keys and values; None: the model's compute type. Keys that every new token
        rewrites are kept in at least float32, because every rewriting rounds them.
      state_dtype: type of position states; None: that of the model's states or, if it is narrower,
        the compute type, to which products round attended states anyway.
      key: random key for encodings that draw; None: their fixed draw.
      length: number of tokens for which random positions are drawn and dynamic scaling is fixed,
        an integer or one for each sequence ``[B]``; None: the capacity. Results agree with a full
        pass with the same ``length``.
      position_dtype: type of the positions, float32 or float64 for fractional ones.

    Raises:
      ValueError: if a size is not positive, the capacity is more than the model or its encoding
        takes, or positions cannot have the given type.
    """
    c, encoding = model.config, model.config.position
    batch_size, capacity = positive("batch_size", batch_size), positive("capacity", capacity)
    dtype = type_name("the cache's dtype", dtype or c.dtype, FLOATS)
    state_dtype = type_name("the cache's state_dtype", state_dtype, (None, *FLOATS))
    kinds = ("int32", "float32", "float64")
    position_dtype = type_name("position_dtype", position_dtype, kinds)
    require_x64(
        dtype=dtype, state_dtype=state_dtype or c.state_dtype, position_dtype=position_dtype
    )
    check_length(model, capacity, what="a cache")
    if length is not None:
        length = jnp.broadcast_to(jnp.int32(as_length(length, (batch_size,))), (batch_size,))
    layers, kept = _layers(model, batch_size, capacity, dtype, state_dtype)

    def slots(dtype: Any = jnp.int32) -> Array:
        # Integers of calls may be as wide.
        is_whole = jnp.issubdtype(dtype, jnp.integer)
        widest = jax.dtypes.canonicalize_dtype(jnp.int64)
        return jnp.zeros((batch_size, capacity), widest if is_whole else dtype)

    positions = on_axes(slots(position_dtype), encoding.coordinate_axes)

    return Cache(
        index=jnp.int32(0),
        tokens=slots(),
        positions=positions,
        segment_ids=slots(),
        layers=_empty(layers),
        key=key,
        length=length,
        kept=_empty(kept),
        encoding=encoding,
    )


def _empty(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def check_cache(model: Model, cache: Cache) -> None:
    """Raises ValueError unless the cache is of the model's encoding, with layers of its shapes."""
    old, own = cache.encoding, model.config.position
    kinds = (old.kind, own.kind) if old.kind != own.kind else (old, own)
    require(
        old == own,
        "the cache is of another encoding, {!r}; this model has {!r}".format(*kinds),
    )

    given = (cache.layers, cache.kept)
    expected = _layers(model, len(cache.tokens), cache.capacity, model.config.dtype)
    check_shapes(given, expected, "model: its layers are {}; this one's are {}")


def check_shapes(given: Any, expected: Any, message: str) -> None:
    """Raises ValueError unless two trees have equal paths and shapes; ``message`` takes both."""

    def shapes(layers: Any) -> str:
        names = jax.tree_util.tree_leaves_with_path(layers)
        return ", ".join(f"{jax.tree_util.keystr(path)} {x.shape}" for path, x in names)

    both = shapes(given), shapes(expected)
    require(both[0] == both[1], f"the cache is of another {message}".format(*both))


def _layers(
    model: Model, batch_size: int, capacity: int, dtype: str, state_dtype: str | None = None
) -> tuple[tuple[LayerCache, ...], dict[str, Any]]:
    """Return the layers of a cache, and its ``kept``, with ShapeDtypeStructs in place of arrays."""
    blocks = tuple(model.config.blocks)
    types = model.config.carried_dtype.name, dtype, state_dtype
    return _layers_of(model.config, blocks, batch_size, capacity, *types)


@functools.lru_cache(maxsize=128)
def _layers_of(
    config: ModelConfig,
    blocks: tuple[LayerStack, ...],
    batch_size: int,
    capacity: int,
    carried_dtype: str,
    dtype: str,
    state_dtype: str | None,
) -> tuple[tuple[LayerCache, ...], dict[str, Any]]:
    encoding, sizes, shape = config.position, config.sizes, jax.ShapeDtypeStruct
    tokens = (batch_size, capacity)
    x = shape((*tokens, config.hidden_size), config.dtype)
    axes = encoding.coordinate_axes
    positions = shape((*tokens, axes) if axes > 1 else tokens, jnp.int32)

    def parameters(specs: dict[str, Param]) -> dict[str, Any]:
        return {name: shape(spec.shape, config.param_dtype) for name, spec in specs.items()}

    def kept(
        own: Encoding, params: Any, x: Array, positions: Array, entering: Any
    ) -> tuple[Any, Any]:
        """Return what the encoding keeps of a layer's tokens, and its features of keys or None."""
        layer = Layer(x, positions, None, True, sizes, **entering)
        terms = own.layer_terms(params, layer)
        return terms.kept or {}, None if terms.features is None else terms.features[1]

    def begin(p: Array, x: Array, params: Any) -> tuple[Any, dict[str, Array]]:
        start, kept = encoding.start_from_embeddings(params, Layer(x, p, None, True, sizes))
        if start is None:
            start = encoding.start(p, sizes, length=capacity, dtype=jnp.dtype(carried_dtype))
        return start, kept

    begins = parameters(encoding.input_params(sizes))
    starts, first = jax.eval_shape(begin, positions, x, begins)
    q = shape((*tokens, config.num_heads, config.dim), dtype)
    head = shape((*tokens, config.kv_heads, config.dim), dtype)

    def slots(like: jax.ShapeDtypeStruct, *n: int) -> Any:
        """Return the shape and type of ``n`` layers of ``like``, with heads before time."""
        batch, time, heads, *tail = like.shape
        return shape((*n, batch, heads, time, *tail), like.dtype)

    def kept_state(e: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        narrower = min(e.dtype, jnp.dtype(config.dtype), key=lambda x: x.itemsize)
        return shape(e.shape, state_dtype or narrower)

    def layer(blocks: LayerStack) -> LayerCache:
        n, like = len(blocks.layers), blocks.like
        own, start = like.encoding, like.own(starts)
        carried = jax.eval_shape(lambda state: own.carry(state, tokens, sizes), start)
        e = jax.eval_shape(lambda state: own.rotation(state)[1], carried)
        keeps_state = like.updates and own.attends_state and e is not None
        params = parameters(own.layer_params(sizes, updates=like.updates))
        entering = {"q": q, "k": head, "state": carried if like.updates else start}
        found = jax.eval_shape(functools.partial(kept, own), params, x, positions, entering)
        more, features = found
        wide, keys = algebra.at_least_float32(dtype), features or head
        if e is not None:
            keys = jax.eval_shape(algebra.rotate, keys, e)
        return LayerCache(
            k=slots(shape(keys.shape, wide if own.rewrites_keys else dtype), n),
            v=slots(head, n),
            e=slots(kept_state(e), n) if keeps_state else None,
            kept={name: slots(x, n) for name, x in more.items()},
        )

    return tuple(map(layer, blocks)), {name: slots(x) for name, x in first.items()}


def empty_layer(
    config: ModelConfig, batch_size: int, capacity: int, *, updates: bool
) -> LayerCache:
    """Return the empty cache of one layer; ``updates``: whether it updates the state."""
    batch_size, capacity = positive("batch_size", batch_size), positive("capacity", capacity)
    return _empty(layer_shapes(config, batch_size, capacity, updates=updates))


def layer_shapes(
    config: ModelConfig, batch_size: int, capacity: int, *, updates: bool
) -> LayerCache:
    """Return the cache of one layer with ShapeDtypeStructs in place of arrays."""
    blocks = (LayerStack(range(1), OfLayer(config.position, None, updates)),)
    types = config.carried_dtype.name, config.dtype
    (layer,), _ = _layers_of(config, blocks, batch_size, capacity, *types, None)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), layer)


@typed
def grow_cache(model: Model, cache: Cache, capacity: int) -> Cache:
    """Returns the cache with more slots; not under ``jax.jit``.

    Args:
      model: the model that uses it.
      cache: a cache of ``model``.
      capacity: slots of the new one, at least as many as the old one has.

    Raises:
      ValueError: if there would be fewer slots, or more than the model or its encoding takes; if
        the encoding draws positions or scales frequencies for the capacity and no ``length`` was
        given: the cache then holds values for another capacity.
    """
    old = cache.capacity
    capacity = positive("capacity", capacity)
    require(capacity >= old, f"a cache of capacity {old} cannot shrink to {capacity}")
    check_cache(model, cache)
    check_length(model, capacity, what="a cache")
    require(
        int(cache.index) <= old,
        f"the cache of capacity {old} was written past it, {int(cache.index)} tokens in all: some "
        "are lost, and more slots do not bring them back",
    )
    require(
        cache.length is not None or not depends_on_capacity(model, old, capacity, key=cache.key),
        f"the encoding {model.config.position.kind!r} depends on the capacity, {old}: give "
        "init_cache the final capacity at once, or a length",
    )

    def grow(x: Array, axis: int) -> Array:
        return pad_to(x, capacity, axis)

    return dataclasses.replace(
        cache,
        tokens=grow(cache.tokens, 1),
        positions=grow(cache.positions, 1),
        segment_ids=grow(cache.segment_ids, 1),
        layers=jax.tree.map(functools.partial(grow, axis=3), cache.layers),
        kept=jax.tree.map(functools.partial(grow, axis=2), cache.kept),
    )


def depends_on_capacity(model: Model, old: int, new: int, *, key: Array | None = None) -> bool:
    """Return whether position states differ between caches of ``old`` and ``new`` slots.

    They do if positions are drawn, or frequencies scaled, for a length.
    """

    if key is not None and model.config.random_positions is not None:
        return old != new

    def start(length: int) -> Any:
        dtype = model.config.carried_dtype
        encoding = model.config.position
        positions = on_axes(jnp.arange(min(old, new)), encoding.coordinate_axes)
        return encoding.start(positions, model.config.sizes, key=key, length=length, dtype=dtype)

    same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), start(old), start(new))
    return not all(jax.tree.leaves(same))


def check_length(model: Model, length: int, *, what: str = "a sequence") -> None:
    """Raises ValueError if ``length`` tokens are more than the model or its encoding takes."""
    encoding = model.config.position
    for limit, whose in (
        (model.config.max_length, "the model's max_length"),
        (encoding.max_length(), f"the limit of the encoding {encoding.kind!r}"),
    ):
        if limit is not None and length > limit:
            raise ValueError(f"{what} of {length} tokens exceeds {whose} of {limit}")


def append(
    cache: Cache, tokens: Array, positions: Array | None, segment_ids: Array | None
) -> Cache:
    """Appends new tokens, with their positions and segments, to the cache.

    Without segment ids, they join the segment of their row's last real token. Without positions,
    they follow the last token of their segment.
    """
    if tokens.ndim != 2 or tokens.shape[0] != cache.tokens.shape[0]:
        raise ValueError(
            f"with a cache for {cache.tokens.shape[0]} sequences, tokens must have shape "
            f"({cache.tokens.shape[0]}, T); got {tokens.shape}"
        )
    time, axes = tokens.shape[1], cache.encoding.coordinate_axes
    used = 0 if isinstance(cache.index, jax.core.Tracer) else int(cache.index)
    if used + time > cache.capacity:
        raise ValueError(
            f"{time} tokens do not fit into a cache of capacity {cache.capacity} with {used} in use"
        )
    if segment_ids is None:
        segment_ids, place = last_segment(cache)[:, None], default_positions(time)
    else:
        segment_ids = jnp.broadcast_to(segment_ids, tokens.shape)
        place = places(segment_ids)
    if positions is None:
        same = cache.segment_ids[:, None] == segment_ids[..., None]
        farthest = cache.positions if axes == 1 else cache.positions.max(-1)
        last, found = _last(farthest[:, None], same)
        positions = on_axes(jnp.where(found, last + 1, 0) + place, axes)
    kept = cache.positions.dtype
    require(
        jnp.issubdtype(kept, jnp.floating) or not jnp.issubdtype(positions.dtype, jnp.floating),
        f"positions of type {positions.dtype} would be cut to the {kept} of the cache: give "
        "init_cache position_dtype='float32'",
    )

    def put(old: Array, new: Array) -> Array:
        tail = old.shape[2:]
        new = without_padding(new, segment_ids, axes=axes if tail else 1)
        new = jnp.broadcast_to(new, (*tokens.shape, *tail)).astype(old.dtype)
        return jax.lax.dynamic_update_slice_in_dim(old, new, cache.index, axis=1)

    return dataclasses.replace(
        cache,
        index=cache.index + time,
        tokens=put(cache.tokens, tokens),
        positions=put(cache.positions, positions),
        segment_ids=put(cache.segment_ids, segment_ids),
    )


def last_segment(cache: Cache) -> Array:
    """Returns the segment of each row's last real token, ``[B]``; 1 where there is none."""
    last, found = _last(cache.segment_ids, cache.segment_ids != PADDING)
    return jnp.where(found, last, 1)


def _last(x: Array, chosen: Array) -> tuple[Array, Array]:
    """Return the last of the chosen entries along the last axis, and whether there is one.

    ``x`` broadcasts to ``chosen [..., S]``; both results are ``[...]``.
    """
    slot = jnp.where(chosen, jnp.arange(chosen.shape[-1]), -1).max(-1, keepdims=True)
    last = jnp.take_along_axis(jnp.broadcast_to(x, chosen.shape), jnp.maximum(slot, 0), axis=-1)
    return last[..., 0], slot[..., 0] >= 0


def entries(
    cache: LayerCache, k: Array, v: Array, e: Array | None, kept: dict[str, Array]
) -> LayerCache:
    """Keys, values, states and the rest of new tokens ``[B, T, H, ...]`` in the form of a cache."""
    state = None if cache.e is None or e is None else _as_slots(cache.e, e)
    more = {name: _as_slots(old, kept[name]) for name, old in cache.kept.items()}
    return LayerCache(k=_as_slots(cache.k, k), v=_as_slots(cache.v, v), e=state, kept=more)


def _as_slots(old: Array, new: Array) -> Array:
    """``new [B, T, H, ...]`` in the form of ``old [B, H, S, ...]``."""
    new = jnp.swapaxes(new, -old.ndim + 1, -old.ndim + 2)
    shape = (*old.shape[:2], new.shape[-old.ndim + 2], *old.shape[3:])
    return jnp.broadcast_to(new, shape).astype(old.dtype)


def keep(cache: Cache, new: dict[str, Array], index: Array | int) -> dict[str, Array]:
    """``Cache.kept`` with what new tokens, ``[B, T, H, ...]``, add from the slot ``index`` on."""
    added = {name: _as_slots(old, new[name]) for name, old in cache.kept.items()}
    return write_cache(cache.kept, added, index)


def with_entries(cache: LayerCache, new: LayerCache, index: Array | int) -> LayerCache:
    """The cache of one layer with new tokens in the slots from ``index`` on."""
    slots, time = cache.k.shape[2], new.k.shape[2]
    if time > 1:
        return write_cache(cache, new, index)
    here = jnp.arange(slots) == index

    def choose_slot(old: Array, new: Array) -> Array:
        # One pass that can be fused with what comes before, unlike a copy and an update.
        return jnp.where(here.reshape(-1, *(1,) * (old.ndim - 3)), new, old)

    return jax.tree.map(choose_slot, cache, new)


def write_cache(cache: Any, new: Any, index: Array | int, *, axis: int = 2) -> Any:
    """Overwrites the slots of a :class:`LayerCache`, or of arrays like its, from ``index`` on.

    ``new`` may hold all keys, rewritten.
    """

    def put(old: Array, new: Array) -> Array:
        # An array as long as the cache starts at slot 0: indices are clamped.
        return jax.lax.dynamic_update_slice_in_dim(old, new, index, axis=axis)

    return jax.tree.map(put, cache, new)
