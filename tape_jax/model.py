"""The decoder: embeddings, runs of like blocks as scans, the output projection."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from tape_jax import algebra
from tape_jax import positions as position_encodings
from tape_jax.attention import BACKENDS, AttentionPlan, recorded_plans
from tape_jax.attention.zigzag import from_zigzag, to_zigzag
from tape_jax.config import ModelConfig, choose, require
from tape_jax.layers import (
    Attention,
    Block,
    Context,
    LayerCache,
    Linear,
    RMSNorm,
    constrain_state,
    create,
    declare,
    declared_axes,
    default_positions,
    gathered,
    pack_state,
    remat_policy,
    runs,
    splits_sequence,
    write_cache,
)
from tape_jax.positions.protocol import Encoding, Param, State
from tape_jax.sharding import Parameter, Sharding, constrain

Array = jax.Array

EMBEDDING_AXES = ("vocab", "embed")


@flax.struct.dataclass
class Cache:
    """Everything that cached decoding keeps of the tokens it has seen; see :func:`init_cache`.

    ``S`` is the capacity in tokens, ``n`` the number of layers of a run of like layers.

    Attributes:
      index: number of slots written, int32.
      tokens: ``[B, S]`` int32.
      positions: ``[B, S]`` int32.
      segment_ids: ``[B, S]`` int32; 0 marks padding.
      layers: per block (see :attr:`Transformer.blocks`) a :class:`tape_jax.layers.LayerCache` with
        a leading axis ``n``, the number of its layers.
      key: random key of the encoding's draw, or None for its fixed draw.
    """

    index: Array
    tokens: Array
    positions: Array
    segment_ids: Array
    layers: tuple[LayerCache, ...]
    key: Array | None = None

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.tokens.shape[-1]

    @property
    def nbytes(self) -> int:
        """Size of everything that grows with the capacity, in bytes."""
        arrays = (self.tokens, self.positions, self.segment_ids, self.layers)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


@flax.struct.dataclass
class States:
    """What ``return_states=True`` returns beside the logits.

    Attributes:
      hidden: residual stream entering each layer and leaving the last: ``[layers + 1]`` entries.
      position: position state entering each layer: ``[layers]`` entries.
      final_norm: ``[B, T, hidden]``, the input of the output projection.
    """

    hidden: tuple[Array, ...]
    position: tuple[State, ...]
    final_norm: Array


class Transformer(nn.Module):
    """A decoder-only Transformer with any position encoding.

    >>> model = Transformer(ModelConfig(vocab_size=256))
    >>> variables = model.init(key, tokens)
    >>> logits = model.apply(variables, tokens)

    Attributes:
      config: the description of the model.
      sharding: a mesh, and rules that say how parameters and activations are split over it; None:
        nothing is said about where arrays live. Parameters do not depend on it.
    """

    config: ModelConfig
    sharding: Sharding | None = None

    def __post_init__(self) -> None:
        choose("attention implementation", self.config.attention, (None, *BACKENDS))
        super().__post_init__()

    @property
    def encoding(self) -> Encoding:
        """The position encoding."""
        return position_encodings.create(self.config.position)

    @property
    def runs(self) -> list[tuple[int, int, bool]]:
        """Runs of like layers: (first, one past the last, whether they update the state)."""
        n = self.config.num_layers
        return runs([self.encoding.updates(i, n) for i in range(n)])

    @property
    def blocks(self) -> list[tuple[int, int, bool]]:
        """What has parameters of its own, ``layers_<first>``: runs, or layers if not scanned."""
        if self.config.scan_layers:
            return self.runs
        return [(i, i + 1, updates) for a, b, updates in self.runs for i in range(a, b)]

    @property
    def state_dtype(self) -> jnp.dtype:
        """Type of the position states."""
        c = self.config
        return jnp.dtype(c.state_dtype or algebra.at_least_float32(c.dtype))

    @nn.nowrap
    def parameters(self) -> dict[str, Parameter]:
        """Shape, type and logical axes of every parameter by its path; nothing is computed.

        A path is ``layers_0/attention/q/kernel``; stacked layers have a first axis ``layers``.
        """
        axes = self.encoding.coordinate_axes
        tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        places = None if axes == 1 else jax.ShapeDtypeStruct((1, 1, axes), jnp.int32)
        key = jax.eval_shape(jax.random.key, 0)

        def shapes(key: Array, tokens: Array, places: Array | None) -> Any:
            return Transformer(self.config).init(key, tokens, positions=places)["params"]

        with declared_axes() as declared:
            flat = flatten_dict(jax.eval_shape(shapes, key, tokens, places), sep="/")
        return {
            path: Parameter(x, (*["layers"] * (x.ndim - len(declared[path])), *declared[path]))
            for path, x in flat.items()
        }

    @nn.nowrap
    def attention_plan(
        self, batch_size: int, length: int, *, causal: bool = True, **inputs: Any
    ) -> dict[str, AttentionPlan]:
        """Says which implementation of attention would run in each run of layers, and why.

        Runs of layers may differ: only layers that update the state attend it. Nothing is computed.

        Args:
          batch_size: number of sequences.
          length: of each, in tokens.
          causal: as when called.
          **inputs: other arrays that the model is called with, or ``jax.ShapeDtypeStruct``.

        Returns:
          By the name of the run's parameters, such as ``layers_0``.

        Raises:
          ValueError: if the model cannot be called like this.
          NotImplementedError: if the named implementation cannot do it here.
        """
        plans: dict[str, AttentionPlan] = {}

        def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            if not isinstance(context.module, Attention) or context.method_name != "__call__":
                return call(*args, **kwargs)
            with recorded_plans() as found:
                out = call(*args, **kwargs)
            plans[context.module.path[0]] = found[0]
            return out

        inputs["tokens"] = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
        key = jax.eval_shape(jax.random.key, 0)
        variables = jax.eval_shape(functools.partial(self.init, causal=causal), key, **inputs)
        with nn.intercept_methods(note):
            jax.eval_shape(functools.partial(self.apply, causal=causal), variables, **inputs)
        return plans

    @nn.compact
    def __call__(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        mask: Array | None = None,
        causal: bool = True,
        initial_state: State = None,
        return_states: bool = False,
        cache: Cache | None = None,
        length: int | None = None,
        output: str = "logits",
    ) -> Any:
        """Logits of the next token.

        Args:
          tokens: integers ``[..., T]``; with a cache ``[B, T]``, the tokens that follow it.
          positions: ``[..., T]``, or ``[..., T, n]`` coordinates; None: 0, 1, ...
          segment_ids: integers ``[..., T]``: tokens see those of equal id only.
          mask: booleans that broadcast to ``[..., H, T, T]``, True where visible.
          causal: whether tokens see earlier ones only.
          initial_state: state entering the first layer, in place of the encoding's own.
          return_states: also return the :class:`States`.
          cache: continue from it. ``positions`` and ``segment_ids`` then describe the new tokens.
          length: tokens for which random positions are drawn and dynamic scaling is fixed; None:
            the cache's capacity, or ``T``.
          output: ``logits``, or ``hidden`` to leave the output projection out: what enters it is
            returned instead, ``[..., T, hidden]`` in the compute type, of which :meth:`project`
            makes logits for a few tokens at a time.

        Returns:
          Logits ``[..., T, vocab]`` in at least float32. With ``return_states`` also the states,
          with a cache also the new cache.

        Raises:
          ValueError: if shapes, types or lengths do not fit; the message gives both sides.
        """
        c, encoding = self.config, self.encoding
        sharding = None if self.is_initializing() else self.sharding
        encoding.check(c)
        choose("output", output, ("logits", "hidden"))
        self._check(tokens, positions, segment_ids, cache)
        if sharding is not None:
            _check_sharded(sharding, c, tokens, initial_state, cache)
        ring = sharding if splits_sequence(sharding) else None
        time = tokens.shape[-1]
        key = self.make_rng("positions") if self.has_rng("positions") else None
        if cache is None:
            if positions is None:
                positions = default_positions(time)
            places = encoding.coordinates(tokens, positions, segment_ids)
            time_axis = positions.ndim - 1 - (encoding.coordinate_axes > 1)
            if ring is not None:
                positions = to_zigzag(ring, positions, time_axis)
                tokens = to_zigzag(ring, tokens, 1)
                places = to_zigzag(ring, places, places.ndim - 1)
                if segment_ids is not None:
                    segment_ids = to_zigzag(ring, segment_ids, segment_ids.ndim - 1)
            context = Context(positions, segment_ids, mask, 0, causal)
        else:
            cache = _append(cache, tokens, positions, segment_ids)
            key, length, start = cache.key, length or cache.capacity, cache.index - time

            def recent(x: Array) -> Array:
                return jax.lax.dynamic_slice_in_dim(x, start, time, axis=1)

            ids = (recent(cache.segment_ids), cache.segment_ids)
            context = Context(cache.positions, ids, mask, start, causal)
            places = recent(encoding.coordinates(cache.tokens, cache.positions, cache.segment_ids))
            positions = recent(cache.positions)

        spec = Param(
            (c.vocab_size, c.hidden_size), nn.initializers.normal(c.embedding_std), EMBEDDING_AXES
        )
        table = create(self, "embedding", spec, c.param_dtype)
        table = gathered(sharding, table, EMBEDDING_AXES)
        h = table[tokens].astype(c.dtype)
        specs = encoding.input_params(c)
        params = declare(self, "position", specs, c.param_dtype, sharding)
        added = encoding.embed(params, places, c, key)
        if added is not None:
            h = h + added.astype(c.dtype)
        h = constrain(sharding, h, "batch", "sequence", "hidden")
        state = initial_state
        if state is None:
            state = encoding.start(
                positions,
                c,
                key=key,
                length=length or time,
                dtype=self.state_dtype,
                params=params,
            )
        state = encoding.locate(state, places)
        h, caches, hidden, states = self._blocks(h, state, context, cache, return_states, sharding)
        final = RMSNorm(c, name="final_norm")(h)
        if ring is not None:
            final = from_zigzag(ring, final, 1)
        logits = None
        if output == "logits" or self.is_initializing():
            if c.tie_embeddings:
                logits = final @ table.T.astype(c.dtype)
            else:
                logits = Linear(c, c.vocab_size, sharding=sharding, name="head")(final)
            logits = constrain(sharding, logits, "batch", "sequence", "vocab")
            logits = logits.astype(algebra.at_least_float32(c.dtype))
        out: list[Any] = [logits if output == "logits" else final]
        if return_states:
            record = States(hidden=(*hidden, h), position=tuple(states), final_norm=final)
            if ring is not None:
                record = self._in_order(record, ring, time_axis)
            out.append(record)
        if cache is not None:
            out.append(dataclasses.replace(cache, layers=caches))
        return out[0] if len(out) == 1 else tuple(out)

    @nn.nowrap
    def project(self, variables: Any, hidden: Array) -> Array:
        """The output projection alone: logits ``[..., vocab]`` of ``hidden [..., hidden]``.

        Args:
          variables: of the model.
          hidden: what the model returns with ``output="hidden"``, or a part of it.
        """
        c, params = self.config, variables["params"]
        if c.tie_embeddings:
            table = gathered(self.sharding, params["embedding"], EMBEDDING_AXES)
            logits = hidden @ table.T.astype(c.dtype)
        else:
            head = Linear(c, c.vocab_size, sharding=self.sharding, name="head", parent=None)
            logits = jnp.asarray(head.apply({"params": params["head"]}, hidden))
        return logits.astype(algebra.at_least_float32(c.dtype))

    @nn.nowrap
    def output_kernel(self, variables: Any) -> Array:
        """The output projection's kernel ``[hidden, vocab]``, for :mod:`tape_jax.losses`."""
        params = variables["params"]
        if self.config.tie_embeddings:
            return params["embedding"].T
        return params["head"]["kernel"]

    @nn.nowrap
    def _in_order(self, record: States, ring: Sharding, start_axis: int) -> States:
        """What was recorded on a mesh that splits sequences, with its tokens in order.

        ``start_axis`` is the axis of time in states that no layer has updated.
        """

        def state_in_order(layer: int, state: State) -> State:
            updated = any(updates and first <= layer for first, _, updates in self.runs)
            axis = 1 if updated else start_axis
            return jax.tree.map(lambda x: from_zigzag(ring, x, axis), state)

        return dataclasses.replace(
            record,
            hidden=tuple(from_zigzag(ring, x, 1) for x in record.hidden),
            position=tuple(state_in_order(i, x) for i, x in enumerate(record.position)),
        )

    def _blocks(
        self,
        h: Array,
        state: State,
        context: Context,
        cache: Cache | None,
        record: bool,
        sharding: Sharding | None,
    ):
        """Runs all layers; returns what leaves them, their caches, and what entered each."""
        c, encoding = self.config, self.encoding
        caches, hidden, states = [], [], []
        for number, (start, stop, updates) in enumerate(self.blocks):
            block: Any = Block
            if c.remat != "none":
                block = nn.remat(block, policy=remat_policy(c.remat), prevent_cse=not c.scan_layers)
            name = f"layers_{start}"
            options = {
                "config": c,
                "encoding": encoding,
                "updates": updates,
                "record": record,
                "sharding": sharding,
            }
            own = None if cache is None else cache.layers[number]
            if updates:
                state = encoding.carry(state, h.shape[:-1], c)
                packed = constrain_state(sharding, pack_state(state, h.ndim - 1))
                carry, fixed = (h, packed), None
            else:
                carry, fixed = (h, None), state
            if c.scan_layers:
                block = nn.scan(
                    block,
                    variable_axes={"params": 0, "maps": 0, "losses": 0},
                    split_rngs={"params": True},
                    in_axes=(nn.broadcast, nn.broadcast, 0),
                    length=stop - start,
                )
                if c.remat != "none" and stop - start == 1 and not self.is_initializing():
                    block, carry = _gradients_at_once(block, self.variables["params"][name], carry)
                carry, (new, entered) = block(**options, name=name)(carry, fixed, context, own)
                own = None if own is None else write_cache(own, new, context.index, axis=3)
            else:
                own = jax.tree.map(lambda x: x[0], own)
                carry, outputs = block(**options, name=name)(carry, fixed, context, own)
                own, entered = jax.tree.map(lambda x: x[None], outputs)
            h = carry[0]
            state = carry[1].unpack() if updates else state
            caches.append(own)
            if record:
                for i in range(stop - start):
                    hidden.append(entered[0][i])
                    states.append(jax.tree.map(lambda x, i=i: x[i], entered[1]))
        return h, tuple(caches), hidden, states

    def _check(self, tokens, positions, segment_ids, cache) -> None:
        encoding = self.encoding
        if not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.ndim < 1:
            raise ValueError(
                f"tokens must be integers [..., T]; got {tokens.dtype} of shape {tokens.shape}"
            )
        time = tokens.shape[-1]
        if time < 1:
            raise ValueError(f"tokens must hold at least one token; got shape {tokens.shape}")
        check_length(self, time if cache is None else cache.capacity)
        if positions is None and encoding.coordinate_axes > 1:
            raise ValueError(
                f"the encoding {encoding.kind!r} has axes={encoding.coordinate_axes}: give "
                f"positions= of shape {(*tokens.shape, encoding.coordinate_axes)}"
            )
        tail = () if encoding.coordinate_axes == 1 else (encoding.coordinate_axes,)
        _fits("positions", positions, tokens, tail)
        _fits("segment_ids", segment_ids, tokens, ())
        if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
            raise ValueError(f"segment_ids must be integers; got {segment_ids.dtype}")


