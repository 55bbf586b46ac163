"""Fused TAPE attention: the part that the kernels of all Pallas backends share.

XLA rotates queries and keys once beforehand. Two accumulators collect ``o`` and ``a`` under one
online softmax, and the log-sum-exp of each row is kept (FlashAttention; Dao et al., 2022; Dao,
2023). Blocks hidden by the causal rule, the window or disjoint ranges of segment ids are not
visited. The body of each kernel is in ``pallas_kernels``, block sizes are in ``pallas_blocks``;
``pallas_triton`` and ``mosaic_program`` launch them.

The backward pass has two kernels: one over blocks of queries (dq), one over blocks of keys (dk, dv,
de). Each recomputes the probabilities. In units of one T x T x D product, with the state attended,
they cost 4 and 6. One pass would cost 7: it would share the logits (1) and the gradient of the
probabilities (2), but would have to add up dq across programs. With wide heads, where blocks are
large, the sums of the second kernel do not fit the registers. Then dv and de have a kernel of their
own, which costs 1 more. No sum uses atomic operations, so two runs are equal to the bit. Gradients
are of first order only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tape_jax._src.attention import pallas_kernels as kernels
from tape_jax._src.attention.pallas_blocks import Tile, Tiles
from tape_jax._src.attention.pallas_kernels import KernelCall
from tape_jax._src.attention.request import Request, refuse, refuse_rows
from tape_jax._src.attention.visibility import full_blocks, segments_meet, visible_blocks
from tape_jax._src.core.devices import tile_size
from tape_jax._src.core.padding import pad_to
from tape_jax._src.core.partition import Named, batch_size, over_batch_and_heads

Array = jax.Array

TYPES = ("float32", "bfloat16", "float16")
MAX_WIDTH = 128

# Runs a body with one program for each block (of queries or of keys), head and row of the batch:
# ``launch(body, call, tile, inputs, out, by_queries=)`` returns the arrays of ``out`` by name.
Launch = Callable[..., Named]

# Axes of all arrays: b batch, h query heads, k key/value heads; and not sharded: t queries, s keys,
# d numbers. States are [b|1, ., ., d], heads full or shared.
AXES = {
    **dict.fromkeys(("q", "d_q", "o", "d_o", "a", "d_a"), "bthd"),
    **dict.fromkeys(("k", "d_k", "v", "d_v", "e", "d_e"), "bskd"),
    **dict.fromkeys(("log_sum", "delta", "query_decay"), "bht"),
    **dict.fromkeys(("key_decay", "d_key_decay"), "bhs"),
    "query_ids": "bt",
    "key_ids": "bs",
    "offset": "b",
}


def check_call(request: Request) -> None:
    states = [x for x in (request.state, request.query_state) if x is not None]
    dim, value_dim = request.q.shape[-1], request.v.shape[-1]
    visibility = request.visibility
    refuse_rows(request)
    refuse(request.bias is not None, "bias= is not in the kernels")
    refuse(request.softcap is not None, "logit_softcap= is not in the kernels")
    refuse(
        visibility.mask is not None, "mask= is not in the kernels; segment_ids= hides padding too"
    )
    refuse(any(x.ndim != 4 for x in states), "only the rotary form of the state is in the kernels")
    refuse(dim % 2 == 1, f"the head dimension must be even; got {dim}")
    refuse(
        max(dim, value_dim) > MAX_WIDTH,
        f"head dimensions are at most {MAX_WIDTH}; got {dim} and, of values, {value_dim}",
    )
    for x in (request.q, request.k, request.v, *states, *(request.log_decay or ())):
        refuse(x.dtype.name not in TYPES, f"types are {', '.join(TYPES)}; got {x.dtype}")
    visibility.refuse_for_kernels(request.query_length, request.key_length)


def attend(
    request: Request,
    launch: Launch,
    tiles: Tiles,
    precision: lax.Precision = lax.Precision.DEFAULT,
    *,
    narrowest: int = 16,
    is_split: bool = True,
) -> tuple[Array, Array | None]:
    """Computes attention with the kernels of a backend.

    Args:
      request: the call, checked.
      launch: the backend's :data:`Launch`.
      tiles: block sizes of each kernel.
      precision: of products of float32 operands.
      narrowest: the smallest width of a tile.
      is_split: whether sharded batches and heads stay sharded.

    Returns:
      ``o [B, Tq, Hq, Dv]`` in the type of ``v`` and ``a [B, Tq, Hq, D]`` in the type of ``e``
      (None if no state is attended).
    """
    call = KernelCall(
        launch=launch,
        scale=request.scale,
        lowest=request.visibility.band.lowest,
        highest=request.visibility.band.highest,
        compute=jnp.dtype(request.compute_dtype),
        precision=precision,
        tiles=tiles,
        interpret=request.interpret,
        is_split=is_split,
        value_types=tuple(x.dtype for x in (request.v, request.state) if x is not None),
    )
    o, a = _attend_compiled(call, _arrays(request, narrowest))
    dim, value_dim = request.q.shape[-1], request.v.shape[-1]
    return o[..., :value_dim], None if a is None else a[..., :dim]


def _arrays(request: Request, narrowest: int) -> Named:
    """Returns the inputs of the kernels, their last axis padded to a tile's width."""
    q, k = request.rotated()

    def padded(x: Array) -> Array:
        return pad_to(x, max(tile_size(x.shape[-1]), narrowest), -1)

    arrays = {
        "q": padded(q),
        "k": padded(k),
        "v": padded(request.v),
        "offset": jnp.asarray(request.visibility.query_offset, jnp.int32).reshape(-1),
    }
    if request.state is not None and request.attend_state:
        arrays["e"] = padded(request.state)
    if (segments := request.visibility.segments) is not None:
        common = jnp.promote_types(jnp.result_type(*segments), jnp.int32)
        arrays["query_ids"], arrays["key_ids"] = (x.astype(common) for x in segments)
    if request.log_decay is not None:
        decay = (x.swapaxes(1, 2) for x in request.log_decay)
        arrays["query_decay"], arrays["key_decay"] = decay
    return arrays


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: KernelCall, inputs: Named) -> tuple[Array, Array | None]:
    """``o [B, Tq, Hq, Dv']`` and ``a [B, Tq, Hq, D']`` or None, in the types of ``v`` and ``e``."""
    return _forward(call, inputs)[0]


