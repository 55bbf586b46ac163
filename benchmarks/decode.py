"""Decoding with a cache: TAPE against RoPE, and both against decoding without one.

    python -m benchmarks.decode [--prompts 128 512] [--new 64] [--batch 4] [--encodings rope tape]

Each call continues a batch of random prompts greedily with :func:`tape_jax.generate`; encodings
take turns. Printed are tokens per second, their ratio to the first encoding, run by run, and the
size of the cache. Without a cache every new token runs the whole sequence through the model again.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

import tape_jax as tape
from tape_jax._src.timing import describe_device, take_turns


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512], metavar="P")
    parser.add_argument("--new", type=int, default=64, help="new tokens (64)")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--encodings", nargs="+", default=["rope", "tape"], metavar="NAME")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dtype", default="float32", help="compute type (float32)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cached-only", action="store_true", help="leave out decoding without")
    return parser.parse_args(argv)


def make_model(kind: str, args: argparse.Namespace) -> tuple[tape.Transformer, dict]:
    """A model with random parameters."""
    config = tape.ModelConfig(
        vocab_size=256,
        hidden_size=args.width,
        num_layers=args.layers,
        num_heads=args.heads,
        intermediate_size=4 * args.width,
        position=kind,
        dtype=args.dtype,
    )
    model = tape.Transformer(config)
    init = jax.jit(lambda key: model.init(key, jnp.zeros((1, 8), jnp.int32)))
    return model, init(jax.random.key(1))


@functools.partial(jax.jit, static_argnums=(0, 3))
def without_cache(model: tape.Transformer, variables: dict, tokens: jax.Array, new: int):
    """Greedy continuation [B, P + new] that runs the whole sequence for every new token."""
    length = tokens.shape[1]
    tokens = jnp.pad(tokens, ((0, 0), (0, new)))

    def step(i: jax.Array, tokens: jax.Array) -> jax.Array:
        logits = model.apply(variables, tokens)[:, length + i - 1]
        return tokens.at[:, length + i].set(jnp.argmax(logits, -1).astype(tokens.dtype))

    return jax.lax.fori_loop(0, new, step, tokens)


def cache_bytes(model: tape.Transformer, batch: int, capacity: int) -> int:
    """Bytes of keys, values and states."""
    cache = jax.eval_shape(lambda: tape.init_cache(model, batch, capacity))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    args = parse(argv)
    print(describe_device())
    print(
        f"width {args.width}, {args.layers} layers, {args.heads} heads, batch {args.batch}, "
        f"{args.new} new tokens, {args.dtype}; median of {args.repeats}"
    )
    models = {kind: make_model(kind, args) for kind in args.encodings}
    for length in args.prompts:
        prompts = jax.random.randint(jax.random.key(0), (args.batch, length), 0, 256, jnp.int32)
        calls = {}
        for kind, (model, variables) in models.items():
            calls[kind] = functools.partial(tape.generate, model, variables, prompts, args.new)
        first = args.encodings[0]
        calls[f"{first}, again"] = calls[first]
        if not args.cached_only:
            for kind, (model, variables) in models.items():
                calls[f"{kind}, no cache"] = functools.partial(
                    without_cache, model, variables, prompts, args.new
                )
        timings = take_turns(calls, repeats=args.repeats)
        print(f"\nprompts of {length} tokens")
        for name, timing in timings.items():
            speed = args.batch * args.new / timing.median
            line = f"  {name:16} {speed:10,.0f} tokens/s (+- {100 * timing.spread:.0f} %)"
            line += f"   {1 / timing.ratio(timings[first]):.3f} x {first}"
            if name in models:
                size = cache_bytes(models[name][0], args.batch, length + args.new)
                line += f", cache {size / 2**20:.1f} MiB"
            print(line, flush=True)


if __name__ == "__main__":
    main()
