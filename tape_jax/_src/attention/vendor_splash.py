"""Attention by jax's splash kernels for TPUs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from tape_jax._src.attention.request import Request, from_rows, refuse, to_rows
from tape_jax._src.attention.vendor import Vendor, VendorCall, wide_types_enabled
from tape_jax._src.core.checks import check_fields, require
from tape_jax._src.core.padding import pad_to, round_up
from tape_jax._src.core.partition import Named

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Splash(Vendor):
    """jax's splash attention for TPUs.

    Attributes:
      block: queries and keys in a block, a multiple of 128; None chooses by length.

    Raises:
      ValueError: if ``block`` is not allowed.
    """

    block: int | None = None
    types = ("float32", "bfloat16")
    segments = True
    softcap = True
    hidden_rows = True

    LANES = 128
    # Not timed yet.
    LARGEST_BLOCK = 512

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.block is None or (self.block > 0 and self.block % self.LANES == 0),
            f"block must be a positive multiple of {self.LANES}; got {self.block}",
        )

    def check_device(self, interpret: bool) -> None:
        refuse(
            not interpret and jax.default_backend() != "tpu",
            f"needs a TPU, but jax runs on {jax.default_backend()!r}; interpret=True runs the "
            "kernel slowly anywhere",
        )

    def check_call(self, call: VendorCall, request: Request) -> None:
        refuse(
            wide_types_enabled() and not call.interpret,
            "the kernel does not compile with 64-bit types enabled",
        )

    def attend(self, request: Request, *, block: int | None = None) -> tuple[Array, Array | None]:
        """Computes attention with splash kernels.

        Args:
          request: the call.
          block: queries and keys in a block, a multiple of 128; None chooses by length.

        Returns:
          As :meth:`Vendor.attend`.

        Raises:
          ValueError: if ``block`` is not allowed.
          NotImplementedError: if the kernel does not support the call.
        """
        return Vendor.attend(dataclasses.replace(self, block=block), request)

    def fixed(self, call: VendorCall, groups: int) -> Named:
        (rows, block_q), (columns, block_k) = map(self._blocks, (call.queries, call.keys))
        masks = [_splash_mask(call, (rows, columns))] * groups
        kernel = splash_attention_kernel.make_splash_mqa(
            splash_attention_mask.MultiHeadMask(masks),
            block_sizes=splash_attention_kernel.BlockSizes(
                block_q=block_q,
                block_kv=block_k,
                block_q_dkv=block_q,
                block_kv_dkv=block_k,
                block_q_dq=block_q,
                block_kv_dq=block_k,
            ),
            attn_logits_soft_cap=call.softcap,
            head_shards=1,
            q_seq_shards=1,
            interpret=call.interpret,
        )
        return {"kernel": kernel}

    def kernel(self, call: VendorCall, args: Named) -> Array:
        kv_heads = args["k"].shape[2]
        q = to_rows(args["q"], kv_heads, call.queries)
        q = q.reshape(*q.shape[:2], -1, call.queries, q.shape[-1])
        given = {"q": q, **{name: args[name].swapaxes(1, 2) for name in ("k", "values")}}
        ids: Named = {name: args[name] for name in ("query_ids", "key_ids") if name in args}
        of_head = functools.partial(self._head, call, args["kernel"])
        of_row = jax.vmap(of_head, in_axes=(dict.fromkeys(given, 0), None))
        out = jax.vmap(of_row)(given, ids)
        out = out.reshape(*out.shape[:2], -1, out.shape[-1])
        return from_rows(out, args["q"].shape[2], call.queries)

    def _head(self, call: VendorCall, kernel: Callable, args: Named, ids: Named) -> Array:
        """Computes attention of one row and key/value head, ``[G, Tq, Dv + De]``.

        Args:
          call: the static part of the call.
          kernel: of jax.
          args: ``q [G, Tq, D]``, ``k [S, D]`` and ``values [S, Dv + De]``.
          ids: optionally ``query_ids [Tq]`` and ``key_ids [S]``.
        """
        (rows, _), (columns, _) = map(self._blocks, (call.queries, call.keys))
        # The kernel does not scale the logits.
        q = (args["q"].astype(jnp.float32) * call.scale).astype(args["q"].dtype)
        segments = None
        if ids:
            padded = (pad_to(ids["query_ids"], rows, 0), pad_to(ids["key_ids"], columns, 0))
            common = jnp.promote_types(jnp.result_type(*padded), jnp.int32)
            segments = splash_attention_kernel.SegmentIds(*(x.astype(common) for x in padded))
        k, values = (pad_to(args[name], columns, 0) for name in ("k", "values"))
        return kernel(pad_to(q, rows, 1), k, values, segments)[:, : call.queries]

    def _blocks(self, length: int) -> tuple[int, int]:
        """Returns the padded length and a block size that divides it."""
        block = self.block
        if block is None:
            count = -(-length // self.LARGEST_BLOCK)
            block = round_up(-(-length // count), self.LANES)
        return round_up(length, block), block


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


def _splash_mask(call: VendorCall, padded: tuple[int, int]) -> splash_attention_mask.Mask:
    """Return the mask by position, and of padding that a query could see."""
    masks, band = splash_attention_mask, call.band
    if not call.rows_that_see().any():
        # The kernel needs a pair that is visible. Results that no query sees become zeros.
        return masks.FullMask(padded)
    if band.window is not None:
        mask: Any = masks.LocalMask(padded, (band.window[0], band.highest), call.offset)
    elif band.is_causal:
        mask = masks.CausalMask(padded, call.offset)
    else:
        mask = masks.FullMask(padded)
    last = call.keys if band.highest is None else call.queries + call.offset + band.highest
    if padded[1] > call.keys and (band.highest is None or last > call.keys):
        mask = mask & _KeysBelow(padded, call.keys)
    return mask


splash = Splash()
