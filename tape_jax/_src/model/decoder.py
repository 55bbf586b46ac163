"""The decoder: embeddings, runs of like blocks as scans, the output projection."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from tape_jax._src.attention import AttentionPlan, recorded_plans
from tape_jax._src.attention.zigzag import from_zigzag
from tape_jax._src.core import algebra
from tape_jax._src.core.checks import check_fields, choose, require_x64
from tape_jax._src.core.explicit import automatic_inside, varying
from tape_jax._src.core.segments import in_pieces, reordered
from tape_jax._src.core.sharding import ParameterSpec, Sharding, constrain, splits_sequence
from tape_jax._src.model import placement
from tape_jax._src.model.attention_layer import Attention, entered_layer
from tape_jax._src.model.block import (
    Block,
    Pattern,
    constrain_state,
    in_groups,
    pack_state,
    remat_policy,
    unpacked,
    unrolls,
)
from tape_jax._src.model.cache import Cache, LayerCache, keep, write_cache
from tape_jax._src.model.config import LayerStack, ModelConfig
from tape_jax._src.model.inputs import Call, Context, check_call
from tape_jax._src.model.layers import Linear, Norm
from tape_jax._src.model.parameters import create, declare, declared_params, gathered
from tape_jax._src.positions.protocol import Encoding, Param, State, as_positions, table_rows

Array = jax.Array

EMBEDDING_AXES = ("vocab", "embed")
HEAD_AXES = ("embed", "vocab")


@flax.struct.dataclass
class States:
    """The states that ``return_states=True`` returns beside the logits.

    Attributes:
      hidden: residual stream entering each layer and leaving the last: ``[layers + 1]`` entries.
      position: position state entering each layer: ``[layers]`` entries.
      final_norm: ``[B, T, hidden]``, the input of the output projection.
    """

    hidden: tuple[Array, ...]
    position: tuple[State, ...]
    final_norm: Array


@automatic_inside(placement.outputs)
def _applied(
    apply: Callable[..., Any],
    variables: Any,
    tokens: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Apply a model; ``tokens`` are those in the arguments, if given."""
    return apply(variables, *args, **kwargs)


@automatic_inside(placement.parameters)
def _initialized(
    init: Callable[..., Any], model: Transformer, rngs: Any, *args: Any, **kwargs: Any
) -> Any:
    return init(rngs, *args, **kwargs)


@functools.lru_cache(maxsize=64)
def _parameters(config: ModelConfig, wide_types: bool) -> dict[str, ParameterSpec]:
    """Return :meth:`Transformer.parameters` from one cached trace of the whole model.

    The implementations are named, because choosing one needs the device, and a TPU serves only one
    process.
    """
    updates = "reference" if "reference" in config.position.update_implementations else None
    config = dataclasses.replace(
        config, attention_implementation="reference", update_implementation=updates
    )
    axes = config.position.coordinate_axes
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    places = None if axes == 1 else jax.ShapeDtypeStruct((1, 1, axes), jnp.int32)
    key = jax.eval_shape(jax.random.key, 0)

    def shapes(key: Array, tokens: Array, places: Array | None) -> Any:
        return Transformer(config).init(key, tokens, positions=places)["params"]

    with declared_params() as declared:
        flat = flatten_dict(jax.eval_shape(shapes, key, tokens, places), sep="/")

    def whole(x: jax.ShapeDtypeStruct, one: ParameterSpec) -> ParameterSpec:
        stack = ["layers"] * (x.ndim - len(one.axes))
        return one._replace(shape=x, axes=(*stack, *one.axes))

    return {path: whole(x, declared[path]) for path, x in flat.items()}


