"""Measures every position encoding: its training step against RoPE's, in one run.

    python -m benchmarks.arena [--lengths 256 1024] [--encodings rope fox ...] [--picture FILE.png]

It trains the ``small`` model of :mod:`benchmarks.train_step` on random tokens. A line for each
encoding and length has the step's time, in turns with RoPE's; its ratio to RoPE's, run by run;
RoPE's ratio to itself in the same turns; the memory that the compiler plans; and the counted
operations of its matrix products, of all pairs of tokens. A combination is written ``tape+alibi``,
a schedule ``rope/rope/none``.

``--long 8192`` compiles a step of one sequence of that length. It prints the memory between its
arguments and results, and the ratio to that of half the length (2: linear, 4: quadratic). Steps
with linear memory are then timed, twice, unless you pass ``--repeats 0``.

``--machines h100 v5e`` adds what the compiler plans for machines that are not here, at the width of
the C4 model; :mod:`train.analysis.ahead_of_time` says what these compilers need.

``--rows FILE.jsonl`` keeps each row the moment it is made, and skips rows that are there: after an
interruption, the same command continues.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.table import mebibytes, ratio
from benchmarks.train_step import PRESETS
from research.overhead import Memory, Runner, TrainingStep
from tape_jax import ModelConfig, Transformer, positions
from tape_jax._src.core.operations import matrix_operations
from tape_jax._src.core.table import markdown
from tape_jax._src.core.timing import describe_device, take_turns
from tape_jax._src.positions.creation import option_names
from train.analysis import ahead_of_time

# Besides the registry: combinations and schedules that are asked for most.
COMBINATIONS = (
    *("rope+alibi", "tape+alibi", "tape+fox", "rope+fox+alibi", "wall+fox"),
    *("rope/rope/none", "rope+window/rope+window/rope", "rope+alibi/tape+alibi/tape+alibi"),
)
LEFT_OUT = ("tape_separate_cos_sin", "tape_mix_head_dim", "tape_no_equivariance")
MACHINES = {"h100": "h100:1", "v5e": "v5e:2x2"}
CANNOT = (ValueError, NotImplementedError, jax.errors.JaxRuntimeError)


@dataclasses.dataclass(frozen=True)
class ArenaRow:
    """The measurements of one encoding at one length.

    Attributes:
      name: of the encoding.
      batch, length: shape of the batch, in sequences and tokens.
      milliseconds: a step's median.
      spread: half the quartiles' distance, relative to the median.
      time_ratio: of a step's time to RoPE's, paired.
      noise: the same ratio of RoPE's to itself.
      temporary: bytes between arguments and results; None if the compiler does not say.
      operations: of the matrix products of a forward pass.
    """

    name: str
    batch: int
    length: int
    milliseconds: float
    spread: float
    time_ratio: float
    noise: float
    temporary: int | None
    operations: float

    def __str__(self) -> str:
        size = "" if self.temporary is None else f", {mebibytes(self.temporary)} MiB"
        return (
            f"{self.name} at {self.length}: {self.milliseconds:.1f} ms, "
            f"{self.time_ratio:.2f} x rope{size}"
        )


def kept(path: Path | None, key: Sequence[Any], make: Callable[[], Any]) -> Any:
    """Returns the row under ``key`` in a file of rows, or makes it with ``make`` and adds it.

    If ``make`` fails, the row is a sentence with the reason.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            # It was being written when the run was stopped.
            continue
        if row["key"] == list(key):
            return row["found"]
    try:
        found = make()
    except CANNOT as error:
        found = f"skipped, {next(iter(str(error).splitlines()), error)}"
    if path:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps({'key': key, 'found': found})}\n")
    return found


def names(asked: Sequence[str] | None) -> list[str]:
    """Encodings to measure, RoPE first."""
    kinds = asked or [*(k for k in positions.registry if k not in LEFT_OUT), *COMBINATIONS]
    return ["rope", *(kind for kind in kinds if kind != "rope")]


def config_of(model: ModelConfig, name: str) -> ModelConfig:
    """Returns the model with an encoding, which may need to know how numbers are written."""
    writing = {"digits": tuple(range(48, 58)), "plus": 43, "equals": 61, "reverse_operands": True}
    known = option_names(name)
    fields = {field: value for field, value in writing.items() if field in known}
    return dataclasses.replace(model, position={"kind": name, **fields})


