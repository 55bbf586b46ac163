"""Measures everything on a machine with a GPU, in one command and in order of importance.

    python -m benchmarks.gpu [--minutes 25] [--folder benchmarks/results] [--dry]

It finds the fastest attention (``python -m tape_jax.tune``, which keeps it for all programs of this
machine), then runs the tests that need a GPU, attention calls, and training steps, each with a
limit. It writes ``DATE-CHIP.md`` with versions, commands and what they printed; a later run of the
day adds its time to the name. The file is complete after every part: whatever stops the run,
measurements are kept. A part that fails is a result. ``--dry`` runs the same parts at sizes that a
CPU does in two minutes, keeps none of their times, and fails if a part does.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tape_jax._src.core.files import write_atomically


@dataclasses.dataclass(frozen=True)
class Part:
    """One command of the plan.

    Attributes:
      title: for the report.
      command: after ``python -m``.
      minutes: at most.
      environment: variables to set.
    """

    title: str
    command: str
    minutes: float
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


# The tests run on a CPU unless told otherwise; here their processes share the GPU's memory.
OF_TESTS = {"JAX_PLATFORMS": "", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


PLAN = (
    Part(
        "What is right and fastest here",
        "tape_jax.tune --minutes 9 --memory-limit 24",
        10,
    ),
    Part(
        "The Mosaic kernels: fast?",
        "benchmarks.attention --head-dim 64 128 --lengths 1024 4096 16384 "
        "--backends mosaic pallas tokamax_mosaic cudnn --memory-limit 24",
        3,
    ),
    Part(
        "The compiled kernels against the reference",
        "pytest -m gpu -n 12 tests/library/attention tests/library/positions",
        5,
        OF_TESTS,
    ),
    Part(
        "Attention by itself: D = 64",
        "benchmarks.attention --head-dim 64 --lengths 1024 4096 16384 --memory-limit 24",
        3,
    ),
    Part(
        "Attention by itself: D = 128",
        "benchmarks.attention --head-dim 128 --lengths 1024 4096 16384 --memory-limit 24",
        3,
    ),
    Part(
        "Training steps of the C4 model",
        "benchmarks.train_step --model c4 --lengths 1024 8192 "
        "--rows rope:cudnn tape tape:tokamax_mosaic tape:cudnn tape:pallas",
        4,
    ),
    Part("The position update", "benchmarks.update", 1),
    Part(
        "Attention by itself: other lengths",
        "benchmarks.attention --head-dim 64 128 --lengths 2048 8192 --memory-limit 24",
        3,
    ),
)
DRY = (
    Part(
        "What is right and fastest here",
        "tape_jax.tune --head-dims 8 --lengths 32 --dtypes float32 --heads 2 --tokens 64",
        2,
    ),
    Part(
        "Tests that need a GPU",
        "pytest -m gpu -qq --collect-only tests/library/attention tests/library/positions",
        2,
    ),
    Part("Attention by itself", "benchmarks.attention --lengths 32 64 --repeats 2", 2),
    Part(
        "Training steps of a tiny model",
        "benchmarks.train_step --model tiny --lengths 32 --tokens 64 --repeats 2 "
        "--rows rope tape:chunked tape:cudnn",
        2,
    ),
    Part("The position update", "benchmarks.update --length 32 --repeats 2", 2),
)
# This runs in its own process: it would keep the GPU's memory from the others.
DESCRIBE = "from tape_jax._src.core.timing import describe_device as d; print(d())"


@dataclasses.dataclass(frozen=True)
class PartOutcome:
    """The outcome of a part.

    Attributes:
      text: what it printed, and why it failed if it did.
      seconds: that it took.
      succeeded: whether it ended in time, without error.
    """

    text: str
    seconds: float = 0.0
    succeeded: bool = False


def run(part: Part, limit: float, environment: Mapping[str, str]) -> PartOutcome:
    """Runs a part for at most ``limit`` seconds."""
    command = [sys.executable, "-m", *part.command.split()]
    start = time.monotonic()
    succeeded = False
    try:
        done = subprocess.run(
            command,
            timeout=limit,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **part.environment, **environment},
        )
        text, succeeded = done.stdout, done.returncode == 0
        if done.returncode:
            text += f"\nFailed with exit code {done.returncode}."
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        text += f"\nStopped after {limit:.0f} s."
    return PartOutcome(text.strip(), time.monotonic() - start, succeeded)


def report_path(folder: Path, chip: str, now: datetime.datetime, *, again: bool = False) -> Path:
    """Returns the path of a report; unless ``again``, no other report of the day is overwritten."""
    path = folder / f"{now:%Y-%m-%d}-{chip}.md"
    return path if again or not path.exists() else path.with_stem(f"{path.stem}-{now:%H%M%S}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the plan; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=25.0, help="for everything (25)")
    parser.add_argument("--folder", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on any machine")
    options = parser.parse_args(argv)
    if not options.folder.is_dir():
        parser.error(f"--folder must be an existing folder; got {options.folder}")
    described = subprocess.run([sys.executable, "-c", DESCRIBE], capture_output=True, text=True)
    device = (described.stdout.strip().splitlines() or ["unknown device"])[-1]
    chip = "-".join(re.findall(r"\w+", device.split("(")[0])).lower() + ("-dry" * options.dry)
    path = report_path(options.folder, chip, datetime.datetime.now(), again=options.dry)
    report = f"# {datetime.date.today()}, {device.split(' (')[0]}\n\n{device}, Python "
    report += f"{platform.python_version()}, {platform.machine()}.\n"
    end = time.monotonic() + 60 * options.minutes
    cache = tempfile.TemporaryDirectory()
    environment = {"TAPE_JAX_CACHE": cache.name} if options.dry else {}
    failed = []
    for part in DRY if options.dry else PLAN:
        limit = min(60 * part.minutes, end - time.monotonic())
        late = PartOutcome("Not measured: no time left.")
        done = run(part, limit, environment) if limit > 5 else late
        failed += [] if done.succeeded else [part.title]
        took = f"{done.seconds:.0f} s"
        print(f"{part.title} ({took})\n\n{done.text}\n", flush=True)
        report += f"\n## {part.title}\n\nCommand: `python -m {part.command}` ({took})\n\n"
        report += f"{done.text}\n" if "|--" in done.text else f"```\n{done.text}\n```\n"
        write_atomically(path, report)
    print(f"written to {path}")
    if failed:
        print(f"did not succeed: {', '.join(failed)}")
    return int(options.dry and bool(failed))


if __name__ == "__main__":
    sys.exit(main())