class Transformer(nn.Module):
    """A decoder-only Transformer with any position encoding.

    >>> model = Transformer(ModelConfig(vocab_size=256))
    >>> variables = model.init(key, tokens)
    >>> logits = model.apply(variables, tokens)

    Attributes:
      config: the description of the model.
      sharding: a mesh, and rules that say how parameters and activations are split over it; None:
        the model does not place arrays. Parameters do not depend on it.
    """

    config: ModelConfig
    sharding: Sharding | None = None

    def __post_init__(self):
        check_fields(self)
        super().__post_init__()

    @property
    def encoding(self) -> Encoding:
        """The position encoding."""
        return self.config.position

    @property
    def blocks(self) -> list[LayerStack]:
        """The stacks of like layers; one for each layer if layers are not scanned."""
        return self.config.blocks

    @property
    def state_dtype(self) -> jnp.dtype:
        """Type of the position states."""
        return self.config.carried_dtype

    @nn.nowrap
    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies the model as ``flax.linen.Module.apply`` does, on meshes with explicit axes too.

        There, results are split like the tokens; logits are also split like the output projection.
        """
        tokens = args[0] if args else kwargs.get("tokens")
        return _applied(super().apply, variables, tokens, args, kwargs)

    @nn.nowrap
    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """Makes variables as ``flax.linen.Module.init`` does, on meshes with explicit axes too.

        There, :attr:`sharding` places parameters; without it, they are whole on every device.
        """
        return _initialized(super().init, self, rngs, *args, **kwargs)

    @nn.nowrap
    def parameters(self) -> dict[str, ParameterSpec]:
        """Returns each parameter's shape, type, logical axes and role by path; computes nothing.

        A path is ``layers_0/attention/q/kernel``; stacked layers have a first axis ``layers``.
        """
        return dict(_parameters(self.config, jax.dtypes.canonicalize_dtype(float).itemsize > 4))

    @nn.nowrap
    def attention_plan(
        self, batch_size: int, length: int, *, is_causal: bool = True, **inputs: Any
    ) -> dict[str, AttentionPlan]:
        """Returns which attention implementation each run of layers would use, and why.

        Runs of layers may differ: only layers that update the state attend it. Nothing is computed.

        Args:
          batch_size: number of sequences.
          length: of each, in tokens.
          is_causal: as when called.
          **inputs: other arrays that the model is called with, or ``jax.ShapeDtypeStruct``.

        Returns:
          A plan by the name of each run's parameters, such as ``layers_0``.

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
            plans[context.module.path[-2]] = found[0]
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
        """Returns the logits of the next token.

        Tokens see only tokens of their own segment. Segment 0 is padding, here, in caches and in
        router losses: its token ids and positions are not read, real tokens do not see it, and its
        logits are finite but meaningless. (:func:`tape_jax.attention` only compares ids: there 0 is
        an id like others.)

        Token ids and positions index tables. Values out of range raise an error or, if they are
        traced, make logits NaN. If a model has a window and a mesh splits sequences, a row with a
        segment in pieces, even with only padding between them, is NaN.

        Args:
          tokens: integers ``[..., T]``; with a cache ``[B, T]``, the tokens that follow it.
          positions: ``[..., T]``, or ``[..., T, n]`` coordinates; None: 0, 1, ... in each segment,
            continuing after its tokens in a cache.
          segment_ids: integers ``[..., T]``; None: one segment or, with a cache, that of each row's
            last real token.
          mask: booleans that broadcast to ``[..., H, T, T]``, with a cache to ``[B, H, T, S]``
            with its capacity ``S``; True where visible.
          is_causal: whether tokens see earlier ones only.
          initial_state: state entering the first layer, in place of the encoding's own; an error
            for encodings that read none.
          return_states: also return the :class:`States`.
          cache: continue from it. ``positions`` and ``segment_ids`` then describe the new tokens.
            Tokens without free slots raise an error or, under ``jax.jit``, make their logits and
            all later ones NaN. The random key of a draw also comes from the cache.
          length: number of tokens for which random positions are drawn and dynamic scaling is
            fixed, an integer or one for each row ``[...]``; None: the row's tokens in all segments,
            without padding. A segment's results match those it has alone only with the ``length``
            that it has alone. With a cache, the cache's applies (:func:`tape_jax.init_cache`).
          output: ``logits``, or ``hidden`` to skip the output projection and return its input,
            ``[..., T, hidden]`` in the compute type. :meth:`project` makes logits of it, for a few
            tokens at a time.

        Returns:
          Logits ``[..., T, vocab]`` in at least float32. With ``return_states`` also the states,
          with a cache also the new cache.

        Raises:
          ValueError: if shapes, types or lengths do not fit; the message gives both sides.
        """
        c = self.config
        sharding = None if self.is_initializing() else self.sharding
        require_x64(dtype=c.dtype, param_dtype=c.param_dtype, state_dtype=c.state_dtype)
        choose("output", output, ("logits", "hidden"))
        check_call(
            self, tokens, positions, segment_ids, initial_state=initial_state, cache=cache,
            length=length, draws=self.has_rng("positions"), sharding=sharding,
        )  # fmt: skip
        key = self.make_rng("positions") if self.has_rng("positions") else None
        positions = None if positions is None else as_positions(positions)
        shared: dict[str, Any] = {"mask": mask, "is_causal": is_causal}
        if cache is None:
            shared |= {"length": length, "key": key}
            call = Call.whole(c, tokens, positions, segment_ids, **shared)
        else:
            call = Call.continued(c, tokens, positions, segment_ids, cache=cache, **shared)
        fixed = return_states or mask is not None or initial_state is not None
        call, in_order, fails = self._arranged(call, sharding, fixed)

        table, h, params = self._embed(call, sharding)
        h = h if fails is None else jnp.where(fails[..., None, None], jnp.nan, h)
        layer = entered_layer(call.context, c, h, sharding, call.cache)
        made, kept = self.encoding.start_from_embeddings(params, layer)
        given = made if initial_state is None else initial_state
        state, time_axis = self._start(call, params, given)
        h, caches, hidden, states = self._blocks(h, state, call, return_states, sharding)
        final = Norm(c, name="final_norm")(h)
        if call.cache is not None:
            # Under a trace, nothing else shows that no slot was left.
            final = jnp.where(call.cache.index > call.cache.capacity, jnp.nan, final)
        final = in_order(final)
        out: list[Any] = [final]
        if output == "logits" or self.is_initializing():
            logits = self._logits(final, table, sharding)
            out = [logits if output == "logits" else final]
        if return_states:
            record = States(hidden=(*hidden, h), position=tuple(states), final_norm=final)
            if sharding is not None and splits_sequence(sharding):
                record = self._in_order(record, sharding, time_axis if made is None else 1)
            out.append(record)
        if call.cache is not None:
            kept = keep(call.cache, kept, call.context.index)
            out.append(dataclasses.replace(call.cache, layers=caches, kept=kept))
        return out[0] if len(out) == 1 else tuple(out)

    @nn.nowrap
    def _arranged(
        self, call: Call, sharding: Sharding | None, fixed: bool
    ) -> tuple[Call, Callable[[Array], Array], Array | None]:
        """Put the tokens of a call into the order in which layers have them.

        Args:
          call: in the given order.
          sharding: a mesh and rules, or None.
          fixed: whether inputs or results depend on that order.

        Returns:
          The call; a function that puts hidden states back into the given order; and a boolean
          array of the rows that a mesh cannot compute, or None.
        """
        c, axes, ids = self.config, self.encoding.coordinate_axes, call.segment_ids
        if sharding is not None and splits_sequence(sharding):
            # There windows are measured by indices.
            fails = in_pieces(ids) if c.has_window and ids is not None else None
            return call.on_ring(sharding, axes), lambda x: from_zigzag(sharding, x, 1), fails
        shown = any(map(self.is_mutable_collection, ("maps", "intermediates")))
        fixed |= shown and not self.is_initializing()
        fixed |= call.cache is not None or c.shifted_groups is not None
        # Ids that rows share keep what is made of them, such as biases, shared.
        if fixed or ids is None or ids.shape != call.tokens.shape or not c.has_window:
            return call, lambda x: x, None
        # Kernels measure windows by indices alone.
        moved, back = call.by_segment(axes)

        def in_order(x: Array) -> Array:
            return constrain(sharding, reordered(x, back), "batch", "sequence", "hidden")

        return moved, in_order, None

    @nn.nowrap
    def _embed(
        self, call: Call, sharding: Sharding | None
    ) -> tuple[Array, Array, dict[str, Array]]:
        """Return the table, the embedded tokens ``[..., T, hidden]``, the encoding's parameters."""
        c, encoding = self.config, self.encoding
        init = nn.initializers.normal(c.embedding_std)
        spec = Param((c.vocab_size, c.hidden_size), init, EMBEDDING_AXES)
        table = create(self, "embedding", spec, c.param_dtype, role="embeddings")
        table = gathered(sharding, table, EMBEDDING_AXES)
        h = table_rows("token ids", table, call.tokens).astype(c.dtype)
        h = h if c.embedding_scale == 1 else h * c.embedding_scale
        specs = encoding.input_params(c.sizes)
        params = declare(self, "position", specs, c.param_dtype, sharding)
        added = encoding.embed(params, call.at, c.sizes, call.key)
        if added is not None:
            h = h + added.astype(c.dtype)
        if c.random_positions is not None and call.key is not None:
            h = jnp.where((call.positions < 0)[..., None], jnp.nan, h)
        return table, constrain(sharding, h, "batch", "sequence", "hidden"), params

    @nn.nowrap
    def _start(self, call: Call, params: dict[str, Array], given: State) -> tuple[State, int]:
        """Return the state that enters the first layer, ``given`` if it is not None.

        Also the axis of time in a state that heads share.
        """
        encoding, positions = self.encoding, call.positions
        lead = positions.ndim - (encoding.coordinate_axes > 1)
        time_axis = lead - 1
        # A state has all batch axes or, where heads share it, none.
        if (lead > 1 or encoding.starts_by_head) and lead < call.tokens.ndim:
            positions = jnp.expand_dims(positions, tuple(range(call.tokens.ndim - lead)))
            time_axis = call.tokens.ndim - 1
        state = given
        if state is None:
            state = encoding.start(
                positions,
                self.config.sizes,
                key=call.key,
                length=call.length,
                dtype=self.state_dtype,
                params=params,
            )
        return encoding.locate(state, call.at), time_axis

    @nn.nowrap
    def _logits(self, final: Array, table: Array, sharding: Sharding | None) -> Array:
        """Return the logits ``[..., T, vocab]`` of what leaves the last norm."""
        c = self.config
        if c.tie_embeddings:
            logits = final @ table.T.astype(c.dtype)
        else:
            logits = self._head(sharding)(final)
        logits = constrain(sharding, logits, "batch", "sequence", "vocab")
        return self._wide(logits)

    @nn.nowrap
    def _wide(self, logits: Array) -> Array:
        """Logits as they are returned: scaled and bounded, in at least float32."""
        c = self.config
        logits = logits.astype(algebra.at_least_float32(c.dtype))
        logits = logits if c.logits_scaling == 1 else logits / c.logits_scaling
        return algebra.capped(logits, c.final_logit_softcap)

    @nn.nowrap
    @automatic_inside(placement.logits)
    def project(self, variables: Any, hidden: Array) -> Array:
        """Applies only the output projection: ``hidden [..., hidden]`` to logits ``[..., vocab]``.

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
        return self._wide(logits)

    @nn.nowrap
    def _head(self, sharding: Sharding | None, **options: Any) -> Linear:
        options |= {"role": "embeddings", "sharding": sharding, "name": "head"}
        return Linear(self.config, self.config.vocab_size, HEAD_AXES, **options)

    @nn.nowrap
    def output_kernel(self, variables: Any) -> Array:
        """Returns the output projection's kernel ``[hidden, vocab]``, for :mod:`tape_jax.losses`.

        It includes ``logits_scaling``, but not ``final_logit_softcap``.
        """
        params, scale = variables["params"], self.config.logits_scaling
        tied = self.config.tie_embeddings
        kernel = params["embedding"].T if tied else params["head"]["kernel"]
        return kernel if scale == 1 else kernel / scale

    @nn.nowrap
    def _in_order(self, record: States, ring: Sharding, start_axis: int) -> States:
        """Return states recorded on a mesh that splits sequences, with their tokens in order.

        ``start_axis`` is the axis of time in states that no layer has updated.
        """

        # What a layer of a loop updates has the form of updated states from the loop's start.
        updating = [
            (loop[0].layers[0], blocks.like.member)
            for loop in self.config.loops
            for blocks in loop
            if blocks.like.updates
        ]

        def state_in_order(layer: int, states: State) -> State:
            ordered = states
            for one in self.encoding.of_layers(self.config.num_layers):
                updated = any(first <= layer and one.member == n for first, n in updating)
                order = functools.partial(from_zigzag, ring, axis=1 if updated else start_axis)
                ordered = one.with_own(ordered, jax.tree.map(order, one.own(states)))
            return ordered

        return dataclasses.replace(
            record,
            hidden=tuple(from_zigzag(ring, x, 1) for x in record.hidden),
            position=tuple(state_in_order(i, x) for i, x in enumerate(record.position)),
        )

    def _blocks(
        self, h: Array, state: State, call: Call, record: bool, sharding: Sharding | None
    ) -> tuple[Array, tuple[Any, ...], list[Array], list[State]]:
        """Run all layers; return their output, their caches, and each layer's inputs."""
        c, cache = self.config, call.cache
        caches: list[LayerCache | None] = []
        entered: dict[int, Any] = {}
        for loop in c.loops:
            first, count = len(caches), len(loop)
            own = None if cache is None else cache.layers[first : first + count]
            # A pattern may have one of them several times.
            updating = {blocks.like.member: blocks.like for blocks in loop if blocks.like.updates}
            for like in updating.values():
                full = like.encoding.carry(like.own(state), h.shape[:-1], c.sizes)
                packed = constrain_state(sharding, pack_state(full, h.ndim - 1), h.shape[:-1])
                state = like.with_own(state, packed)
            carried, fixed = (state, None) if updating else (None, state)
            options = {"config": c, "record": record, "sharding": sharding}
            (h, carried), out = self._loop(loop, options, (h, carried), fixed, call.context, own)
            state = unpacked(carried) if updating else state
            caches += [new for new, _ in out]
            for blocks, (_, seen) in zip(loop, out, strict=True):
                for n, layer in enumerate(blocks.layers if record else ()):
                    entered[layer] = jax.tree.map(lambda x, n=n: x[n], seen)
        in_order = [entered[layer] for layer in sorted(entered)]
        return h, tuple(caches), [x for x, _ in in_order], [x for _, x in in_order]

    def _loop(
        self,
        loop: tuple[LayerStack, ...],
        options: dict[str, Any],
        carry: Any,
        fixed: State,
        context: Context,
        caches: Sequence[LayerCache] | None,
    ) -> tuple[Any, Sequence[tuple[LayerCache | None, Any]]]:
        """Run like layers: as a scan, in groups that are recomputed, or one by one.

        Args:
          loop: what is repeated: one block, or a pattern of several.
          options: of each :class:`Block`.
          carry: hidden and position states that enter.
          fixed: the position state, if these layers do not update it.
          context: of the call.
          caches: of the blocks, with a leading axis of layers.

        Returns:
          The last layer's output and, for each block, the new cache and the inputs of its layers if
          recorded.
        """
        c, kind, length, name = self.config, Block, len(loop[0].layers), f"loop_{loop[0].layers[0]}"
        # Along manual mesh axes tokens differ; states, equal at first, will too.
        carry = varying(carry, carry)
        if c.remat != "none":
            kind = nn.remat(kind, policy=remat_policy(c.remat), prevent_cse=not c.scan_layers)
        grouped = c.remat == "groups" and not (
            options["record"] or self.is_initializing() or self.is_mutable_collection("maps")
        )
        if grouped and caches is None and length > 2:
            plain = [Block(like=blocks.like, **options, parent=None) for blocks in loop]
            params = [self.variables["params"][blocks.name] for blocks in loop]
            return in_groups(plain, params, carry, fixed, context), [(None, None)] * len(loop)
        made = tuple(kind(like=blocks.like, **options, name=blocks.name) for blocks in loop)
        if not c.scan_layers:
            one = jax.tree.map(lambda x: x[0], caches)
            carry, out = Pattern(made, name=name)(carry, fixed, context, one)
            return carry, jax.tree.map(lambda x: x[None], out)
        alone = caches is None and options["sharding"] is None and not self.is_initializing()
        scanned: Any = nn.scan(
            Pattern,
            variable_axes={"params": 0, "maps": 0, "losses": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, nn.broadcast, 0),
            length=length,
            unroll=alone and unrolls(c),
        )
        if c.remat != "none" and length == 1 and not self.is_initializing():
            params = self.variables["params"][loop[0].name]
            scanned, carry = _gradients_at_once(scanned, params, carry)
        carry, out = scanned(made, name=name)(carry, fixed, context, caches)
        if caches is not None:
            write = functools.partial(write_cache, index=context.index, axis=3)
            return carry, [(write(old, new), x) for old, (new, x) in zip(caches, out, strict=True)]
        return carry, out


def _gradients_at_once(pattern: Any, params: Any, carry: Any) -> tuple[Any, Any]:
    """Return a block and its inputs, such that all its gradients are made before they leave it.

    A loop does this for its layers. For a single layer, gradients of parameters may be left for
    later, and its activations would have to be kept until then.
    """
    params, carry = jax.lax.optimization_barrier((params, carry))

    def given(own: Any) -> Any:
        return {"params": params} if jax.tree.leaves(own) else own

    return nn.map_variables(pattern, "params", trans_in_fn=given), carry
