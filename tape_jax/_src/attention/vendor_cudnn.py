"""Attention by cuDNN, through jax's public function."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from tape_jax._src.attention.request import Request, refuse
from tape_jax._src.attention.vendor import Vendor, VendorCall
from tape_jax._src.core import devices
from tape_jax._src.core.padding import pad_to, round_up
from tape_jax._src.core.partition import Named, first_derivative_only

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Cudnn(Vendor):
    """Calls cuDNN once for values and once for states, since values must be as wide as keys.

    jax's function passes on batching and sharding itself.

    Attributes:
      implementation: of ``jax.nn.dot_product_attention``.
    """

    implementation: Literal["cudnn", "xla"] = "cudnn"
    types = ("bfloat16", "float16")

    def check_device(self, interpret: bool) -> None:
        refuse(interpret, "the kernel has no interpreted mode")
        devices.check_ampere()
        x = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.bfloat16)
        try:
            jax.eval_shape(
                lambda x: jax.nn.dot_product_attention(x, x, x, implementation="cudnn"), x
            )
        except RuntimeError as error:  # jax finds no cuDNN.
            raise NotImplementedError(str(error)) from error

    def check_call(self, call: VendorCall, request: Request) -> None:
        refuse(
            call.offset != 0 and call.band.hides,
            "query_offset= is not in the kernel",
        )
        refuse(
            call.band.window is not None and not call.band.is_causal,
            "local_window_size= needs is_causal=True in the kernel",
        )
        capability = devices.compute_capability()
        widest = 256 if capability is not None and capability >= (9, 0) else 128
        width = self._width(request.rotated_width, call)
        refuse(width > widest, f"head dimensions are at most {widest} here; got {width}")

    def everywhere(self, call: VendorCall, args: Named) -> Array:
        return first_derivative_only(functools.partial(self._values_and_states, call), args)

    def _values_and_states(self, call: VendorCall, args: Named) -> Array:
        width = self._width(args["q"].shape[-1], call)
        q, k = (pad_to(args[name], width, -1) for name in "qk")
        attend = functools.partial(
            jax.nn.dot_product_attention,
            scale=call.scale,
            is_causal=call.band.is_causal,
            local_window_size=call.band.window,
            implementation=self.implementation,
        )
        parts = jnp.split(args["values"], call.widths[:1], axis=-1)
        outs = [attend(q, k, pad_to(x, width, -1))[..., : x.shape[-1]] for x in parts if x.size]
        return jnp.concatenate(outs, axis=-1)

    def _width(self, dim: int, call: VendorCall) -> int:
        """Returns the common width of queries, keys and values."""
        return round_up(max(dim, *call.widths), 8)


cudnn = Cudnn()
