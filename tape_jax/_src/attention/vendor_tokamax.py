"""Attention by tokamax's kernels for GPUs, through its public function."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys

import jax
import jax.numpy as jnp
from jax._src.lib import cuda_versions

from tape_jax._src.attention.request import Request, refuse
from tape_jax._src.attention.vendor import Vendor, VendorCall, wide_types_enabled
from tape_jax._src.core import devices
from tape_jax._src.core.padding import pad_to, round_up
from tape_jax._src.core.partition import Named

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Tokamax(Vendor):
    """Kernels of tokamax.

    Attributes:
      kernels: their names in tokamax; the first that runs on this machine is used.
    """

    kernels: tuple[str, ...]
    types = ("bfloat16", "float16")

    # Compute capabilities from the first on, before the second.
    CAPABILITIES = {
        "mosaic_gpu": ((9, 0), (11, 0), "Hopper or Blackwell"),
        "triton": ((8, 0), (99, 0), "Ampere or later"),
    }
    # Lengths are padded to a multiple: of 64 for Mosaic's tiles, of 128 if there is a window.
    MULTIPLE = 128

    def check_device(self, interpret: bool) -> None:
        refuse(interpret, "the kernel has no interpreted mode")
        if importlib.util.find_spec("tokamax") is None:
            raise NotImplementedError("needs tokamax: pip install tape-jax[tokamax]")
        self.here()

    def here(self) -> str:
        """Returns the first kernel that runs on this machine."""
        capability = devices.gpu_capability()
        for name in self.kernels:
            first, last, _ = self.CAPABILITIES[name]
            if first <= capability < last:
                return name
        kinds = " or of ".join(self.CAPABILITIES[name][2] for name in self.kernels)
        major, minor = capability
        raise NotImplementedError(f"needs a GPU of {kinds}; this one has {major}.{minor}")

    def check_call(self, call: VendorCall, request: Request) -> None:
        refuse(wide_types_enabled(), "the kernel does not compile with 64-bit types enabled")
        window = call.band.window is not None
        refuse(
            self.here() == "mosaic_gpu" and call.band.is_causal and miscompiles_causal(),
            "CUDA 12.8.0 to 12.9.0 miscompiles causal Mosaic kernels",
        )
        refuse(
            call.offset != 0 and call.band.hides,
            "tokamax's function takes no query_offset=",
        )
        refuse(
            window and call.queries != call.keys,
            "tokamax's local_window_size= needs as many queries as keys",
        )
        widths = (request.rotated_width, sum(call.widths))
        refuse(
            self.here() == "mosaic_gpu" and (widths[0] > 128 or widths[1] > 256),
            "the blocks of tokamax's Mosaic kernel hold keys of at most 128 and values and states "
            f"of at most 256 together; got {widths[0]} and {widths[1]}",
        )
        refuse(
            self.here() == "triton" and any(n < 16 or n.bit_count() > 1 for n in widths),
            "tokamax's Triton kernel takes widths that are powers of two, at least 16; got "
            f"{widths[0]} of keys and {widths[1]} of values",
        )
        # Release 0.0.17; before, it had no such mask.
        refuse(
            window and self.here() == "triton",
            "tokamax's Triton kernel takes a window as a mask as large as the logits",
        )

    def kernel(self, call: VendorCall, args: Named) -> Array:
        import tokamax
        from absl import flags

        if not flags.FLAGS.is_parsed():
            # tokamax 0.0.12 would parse the arguments of the program that it runs in.
            flags.FLAGS(sys.argv[:1])
        rows, columns = (round_up(n, self.MULTIPLE) for n in (call.queries, call.keys))
        # The padding is visible unless the causal rule hides it anyway.
        is_causal, window = call.band.is_causal, call.band.window
        hide = columns > call.keys and not (is_causal and call.queries <= call.keys)
        out = tokamax.dot_product_attention(
            pad_to(args["q"], rows, 1),
            pad_to(args["k"], columns, 1),
            pad_to(args["values"], columns, 1),
            scale=call.scale,
            is_causal=is_causal,
            local_window_size=(window[0], 0) if window and is_causal else window,
            key_value_seq_lengths=jnp.full((1,), call.keys, jnp.int32) if hide else None,
            implementation=self.here(),
        )
        return out[:, : call.queries]


def miscompiles_causal() -> bool:
    """Returns whether jax's own kernels refuse a causal mask because of this CUDA's ``ptxas``."""
    if cuda_versions is None:
        return False
    return 12_080 <= cuda_versions.cuda_runtime_get_version() < 12_091


tokamax_mosaic = Tokamax(("mosaic_gpu",))
tokamax_triton = Tokamax(("triton",))
tokamax = Tokamax(("mosaic_gpu", "triton"))
