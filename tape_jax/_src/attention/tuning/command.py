"""What :mod:`tape_jax.tune` does."""

from __future__ import annotations

import argparse
import collections
from collections.abc import Sequence

import jax

from tape_jax._src.attention.tuning import cases, choice, picture, store
from tape_jax._src.attention.tuning.cases import CallShape, Contender, Measured
from tape_jax._src.attention.tuning.measure import Limits
from tape_jax._src.attention.tuning.session import finished, trials, tune
from tape_jax._src.core.files import write_atomically
from tape_jax._src.core.table import markdown

# Seconds that a case takes, nearly all of them to compile: on two cores (Xeon).
SECONDS_A_CASE = {"cpu": 20}


def main(argv: Sequence[str] | None = None, *, description: str | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tape_jax.tune", description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--head-dims", type=_positive, nargs="+", metavar="D")
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
    wanted = cases.shapes(
        options.head_dims,
        options.lengths,
        options.dtypes,
        heads=options.heads,
        tokens=options.tokens,
    )
    print(f"{store.device()}, jax {jax.__version__}; {len(wanted)} cases, kept in {store.path()}")
    table, ignored = store.read()
    for file, why in ignored.items():
        print(f"{file} is ignored: {why}")
    known = {} if options.again else table or {}
    done = [shape for shape in wanted if shape in known and finished(known[shape])]
    if done:
        print(f"{len(done)} of them were measured before; --again measures them anew")
    print(forecast(len(wanted) - len(done), options.minutes))
    table = tune(
        wanted,
        seconds=60 * options.minutes,
        again=options.again,
        limits=Limits(seconds=options.seconds, memory=options.memory_limit * 2**30),
        say=lambda line: print(line, flush=True),
    )
    measured = [shape for shape in wanted if shape in table]
    if not measured:
        return 0
    print(f"\n{report(table, measured)}\n\nwritten: {store.path()}")
    try:
        drawn = picture.draw(table, measured)
    except ImportError as error:
        print(f"no picture: {error}")
    else:
        to = store.path().with_suffix(".png")
        write_atomically(to, drawn)
        print(f"picture: {to}")
    return 0


def forecast(cases: int, minutes: float) -> str:
    """How long it takes to measure so many cases, where that is known, and when it ends."""
    each = SECONDS_A_CASE.get(jax.default_backend())
    about = f" in about {max(1, round(cases * each / 60))} min" if cases and each else ""
    return (
        f"{cases} cases to measure{about}; nothing is begun after {minutes:g} min (--minutes), and "
        "the same command goes on"
    )


def report(table: store.Table, shapes: Sequence[CallShape]) -> str:
    """What calls of each shape take, and why others were left out."""
    lines = [_line(shape, table[shape]) for shape in shapes]
    shape = ("D", "T", "type", "sequences x heads", "state")
    times = ("forward ms", "x default", "and backward ms", "x default", "default")
    left: dict[tuple[str, str], int] = collections.Counter(
        (str(result.contender), result.struck)
        for shape in shapes
        for result in table[shape]
        if result.struck is not None
    )
    text = markdown((*shape, "taken", *times), lines)
    if left:
        text += "\n\nNot taken:\n" + "\n".join(
            f"  {name}: {why}" + f" ({count} cases)" * (count > 1)
            for (name, why), count in left.items()
        )
    return text


def _line(shape: CallShape, results: Sequence[Measured]) -> tuple[object, ...]:
    default: Contender = trials(shape).default
    ranked = choice.ranked(results, default.implementation)
    best = ranked[0] if ranked else Measured(default)
    base = next((x for x in ranked if x.contender == default), best)

    def times(mine: float, theirs: float) -> tuple[str, str]:
        return (f"{1e3 * mine:.3g}", f"{mine / theirs:.3f}") if ranked else ("-", "-")

    return (
        shape.head_dim,
        shape.length,
        shape.dtype,
        f"{shape.batch} x {shape.heads}",
        "yes" if shape.state else "no",
        best.contender if ranked else "not measured",
        *times(best.forward, base.forward),
        *times(best.gradients, base.gradients),
        default,
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number
