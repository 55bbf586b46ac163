"""What TAPE costs: its training step against RoPE's, the same model otherwise.

    python -m benchmarks.step [--lengths 256 1024] [--tokens 2048] [--repeats 20] [--encodings ...]

The step is loss, gradients and an AdamW update of a decoder of width 256 (intermediate 1024, 6
layers, 4 heads, 256 tokens in the vocabulary) on random tokens. Encodings take turns, and both use
the same attention implementation. Printed are the median time, its spread and the ratio to the
first encoding, run by run; the same encoding a second time shows what the noise is. Temporary
memory is what the compiler reports. The table of :mod:`benchmarks.attention`, ``chunked`` against
``reference``, follows unless ``--step-only`` is given.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import optax

import tape_jax as tape
from benchmarks import attention
from benchmarks.timing import describe_device, take_turns


def make_step(kind: str, tokens: jax.Array, args: argparse.Namespace):
    """A compiled training step without arguments, and its temporary memory in bytes."""
    config = tape.ModelConfig(
        vocab_size=256,
        hidden_size=args.width,
        num_layers=args.layers,
        num_heads=args.heads,
        intermediate_size=4 * args.width,
        position=kind,
        attention=args.implementation,
        dtype=args.dtype,
    )
    model = tape.Transformer(config)
    optimizer = optax.adamw(1e-4)
    params = jax.jit(lambda key: model.init(key, tokens))(jax.random.key(1))["params"]
    opt_state = optimizer.init(params)

    def loss_fn(params):
        logits = model.apply({"params": params}, tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return losses.mean()

    def step(params, opt_state):
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    compiled = jax.jit(step).lower(params, opt_state).compile()
    memory = compiled.memory_analysis()
    return lambda: compiled(params, opt_state), memory.temp_size_in_bytes


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024], metavar="T")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per batch (2048)")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps of each (20)")
    parser.add_argument("--encodings", nargs="+", default=["rope", "tape"], metavar="NAME")
    parser.add_argument(
        "--implementation", default=None, help="of attention (the fastest that can)"
    )
    parser.add_argument("--dtype", default="float32", help="compute type (float32)")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--step-only", action="store_true", help="leave out attention by itself")
    args = parser.parse_args()
    print(describe_device())
    for length in args.lengths:
        batch = max(1, args.tokens // length)
        tokens = jax.random.randint(jax.random.key(0), (batch, length), 0, 256, jnp.int32)
        steps, memory = {}, {}
        for kind in args.encodings:
            steps[kind], memory[kind] = make_step(kind, tokens, args)
        first = args.encodings[0]
        steps[f"{first}, again"], memory[f"{first}, again"] = steps[first], memory[first]
        timings = take_turns(steps, repeats=args.repeats)
        print(f"\nT = {length}, batch {batch}")
        for name, timing in timings.items():
            print(
                f"  {name:14} {timing!s:22} {timing.ratio(timings[first]):.3f} x {first}, "
                f"{memory[name] / 2**20:.0f} MiB temporary"
            )
    if not args.step_only:
        print("\nattention by itself")
        attention.main([])


if __name__ == "__main__":
    main()
