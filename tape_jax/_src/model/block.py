"""One decoder block, and how runs of like blocks are compiled."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax
import flax.linen as nn
import jax

from tape_jax._src.core.sharding import Sharding, constrain
from tape_jax._src.model import experts
from tape_jax._src.model.attention_layer import Attention
from tape_jax._src.model.cache import LayerCache
from tape_jax._src.model.config import NORMS, ModelConfig, kinds_by_pairs
from tape_jax._src.model.inputs import Context
from tape_jax._src.model.layers import MLP, ExpertMLP, Norm
from tape_jax._src.model.parameters import declare
from tape_jax._src.positions.protocol import OfLayer, State
from tape_jax._src.positions.tape.mixing import SUM_OVER_DEVICES

Array = jax.Array
# Most layers that are compiled one by one where a loop over them is slower, by platform.
MOST_UNROLLED = {"cpu": 8, "gpu": 16}


@flax.struct.dataclass
class PackedState:
    """A position state between two layers, where ``remat`` keeps it for the backward pass.

    A TPU pads the last two axes of an array to tiles of 8 x 128, which for 12 heads of 64 numbers
    takes 2.7 times the memory. So the axes behind time are merged.

    Attributes:
      flat: the state with arrays ``[B, T, N]``.
      tails: the merged axes of each array.
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
    """Packs a state; its arrays keep their first ``axes`` axes as they are."""
    arrays, tree = jax.tree.flatten(state)
    flat = [x.reshape(*x.shape[:axes], -1) if x.ndim > axes else x for x in arrays]
    return PackedState(jax.tree.unflatten(tree, flat), tuple(x.shape[axes:] for x in arrays))


def unpacked(states: State) -> State:
    """Unpacks a state, or those of a schedule."""

    def is_packed(x: Any) -> bool:
        return isinstance(x, PackedState)

    return jax.tree.map(lambda x: x.unpack() if is_packed(x) else x, states, is_leaf=is_packed)


class Block(nn.Module):
    """One decoder block: attention, MLP, and the update of the position state between them.

    Attributes:
      like: its kind among the model's layers.
      record: whether the hidden and position states that enter are returned.
      sharding: a mesh and rules, or None.
    """

    config: ModelConfig
    like: OfLayer
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
        c, encoding, updates = self.config, self.like.encoding, self.like.updates
        h, carried = carry
        states = fixed_state if carried is None else carried
        state = self.like.own(states)
        packed = isinstance(state, PackedState)
        state = state.unpack() if packed else state
        entered = (h, unpacked(states)) if self.record else None
        specs = encoding.layer_params(c.sizes, updates=updates)
        params = declare(self, "position", specs, c.param_dtype, self.sharding)
        attends_state = updates and encoding.attends_state
        before, after = NORMS[c.norms]

        def normalized(of: str, name: str | None, x: Array) -> Array:
            return x if name is None else Norm(c, name=f"{of}_{name}")(x)

        entering = normalized("attention", before, h)
        out, attended, cache = Attention(
            c, encoding, attend_state=attends_state, sharding=self.sharding, name="attention"
        )(entering, state, params, context, cache)
        h = self._residual(h + self._scaled(normalized("attention", after, out)))
        x = self._mlp(entering if c.parallel_block else normalized("mlp", before, h), context)
        x = self._residual(normalized("mlp", after, x))
        if updates:
            options: dict[str, Any] = {} if self.sharding is None else {"sharding": self.sharding}
            if c.update_implementation is not None and encoding.update_implementations:
                options["implementation"] = c.update_implementation
            state = encoding.update_state(params, state, attended, x, **options)
            state = pack_state(state, x.ndim - 1) if packed else state
            carried = self.like.with_own(
                states, constrain_state(self.sharding, state, x.shape[:-1])
            )
        return (h + self._scaled(x), carried), (cache, entered)

    @nn.nowrap
    def _scaled(self, x: Array) -> Array:
        scale = self.config.residual_scale
        return x if scale == 1 else x * scale

    @nn.nowrap
    def _mlp(self, x: Array, context: Context) -> Array:
        if self.config.experts is None:
            return MLP(self.config, self.sharding, name="mlp")(x)
        ids = context.segment_ids
        ids = ids[0] if isinstance(ids, tuple) else ids
        return ExpertMLP(self.config, self.sharding, name="mlp")(x, ids)

    def _residual(self, h: Array) -> Array:
        return constrain(self.sharding, h, "batch", "sequence", "hidden")


class Pattern(nn.Module):
    """Consecutive blocks, which a loop over layers repeats."""

    blocks: tuple[Block, ...]

    @nn.compact
    def __call__(
        self, carry: Any, fixed_state: State, context: Context, caches: Sequence[Any] | None
    ) -> tuple[Any, tuple[tuple[LayerCache | None, Any], ...]]:
        out = []
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            carry, more = block(carry, fixed_state, context, cache)
            out.append(more)
        return carry, tuple(out)


def constrain_state(sharding: Sharding | None, state: State, tokens: tuple[int, ...]) -> State:
    """Position states ``[B, T, H_kv, ...]``, tokens ``[B, T]``, kept where the rules put them."""

    def keep(x: Array) -> Array:
        # Beside states there may be the number of a layer, or tables that all rows share.
        of_tokens = x.ndim > 1 and x.shape[:2] == tokens
        return constrain(sharding, x, "batch", "sequence", "kv_heads") if of_tokens else x

    return jax.tree.map(keep, state)


def remat_policy(name: str) -> Callable | None:
    """The policy of ``jax.checkpoint`` that ``ModelConfig.remat`` names."""
    policies = jax.checkpoint_policies
    dots = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable,
        policies.save_only_these_names(experts.PRODUCT, SUM_OVER_DEVICES),
    )
    return {"dots": dots, "full": None, "groups": None}[name]


def unrolls(config: ModelConfig) -> bool:
    """Returns whether layers are unrolled where a training step would loop over them.

    A loop keeps activations in stacks. Zeroing, writing and reading them takes a sixth of a step on
    a CPU, and a fifth of RoPE's with 12 layers on an H200. An unrolled program compiles for longer.
    On a CPU it keeps a quarter more memory. For encodings of token pairs it keeps up to three times
    as much, and saves less time or none. On an H200 it kept a third less.
    """
    few = config.num_layers <= MOST_UNROLLED.get(jax.default_backend(), 0)
    return few and config.remat == "none" and not kinds_by_pairs(config.position)


def in_groups(
    blocks: Sequence[Block], params: Any, carry: Any, fixed: State, context: Context
) -> Any:
    """Runs a loop over layers; the backward pass keeps the inputs of every n-th.

    Args:
      blocks: what it repeats.
      params: of each of them, stacked.
      carry: what enters.
      fixed: the position state if none of them updates it.
      context: of the call.

    From there it recomputes the inputs of a group's layers, and then each layer.
    """
    layers = jax.tree.leaves(params)[0].shape[0]
    size = math.isqrt(layers - 1) + 1

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(carry: Any, params: Any) -> tuple[Any, None]:
        for block, own in zip(blocks, params, strict=True):
            out: Any = block.apply({"params": own}, carry, fixed, context, None)
            carry = out[0]
        return carry, None

    @jax.checkpoint
    def group(carry: Any, params: Any) -> Any:
        return jax.lax.scan(layer, carry, params)[0]

    for first in range(0, layers, size):
        carry = group(carry, jax.tree.map(lambda x, i=first: x[i : i + size], params))
    return carry
