"""Which blocks of the fused kernels compile without spilling registers, and what they take.

    python -m benchmarks.tiles [--targets sm_80 sm_90a] [--dims 64 128] [--dtypes bfloat16 float32]

For every size of blocks and number of warps the three kernels are compiled as in
:mod:`benchmarks.aot`, which says what must be installed. Printed, for each kernel, are the sizes
that spill nothing and fit the shared memory, largest blocks first. How fast they are only a GPU can
tell.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import jax

from benchmarks.aot import CHOSEN, attention_program, compile_for
from benchmarks.table import markdown
from tape_jax._src.attention.pallas_blocks import Tile, Tiles
from train.analysis.ahead_of_time import Cuda

KERNELS = ("forward", "query_gradients", "key_gradients")


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
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    for target, dim, dtype in itertools.product(options.targets, options.dims, options.dtypes):
        device = CHOSEN[target].devices()[0]
        found: dict[str, list[tuple[Tile, list[object]]]] = {name: [] for name in KERNELS}
        for sizes in itertools.product(options.sizes, options.sizes, options.warps, options.stages):
            tile = Tile(*sizes)
            choice = {"tiles": Tiles(tile, tile, tile)}
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
