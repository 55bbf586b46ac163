"""Measures decoding with a cache: TAPE against RoPE, and a cache's size.

    python -m benchmarks.decode [--widths 256 512] [--batches 1 16] [--context 512] [--new 64]

For each width and batch, :func:`tape_jax.prefill` fills a cache with ``context`` random tokens and
:func:`tape_jax.decode` goes on from it greedily; each is timed separately, and encodings take
turns. It prints tokens per second and their ratio to the first encoding, the median of the ratios
run by run; then a cache's bytes for each token, from the shapes of a model's own cache.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import tape_jax as tape
from tape_jax._src.core.table import markdown
from tape_jax._src.core.timing import Timing, describe_device, take_turns


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the command-line options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512], metavar="W")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], metavar="B")
    parser.add_argument("--context", type=int, default=512, help="tokens in the cache (512)")
    parser.add_argument("--new", type=int, default=64, help="new tokens (64)")
    parser.add_argument("--encodings", nargs="+", default=["rope", "tape"], metavar="NAME")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32", help="compute type (float32)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--bytes-only", action="store_true", help="print what caches hold only")
    return parser.parse_args(argv)


def make_config(kind: str, width: int, args: argparse.Namespace, dtype: str) -> tape.ModelConfig:
    """Returns the config of a model of bytes."""
    return tape.ModelConfig(
        vocab_size=256,
        hidden_size=width,
        num_layers=args.layers,
        num_heads=width // args.head_dim,
        intermediate_size=4 * width,
        position=kind,
        dtype=dtype,
    )


def calls(
    kind: str, width: int, batch: int, args: argparse.Namespace
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Returns two functions: one fills a cache, the other decodes from a full one."""
    model = tape.Transformer(make_config(kind, width, args, args.dtype))
    init = jax.jit(lambda key: model.init(key, jnp.zeros((1, 8), jnp.int32)))
    variables = init(jax.random.key(1))
    prompts = jax.random.randint(jax.random.key(0), (batch, args.context), 0, 256, jnp.int32)
    capacity = args.context + args.new

    @jax.jit
    def fill(variables: Any, prompts: jax.Array) -> Any:
        return tape.prefill(model, variables, prompts, capacity=capacity)[1]

    @jax.jit
    def decode(variables: Any, cache: Any, token: jax.Array) -> jax.Array:
        return tape.decode(model, variables, cache, token, args.new)[0]

    return (
        functools.partial(fill, variables, prompts),
        functools.partial(decode, variables, fill(variables, prompts), prompts[:, -1]),
    )


def report(timings: dict[str, Timing], tokens: int) -> None:
    """Prints tokens per second, and ratios to the first."""
    first = next(iter(timings))
    for name, timing in timings.items():
        speed = f"{tokens / timing.median:10,.0f} tokens/s (+- {100 * timing.spread:.0f} %)"
        print(f"    {name:16} {speed}   {1 / timing.ratio(timings[first]):.3f} x {first}")


def measure(width: int, batch: int, args: argparse.Namespace) -> None:
    """Times one shape and prints it."""
    fills, decodes = {}, {}
    for kind in args.encodings:
        fills[kind], decodes[kind] = calls(kind, width, batch, args)
    first = args.encodings[0]
    decodes[f"{first}, again"] = decodes[first]
    print(f"\nwidth {width}, batch {batch}")
    print(f"  decoding {args.new} tokens behind {args.context}")
    report(take_turns(decodes, repeats=args.repeats), batch * args.new)
    print(f"  filling the cache with {args.context} tokens")
    report(take_turns(fills, repeats=args.repeats), batch * args.context)


def bytes_a_token(model: tape.Transformer, state_dtype: str | None) -> list[int]:
    """Returns a cache's bytes for each token: of keys, values, states, all else, and in total.

    "All else" are ids, positions, segments and what the encoding keeps beside its state.
    """
    make = functools.partial(tape.init_cache, model, 1, 1, state_dtype=state_dtype)
    cache = jax.eval_shape(make)

    def size(tree: Any) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    parts = [size([getattr(layer, name) for layer in cache.layers]) for name in ("k", "v", "e")]
    return [*parts, cache.nbytes - sum(parts), cache.nbytes]


def print_bytes(args: argparse.Namespace) -> None:
    """Prints what caches hold for each token."""
    rows = []
    for width in args.widths:
        for kind in args.encodings:
            for dtype, state_dtype in (
                ("float32",) * 2,
                ("float32", "bfloat16"),
                ("bfloat16",) * 2,
            ):
                model = tape.Transformer(make_config(kind, width, args, dtype))
                sizes = bytes_a_token(model, state_dtype)
                if sizes[2] or dtype == state_dtype:
                    named = state_dtype if sizes[2] else "-"
                    rows.append([kind, width, dtype, named, *(f"{n:,}" for n in sizes)])
    header = ["", "width", "keys, values", "states", *(f"B of {x}" for x in ("keys", "values"))]
    print(f"\na cache's bytes for each token, {args.layers} layers")
    print(markdown([*header, "B of states", "B of all else", "B"], rows))


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    args = parse(argv)
    print(describe_device())
    print(f"{args.layers} layers, heads of {args.head_dim}, {args.dtype}; median of {args.repeats}")
    if not args.bytes_only:
        for width in args.widths:
            for batch in args.batches:
                measure(width, batch, args)
    print_bytes(args)


if __name__ == "__main__":
    main()
