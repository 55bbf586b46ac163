"""Finds the blocks of the fused kernels that spill no registers, or times candidates.

    python -m benchmarks.tiles [--targets sm_80 sm_90a] [--dims 64 128] [--dtypes bfloat16 float32]
    python -m benchmarks.tiles --time [--dims 64 128] [--length 4096]

It compiles the three kernels for every block size and number of warps, as in :mod:`benchmarks.aot`,
which says what must be installed. For each kernel it prints the sizes that spill nothing and fit
the shared memory, largest blocks first. ``--time`` instead times the candidates of
:data:`CANDIDATES` on this machine's GPU, each kernel separately, in turns.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.aot import CHOSEN, attention_program, compile_for
from benchmarks.table import markdown
from tape_jax._src.attention import pallas_attention, pallas_triton
from tape_jax._src.attention.pallas_blocks import Tile, Tiles
from tape_jax._src.attention.pallas_kernels import KernelCall
from tape_jax._src.core.timing import take_turns
from train.analysis.ahead_of_time import Cuda

LAUNCHERS = {
    "forward": pallas_attention._forward_kernel,
    "query_gradients": pallas_attention._query_kernel,
    "key_gradients": pallas_attention._key_kernel,
    "value_gradients": pallas_attention._value_kernel,
}
KERNELS = tuple(LAUNCHERS)


# By head dimension and kernel: sizes for 16 bits that spill nothing on Hopper.
CANDIDATES = {
    (64, "forward"): "64/64/4/2 64/128/4/2 128/64/8/3 128/32/4/3",
    (64, "query_gradients"): "64/64/4/2 64/64/4/3 128/64/8/3",
    (64, "key_gradients"): "64/64/4/2 64/64/4/3 64/32/4/3 32/64/4/3",
    (64, "key_gradients alone"): "64/64/4/2 64/64/4/3 64/128/4/2",
    (64, "value_gradients"): "64/64/4/2 64/64/4/3 64/128/4/2",
    (128, "forward"): "64/64/4/2 64/32/4/3 64/32/4/4",
    (128, "query_gradients"): "64/64/4/3 64/32/4/3 64/64/4/2",
    (128, "key_gradients"): "64/64/8/3 64/32/4/3 64/32/4/2",
    (128, "key_gradients alone"): "64/64/4/2 64/64/4/3 32/64/4/3 64/32/4/3",
    (128, "value_gradients"): "64/64/4/2 64/64/4/3 32/64/4/3 64/32/4/3",
}


def time_candidates(dims: Sequence[int], length: int) -> None:
    """Prints a table for each kernel and head dimension: causal, 12 heads, 16,384 tokens."""
    rng, batch = np.random.default_rng(0), max(1, 16_384 // length)
    for dim in dims:
        shape = (batch, length, 12, dim)
        x = {n: jnp.asarray(rng.normal(size=shape), "bfloat16") for n in ("q", "k", "v", "e")}
        rows = {n: jnp.ones((batch, 12, length), jnp.float32) for n in ("log_sum", "delta")}
        x |= rows | {"offset": jnp.zeros((1,), jnp.int32), "d_o": x["v"], "d_a": x["e"]}
        for name in [name for width, name in CANDIDATES if width == dim]:
            programs, launch = {}, LAUNCHERS[name.removesuffix(" alone")]
            for sizes in CANDIDATES[dim, name].split():
                split = name.endswith((" alone", "value_gradients"))
                tiles = Tiles.of([[int(n) for n in sizes.split("/")]] * (4 if split else 3))
                call = KernelCall(
                    pallas_triton.launch, dim**-0.5, None, 0, jnp.dtype("bfloat16"),
                    lax.Precision.HIGHEST, tiles, False, True,
                    (jnp.dtype("bfloat16"), jnp.dtype("float32")),
                )  # fmt: skip
                try:
                    program = jax.jit(functools.partial(launch, call)).lower(x).compile()
                    jax.block_until_ready(program(x))
                except Exception as error:  # Whatever a compiler may raise.
                    print(f"D {dim}, {name}, {sizes}: {str(error).splitlines()[0]}", flush=True)
                    continue
                programs[sizes] = functools.partial(program, x)
            timings = take_turns(programs, repeats=7, warm_up=2, least=0.01)
            lines = [
                (sizes, f"{1e3 * got.median:.3f}", f"{100 * got.spread:.1f} %")
                for sizes, got in sorted(timings.items(), key=lambda item: item[1].median)
            ]
            header = ("queries/keys/warps/stages", "ms", "+-")
            print(f"\nD {dim}, T {length}: {name}\n\n{markdown(header, lines)}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles and prints."""
    gpus = [name for name, target in CHOSEN.items() if isinstance(target, Cuda)]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiles", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--targets", nargs="+", choices=gpus, default=gpus)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--warps", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--stages", type=int, nargs="+", default=[2])
    parser.add_argument("--split", action="store_true", help="dv and de by themselves")
    parser.add_argument("--time", action="store_true", help="time candidates on this GPU")
    parser.add_argument("--length", type=int, default=4096, help="for --time (4096)")
    options = parser.parse_args(argv)
    if options.time:
        time_candidates(options.dims, options.length)
        return
    jax.config.update("jax_platforms", "cpu")
    for target, dim, dtype in itertools.product(options.targets, options.dims, options.dtypes):
        device = CHOSEN[target].devices()[0]
        found: dict[str, list[tuple[Tile, list[object]]]] = {name: [] for name in KERNELS}
        for sizes in itertools.product(options.sizes, options.sizes, options.warps, options.stages):
            tile = Tile(*sizes)
            choice = {"tiles": Tiles(tile, tile, tile, tile if options.split else None)}
            got = compile_for(
                target, device, attention_program("pallas", dim, dtype, options=choice)
            )
            for kernel in got.kernels:
                name = kernel.name.removeprefix("tape_attention_")
                if name in found and not any(kernel.spills):
                    waits = "waits" if kernel.serialized else ""
                    numbers = [kernel.registers, f"{kernel.shared_memory / 1024:.1f}", waits]
                    found[name].append((tile, [*sizes, *numbers]))
        for name, rows in found.items():
            rows.sort(key=lambda row: -row[0].queries * row[0].keys)
            print(f"\n{target}, D {dim}, {dtype}: {name}\n")
            header = ("queries", "keys", "warps", "stages", "registers", "shared KiB", "products")
            print(markdown(header, [row for _, row in rows]), flush=True)


if __name__ == "__main__":
    main()