def _forward(call: KernelCall, inputs: Named) -> tuple[tuple[Array, Array | None], Any]:
    # These are read again for every block of queries, in the narrow type.
    narrow: Named = {
        name: inputs[name].astype(call.compute) for name in ("v", "e") if name in inputs
    }
    out = _run(_forward_kernel, call, {**inputs, **narrow})
    return (out["o"], out.get("a")), (inputs, narrow, out)


def _backward(call: KernelCall, saved: Any, cotangents: tuple[Array, Array | None]) -> tuple[Named]:
    inputs, narrow, out = saved
    given = {**inputs, **narrow, "log_sum": out["log_sum"], "delta": jnp.float32(0)}
    for name, cotangent in zip("oa", cotangents, strict=True):
        if cotangent is not None:
            given["delta"] += _row_products(cotangent, out[name])
            given[f"d_{name}"] = cotangent.astype(call.compute)
    gradients: dict[str, Any] = dict.fromkeys(inputs)
    launched = [_query_kernel, _key_kernel]
    if call.tiles.value_gradients is not None:
        launched.append(_value_kernel)
    for kernel in launched:
        found = _run(kernel, call, given)
        for name, x in found.items():
            name = name.removeprefix("d_")
            gradients[name] = _sum_shared(x, inputs[name])
    return (gradients,)


_attend.defvjp(_forward, _backward)
_attend_compiled = jax.jit(_attend, static_argnums=0)


def _run(kernel: Callable[..., Named], call: KernelCall, inputs: Named) -> Named:
    """Runs a kernel on the rows and heads that each device holds."""
    function = functools.partial(kernel, call)
    return over_batch_and_heads(function, inputs, AXES) if call.is_split else function(inputs)


def _row_products(x: Array, y: Array) -> Array:
    """Sums products over the numbers of a head, ``[B, H, T]`` in float32."""
    sums = jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)
    return sums.transpose(0, 2, 1)


def _sum_shared(x: Array, like: Array) -> Array:
    """Sums a gradient over the batch and the heads that share one entry of ``like``."""
    if like.shape[0] == 1:
        x = jnp.sum(x, axis=0, keepdims=True)
    axis = 1 if x.ndim == 3 else 2
    heads = like.shape[axis]
    x = jnp.sum(x.reshape(*x.shape[:axis], heads, -1, *x.shape[axis + 1 :]), axis=axis + 1)
    return x.astype(like.dtype)


