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

from tape_jax._src.attention import AttentionPlan, recorded_plans
from tape_jax._src.attention.zigzag import from_zigzag, to_zigzag
from tape_jax._src.core import algebra
from tape_jax._src.core.checks import choose, require, require_x64
from tape_jax._src.core.segments import PADDING, places, without_padding
from tape_jax._src.core.sharding import ParameterSpec, Sharding, constrain
from tape_jax._src.model.cache import (
    Cache,
    append,
    check_cache,
    keep,
    write_cache,
)
from tape_jax._src.model.config import ModelConfig
from tape_jax._src.model.inputs import check_initial_state, check_inputs, check_sharded
from tape_jax._src.model.layers import (
    Attention,
    Block,
    Context,
    Linear,
    RMSNorm,
    constrain_state,
    entered_layer,
    in_groups,
    pack_state,
    remat_policy,
    runs,
    splits_sequence,
    unrolls,
)
from tape_jax._src.model.parameters import create, declare, declared_params, gathered
from tape_jax._src.positions.drawing import drawn_positions
from tape_jax._src.positions.protocol import (
    Encoding,
    Param,
    State,
    as_length,
    as_positions,
    default_positions,
    table_rows,
)

Array = jax.Array

EMBEDDING_AXES = ("vocab", "embed")
HEAD_AXES = ("embed", "vocab")


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

    @property
    def encoding(self) -> Encoding:
        """The position encoding."""
        return self.config.position

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
    def parameters(self) -> dict[str, ParameterSpec]:
        """Shape, type, logical axes and role of every parameter by its path; nothing is computed.

        A path is ``layers_0/attention/q/kernel``; stacked layers have a first axis ``layers``.
        """
        axes = self.encoding.coordinate_axes
        tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        places = None if axes == 1 else jax.ShapeDtypeStruct((1, 1, axes), jnp.int32)
        key = jax.eval_shape(jax.random.key, 0)

        def shapes(key: Array, tokens: Array, places: Array | None) -> Any:
            return Transformer(self.config).init(key, tokens, positions=places)["params"]

        with declared_params() as declared:
            flat = flatten_dict(jax.eval_shape(shapes, key, tokens, places), sep="/")

        def whole(x: jax.ShapeDtypeStruct, one: ParameterSpec) -> ParameterSpec:
            stack = ["layers"] * (x.ndim - len(one.axes))
            return one._replace(shape=x, axes=(*stack, *one.axes))

        return {path: whole(x, declared[path]) for path, x in flat.items()}

    @nn.nowrap
    def attention_plan(
        self, batch_size: int, length: int, *, is_causal: bool = True, **inputs: Any
    ) -> dict[str, AttentionPlan]:
        """Says which implementation of attention would run in each run of layers, and why.

        Runs of layers may differ: only layers that update the state attend it. Nothing is computed.

        Args:
          batch_size: number of sequences.
          length: of each, in tokens.
          is_causal: as when called.
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
            with recorded_plans(operations=True) as found:
                out = call(*args, **kwargs)
            plans[context.module.path[0]] = found[0]
            return out

        inputs["tokens"] = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
        key = jax.eval_shape(jax.random.key, 0)
        # In groups of layers modules do not know their names.
        plain = Transformer(dataclasses.replace(self.config, remat="none"), sharding=self.sharding)
        call: dict[str, Any] = {"is_causal": is_causal}
        variables = jax.eval_shape(functools.partial(plain.init, **call), key, **inputs)
        with nn.intercept_methods(note):
            jax.eval_shape(functools.partial(plain.apply, **call), variables, **inputs)
        return plans

    @nn.compact
    def __call__(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        mask: Array | None = None,
        is_causal: bool = True,
        initial_state: State = None,
        return_states: bool = False,
        cache: Cache | None = None,
        length: int | Array | None = None,
        output: str = "logits",
    ) -> Any:
        """Logits of the next token.

        Tokens see those of their own segment only, and segment 0 is padding, here, in caches and in
        the losses of routers: the token id and the position that stand there are not read, no real
        token sees it, and its logits, though finite, mean nothing. (In :func:`tape_jax.attention`
        ids are only compared: there 0 is an id like others.)

        Token ids and positions index tables. Out of range they are refused or, where they are not
        known yet, traced ones, make logits NaN.

        Args:
          tokens: integers ``[..., T]``; with a cache ``[B, T]``, the tokens that follow it.
          positions: ``[..., T]``, or ``[..., T, n]`` coordinates; None: 0, 1, ... in each segment,
            going on behind those of its tokens that a cache holds.
          segment_ids: integers ``[..., T]``; None: one segment or, with a cache, that of each row's
            last real token.
          mask: booleans that broadcast to ``[..., H, T, T]``, with a cache to ``[B, H, T, S]``
            with its capacity ``S``; True where visible.
          is_causal: whether tokens see earlier ones only.
          initial_state: state entering the first layer, in place of the encoding's own; refused by
            encodings that read none.
          return_states: also return the :class:`States`.
          cache: continue from it. ``positions`` and ``segment_ids`` then describe the new tokens.
            Tokens for which no slots are left are refused or, under ``jax.jit``, make these and all
            later logits NaN. The random key of a draw is the cache's too.
          length: for how many tokens random positions are drawn and dynamic scaling is fixed, an
            integer or one for each sequence ``[...]``; None: as many as the sequence has, padding
            not counted. With a cache it is the cache's (:func:`tape_jax.init_cache`).
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
        require_x64(dtype=c.dtype, param_dtype=c.param_dtype, state_dtype=c.state_dtype)
        choose("output", output, ("logits", "hidden"))
        check_inputs(self, tokens, positions, segment_ids, cache)
        check_initial_state(encoding, initial_state)
        if cache is not None:
            check_cache(self, cache)
            require(
                length is None,
                f"with a cache, length is the cache's: give init_cache length={length}",
            )
            require(
                not self.has_rng("positions"),
                "with a cache, the key of a draw is the cache's: give init_cache key=, in place of "
                "the random stream 'positions'",
            )
        positions = None if positions is None else as_positions(positions)
        if sharding is not None:
            check_sharded(sharding, c, tokens, initial_state, cache)
        ring = sharding if splits_sequence(sharding) else None
        time = tokens.shape[-1]
        key = self.make_rng("positions") if self.has_rng("positions") else None
        key = key if cache is None else cache.key
        draw = c.random_positions

        def drawn(positions: Array, length: int | Array) -> Array:
            if draw is None or key is None:
                return positions
            # Not the key itself, by which encodings draw.
            return drawn_positions(draw, positions, length, jax.random.fold_in(key, 0))

        if cache is None:
            if length is not None:
                length = as_length(length, tokens.shape[:-1])
            elif segment_ids is None:
                length = time
            else:
                # Nothing is drawn for none; of a row that is all padding nothing is read.
                length = jnp.maximum((segment_ids != PADDING).sum(-1, dtype=jnp.int32), 1)
            if positions is None:
                positions = default_positions(time) if segment_ids is None else places(segment_ids)
            tokens = without_padding(tokens, segment_ids)
            positions = without_padding(positions, segment_ids, axes=encoding.coordinate_axes)
            positions = drawn(positions, length)
            at = encoding.coordinates(tokens, positions, segment_ids)
            time_axis = positions.ndim - 1 - (encoding.coordinate_axes > 1)
            if ring is not None:
                positions = to_zigzag(ring, positions, time_axis)
                tokens = to_zigzag(ring, tokens, 1)
                at = to_zigzag(ring, at, at.ndim - 1 - (encoding.coordinate_axes > 1))
                if segment_ids is not None:
                    segment_ids = to_zigzag(ring, segment_ids, segment_ids.ndim - 1)
            context = Context(positions, segment_ids, mask, 0, is_causal)
        else:
            cache = append(cache, tokens, positions, segment_ids)
            start = cache.index - time
            length = cache.capacity if cache.length is None else cache.length

            def recent(x: Array) -> Array:
                return jax.lax.dynamic_slice_in_dim(x, start, time, axis=1)

            ids = (recent(cache.segment_ids), cache.segment_ids)
            every = drawn(cache.positions, length)
            context = Context(every, ids, mask, start, is_causal)
            at = recent(encoding.coordinates(cache.tokens, every, cache.segment_ids))
            tokens, positions, segment_ids = recent(cache.tokens), recent(every), ids[0]
        at = without_padding(at, segment_ids, axes=encoding.coordinate_axes)

        spec = Param(
            (c.vocab_size, c.hidden_size), nn.initializers.normal(c.embedding_std), EMBEDDING_AXES
        )
        table = create(self, "embedding", spec, c.param_dtype, role="embeddings")
        table = gathered(sharding, table, EMBEDDING_AXES)
        h = table_rows("token ids", table, tokens).astype(c.dtype)
        specs = encoding.input_params(c)
        params = declare(self, "position", specs, c.param_dtype, sharding)
        added = encoding.embed(params, at, c, key)
        if added is not None:
            h = h + added.astype(c.dtype)
        if draw is not None and key is not None:
            h = jnp.where((positions < 0)[..., None], jnp.nan, h)
        h = constrain(sharding, h, "batch", "sequence", "hidden")
        layer = entered_layer(context, c, h, sharding, cache)
        made, kept = encoding.start_from_embeddings(params, layer)
        state = made if initial_state is None else initial_state
        lead = positions.ndim - (encoding.coordinate_axes > 1)
        # A state has all batch axes or, where heads share it, none.
        if (lead > 1 or encoding.starts_by_head) and lead < tokens.ndim:
            positions = jnp.expand_dims(positions, tuple(range(tokens.ndim - lead)))
            time_axis = tokens.ndim - 1
        if state is None:
            state = encoding.start(
                positions,
                c,
                key=key,
                length=length,
                dtype=self.state_dtype,
                params=params,
            )
        state = encoding.locate(state, at)
        h, caches, hidden, states = self._blocks(h, state, context, cache, return_states, sharding)
        final = RMSNorm(c, name="final_norm")(h)
        if cache is not None:
            # Traced, nothing else says that no slot was left.
            final = jnp.where(cache.index > cache.capacity, jnp.nan, final)
        if ring is not None:
            final = from_zigzag(ring, final, 1)
        logits = None
        if output == "logits" or self.is_initializing():
            if c.tie_embeddings:
                logits = final @ table.T.astype(c.dtype)
            else:
                logits = self._head(sharding)(final)
            logits = constrain(sharding, logits, "batch", "sequence", "vocab")
            logits = logits.astype(algebra.at_least_float32(c.dtype))
        out: list[Any] = [logits if output == "logits" else final]
        if return_states:
            record = States(hidden=(*hidden, h), position=tuple(states), final_norm=final)
            if ring is not None:
                record = self._in_order(record, ring, time_axis if made is None else 1)
            out.append(record)
        if cache is not None:
            kept = keep(cache, kept, context.index)
            out.append(dataclasses.replace(cache, layers=caches, kept=kept))
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
            head = self._head(self.sharding, parent=None)
            logits = jnp.asarray(head.apply({"params": params["head"]}, hidden))
        return logits.astype(algebra.at_least_float32(c.dtype))

    @nn.nowrap
    def _head(self, sharding: Sharding | None, **options: Any) -> Linear:
        options |= {"role": "embeddings", "sharding": sharding, "name": "head"}
        return Linear(self.config, self.config.vocab_size, HEAD_AXES, **options)

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
        entered: Any
        unroll = cache is None and sharding is None and not self.is_initializing()
        unroll = unroll and unrolls(c)
        for number, (start, stop, updates) in enumerate(self.blocks):
            block: Any = Block
            if c.remat != "none":
                block = nn.remat(block, policy=remat_policy(c.remat), prevent_cse=not c.scan_layers)
            name = f"layers_{start}"
            options: dict[str, Any] = {
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
            grouped = c.remat == "groups" and not (
                record or self.is_initializing() or self.is_mutable_collection("maps")
            )
            if grouped and own is None and stop - start > 2:
                params = self.variables["params"][name]
                carry = in_groups(Block(**options, parent=None), params, carry, fixed, context)
                new = entered = None
            elif c.scan_layers:
                block = nn.scan(
                    block,
                    variable_axes={"params": 0, "maps": 0, "losses": 0},
                    split_rngs={"params": True},
                    in_axes=(nn.broadcast, nn.broadcast, 0),
                    length=stop - start,
                    unroll=unroll,
                )
                if c.remat != "none" and stop - start == 1 and not self.is_initializing():
                    block, carry = _gradients_at_once(block, self.variables["params"][name], carry)
                carry, (new, entered) = block(**options, name=name)(carry, fixed, context, own)
                if own is not None:
                    own = write_cache(own, new, context.index, axis=3)
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


def _gradients_at_once(block: Any, params: Any, carry: Any) -> tuple[Any, Any]:
    """A block, and what enters it, such that all its gradients are made before they leave it.

    A loop sees to that for its layers. The gradients of parameters of a single layer may be left
    for later, and its activations would have to be kept until then.
    """
    params, carry = jax.lax.optimization_barrier((params, carry))
    return nn.map_variables(block, "params", trans_in_fn=lambda _: {"params": params}), carry