def _gradients_at_once(block: Any, params: Any, carry: Any) -> tuple[Any, Any]:
    """A block, and what enters it, such that all its gradients are made before they leave it.

    A loop sees to that for its layers. The gradients of parameters of a single layer may be left
    for later, and its activations would have to be kept until then.
    """
    params, carry = jax.lax.optimization_barrier((params, carry))
    return nn.map_variables(block, "params", trans_in_fn=lambda _: {"params": params}), carry


def check_length(model: Transformer, length: int, *, what: str = "a sequence") -> None:
    """Raises ValueError if ``length`` tokens are more than the model or its encoding takes."""
    encoding = model.encoding
    for limit, whose in (
        (model.config.max_length, "the model's max_length"),
        (encoding.max_length(), f"the limit of the encoding {encoding.kind!r}"),
    ):
        if limit is not None and length > limit:
            raise ValueError(f"{what} of {length} tokens exceeds {whose} of {limit}")


def _check_sharded(
    sharding: Sharding, config: ModelConfig, tokens: Array, initial_state: State, cache: Any
) -> None:
    """Raises ValueError unless the mesh can take a call."""
    require(tokens.ndim == 2, f"on a mesh, tokens must have shape [B, T]; got shape {tokens.shape}")
    require(
        not splits_sequence(sharding) or (cache is None and initial_state is None),
        "a mesh that splits sequences takes neither a cache nor an initial_state",
    )
    sharding.check_activations(config, *tokens.shape)