def count(config: ModelConfig, batch: int, length: int) -> float:
    """Counts operations of a forward pass's matrix products, for all pairs of tokens."""
    tokens = jax.ShapeDtypeStruct((batch, length), "int32")
    model = Transformer(dataclasses.replace(config, attention_implementation="reference"))
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return matrix_operations(model.apply, variables, tokens)


def rows(model: ModelConfig, options: argparse.Namespace, length: int) -> Iterator[ArenaRow | str]:
    """Measures all encodings at one length, RoPE beside each; a failure is a sentence."""
    batch = max(1, options.tokens // length)
    first = functools.cache(lambda: Runner(TrainingStep(config_of(model, "rope"), batch, length)))

    def measured(name: str) -> dict[str, Any]:
        config = config_of(model, name)
        own = first() if name == "rope" else Runner(TrainingStep(config, batch, length))
        turns = {"rope": first(), "own": own, "again": first()}
        times = take_turns(turns, repeats=options.repeats)
        row = ArenaRow(
            name=name,
            batch=batch,
            length=length,
            milliseconds=1e3 * times["own"].median,
            spread=times["own"].spread,
            time_ratio=times["own"].ratio(times["rope"]),
            noise=times["again"].ratio(times["rope"]),
            temporary=None if own.memory is None else own.memory.temporary,
            operations=count(config, batch, length),
        )
        return dataclasses.asdict(row)

    for name in names(options.encodings):
        key = ["step", options.model, batch, length, options.repeats, name]
        found = kept(options.rows, key, functools.partial(measured, name))
        yield f"{name}: {found}" if isinstance(found, str) else ArenaRow(**found)


def table(found: Sequence[ArenaRow]) -> str:
    """Returns the table of all rows of one length."""
    first = found[0]
    lines = [
        (
            row.name,
            f"{row.milliseconds:.1f}",
            f"{100 * row.spread:.1f} %",
            f"{row.time_ratio:.2f}",
            f"{row.noise:.2f}",
            mebibytes(row.temporary),
            ratio(row.temporary, first.temporary),
            f"{row.operations / 1e9:.2f}",
            f"{row.operations / first.operations:.3f}",
        )
        for row in found
    ]
    header = (
        *("encoding", "ms", "+-", "x rope", "rope x rope", "MiB", "x rope"),
        *("GFLOP forward", "x rope"),
    )
    return markdown(header, lines)


def long_lines(model: ModelConfig, options: argparse.Namespace) -> Iterator[str]:
    """Yields steps of one long sequence: memory, its growth and, if that is linear, time."""
    linear = []
    for name in names(options.encodings):

        def sizes(name: str = name) -> list[int | None]:
            config = config_of(model, name)
            return [temporary(config, n) for n in (options.long // 2, options.long)]

        found = kept(options.rows, ["memory", options.model, options.long, name], sizes)
        if isinstance(found, str):
            yield f"{name} at {options.long}: {found}"
            continue
        half, whole = found
        yield (
            f"{name} at {options.long}: {mebibytes(whole)} MiB, "
            f"{ratio(whole, half)} x those of {options.long // 2}"
        )
        if whole and half and whole < 3 * half:
            linear.append(name)
    if linear and options.repeats:
        least = {"encodings": linear, "tokens": options.long, "repeats": min(options.repeats, 2)}
        again = argparse.Namespace(**{**vars(options), **least})
        yield from map(str, rows(model, again, options.long))


def temporary(config: ModelConfig, length: int) -> int | None:
    """Returns temporary memory of a step of one sequence, by the compiler's plan."""
    step = TrainingStep(config, 1, length)
    memory = Memory.of(step.function.lower(*step.shapes()).compile())
    return None if memory is None else memory.temporary


def planned(options: argparse.Namespace) -> Iterator[str]:
    """Yields what other machines' compilers plan for a step of the C4 model, a line each."""
    for name in options.machines:
        try:
            machine = ahead_of_time.machine(MACHINES[name])
            compiler = (
                ahead_of_time.cuda_options()
                if isinstance(machine.target, ahead_of_time.Cuda)
                else {}
            )
        except NotImplementedError as error:
            yield f"{name}: skipped, {error}"
            continue
        first = None
        for kind in names(options.encodings):
            make = functools.partial(plan, machine, compiler, kind)
            found = kept(options.rows, ["plan", name, kind], make)
            if isinstance(found, str):
                yield f"{kind} on {name}: {found}"
                continue
            total, work = found
            first = first or found
            yield (
                f"{kind} on {name}: {mebibytes(total)} MiB in all, {ratio(total, first[0])} x "
                f"rope; {work / 1e12:.2f} TFLOP forward, {work / first[1]:.3f} x rope"
            )


def plan(machine: Any, compiler: dict[str, Any], kind: str) -> tuple[int | None, float]:
    """Bytes of a step of the C4 model on a machine, and operations of its forward pass."""
    batch, length = 8, 1024
    config, device = config_of(PRESETS["c4"].model, kind), machine.devices[0]
    with ahead_of_time.as_if_on(machine.target, device):
        step = TrainingStep(config, batch, length)
        sharding = jax.sharding.SingleDeviceSharding(device)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), step.shapes()
        )
        memory = Memory.of(step.function.lower(*shapes).compile(compiler))
    return memory.total if memory else None, count(config, batch, length)


def draw(found: Sequence[ArenaRow], path: Path) -> None:
    """Draws a bar chart of the steps' times over RoPE's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = sorted({row.length for row in found})
    kinds = list(dict.fromkeys(row.name for row in found))
    figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.3 * len(kinds)), layout="constrained")
    height = 0.8 / len(lengths)
    for n, length in enumerate(lengths):
        own = {row.name: row.time_ratio for row in found if row.length == length}
        places = [kinds.index(kind) + (n - (len(lengths) - 1) / 2) * height for kind in own]
        axes.barh(places, list(own.values()), height, label=f"{length} tokens")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.set_xlabel("time of a training step, over that with RoPE")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def picture_error(path: Path) -> str | None:
    """Returns why a chart cannot be drawn at ``path``; None if it can."""
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds:
        return f"the kind of picture must be one of {', '.join(sorted(kinds))}"
    return None if path.parent.is_dir() else f"there is no folder {path.parent}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the command-line options."""
    small = PRESETS["small"]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.arena", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--lengths", type=int, nargs="*", default=small.lengths, metavar="T")
    parser.add_argument("--encodings", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--tokens", type=int, default=small.tokens, help="tokens per batch (2048)")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps of each (10)")
    parser.add_argument("--model", choices=PRESETS, default="small")
    parser.add_argument("--long", type=int, metavar="T", help="a length to plan memory for")
    parser.add_argument("--machines", nargs="*", choices=MACHINES, default=[], metavar="NAME")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="keeps rows, and goes on by them")
    parser.add_argument("--picture", type=Path, help="where to draw a bar chart")
    options = parser.parse_args(argv)
    for name in options.encodings or ():
        try:
            config_of(PRESETS[options.model].model, name)
        except ValueError as error:
            parser.error(f"--encodings {name}: {error}")
    halves = [] if options.long is None else [options.long // 2]
    if min([*options.lengths, *halves, options.tokens]) < 1:
        parser.error("--lengths and --tokens must be positive, --long at least 2")
    if options.rows and not options.rows.parent.is_dir():
        parser.error(f"--rows {options.rows}: there is no folder {options.rows.parent}")
    if options.picture and (error := picture_error(options.picture)):
        parser.error(f"--picture {options.picture}: {error}")
    if options.repeats < 0 or (options.lengths and options.repeats == 0):
        parser.error(
            f"--repeats {options.repeats}: at least 1; 0 is for --lengths without a number, with "
            "--long or --machines"
        )
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    options = parse(argv)
    model = PRESETS[options.model].model
    print(describe_device())
    every = []
    for length in options.lengths:
        found = []
        for row in rows(model, options, length):
            print(row, flush=True)
            if isinstance(row, ArenaRow):
                found.append(row)
        print(f"\nT = {length}, batch {found[0].batch}\n\n{table(found)}\n")
        every += found
    if options.picture and every:
        draw(every, options.picture)
        print(f"picture: {options.picture}")
    long = long_lines(model, options) if options.long else ()
    for line in itertools.chain(long, planned(options)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
