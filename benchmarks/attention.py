"""Time and memory of attention backends, as ratios to the first one within one run.

``python -m benchmarks.attention --help`` lists the options. The default compares ``chunked`` with
``reference``, causal with an attended rotary state, forward and forward plus backward (gradients
of q, k, v and e). A backend is skipped, and the table says so, where it cannot do the call or where
its temporary memory by XLA's analysis exceeds ``--memory-limit``.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Timing, describe_device, take_turns
from tape_jax.attention import attention


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One backend at one length, in one direction."""

    timing: Timing
    temporary: int


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=1, help="query heads")
    parser.add_argument("--kv-heads", type=int, help="key/value heads; default: as many")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--backends", nargs="+", default=["reference", "chunked"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--window", type=int, help="sliding window, in tokens")
    parser.add_argument("--bidirectional", action="store_true", help="not causal")
    parser.add_argument("--no-state", action="store_true", help="rotate only: RoPE")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory-limit", type=float, default=4.0, help="temporary memory, in GiB")
    return parser.parse_args(argv)


def arrays(options: argparse.Namespace, length: int) -> list[jax.Array]:
    """q, k, v and e of one call."""
    kv_heads = options.kv_heads or options.heads
    rng = np.random.default_rng(0)
    heads = [options.heads, kv_heads, kv_heads, kv_heads]
    return [
        jnp.asarray(rng.normal(size=(options.batch, length, h, options.head_dim)), options.dtype)
        for h in heads
    ]


def temporary_bytes(program: jax.stages.Compiled) -> int:
    """Peak temporary memory by XLA's own analysis."""
    analysis = program.memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes


def compiled(options: argparse.Namespace, backend: str, inputs: list[jax.Array]):
    """The forward pass, and the forward and backward pass, compiled."""

    def forward(q, k, v, e):
        return attention(
            q,
            k,
            v,
            e,
            causal=not options.bidirectional,
            window=options.window,
            attend_state=not options.no_state,
            implementation=backend,
        )

    def both(*inputs):
        def loss(inputs):
            return sum(
                jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(forward(*inputs))
            )

        return jax.value_and_grad(loss)(inputs)

    return {
        "forward": jax.jit(forward).lower(*inputs).compile(),
        "forward and backward": jax.jit(both).lower(*inputs).compile(),
    }


def measure(
    options: argparse.Namespace, length: int
) -> tuple[dict[str, dict[str, Measurement]], dict[str, str]]:
    """Measurements by direction and backend, and why backends were skipped."""
    inputs = arrays(options, length)
    programs, skipped = {}, {}
    for backend in options.backends:
        try:
            program = compiled(options, backend, inputs)
        except NotImplementedError as error:
            skipped[backend] = str(error)
            continue
        need = max(temporary_bytes(p) for p in program.values())
        if need > options.memory_limit * 2**30:
            skipped[backend] = f"needs {need / 2**30:.1f} GiB, limit {options.memory_limit:g} GiB"
        else:
            programs[backend] = program
    results: dict[str, dict[str, Measurement]] = {}
    for direction in ("forward", "forward and backward"):
        calls = {
            backend: lambda program=program[direction]: program(*inputs)
            for backend, program in programs.items()
        }
        timings = take_turns(calls, repeats=options.repeats)
        results[direction] = {
            backend: Measurement(timings[backend], temporary_bytes(program[direction]))
            for backend, program in programs.items()
        }
    return results, skipped


def report(
    length: int, results: dict[str, dict[str, Measurement]], skipped: dict[str, str]
) -> None:
    """Prints the lines of one length; ratios are to the first backend that ran."""
    for direction, by_backend in results.items():
        base_name = next(iter(by_backend), "")
        for backend, got in by_backend.items():
            line = (
                f"T {length:6d}  {direction:20s}  {backend:10s} {got.timing!s:22s} "
                f"{got.temporary / 2**20:9.1f} MiB"
            )
            if backend != base_name:
                base = by_backend[base_name]
                line += f"   {got.timing.ratio(base.timing):.2f} x time of {base_name}"
                line += f", {got.temporary / base.temporary:.3f} x memory"
            print(line, flush=True)
    for backend, reason in skipped.items():
        print(f"T {length:6d}  {backend}: skipped, {reason}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    options = parse(argv)
    print(describe_device())
    print(
        f"batch {options.batch}, {options.heads} query heads, {options.kv_heads or options.heads} "
        f"key/value heads of {options.head_dim}, {options.dtype}, "
        f"{'bidirectional' if options.bidirectional else 'causal'}, window {options.window}, "
        f"{'state not attended' if options.no_state else 'state attended'}; median of "
        f"{options.repeats} (+- half the quartiles' distance); memory: temporary, at most "
        f"{options.memory_limit:g} GiB"
    )
    for length in options.lengths:
        report(length, *measure(options, length))


if __name__ == "__main__":
    main()