def _fits(name: str, x: Array | None, tokens: Array, tail: tuple[int, ...]) -> None:
    """Raises ValueError unless ``x`` is None or ``[..., T, *tail]`` for ``tokens [..., T]``."""
    if x is None:
        return
    lead = x.shape[: x.ndim - len(tail)]
    batch = zip(lead[-2::-1], tokens.shape[-2::-1], strict=False)
    if (
        x.shape[x.ndim - len(tail) :] != tail
        or not 1 <= len(lead) <= tokens.ndim
        or lead[-1] != tokens.shape[-1]
        or any(a not in (1, b) for a, b in batch)
    ):
        raise ValueError(
            f"{name} of shape {x.shape} does not fit tokens of shape {tokens.shape}: expected "
            f"{(*tokens.shape, *tail)}, leading axes may be missing"
        )


def _append(cache: Cache, tokens: Array, positions: Array | None, segment_ids: Array | None):
    """The cache with the new tokens, their positions and segments written behind the old ones."""
    if tokens.ndim != 2 or tokens.shape[0] != cache.tokens.shape[0]:
        raise ValueError(
            f"with a cache for {cache.tokens.shape[0]} sequences, tokens must have shape "
            f"({cache.tokens.shape[0]}, T); got {tokens.shape}"
        )
    time = tokens.shape[1]
    used = 0 if isinstance(cache.index, jax.core.Tracer) else int(cache.index)
    if used + time > cache.capacity:
        raise ValueError(
            f"{time} tokens do not fit into a cache of capacity {cache.capacity} with {used} in use"
        )
    if positions is None:
        positions = cache.index + default_positions(time)
    if segment_ids is None:
        segment_ids = jnp.ones((time,), jnp.int32)

    def put(old: Array, new: Array) -> Array:
        new = jnp.broadcast_to(new, tokens.shape).astype(old.dtype)
        return jax.lax.dynamic_update_slice_in_dim(old, new, cache.index, axis=1)

    return dataclasses.replace(
        cache,
        index=cache.index + time,
        tokens=put(cache.tokens, tokens),
        positions=put(cache.positions, positions),
        segment_ids=put(cache.segment_ids, segment_ids),
    )


