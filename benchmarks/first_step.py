"""Measures how long a training takes to its first step: tracing, lowering and compiling.

    python -m benchmarks.first_step [--models demo bytes c4] [--encodings rope tape] [--repeats 3]

It compiles the programs of ``configs/addition_demo.py``, ``configs/bytes_demo.py`` and
``configs/c4_pretrain.py`` as ``train`` builds them: the one that makes the first state, all of it
in one number, and the step. Each time is that of a new process, which keeps no compiled programs;
encodings take turns. It prints medians and the ratio of the total times to the first encoding, run
by run. Nothing is run, so no model needs the memory of its parameters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tape_jax._src.core.table import markdown
from tape_jax._src.core.timing import Timing

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = {"demo": "addition_demo.py", "bytes": "bytes_demo.py", "c4": "c4_pretrain.py"}


class Seconds(NamedTuple):
    """Seconds until a training can begin.

    Attributes:
      state: to trace, lower and compile what makes the first state.
      trace, lower, compile: those of the step.
    """

    state: float
    trace: float
    lower: float
    compile: float

    @property
    def total(self) -> float:
        """The seconds in all."""
        return sum(self)


def measure(model: str, encoding: str, overrides: Sequence[str] = ()) -> Seconds:
    """Measures the times in this process, which must not have traced the model before."""
    import jax

    from train import experiment
    from train.training.loop import build_program

    options = [f"--config.model.position.kind={encoding}", *overrides]
    wanted = experiment.from_file(CONFIGS / MODELS[model], options, report=lambda line: None)
    shape = (wanted.train.batch_size, wanted.task.sequence_length)
    kinds = {"inputs": "int32", "targets": "int32", "weights": "float32"}
    batch = {name: jax.ShapeDtypeStruct(shape, kind) for name, kind in kinds.items()}
    jax.jit(lambda: 0).lower().compile()  # Starts the backend.
    program = build_program(wanted, None, None)

    marks = [time.perf_counter()]

    def mark(done: Any) -> Any:
        marks.append(time.perf_counter())
        return done

    mark(program.initial.lower(None, jax.ShapeDtypeStruct((2,), "uint32")).compile())
    traced = mark(program.step.trace(program.template, batch, None))
    mark(mark(traced.lower()).compile())
    return Seconds(*(end - start for start, end in itertools.pairwise(marks)))


def in_a_new_process(model: str, encoding: str, overrides: Sequence[str]) -> Seconds:
    """Returns the result of :func:`measure` in a new process, with no compilation cache."""
    command = [sys.executable, "-m", "benchmarks.first_step", "--one", model, encoding, *overrides]
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return Seconds(*json.loads(done.stdout.splitlines()[-1]))


def table(found: dict[str, list[Seconds]]) -> str:
    """Returns a table of each encoding's medians, with ratios to the first encoding."""
    base = Timing(tuple(x.total for x in next(iter(found.values()))))
    rows = []
    for name, runs in found.items():
        total = Timing(tuple(x.total for x in runs))
        parts = [Timing(column).median for column in zip(*runs, strict=True)]
        times = [f"{x:.2f}" for x in (*parts, total.median)]
        rows.append((name, *times, f"{100 * total.spread:.0f} %", f"{total.ratio(base):.3f}"))
    names = (f"{name} s" for name in (*Seconds._fields, "in all"))
    return markdown(("encoding", *names, "+-", "ratio"), rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--encodings", nargs="+", default=["rope", "tape"], metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each (3)")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "ENCODING"), help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args(argv)
    if options.one:
        print(json.dumps(measure(*options.one, overrides)))
        return
    for model in options.models:
        found: dict[str, list[Seconds]] = {name: [] for name in options.encodings}
        for _ in range(options.repeats):
            for name, runs in found.items():
                runs.append(in_a_new_process(model, name, overrides))
        print(f"{model} ({MODELS[model]})\n\n{table(found)}\n", flush=True)


if __name__ == "__main__":
    main()
