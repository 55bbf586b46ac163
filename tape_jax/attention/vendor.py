"""Attention by kernels of other libraries, with the value ``[v | e]``.

Attention over values and over states shares its probabilities, so a kernel that takes values of
another width than its keys computes both at once, from queries and keys rotated before. What can be
had around a kernel (rotation, padding, rows that see no key, batching, sharding) is done here; what
the kernel has not is refused, with the reason.

Each backend is an instance of :class:`Vendor`, at the end of the file.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import sys
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn_calls
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from tape_jax.attention.pallas_blocks import compute_capability
from tape_jax.attention.partition import Arrays, differentiable_over_batch_and_heads
from tape_jax.attention.request import Request, same_segment, visible_positions
from tape_jax.config import require

Array = jax.Array

# Indices, and sums of a few of them, are 32-bit integers.
MAX_INDEX = 2**29
# b batch, t queries, s keys, h query heads, k key/value heads, d numbers.
AXES = {
    **dict.fromkeys(("q", "out"), "bthd"),
    **dict.fromkeys(("k", "values"), "bskd"),
    "query_ids": "bt",
    "key_ids": "bs",
}


@dataclasses.dataclass(frozen=True)
class Call:
    """What a kernel knows of a call beside its arrays.

    Attributes:
      scale: factor on the logits.
      causal, window: as in :func:`tape_jax.attention`.
      offset: index of the first query among the keys.
      queries, keys: how many there are.
      widths: of the values, and of the state as a value (0: not attended).
      same_ids: whether segment ids, if there are any, are those of queries and keys alike.
      interpret: run by XLA operations, on any device.
    """

    scale: float
    causal: bool
    window: int | None
    offset: int
    queries: int
    keys: int
    widths: tuple[int, int]
    same_ids: bool
    interpret: bool

    @classmethod
    def of(cls, request: Request) -> Call:
        """Raises NotImplementedError for what no kernel here takes."""
        offset = request.query_offset
        if not isinstance(offset, int):
            raise NotImplementedError("query_offset= must be known when the call is compiled")
        sizes = (request.query_length, request.key_length, abs(offset), request.window or 0)
        _refuse(
            max(sizes) > MAX_INDEX,
            f"lengths, query_offset and window are at most {MAX_INDEX}; got {sizes[:2]}, "
            f"{sizes[2]}, {sizes[3]}",
        )
        state = request.e if request.attend_state else None
        return cls(
            scale=request.scale,
            causal=request.causal,
            window=request.window,
            offset=offset,
            queries=request.query_length,
            keys=request.key_length,
            widths=(request.v.shape[-1], 0 if state is None else math.prod(state.shape[3:])),
            same_ids=request.segments is not None and request.segments[0] is request.segments[1],
            interpret=request.interpret,
        )

    def key_ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """For each query the first key that position lets it see, and one past the last.

        Both may lie outside the keys that there are. Integers ``[Tq]``, int32.
        """
        at = np.arange(self.queries, dtype=np.int32) + np.int32(self.offset)
        first = np.full_like(at, 0) if self.window is None else at - np.int32(self.window - 1)
        if self.causal:
            return first, at + 1
        return first, np.full_like(at, self.keys) if self.window is None else at + self.window

    def rows_that_see(self) -> np.ndarray:
        """Booleans ``[Tq]``: whether position lets a query see any key."""
        first, last = self.key_ranges()
        return np.maximum(first, 0) < np.minimum(last, self.keys)


class Vendor:
    """A backend: what a library's kernel is and what it takes.

    Attributes:
      types: of the operands of the kernel.
      segments: whether it takes segment ids.
      hidden_rows: whether it stays finite, forward and backward, for queries that see no key.
    """

    types: tuple[str, ...]
    segments = False
    hidden_rows = False

    def check_device(self, interpret: bool) -> None:
        """Raises NotImplementedError unless the kernel runs on this machine."""
        raise NotImplementedError

    def check_call(self, call: Call, request: Request) -> None:
        """Raises NotImplementedError for calls that this kernel cannot do, beside the common."""

    def kernel(self, call: Call, args: Arrays) -> Array:
        """``out [B, Tq, Hq, Dv + De]``, differentiable.

        Args:
          call: what is known beside the arrays.
          args: ``q [B, Tq, Hq, D]``, ``k [B, S, Hk, D]``, ``values [B, S, Hk, Dv + De]`` and maybe
            ``query_ids [B, Tq]`` and ``key_ids [B, S]``.
        """
        raise NotImplementedError

    def check(self, request: Request) -> None:
        """Raises NotImplementedError unless the kernel can do this call on this machine."""
        self.check_device(request.interpret)
        self._checked(request)

    def _checked(self, request: Request) -> Call:
        _refuse(request.bias is not None, "bias= is not in the kernel")
        _refuse(
            request.mask is not None, "mask= is as large as the logits; only 'reference' takes it"
        )
        _refuse(
            request.segments is not None and not self.segments,
            "segment_ids= would need a mask as large as the logits",
        )
        name = request.compute_dtype.name
        _refuse(name not in self.types, f"types of q are {', '.join(self.types)}; got {name}")
        call = Call.of(request)
        _refuse(
            not self.hidden_rows and not call.rows_that_see().all(),
            "the kernel does not define what a query gives that sees no key",
        )
        self.check_call(call, request)
        return call

    def attend(self, request: Request) -> tuple[Array, Array | None]:
        """Computes attention by the library's kernel.

        Returns:
          ``o [B, Tq, Hq, Dv]`` and ``a [B, Tq, Hq, De]`` (None if no state is attended), in the
          type of the queries.

        Raises:
          NotImplementedError: if the call has what the kernel has not.
        """
        call = self._checked(request)
        q, k = request.rotated()
        values, state = request.v.astype(request.compute_dtype), request.attended_state()
        if state is not None:
            state = jnp.broadcast_to(state, (*values.shape[:-1], state.shape[-1]))
            values = jnp.concatenate([values, state], axis=-1)
        args = {"q": q, "k": k, "values": values}
        if request.segments is not None:
            args["query_ids"], args["key_ids"] = request.segments
        out = _attend_compiled(self, call, args)
        width = call.widths[0]
        return out[..., :width], None if state is None else out[..., width:]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend_compiled(vendor: Vendor, call: Call, args: Arrays) -> Array:
    kernel = functools.partial(vendor.kernel, call)
    out = differentiable_over_batch_and_heads(kernel, args, AXES)
    seen = _rows_that_see(call, args)
    return out if seen is None else jnp.where(seen[..., None, None], out, 0)


def _rows_that_see(call: Call, args: Arrays) -> Array | None:
    """Booleans ``[B|1, Tq]``: whether a query sees any key; None if all do."""
    if "query_ids" not in args:
        seen = call.rows_that_see()
        return None if seen.all() else jnp.asarray(seen)[None]
    if call.same_ids and call.offset == 0:
        return None  # Every query sees its own key.
    i = jnp.arange(call.queries, dtype=jnp.int32) + call.offset
    j = jnp.arange(call.keys, dtype=jnp.int32)
    near = visible_positions(i, j, causal=call.causal, window=call.window)
    same = same_segment(args["query_ids"], args["key_ids"])[:, 0]
    return jnp.any(same if near is None else same & near, axis=-1)


def _refuse(when: bool, reason: str) -> None:
    if when:
        raise NotImplementedError(reason)


def _check_gpu(interpret: bool, oldest: tuple[int, int], architecture: str) -> None:
    _refuse(interpret, "the kernel has no interpreted mode")
    capability = compute_capability()
    if capability is None:
        raise NotImplementedError(f"needs a CUDA GPU, but jax runs on {jax.default_backend()!r}")
    _refuse(
        capability < oldest,
        f"needs a GPU of compute capability {oldest[0]}.{oldest[1]} ({architecture}) or later; "
        f"this one has {capability[0]}.{capability[1]}",
    )


def _64_bit_types_enabled() -> bool:
    return jax.dtypes.canonicalize_dtype(np.int64) == np.int64


def _pad(x: Array, size: int, axis: int) -> Array:
    """Pads ``axis`` to ``size`` with zeros."""
    missing = size - x.shape[axis]
    pads = [(0, missing if n == axis % x.ndim else 0) for n in range(x.ndim)]
    return jnp.pad(x, pads) if missing else x


def _round_up(n: int, size: int) -> int:
    return -(-n // size) * size


@dataclasses.dataclass(frozen=True)
class Splash(Vendor):
    """TPU splash attention, of jax.

    Attributes:
      block: queries and keys in a block, a multiple of 128; None: chosen by length.
    """

    block: int | None = None
    types = ("float32", "bfloat16")
    segments = True
    hidden_rows = True

    LANES = 128
    # Not timed yet.
    LARGEST_BLOCK = 512

    def check_device(self, interpret: bool) -> None:
        _refuse(
            not interpret and jax.default_backend() != "tpu",
            f"needs a TPU, but jax runs on {jax.default_backend()!r}; interpret=True runs the "
            "kernel slowly anywhere",
        )

    def check_call(self, call: Call, request: Request) -> None:
        _refuse(
            _64_bit_types_enabled() and not call.interpret,
            "the kernel does not compile with 64-bit types enabled",
        )

    def attend(self, request: Request, *, block: int | None = None) -> tuple[Array, Array | None]:
        """Computes attention by splash kernels.

        Args:
          request: the call.
          block: queries and keys in a block, a multiple of 128; None: chosen by length.

        Returns:
          As :meth:`Vendor.attend`.

        Raises:
          ValueError: if ``block`` is not allowed.
          NotImplementedError: if the call has what the kernel has not.
        """
        require(
            block is None or (block > 0 and block % self.LANES == 0),
            f"block must be a positive multiple of {self.LANES}; got {block}",
        )
        return Vendor.attend(dataclasses.replace(self, block=block), request)

    def kernel(self, call: Call, args: Arrays) -> Array:
        b, _, query_heads, _ = args["q"].shape
        heads = args["k"].shape[2]
        (rows, block_q), (columns, block_k) = map(self._blocks, (call.queries, call.keys))
        kernel = splash_attention_kernel.make_splash_mqa(
            splash_attention_mask.MultiHeadMask(
                [_splash_mask(call, (rows, columns))] * (query_heads // heads)
            ),
            block_sizes=splash_attention_kernel.BlockSizes(
                block_q=block_q,
                block_kv=block_k,
                block_q_dkv=block_q,
                block_kv_dkv=block_k,
                block_q_dq=block_q,
                block_kv_dq=block_k,
            ),
            head_shards=1,
            q_seq_shards=1,
            interpret=call.interpret,
        )

        def by_kv_head(x: Array, length: int) -> Array:
            x = _pad(x, length, 1).reshape(b, length, heads, -1, x.shape[-1])
            return x.transpose(0, 2, 3, 1, 4)

        # The kernel has no factor on the logits.
        q = (args["q"].astype(jnp.float32) * call.scale).astype(args["q"].dtype)
        k, values = (by_kv_head(args[name], columns)[:, :, 0] for name in ("k", "values"))
        ids = None
        if "query_ids" in args:
            padded = (_pad(args["query_ids"], rows, 1), _pad(args["key_ids"], columns, 1))
            common = jnp.promote_types(jnp.result_type(*padded), jnp.int32)
            ids = splash_attention_kernel.SegmentIds(*(x.astype(common) for x in padded))
        over_heads = jax.vmap(kernel, in_axes=(0, 0, 0, None))
        out = jax.vmap(over_heads)(by_kv_head(q, rows), k, values, ids)
        out = out.transpose(0, 3, 1, 2, 4).reshape(b, rows, query_heads, -1)
        return out[:, : call.queries]

    def _blocks(self, length: int) -> tuple[int, int]:
        """Length to pad to, and a size of blocks that divides it."""
        block = self.block
        if block is None:
            count = -(-length // self.LARGEST_BLOCK)
            block = _round_up(-(-length // count), self.LANES)
        return _round_up(length, block), block


@dataclasses.dataclass(frozen=True)
class _KeysBelow(splash_attention_mask.Mask):
    """Hides keys from ``limit`` on."""

    lengths: tuple[int, int]
    limit: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.lengths

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, columns = (np.arange(n)[x] for n, x in zip(self.lengths, index, strict=True))
        return np.broadcast_to(columns < self.limit, (rows.size, columns.size))


def _splash_mask(call: Call, padded: tuple[int, int]) -> splash_attention_mask.Mask:
    """What position hides, and the keys that are padding if a query could see them."""
    masks = splash_attention_mask
    if call.window is not None:
        reach = (call.window - 1, 0 if call.causal else call.window - 1)
        mask: Any = masks.LocalMask(padded, reach, call.offset)
    elif call.causal:
        mask = masks.CausalMask(padded, call.offset)
    else:
        mask = masks.FullMask(padded)
    unbounded = not call.causal and call.window is None
    if padded[1] > call.keys and (unbounded or call.key_ranges()[1].max() > call.keys):
        mask = mask & _KeysBelow(padded, call.keys)
    return mask


@dataclasses.dataclass(frozen=True)
class Cudnn(Vendor):
    """cuDNN's fused attention by way of jax: one call for values and one for states.

    Attributes:
      implementation: of ``jax.nn.dot_product_attention``.
    """

    implementation: Literal["cudnn", "xla"] = "cudnn"
    types = ("bfloat16", "float16")

    def check_device(self, interpret: bool) -> None:
        _check_gpu(interpret, (8, 0), "Ampere")
        self.version()

    def version(self) -> int:
        """Version of cuDNN, such as 91000 for 9.10."""
        try:
            return cudnn_calls.check_cudnn_version()
        except RuntimeError as error:
            raise NotImplementedError(str(error)) from error

    def check_call(self, call: Call, request: Request) -> None:
        _refuse(
            call.offset != 0 and (call.causal or call.window is not None),
            "query_offset= is not in the kernel",
        )
        _refuse(
            call.window is not None and not call.causal, "window= needs causal=True in the kernel"
        )
        capability = compute_capability()
        widest = 256 if capability is not None and capability >= (9, 0) else 128
        width = self._width(request.k.shape[-1], call)
        _refuse(width > widest, f"head dimensions are at most {widest} here; got {width}")

    def kernel(self, call: Call, args: Arrays) -> Array:
        width = self._width(args["q"].shape[-1], call)
        q, k = (_pad(args[name], width, -1) for name in "qk")
        outs = []
        for part in jnp.split(args["values"], call.widths[:1], axis=-1):
            if part.shape[-1]:
                out = self._one(call, q, k, _pad(part, width, -1))
                outs.append(out[..., : part.shape[-1]])
        return jnp.concatenate(outs, axis=-1)

    def _one(self, call: Call, q: Array, k: Array, v: Array) -> Array:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=call.scale,
            is_causal=call.causal,
            local_window_size=None if call.window is None else (call.window - 1, 0),
            implementation=self.implementation,
        )

    def _width(self, dim: int, call: Call) -> int:
        """The one width of queries, keys and values."""
        return _round_up(max(dim, *call.widths), 8)


@dataclasses.dataclass(frozen=True)
class CudnnDirect(Cudnn):
    """One call of cuDNN with values wider than keys, which jax's public function refuses."""

    def check_device(self, interpret: bool) -> None:
        _check_gpu(interpret, (9, 0), "Hopper")
        version = self.version()
        _refuse(version < 91000, f"needs cuDNN 9.10 or later; got version {version}")

    def kernel(self, call: Call, args: Arrays) -> Array:
        dim, width = args["q"].shape[-1], args["values"].shape[-1]
        q, k = (_pad(args[name], _round_up(dim, 8), -1) for name in "qk")
        mask = cudnn_calls.MaskType.CAUSAL if call.causal else cudnn_calls.MaskType.NO_MASK
        out = cudnn_calls.dot_product_attention(
            q,
            k,
            _pad(args["values"], _round_up(width, 8), -1),
            scale=call.scale,
            mask_type=mask,
            sliding_window_length=call.window,
        )
        return out[..., :width]

    def _width(self, dim: int, call: Call) -> int:
        return _round_up(max(dim, sum(call.widths)), 8)