def init_cache(
    model: Transformer,
    batch_size: int,
    capacity: int,
    *,
    dtype: Any = None,
    key: Array | None = None,
) -> Cache:
    """An empty cache for decoding ``batch_size`` sequences of up to ``capacity`` tokens.

    Args:
      model: the model that will use it.
      batch_size: number of sequences ``B``.
      capacity: number of slots ``S``. Random positions are drawn, and dynamic scaling is fixed, for
        this length, so results agree with a full pass given ``length=capacity``.
      dtype: type of keys and values; None: the model's compute type.
      key: random key for encodings that draw; None: their fixed draw.

    Raises:
      ValueError: if a size is not positive, the capacity is more than the model or its encoding
        takes, or the encoding has n-dimensional coordinates.
    """
    c, encoding = model.config, model.encoding
    if batch_size < 1 or capacity < 1:
        raise ValueError(
            f"batch_size and capacity must be positive; got {batch_size} and {capacity}"
        )
    check_length(model, capacity, what="a cache")
    if encoding.coordinate_axes > 1:
        raise ValueError(
            f"a cache holds one coordinate per token; {encoding.kind!r} has "
            f"axes={encoding.coordinate_axes}"
        )
    dtype = jnp.dtype(dtype or c.dtype)
    positions = jax.ShapeDtypeStruct((batch_size, capacity), jnp.int32)

    def key_state(p: Array) -> Array | None:
        start = encoding.start(p, c, length=capacity, dtype=model.state_dtype)
        return encoding.rotation(encoding.carry(start, p.shape, c))[1]

    e = jax.eval_shape(key_state, positions)
    head = jax.ShapeDtypeStruct((batch_size, capacity, c.kv_heads, c.dim), dtype)
    rotated = head if e is None else jax.eval_shape(algebra.rotate, head, e)

    def zeros(n: int, like: jax.ShapeDtypeStruct, dtype: Any) -> Array:
        batch, slots, heads, *tail = like.shape
        return jnp.zeros((n, batch, heads, slots, *tail), dtype)

    def layer(updates: bool, n: int) -> LayerCache:
        keeps_state = updates and encoding.attends_state and e is not None
        return LayerCache(
            k=zeros(n, rotated, dtype),
            v=zeros(n, head, dtype),
            e=zeros(n, e, e.dtype) if keeps_state else None,
        )

    def slots() -> Array:
        return jnp.zeros((batch_size, capacity), jnp.int32)

    return Cache(
        index=jnp.int32(0),
        tokens=slots(),
        positions=slots(),
        segment_ids=slots(),
        layers=tuple(layer(updates, stop - start) for start, stop, updates in model.blocks),
        key=key,
    )
