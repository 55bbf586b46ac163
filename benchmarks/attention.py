"""Measures attending the state: every backend against plain attention and the published way.

    python -m benchmarks.attention [--lengths T ...] [--head-dim D ...] [--backends NAME ...]

One run measures, forward and forward plus backward (gradients of all inputs), in turns:

* each backend that can, for values and state under one set of probabilities (products of values
  twice as wide);
* ``automatic``: the same by ``implementation=None``, which uses what ``python -m tape_jax.tune``
  has measured here, and ``static``, its choice without measurements; a line under each table names
  both, and the ratio of their times;
* ``plain``: RoPE, by the library named in the header: one fixed state for all heads, which is not
  attended and has no gradient; twice, to show the noise;
* ``three calls``: the published code's way, by the same library: the state with duplicated halves,
  and one attention each over values, cosines and sines;
* PyTorch's own, if it sees a GPU: its scaled_dot_product_attention and FlashAttention by three
  calls, and FlexAttention by one (:mod:`benchmarks.torch_attention`).

Ratios are of times, run by run. Compare ``x plain`` with the arithmetic floor in the header;
``x floor`` is their ratio. ``three calls x`` says how much longer those take. TFLOP/s count the
products that a row's way needs, causal ones half. ``moved`` is the minimum: inputs and outputs,
once each. A backend is skipped, and the output says so, if it cannot do the call or its temporary
memory exceeds ``--memory-limit``.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import torch_attention
from benchmarks.table import markdown, mebibytes
from research.overhead import Memory
from tape_jax import rotary_state
from tape_jax._src.attention import attention, attention_plan
from tape_jax._src.attention.choice import BACKENDS, default
from tape_jax._src.attention.normalize import normalize
from tape_jax._src.attention.tuning.measure import DIRECTIONS, both_ways
from tape_jax._src.core import algebra
from tape_jax._src.core.checks import choose
from tape_jax._src.core.timing import Timing, describe_device, take_turns
from train.training.flops import PLAIN, STATE, THREE_CALLS, TWO_CALLS, Products, attention_flops

Array = jax.Array

# For plain attention, fastest first; None: what the library itself chooses.
LIBRARIES = ("cudnn", "tokamax_mosaic", "splash", None)
# Sizes by platform: seconds on a CPU, work that fills a chip elsewhere.
CPU = {"lengths": [128, 512], "heads": 1, "head_dim": [64], "dtype": "float32", "least": 0.0}
ACCELERATOR = {
    "lengths": [1024, 2048, 4096, 8192, 16_384],
    "tokens": 16_384,
    "heads": 12,
    "head_dim": [64, 128],
    "dtype": "bfloat16",
    "least": 0.02,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to compute attention.

    Attributes:
      products: that it needs.
      forward: the computation, of ``inputs``.
      inputs: arrays, all of which get gradients.
    """

    products: Products
    forward: Callable[..., Any]
    inputs: tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class CallMeasurement:
    """The measurement of one row in one direction; memory is None outside of jax."""

    timing: Timing
    memory: Memory | None
    flops: float


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the command-line options, with those of the platform where none are given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--lengths", type=int, nargs="+", metavar="T")
    parser.add_argument("--batch", type=int, default=1, help="sequences, unless --tokens is given")
    parser.add_argument("--tokens", type=int, help="tokens per batch, at every length")
    parser.add_argument("--heads", type=int, help="query heads")
    parser.add_argument("--kv-heads", type=int, help="key/value heads; default: as many")
    parser.add_argument("--head-dim", type=int, nargs="+", metavar="D")
    parser.add_argument("--backends", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--library", help="backend of plain attention and of the three calls")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--state-dtype", default="float32", help="type of the states (float32)")
    parser.add_argument("--window", type=int, help="sliding window, in tokens")
    parser.add_argument("--bidirectional", action="store_true", help="not causal")
    parser.add_argument("--no-state", action="store_true", help="backends rotate only: RoPE")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--least", type=float, help="seconds that a timed run lasts at least")
    parser.add_argument("--memory-limit", type=float, default=4.0, help="temporary memory, in GiB")
    options = parser.parse_args(argv)
    defaults: Mapping[str, Any] = CPU if jax.default_backend() == "cpu" else ACCELERATOR
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.backends = options.backends or list(BACKENDS)
    options.kv_heads = options.kv_heads or options.heads
    for name in (*options.backends, *([options.library] if options.library else [])):
        choose("attention implementation", name, BACKENDS)
    return options


