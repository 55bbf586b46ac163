"""Measures TAPE's training step against RoPE's on a CPU, the same model otherwise.

    python -m benchmarks.step [--lengths 256 1024] [--tokens 2048] [--repeats 20] [--encodings ...]

The ``small`` model of :mod:`benchmarks.train_step`: a decoder of width 256 (intermediate 1024, 6
layers, 4 heads, 256 tokens in the vocabulary) on random tokens. Encodings take turns, and all use
the same attention implementation. It prints the median time, its spread and the ratio to the first
encoding, run by run; the same encoding a second time shows the noise. Temporary memory is what the
compiler reports. The tables of :mod:`benchmarks.attention` follow unless ``--step-only`` is given.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from benchmarks import attention
from benchmarks.train_step import PRESETS
from research.overhead import measure_steps
from tape_jax._src.core.timing import describe_device


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the measured steps and, unless ``--step-only`` is given, the tables of attention."""
    small = PRESETS["small"]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--lengths", type=int, nargs="+", default=small.lengths, metavar="T")
    parser.add_argument("--tokens", type=int, default=small.tokens, help="tokens per batch (2048)")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps of each (20)")
    parser.add_argument("--encodings", nargs="+", default=["rope", "tape"], metavar="NAME")
    parser.add_argument(
        "--implementation", default=None, help="of attention (the fastest that can)"
    )
    parser.add_argument("--dtype", default="float32", help="compute type (float32)")
    parser.add_argument("--width", type=int, default=small.model.hidden_size)
    parser.add_argument("--layers", type=int, default=small.model.num_layers)
    parser.add_argument("--heads", type=int, default=small.model.num_heads)
    parser.add_argument("--step-only", action="store_true", help="leave out attention by itself")
    args = parser.parse_args(argv)
    configs = {
        kind: dataclasses.replace(
            small.model,
            hidden_size=args.width,
            num_layers=args.layers,
            num_heads=args.heads,
            position=kind,
            attention_implementation=args.implementation,
            dtype=args.dtype,
        )
        for kind in args.encodings
    }
    print(describe_device())
    for length in args.lengths:
        batch = max(1, args.tokens // length)
        found, skipped = measure_steps(configs, batch, length, repeats=args.repeats)
        print(f"\nT = {length}, batch {batch}")
        for name, got in found.items():
            first = next(iter(found))
            line = f"  {name:14} {got.timing!s:22} "
            line += f"{got.timing.ratio(found[first].timing):.3f} x {first}"
            if got.memory is not None:
                line += f", {got.memory.temporary / 2**20:.0f} MiB temporary"
            print(line)
        for name, reason in skipped.items():
            print(f"  {name}: skipped, {reason}")
    if not args.step_only:
        print("\nattention by itself")
        attention.main(["--lengths", "256", "1024", "4096", "16384"])


if __name__ == "__main__":
    main()