def _forward_kernel(call: KernelCall, inputs: Named) -> Named:
    b, (_, t, heads, _) = batch_size(inputs), inputs["q"].shape
    out = {"log_sum": jax.ShapeDtypeStruct((b, heads, t), jnp.float32)}
    for name, value in (("o", "v"), ("a", "e")):
        if value in inputs:
            shape = (b, t, heads, inputs[value].shape[-1])
            out[name] = jax.ShapeDtypeStruct(shape, call.types[value])
    return _launch(kernels.forward, call, call.tiles.forward, inputs, out, by_queries=True)


def _query_kernel(call: KernelCall, inputs: Named) -> Named:
    out = {"d_q": _gradient(call, inputs, "q", of="q")}
    tile = call.tiles.query_gradients
    return _launch(kernels.query_gradients, call, tile, inputs, out, by_queries=True)


def _key_kernel(call: KernelCall, inputs: Named) -> Named:
    names = "k" if call.tiles.value_gradients else "kve"
    out = {f"d_{name}": _gradient(call, inputs, name, of="k") for name in names if name in inputs}
    if "key_decay" in inputs:
        shape = (batch_size(inputs), inputs["q"].shape[2], inputs["k"].shape[1])
        out["d_key_decay"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    tile = call.tiles.key_gradients
    return _launch(kernels.key_gradients, call, tile, inputs, out, by_queries=False)


def _value_kernel(call: KernelCall, inputs: Named) -> Named:
    out = {f"d_{name}": _gradient(call, inputs, name, of="k") for name in "ve" if name in inputs}
    tile = call.tiles.value_gradients
    assert tile is not None
    inputs = {name: x for name, x in inputs.items() if name not in ("v", "e", "delta")}
    return _launch(kernels.value_gradients, call, tile, inputs, out, by_queries=False)


def _gradient(call: KernelCall, inputs: Named, name: str, *, of: str) -> jax.ShapeDtypeStruct:
    """Describes a gradient with all rows and heads of ``of``; float32 if some are summed later."""
    x = inputs[name]
    full = (batch_size(inputs), *inputs[of].shape[1:3], x.shape[-1])
    dtype = call.types.get(name, x.dtype) if x.shape == full else jnp.float32
    return jax.ShapeDtypeStruct(full, dtype)


def _launch(
    body: Callable[[Any], None],
    call: KernelCall,
    tile: Tile,
    inputs: Named,
    out: dict[str, jax.ShapeDtypeStruct],
    *,
    by_queries: bool,
) -> Named:
    inputs = {**inputs, "bounds": _bounds(call, tile, inputs, by_queries=by_queries)}
    return call.launch(body, call, tile, inputs, out, by_queries=by_queries)


def _bounds(call: KernelCall, tile: Tile, inputs: Named, *, by_queries: bool) -> Array:
    """Returns four marks of the blocks of the other side that each block meets.

    From the first on, blocks may have hidden pairs. From the second on, they have none; from the
    third on, they may again. The fourth is one past the last.

    Returns:
      ``[B|1, blocks, 4]``, int32.
    """
    sides = [("q", "query_ids", tile.queries), ("k", "key_ids", tile.keys)]
    (own, own_ids, size), (other, other_ids, other_size) = sides if by_queries else sides[::-1]
    length, other_length = inputs[own].shape[1], inputs[other].shape[1]
    count = pl.cdiv(other_length, other_size)
    # Distances from an index of this side to visible ones of the other, and indices of this side
    # as the other counts them.
    low, high, shift = call.lowest, call.highest, inputs["offset"][:, None]
    if not by_queries:
        low, high = (None if x is None else -x for x in (high, low))
        shift = -shift
    first = jnp.arange(0, length, size, dtype=jnp.int32)
    last = jnp.minimum(first + size, length) - 1
    at = (first + shift, last + shift, other_size)
    begin, end = visible_blocks((low, high), *at, count)
    full, masked = full_blocks(
        (low, high), *at, other_length // other_size if by_queries else count
    )
    if own_ids in inputs:
        meet = segments_meet((inputs[own_ids], inputs[other_ids]), size, other_size)
        met = jnp.any(meet, axis=-1)
        begin = jnp.maximum(begin, jnp.argmax(meet, axis=-1))
        end = jnp.where(met, jnp.minimum(end, count - jnp.argmax(meet[..., ::-1], axis=-1)), 0)
    full = jnp.minimum(jnp.maximum(full, begin), end)
    masked = jnp.minimum(jnp.maximum(masked, full), end)
    return jnp.stack(jnp.broadcast_arrays(begin, full, masked, end), axis=-1).astype(jnp.int32)
