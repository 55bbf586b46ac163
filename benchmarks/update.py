"""Measures the position update by each of its implementations.

    python -m benchmarks.update [--batch B] [--length T] [--heads H] [--mixes NAME ...]

One run measures, in turns, forward and forward plus backward (gradients of everything), the update
of states in float32 and bfloat16, with activations in bfloat16. ``moved`` is the minimum: inputs
and outputs, once each; ``GB/s`` uses it. ``ratio`` is to ``reference``, run by run, and its second
entry shows the noise. An implementation that cannot run here is skipped, and the output says so.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.table import markdown, mebibytes
from research.overhead import Memory, again
from tape_jax import init_update, update_state
from tape_jax._src.attention.tuning.measure import DIRECTIONS, both_ways
from tape_jax._src.core.timing import describe_device, take_turns
from tape_jax._src.positions.tape.update import UPDATES, fused


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the command-line options: small on a CPU, the C4 model's batch elsewhere."""
    cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.update", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--batch", type=int, default=1 if cpu else 16)
    parser.add_argument("--length", type=int, default=256 if cpu else 1024)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--mixes", nargs="+", default=["head_scale", "heads"])
    parser.add_argument("--norm", default="none", help="of the new states (none)")
    parser.add_argument(
        "--fused", type=int, nargs=3, action="append", default=[],
        metavar=("TOKENS", "WARPS", "STAGES"),
        help="also time the fused kernels with these sizes of a program; any number of times",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--least", type=float, default=0.0 if cpu else 0.02)
    return parser.parse_args(argv)


def arguments(options: argparse.Namespace, mix: str, dtype: str) -> tuple[Any, ...]:
    """Makes random parameters, state, attended state and activations."""
    rng, hidden = np.random.default_rng(0), options.heads * options.head_dim
    params = init_update(jax.random.key(0), hidden, options.heads, attention_mix=mix)
    shape = (options.batch, options.length, options.heads, options.head_dim)
    e, a = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    return params, e, a, jnp.asarray(rng.normal(size=(*shape[:2], hidden)), "bfloat16")


def measure(options: argparse.Namespace, mix: str, dtype: str, skipped: dict[str, str]) -> list:
    """Returns the lines of the table for one kind of update and type of state."""
    args = arguments(options, mix, dtype)
    ways = dict(UPDATES)
    for sizes in options.fused:
        named = dict(zip(("tokens", "warps", "stages"), sizes, strict=True))
        ways[f"fused {sizes}"] = functools.partial(fused, **named)
    programs = {}
    for name, way in ways.items():
        run = functools.partial(update_state, implementation=name, norm=options.norm)
        with mock.patch.dict(UPDATES, {name: way}):
            try:
                programs[name] = both_ways(run, args)
            except NotImplementedError as error:
                skipped[name] = str(error)
    programs[again("reference")] = programs["reference"]
    lines = []
    for direction in DIRECTIONS:
        calls: dict[str, Callable[[], Any]] = {
            name: functools.partial(both[direction][0], *both[direction][1])
            for name, both in programs.items()
        }
        timings = take_turns(calls, repeats=options.repeats, warm_up=2, least=options.least)
        for name, timing in timings.items():
            memory = Memory.of(programs[name][direction][0])
            moved = memory.moved if memory else None
            lines.append(
                (
                    f"{mix}, {dtype}, {direction}",
                    name,
                    f"{1e3 * timing.median:.3f}",
                    f"{100 * timing.spread:.1f} %",
                    f"{timing.ratio(timings['reference']):.3f}",
                    mebibytes(moved),
                    mebibytes(memory.temporary if memory else None),
                    "-" if moved is None else f"{moved / timing.median / 1e9:.0f}",
                )
            )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    options = parse(argv)
    print(describe_device())
    print(
        f"states [{options.batch}, {options.length}, {options.heads}, {options.head_dim}]; median "
        f"of {options.repeats} runs, +- half the quartiles' distance"
    )
    lines, skipped = [], {}
    for mix, dtype in itertools.product(options.mixes, ("float32", "bfloat16")):
        lines += measure(options, mix, dtype, skipped)
    header = ("update", "by", "ms", "+-", "ratio", "moved MiB", "temporary MiB", "GB/s")
    print(f"\n{markdown(header, lines)}")
    for name, reason in skipped.items():
        print(f"\n{name}: skipped, {reason}")


if __name__ == "__main__":
    main()
