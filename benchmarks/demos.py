"""Times the training steps of the demos, here and in another checkout, in turns.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.demos --before /tmp/before [--repeats 9]

It takes steps of the configs that ``make`` trains, on random tokens. Each checkout has its own
process, which keeps its compiled programs (``JAX_COMPILATION_CACHE_DIR``) from one call of this
command to the next. It prints medians of the step time, their spreads, and the ratio run by run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
SHORT = ("--config.task.sequence_length=64", "--config.train.batch_size=32")
CASES: dict[str, tuple[str, ...]] = {
    **{
        f"addressing, {kind}": ("addressing_demo.py", kind) for kind in ("tape+alibi", "rope+alibi")
    },
    **{f"addition, {kind}": ("addition_demo.py", kind) for kind in ("tape", "rope")},
    **{
        f"bytes, {kind}": ("bytes_demo.py", kind)
        for kind in ("tape", "rope", "alibi", "sinusoidal")
    },
    "base of the extension, rope": ("bytes_demo.py", "rope", *SHORT),
    **{f"passkeys, {kind}": ("passkey_demo.py", kind) for kind in ("tape", "rope")},
}
# Steps in a run.
STEPS = 10


def step_of(case: str) -> Iterator[None]:
    """Makes :data:`STEPS` steps each time that it is asked for the next."""
    import jax
    import jax.numpy as jnp

    from train import experiment
    from train.training import loop

    config, kind, *overrides = CASES[case]
    options = [f"--config.model.position.kind={kind}", *overrides]
    wanted = experiment.from_file(Path("configs") / config, options, report=lambda line: None)
    program = loop.build_program(wanted, None, None)
    shape = (wanted.train.batch_size, wanted.task.sequence_length + 1)
    tokens = jax.random.randint(jax.random.key(0), shape, 0, wanted.model.vocab_size)
    weights = jnp.ones((shape[0], shape[1] - 1))
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    state: Any = jax.tree.map(
        lambda x: jnp.full(x.shape, 0 if x.dtype == jnp.int32 else 0.01, x.dtype), program.template
    )
    while True:
        for _ in range(STEPS):
            state, metrics = program.step(state, batch, None)
        jax.block_until_ready(metrics)
        yield


def serve() -> None:
    """Prints how long a run of a step took, for each name of a case that is read."""
    from train.process import keep_freed_memory

    keep_freed_memory()
    cases = {name: step_of(name) for name in CASES}
    for line in sys.stdin:
        name = line.strip()
        start = time.perf_counter()
        next(cases[name])
        print(json.dumps((time.perf_counter() - start) / STEPS), flush=True)


def started(checkout: Path) -> subprocess.Popen[str]:
    """Starts a process that serves the steps of a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    return subprocess.Popen(
        [sys.executable, str(HERE), "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=checkout,
        env=environment,
    )


def ask(process: subprocess.Popen[str], case: str) -> float:
    """Returns the seconds that a step of a case takes."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{case}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--cases", choices=CASES, nargs="+", default=list(CASES), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each (9)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        serve()
        return

    from benchmarks.table import markdown
    from tape_jax._src.core.timing import Timing, describe_device

    print(f"{describe_device()}; {STEPS} steps a run, {options.repeats} runs")
    folders = {"before": options.before} if options.before else {}
    processes = {name: started(x.resolve()) for name, x in folders.items()}
    processes["now"] = started(HERE.parents[1])
    rows = []
    for case in options.cases:
        for process in processes.values():
            ask(process, case)  # This compiles.
        seconds: dict[str, list[float]] = {name: [] for name in processes}
        for _ in range(options.repeats):
            for name, process in processes.items():
                seconds[name].append(ask(process, case))
        found = {name: Timing(tuple(x)) for name, x in seconds.items()}
        now = found["now"]
        times = [f"{1e3 * x.median:.2f} +- {100 * x.spread:.0f} %" for x in found.values()]
        rows.append((case, *times, f"{now.ratio(found.get('before', now)):.3f}"))
        print("; ".join(rows[-1]), flush=True)
    for process in processes.values():
        process.communicate()
    header = (f"{name}, ms a step" for name in processes)
    print(f"\n{markdown(('demo', *header, 'now / before'), rows)}")


if __name__ == "__main__":
    main()