def batch_size(options: argparse.Namespace, length: int) -> int:
    """Returns the number of sequences in a batch."""
    return max(1, options.tokens // length) if options.tokens else options.batch


def arrays(options: argparse.Namespace, dim: int, length: int) -> list[Array]:
    """Returns random q, k, v and e of one call."""
    rng, batch = np.random.default_rng(0), batch_size(options, length)
    heads = [options.heads, *[options.kv_heads] * 3]
    types = [*[options.dtype] * 3, options.state_dtype]
    return [
        jnp.asarray(rng.normal(size=(batch, length, h, dim)), dtype)
        for h, dtype in zip(heads, types, strict=True)
    ]


def duplicated(e: Array) -> tuple[Array, Array]:
    """Returns cosines and sines of a rotary state with duplicated halves, as in the published code.

    Args:
      e: ``[..., D]``.

    Returns:
      Two arrays ``[..., D]``.
    """
    cos, sin = jnp.split(e, 2, axis=-1)
    return jnp.concatenate([cos, cos], -1), jnp.concatenate([sin, sin], -1)


def three_calls(
    q: Array, k: Array, v: Array, cos: Array, sin: Array, **call: Any
) -> tuple[Array, Array, Array]:
    """Attends to values, cosines and sines in separate calls; ``call`` is passed on."""

    def rotate(x: Array) -> Array:
        c, s = (algebra.repeat_heads(y, x.shape[-2]) for y in (cos, sin))
        real, imag = jnp.split(x, 2, axis=-1)
        return x * c + jnp.concatenate([-imag, real], -1) * s

    q, k = rotate(q), rotate(k)
    o, a_cos, a_sin = (attention(q, k, x, **call)[0] for x in (v, cos, sin))
    return o, a_cos, a_sin


def rows(options: argparse.Namespace, dim: int, length: int) -> dict[str, Row]:
    """Returns all rows that are measured with jax, by name."""
    q, k, v, e = inputs = tuple(arrays(options, dim, length))
    call = {"is_causal": not options.bidirectional, "local_window_size": options.window}

    def by(backend: str | None, attends: bool) -> Callable[..., Any]:
        return lambda q, k, v, e: attention(
            q, k, v, state=e, attend_state=attends, implementation=backend, **call
        )

    attends = not options.no_state
    found = {
        name: Row(products_of(name, attends), by(name, attends), inputs)
        for name in options.backends
    }
    taken, static = chosen(inputs, attends, call)
    found["automatic"] = Row(products_of(taken, attends), by(None, attends), inputs)
    found["static"] = Row(products_of(static, attends), by(static, attends), inputs)
    library = best_library(options, by, inputs)
    state = rotary_state(jnp.arange(length), dim)
    plain = by(library, False)
    found["plain"] = Row(PLAIN, lambda q, k, v: plain(q, k, v, state), (q, k, v))
    if attends:
        found["three calls"] = Row(
            THREE_CALLS,
            lambda *args: three_calls(*args, **call, implementation=library),
            (q, k, v, *duplicated(e.astype(options.dtype))),
        )
    return found


def products_of(backend: str, attends: bool) -> Products:
    """Returns the products that a backend needs; cuDNN attends values and state in two calls."""
    if not attends:
        return PLAIN
    return TWO_CALLS if backend == "cudnn" else STATE


def chosen(inputs: Sequence[Array], attends: bool, call: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the backend that ``implementation=None`` takes, and the one without measurements."""
    q, k, v, e = inputs
    keywords = {"state": e, "attend_state": attends, **call}
    plan = attention_plan(q, k, v, **keywords)
    assert plan.implementation is not None
    return plan.implementation, default(normalize(q, k, v, **keywords))


def best_library(options: argparse.Namespace, by: Callable, inputs: Sequence[Array]) -> str | None:
    """Returns plain attention's backend: the one asked for, or the first that works here."""
    if options.library:
        return options.library
    for name in LIBRARIES:
        if name is None or name in BACKENDS:
            try:
                jax.eval_shape(by(name, False), *inputs)
            except NotImplementedError:
                continue
            return name
    raise NotImplementedError("no backend computes plain attention here")


def measure(
    options: argparse.Namespace, dim: int, length: int
) -> tuple[dict[str, dict[str, CallMeasurement]], dict[str, str]]:
    """Returns measurements by direction and row, and the reasons why rows were left out."""
    ways = rows(options, dim, length)
    programs, skipped = {}, {}
    for name, row in ways.items():
        try:
            compiled = both_ways(row.forward, row.inputs)
            plans = [Memory.of(program) for program, _ in compiled.values()]
            jax.block_until_ready([program(*args) for program, args in compiled.values()])
        except NotImplementedError as error:
            skipped[name] = str(error)
            continue
        except jax.errors.JaxRuntimeError as error:
            skipped[name] = f"failed, {str(error).splitlines()[0]}"
            continue
        need = max(plan.temporary for plan in plans if plan is not None)
        if need > options.memory_limit * 2**30:
            skipped[name] = f"needs {need / 2**30:.1f} GiB, limit {options.memory_limit:g} GiB"
        else:
            programs[name] = compiled
    batch, rivals = batch_size(options, length), dict[str, torch_attention.TorchRow]()
    if not options.no_state and options.heads == options.kv_heads:
        rivals, refused = torch_attention.rows(
            (batch, options.heads, length, dim),
            options.dtype,
            is_causal=not options.bidirectional,
            window=options.window,
        )
        skipped |= refused
    results: dict[str, dict[str, CallMeasurement]] = {}
    for direction in DIRECTIONS:
        calls: dict[str, Callable[[], Any]] = {
            name: (lambda program, args: lambda: program(*args))(*compiled[direction])
            for name, compiled in programs.items()
        }
        if "plain" in calls:
            calls["plain, again"] = calls["plain"]
        calls |= {name: row.calls[direction] for name, row in rivals.items()}
        timings = take_turns(calls, repeats=options.repeats, warm_up=2, least=options.least)
        results[direction] = {}
        for name, timing in timings.items():
            source = name.removesuffix(", again")
            memory = Memory.of(programs[source][direction][0]) if source in programs else None
            products = (rivals | ways)[source].products
            flops = attention_flops(
                products.forward if direction == DIRECTIONS[0] else products.both,
                length,
                batch=batch,
                heads=options.heads,
                head_dim=dim,
                is_causal=not options.bidirectional,
                local_window_size=options.window,
            )
            results[direction][name] = CallMeasurement(timing, memory, flops)
    return results, skipped


def describe_choice(options: argparse.Namespace, dim: int, length: int) -> str:
    """Returns a line that names the backends behind ``automatic`` and ``static``."""
    call = {"is_causal": not options.bidirectional, "local_window_size": options.window}
    names = chosen(arrays(options, dim, length), not options.no_state, call)
    return "automatic: {}; static: {}".format(*names)


def report(found: dict[str, CallMeasurement], floor: float) -> str:
    """Returns the table of one direction at one length."""
    plain, three = found.get("plain"), found.get("three calls")
    lines = []
    for name, got in found.items():
        to_plain = got.timing.ratio(plain.timing) if plain else None
        lines.append(
            (
                name,
                f"{1e3 * got.timing.median:.3f}",
                f"{100 * got.timing.spread:.1f} %",
                f"{got.flops / got.timing.median / 1e12:.3f}",
                mebibytes(got.memory.temporary if got.memory else None),
                mebibytes(got.memory.moved if got.memory else None),
                "-" if to_plain is None else f"{to_plain:.3f}",
                "-" if to_plain is None else f"{to_plain / floor:.3f}",
                f"{three.timing.ratio(got.timing):.3f}" if three else "-",
            )
        )
    header = ("attention", "ms", "+-", "TFLOP/s", "temporary MiB", "moved MiB", "x plain")
    return markdown((*header, "x floor", "three calls x"), lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    options = parse(argv)
    wanted = PLAIN if options.no_state else STATE
    floors = {
        DIRECTIONS[0]: wanted.forward / PLAIN.forward,
        DIRECTIONS[1]: wanted.both / PLAIN.both,
    }
    print(describe_device())
    print(
        f"{options.heads} query heads, {options.kv_heads} key/value heads, {options.dtype}, "
        f"{'bidirectional' if options.bidirectional else 'causal'}, window {options.window}, "
        f"{'state not attended' if options.no_state else 'state attended'}; median of "
        f"{options.repeats} runs, +- half the quartiles' distance; temporary memory at most "
        f"{options.memory_limit:g} GiB; floors: "
        + ", ".join(f"{name} {floor:.2f} x plain" for name, floor in floors.items())
    )
    said: set[str] = set()
    for dim in options.head_dim:
        for length in options.lengths:
            found, skipped = measure(options, dim, length)
            taken = describe_choice(options, dim, length)
            for direction in DIRECTIONS:
                print(
                    f"\nD = {dim}, T = {length}, batch {batch_size(options, length)}, {direction}\n"
                )
                print(report(found[direction], floors[direction]), flush=True)
                if {"automatic", "static"} <= found[direction].keys():
                    automatic, static = (
                        found[direction][x].timing for x in ("automatic", "static")
                    )
                    print(f"\n{taken}, {automatic.ratio(static):.3f} x static", flush=True)
            for line in (f"{name}: skipped, {reason}" for name, reason in skipped.items()):
                if line not in said:
                    print(f"\n{line}", flush=True)
                said.add(line)


if __name__ == "__main__":
    main()