@dataclasses.dataclass(frozen=True)
class Tokamax(Vendor):
    """Kernels of tokamax.

    Attributes:
      kernels: their names there; the first that runs on this machine is taken.
    """

    kernels: tuple[str, ...]
    types = ("bfloat16", "float16")

    # Compute capabilities from the first on, before the second.
    CAPABILITIES = {
        "mosaic_gpu": ((9, 0), (11, 0), "Hopper or Blackwell"),
        "triton": ((8, 0), (99, 0), "Ampere or later"),
    }
    # Lengths are padded to a multiple: Mosaic's tiles are whole multiples of 64.
    MULTIPLE = 64

    def check_device(self, interpret: bool) -> None:
        _refuse(interpret, "the kernel has no interpreted mode")
        if importlib.util.find_spec("tokamax") is None:
            raise NotImplementedError("needs tokamax: pip install tape-jax[tokamax]")
        self.here()

    def here(self) -> str:
        """The first kernel that runs on this machine."""
        capability = compute_capability()
        if capability is None:
            raise NotImplementedError(
                f"needs a CUDA GPU, but jax runs on {jax.default_backend()!r}"
            )
        for name in self.kernels:
            first, last, _ = self.CAPABILITIES[name]
            if first <= capability < last:
                return name
        kinds = " or of ".join(self.CAPABILITIES[name][2] for name in self.kernels)
        major, minor = capability
        raise NotImplementedError(f"needs a GPU of {kinds}; this one has {major}.{minor}")

    def check_call(self, call: Call, request: Request) -> None:
        _refuse(_64_bit_types_enabled(), "the kernel does not compile with 64-bit types enabled")

    def kernel(self, call: Call, args: Arrays) -> Array:
        from absl import flags
        from tokamax._src.ops.attention import api, base

        if not flags.FLAGS.is_parsed():
            # tokamax 0.0.12 would parse the arguments of the program that it runs in.
            flags.FLAGS(sys.argv[:1])
        rows, columns = (_round_up(n, self.MULTIPLE) for n in (call.queries, call.keys))
        first, last = call.key_ranges()
        # The padding is visible unless the causal rule hides it anyway.
        plain = call.causal and call.offset == 0
        limited = not plain or (columns > call.keys and last.max() > call.keys)

        def by_row(x: np.ndarray) -> Array:
            x = np.clip(x, 0, call.keys)
            return jnp.asarray(np.pad(x, (0, rows - call.queries), mode="edge"))[None, None]

        mask = base.Mask(
            is_causal=plain,
            k_start=None if call.window is None else by_row(first),
            k_end=by_row(last) if limited else None,
        )
        out = api.IMPLEMENTATIONS[self.here()](
            _pad(args["q"], rows, 1),
            _pad(args["k"], columns, 1),
            _pad(args["values"], columns, 1),
            logits_scale=call.scale,
            mask=mask,
        )
        return out[:, : call.queries]


splash = Splash()
cudnn = Cudnn()
cudnn_direct = CudnnDirect()
tokamax_mosaic = Tokamax(("mosaic_gpu",))
tokamax_triton = Tokamax(("triton",))
tokamax = Tokamax(("mosaic_gpu", "triton"))
