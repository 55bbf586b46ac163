"""Attention by kernels of other libraries, with the value ``[v | e]``: the part they share.

Attention over values and over states shares its probabilities. A kernel whose values may differ in
width from its keys therefore computes both at once, from rotated queries and keys. This module
does what can be done around a kernel: rotation, padding, rows that see no key, batching, sharding.
It refuses what the kernel lacks, with the reason.

Each backend is an instance of a :class:`Vendor` in a module ``vendor_<library>``.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.attention.request import Request, refuse, refuse_rows
from tape_jax._src.attention.visibility import Band, Visibility
from tape_jax._src.core.partition import Named, differentiable_over_batch_and_heads

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class VendorCall:
    """The static part of a call of a kernel.

    Attributes:
      scale: factor on the logits.
      softcap: bound of the scaled logits, or None.
      band: the causal rule and the window.
      offset: index of the first query among the keys.
      queries, keys: number of each.
      widths: of the values, and of the state as a value (0: not attended).
      same_ids: whether queries and keys share segment ids, if there are any.
      interpret: run by XLA operations, on any device.
    """

    scale: float
    band: Band
    offset: int
    queries: int
    keys: int
    widths: tuple[int, int]
    same_ids: bool
    interpret: bool
    softcap: float | None = None

    @classmethod
    def of(cls, request: Request) -> VendorCall:
        """Describes a call; raises NotImplementedError for calls that no kernel here takes."""
        visibility = request.visibility
        offset, segments = visibility.query_offset, visibility.segments
        if not isinstance(offset, int):
            raise NotImplementedError(
                "query_offset= must be known when the call is compiled, and one for all rows"
            )
        visibility.refuse_for_kernels(request.query_length, request.key_length)
        state = request.state if request.attend_state else None
        return cls(
            scale=request.scale,
            band=visibility.band,
            offset=offset,
            queries=request.query_length,
            keys=request.key_length,
            widths=(request.v.shape[-1], 0 if state is None else math.prod(state.shape[3:])),
            same_ids=segments is not None and segments[0] is segments[1],
            interpret=request.interpret,
            softcap=request.softcap,
        )

    def rows_that_see(self) -> np.ndarray:
        """Returns booleans ``[Tq]``: whether a query sees any key by position."""
        at, last = np.arange(self.queries, dtype=np.int32) + np.int32(self.offset), self.keys - 1
        lowest, highest = self.band.lowest, self.band.highest
        first = np.zeros_like(at) if lowest is None else np.maximum(at + np.int32(lowest), 0)
        end = np.full_like(at, last) if highest is None else at + np.int32(highest)
        return first <= np.minimum(end, last)


class Vendor:
    """A backend: a library's kernel and what it takes.

    Attributes:
      types: dtypes of the kernel's operands.
      segments: whether it takes segment ids.
      softcap: whether it bounds logits.
      hidden_rows: whether it stays finite, forward and backward, for queries that see no key.
    """

    types: tuple[str, ...]
    segments = False
    softcap = False
    hidden_rows = False

    def check_device(self, interpret: bool) -> None:
        """Raises NotImplementedError unless the kernel runs on this machine."""
        raise NotImplementedError

    def check_call(self, call: VendorCall, request: Request) -> None:
        """Raises NotImplementedError for calls that this kernel cannot do, beyond common ones."""

    def kernel(self, call: VendorCall, args: Named) -> Array:
        """Attends for any number of rows and heads, ``[B, Tq, Hq, Dv + De]``; differentiable.

        Args:
          call: the static part of the call.
          args: as in :meth:`everywhere`, but ids ``[B, T]``, and the arrays of :meth:`fixed`.
        """
        raise NotImplementedError

    def fixed(self, call: VendorCall, groups: int) -> Named:
        """Returns further arrays for the kernel, the same for all rows and heads."""
        return {}

    def everywhere(self, call: VendorCall, args: Named) -> Array:
        """Runs the kernel, with its derivative, under ``vmap`` and in sharded programs.

        Args:
          call: the static part of the call.
          args: ``q [B, Tq, Hq, D]``, ``k [B, S, Hk, D]``, ``values [B, S, Hk, Dv + De]``, and
            optionally ``query_ids [B|1, Tq]`` and ``key_ids [B|1, S]``.
        """
        rows, _, heads, _ = args["q"].shape
        ids: Named = {name: args[name] for name in ("query_ids", "key_ids") if name in args}
        ids = {name: jnp.broadcast_to(x, (rows, x.shape[1])) for name, x in ids.items()}
        fixed = self.fixed(call, heads // args["k"].shape[2])
        axes = {"q": "b.h.", "k": "b.k.", "values": "b.k."}
        axes |= dict.fromkeys(ids, "b.") | dict.fromkeys(fixed, "")
        kernel = functools.partial(self.kernel, call)
        return differentiable_over_batch_and_heads(kernel, {**args, **ids, **fixed}, axes, "b.h.")

    def check(self, request: Request) -> None:
        """Raises NotImplementedError unless the kernel can do this call on this machine."""
        self.check_device(request.interpret)
        self._checked(request)

    def _checked(self, request: Request) -> VendorCall:
        refuse_rows(request)
        refuse(request.bias is not None, "bias= is not in the kernel")
        refuse(
            request.softcap is not None and not self.softcap, "logit_softcap= is not in the kernel"
        )
        refuse(
            request.visibility.mask is not None,
            "mask= is not in the kernel; segment_ids= hides padding too",
        )
        refuse(
            request.log_decay is not None,
            "log_decay= is not in the kernel, and as a bias would be as large as the logits",
        )
        refuse(
            request.visibility.segments is not None and not self.segments,
            "segment_ids= would need a mask as large as the logits",
        )
        name = request.compute_dtype.name
        refuse(name not in self.types, f"types of q are {', '.join(self.types)}; got {name}")
        call = VendorCall.of(request)
        refuse(
            not self.hidden_rows and not call.rows_that_see().all(),
            "the kernel does not define what a query gives that sees no key",
        )
        self.check_call(call, request)
        return call

    def attend(self, request: Request) -> tuple[Array, Array | None]:
        """Computes attention with the library's kernel.

        Returns:
          ``o [B, Tq, Hq, Dv]`` and ``a [B, Tq, Hq, De]`` (None if no state is attended), in the
          type of the queries.

        Raises:
          NotImplementedError: if the kernel does not support the call.
        """
        call = self._checked(request)
        q, k = request.rotated()
        args = {"q": q, "k": k, "values": request.values()}
        if request.visibility.segments is not None:
            args["query_ids"], args["key_ids"] = request.visibility.segments
        out = _attend_compiled(self, call, args)
        width = call.widths[0]
        return out[..., :width], None if out.shape[-1] == width else out[..., width:]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend_compiled(vendor: Vendor, call: VendorCall, args: Named) -> Array:
    out = vendor.everywhere(call, args)
    seen = _rows_that_see(call, args)
    return out if seen is None else jnp.where(seen[..., None, None], out, 0)


def _rows_that_see(call: VendorCall, args: Named) -> Array | None:
    """Returns booleans ``[B|1, Tq]``: whether a query sees any key; None if all do."""
    if "query_ids" not in args:
        seen = call.rows_that_see()
        return None if seen.all() else jnp.asarray(seen)[None]
    if call.same_ids and call.offset == 0:
        return None  # Every query sees its own key.
    ids = (args["query_ids"], args["key_ids"])
    pairs = Visibility(call.band, call.offset, ids).pairs(call.queries, call.keys)
    return None if pairs is None else jnp.any(pairs, axis=(1, -1))


def wide_types_enabled() -> bool:
    """Returns whether 64-bit types are enabled in jax."""
    return jax.dtypes.canonicalize_dtype(np.int64) == np.int64
