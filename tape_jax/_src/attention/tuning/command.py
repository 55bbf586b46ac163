"""The command :mod:`tape_jax.tune`."""

from __future__ import annotations

import argparse
import collections
import io
import math
from collections.abc import Sequence
from typing import Any

import jax

from tape_jax._src.attention.tuning import measure, records
from tape_jax._src.attention.tuning.records import CallShape, Table
from tape_jax._src.core.files import write_atomically
from tape_jax._src.core.table import markdown


def main(argv: Sequence[str] | None = None, *, description: str | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tape_jax.tune", description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--head-dims", type=_even, nargs="+", metavar="D")
    add("--lengths", type=_positive, nargs="+", metavar="T")
    add("--dtypes", choices=("bfloat16", "float16", "float32"), nargs="+")
    add("--heads", type=_positive, nargs="+", help="numbers of heads; one: a single sequence")
    add("--tokens", type=_positive, help="in a batch, where there are several heads")
    add("--minutes", type=float, default=15.0, help="after which nothing new is begun (15)")
    add("--seconds", type=float, default=3.0, help="a call that takes longer is left out (3)")
    add("--memory-limit", type=float, default=4.0, help="temporary memory of a call in GiB (4)")
    add("--again", action="store_true", help="measure what the file has, too")
    try:
        return _run(parser.parse_args(argv))
    except OSError as error:
        parser.exit(1, f"{parser.prog}: measurements cannot be kept: {error}\n")


def _run(options: argparse.Namespace) -> int:
    wanted = measure.shapes(
        options.head_dims,
        options.lengths,
        options.dtypes,
        heads=options.heads,
        tokens=options.tokens,
    )
    file = records.path()
    print(f"{records.device()}, jax {jax.__version__}; {len(wanted)} cases, kept in {file}")
    table, ignored = records.read()
    for other, why in ignored.items():
        print(f"{other} is ignored: {why}")
    known = {} if options.again else table or {}
    done = sum(shape in known and records.finished(known[shape]) for shape in wanted)
    if done:
        print(f"{done} of them were measured before; --again measures them anew")
    print(
        f"{len(wanted) - done} cases to measure; nothing is begun after {options.minutes:g} min "
        "(--minutes), and the same command goes on"
    )
    table = measure.tune(
        wanted,
        seconds=60 * options.minutes,
        again=options.again,
        limits=measure.Limits(seconds=options.seconds, memory=options.memory_limit * 2**30),
        say=lambda line: print(line, flush=True),
    )
    measured = [shape for shape in wanted if shape in table]
    if not measured:
        return 0
    print(f"\n{report(table, measured)}\n\nwritten: {file}")
    try:
        drawn = draw(table, measured)
    except ImportError as error:
        print(f"no picture: {error}")
    else:
        to = file.with_suffix(".png")
        write_atomically(to, drawn)
        print(f"picture: {to}")
    return 0


def report(table: Table, shapes: Sequence[CallShape]) -> str:
    """Return a table of each call's implementation, and why others were left out."""
    shape = ("D", "T", "type", "sequences x heads", "state")
    times = ("forward ms", "x default", "and backward ms", "x default", "default")
    heading = (*shape, "taken", *times)
    text = markdown(heading, [_line(shape, table[shape]) for shape in shapes])
    left: dict[tuple[str, str], int] = collections.Counter(
        (result.implementation, result.struck)
        for results in map(table.__getitem__, shapes)
        for result in results
        if result.struck is not None
    )
    if left:
        text += "\n\nNot taken:\n" + "\n".join(
            f"  {name}: {why}" + f" ({count} cases)" * (count > 1)
            for (name, why), count in left.items()
        )
    return text


def _line(shape: CallShape, results: Sequence[records.Measured]) -> tuple[object, ...]:
    default = measure.trials(shape).default
    heads = f"{shape.batch} x {shape.heads}"
    row = (shape.head_dim, shape.length, shape.dtype, heads, "yes" if shape.state else "no")
    ranked = records.ranked(results, default)
    if not ranked:
        return (*row, "not measured", *["-"] * 4, default)
    best = ranked[0]
    base = next((x for x in ranked if x.implementation == default), best)
    pairs = ((best.forward, base.forward), (best.gradients, base.gradients))
    times = [text for x, y in pairs for text in (f"{1e3 * x:.3g}", f"{x / y:.3f}")]
    return (*row, best.implementation, *times, default)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer; got {text!r}")
    return int(text)


def _even(text: str) -> int:
    if _positive(text) % 2:
        raise argparse.ArgumentTypeError(f"expected an even integer; got {text!r}")
    return int(text)


def draw(table: Table, shapes: Sequence[CallShape]) -> bytes:
    """Draws time by length as PNG: a panel for each kind of call, a line for each implementation.

    Raises:
      ImportError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    kinds: dict[str, list[CallShape]] = {}
    for shape in shapes:
        one = shape.batch == shape.heads == 1
        title = f"D {shape.head_dim}, {shape.dtype}, {'state' if shape.state else 'no state'}, "
        title += "one head" if one else f"{shape.heads} heads, batches"
        kinds.setdefault(title, []).append(shape)
    columns = min(4, len(kinds))
    rows = math.ceil(len(kinds) / columns)
    figure = Figure(figsize=(4 * columns, 3 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (title, group) in zip(panels, kinds.items(), strict=False):
        lines: dict[str, list[tuple[int, float]]] = {}
        for shape in group:
            for result in table[shape]:
                if result.timed:
                    point = (shape.length, 1e3 * result.gradients)
                    lines.setdefault(result.implementation, []).append(point)
        for name, line in sorted(lines.items()):
            axes.plot(*zip(*sorted(line), strict=True), marker="o", label=name)
        axes.set(xlabel="length", ylabel="ms, forward and backward", yscale="log")
        axes.set_xscale("log", base=2)
        axes.set_title(title, fontsize=9)
        if lines:
            axes.legend(fontsize=8)
    return as_png(figure)


def as_png(figure: Any) -> bytes:
    """Renders a matplotlib figure as PNG, whatever its backend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
