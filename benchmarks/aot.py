"""Compiles for GPUs and TPUs on a machine that has none, and reports what the compilers say.

    python -m benchmarks.aot [--targets sm_90a v5e] [--programs WORD ...] [--out FILE.md]

:mod:`train.analysis.ahead_of_time` says what must be installed. Programs are attention
forward and backward by every backend, the position update, and whole training steps. It prints
three tables: programs, with the memory that the compiler plans; steps, with what they only move;
and kernels, with what ``ptxas`` reports. It shows neither speed nor whether numbers are right.

The compiler's own counts of operations and bytes count a loop's body once and do not see inside a
kernel, so ``needed`` is what the mathematics needs (:mod:`train.training.flops`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
from jax._src.lib import _jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

import tape_jax as tape
from benchmarks.moves import KINDS, Move, moves
from benchmarks.table import markdown, mebibytes
from benchmarks.train_step import PRESETS, row_config
from research.overhead import Memory, TrainingStep
from tape_jax._src.attention import BACKENDS
from tape_jax._src.attention import attention as attend
from tape_jax._src.core.files import write_atomically
from tape_jax._src.model.block import MOST_UNROLLED
from train.analysis.ahead_of_time import TARGETS, Cuda, Tpu, as_if_on, ptxas
from train.training.flops import PLAIN, STATE, attention_flops, model_flops


@dataclasses.dataclass(frozen=True)
class AotProgram:
    """A program to be compiled.

    Attributes:
      name: for the tables.
      build: makes the function and its arguments' shapes.
      needed: operations that the mathematics needs.
      loop: whether layers of a step stay in a loop.
    """

    name: str
    build: Callable[[], tuple[Any, Sequence[Any]]]
    needed: float
    loop: bool = False


# The names of these targets in the results that are kept.
CHOSEN = {
    "sm_80": TARGETS["a100"],
    "sm_89": dataclasses.replace(
        TARGETS["a100"], name="NVIDIA L40S", capability=(8, 9), processors=142,
        shared_memory=102_400, l2=100_663_296, memory=48 * 2**30, clock=2.52, fpus=128,
    ),
    "sm_90a": TARGETS["h100"],
    "sm_100": dataclasses.replace(
        TARGETS["h100"], name="NVIDIA B200", capability=(10, 0), processors=148, l2=132_644_864,
        memory=180 * 2**30, clock=1.97,
    ),
    "v5e": TARGETS["v5e"],
}  # fmt: skip

BATCH, LENGTH, HEADS = 4, 4096, 12


def attention_program(
    backend: str,
    dim: int,
    dtype: str,
    *,
    state: bool = True,
    options: Mapping[str, Any] | None = None,
) -> AotProgram:
    """Returns causal attention, forward and backward, by one backend and its ``options``."""

    def loss(q, k, v, e):
        o, a = attend(
            q, k, v, state=e, attend_state=state, is_causal=True, implementation=backend,
            options=options,
        )  # fmt: skip
        return sum(jnp.sum(x.astype(jnp.float32)) for x in (o, a) if x is not None)

    def build():
        x = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, dim), dtype)
        e = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3))), (x, x, x, e)

    products = (STATE if state else PLAIN).both
    needed = attention_flops(products, LENGTH, batch=BATCH, heads=HEADS, head_dim=dim)
    what = "" if state else " (RoPE)"
    name = f"attention{what} {backend} D {dim} {dtype}"
    return AotProgram(name, build, needed)


def update_program(dtype: str, mix: str, by: str, *, backward: bool) -> AotProgram:
    """Returns the C4 model's position update, forward or forward and backward."""
    update = functools.partial(tape.update_state, implementation=by)
    config = PRESETS["c4"].model
    heads, dim, hidden = config.num_heads, config.dim, config.hidden_size
    shape = (16, 1024, heads, dim)

    def both(given, *args):
        out, pull = jax.vjp(update, *args)
        return out, pull(given)

    def build():
        make = functools.partial(tape.init_update, attention_mix=mix)
        params = jax.eval_shape(lambda: make(jax.random.key(0), hidden, heads))
        e = jax.ShapeDtypeStruct(shape, dtype)
        x = jax.ShapeDtypeStruct((*shape[:2], hidden), config.dtype)
        if backward:
            return jax.jit(both), (e, params, e, e, x)
        return jax.jit(update), (params, e, e, x)

    width = 4 * heads
    per_token = hidden * width + width * heads**2 + heads**2 * dim
    per_token += heads**2 * dim if mix == "heads" else 0
    needed = 2 * per_token * shape[0] * shape[1] * (3 if backward else 1)
    passes = "forward and backward" if backward else "forward"
    name = f"position update {by} {mix} {dtype}, {passes}"
    return AotProgram(name, build, needed)


def step_program(
    row: str, length: int, tokens: int, *, model: str = "c4", loop: bool = False
) -> AotProgram:
    """Returns a training step; ``loop`` keeps its layers in a loop, whatever the default says."""
    config, batch = row_config(PRESETS[model].model, row), tokens // length

    def build():
        step = TrainingStep(config, batch, length)
        return step.function, step.shapes()

    name = f"step {model} {row} T {length}, {tokens} tokens{', in a loop' if loop else ''}"
    return AotProgram(name, build, model_flops(config, batch, length), loop)


def programs(target: Cuda | Tpu) -> list[AotProgram]:
    """Returns the programs to compile for a target: attention, updates and training steps."""
    if isinstance(target, Tpu):
        kernels, plain = [name for name in ("splash",) if name in BACKENDS], "splash"
    else:
        skipped = ("reference", "chunked", "splash")
        kernels, plain = [name for name in BACKENDS if name not in skipped], "cudnn"
    found = [attention_program(name, dim, "bfloat16") for name in kernels for dim in (64, 128)]
    if "pallas" in kernels:
        found.append(attention_program("pallas", 64, "float32"))
        found.append(attention_program("pallas", 128, "float32"))
    if plain in BACKENDS:
        found += [attention_program(plain, dim, "bfloat16", state=False) for dim in (64, 128)]
    ways = ("reference",) if isinstance(target, Tpu) else ("reference", "fused")
    for by, dtype in itertools.product(ways, ("float32", "bfloat16")):
        found += [update_program(dtype, "heads", by, backward=back) for back in (False, True)]
    best = [name for name in ("pallas", "tokamax_mosaic", "splash") if name in kernels]
    # A v5e has less memory.
    tokens = 4096 if isinstance(target, Tpu) else PRESETS["c4"].tokens
    for length in PRESETS["c4"].lengths:
        if length <= tokens:
            rows = [f"{encoding}:{b}" for b in ("chunked", *best) for encoding in ("rope", "tape")]
            found += [step_program(row, length, tokens) for row in rows]
    if isinstance(target, Cuda) and "cudnn" in kernels:
        found += list(_default_steps())
    return found


def _default_steps() -> Iterator[AotProgram]:
    """Yields steps by today's defaults and by earlier ones: layers in a loop, and XLA's update."""
    for model, length in itertools.product(("c4", "1b"), (1024, 8192)):
        for row, loop in itertools.product(("rope:cudnn", "tape:cudnn:reference"), (True, False)):
            yield step_program(row, length, 16_384, model=model, loop=loop)
        yield step_program("tape:cudnn:fused", length, 16_384, model=model)


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """The report of ``ptxas`` on a kernel, with the sizes of its launch.

    Attributes:
      name: its name in the program.
      registers: of a thread.
      spills: bytes stored and loaded because registers did not suffice.
      shared_memory: of a block, in bytes.
      threads: of a block; for Mosaic's kernels neither is known.
      serialized: whether Hopper's asynchronous matrix products wait for one another.
    """

    name: str
    registers: int
    spills: tuple[int, int]
    shared_memory: int | None
    threads: int | None
    serialized: bool


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A program that compiled, or the error.

    Attributes:
      target, program: what was compiled for what.
      seconds: how long that took.
      error: first line of the error, or an empty string.
      memory: the compiler's plan.
      counted: operations and bytes by the compiler's own count.
      kernels: of a GPU program.
      moves: what it only moves, by kind.
    """

    target: str
    program: AotProgram
    seconds: float
    error: str = ""
    memory: Memory | None = None
    counted: tuple[float, float] | None = None
    kernels: tuple[KernelReport, ...] = ()
    moves: Mapping[str, Move] = dataclasses.field(default_factory=dict)


def compile_for(target: str, device: Any, program: AotProgram, axis: str = "device") -> Compilation:
    """Compiles a program for a device that need not be here; every error is a result.

    Args:
      target: its name.
      device: a stand-in for it.
      program: what is compiled, on a mesh of this device.
      axis: of the mesh.
    """
    mesh = Mesh(np.array([device]), (axis,))
    place = NamedSharding(mesh, PartitionSpec())
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(use_abstract_mesh(mesh.abstract_mesh))
        stack.enter_context(as_if_on(CHOSEN[target], device))
        if program.loop:
            stack.enter_context(mock.patch.dict(MOST_UNROLLED, clear=True))
        try:
            function, shapes = program.build()
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes
            )
            options = reporting_options(folder) if device.platform in ("gpu", "cuda") else {}
            with reports_of_mosaic(folder / "mosaic.ptxas"):
                compiled = function.lower(*shapes).compile(compiler_options=options)
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            reason = f"{type(error).__name__}: {reason}"
            return Compilation(target, program, time.perf_counter() - start, reason)
        seconds = time.perf_counter() - start
        counted = counts(compiled)
        kernels = tuple(read_kernels(folder))
        moved = moves(compiled.as_text())
        plan = Memory.of(compiled)
        return Compilation(target, program, seconds, "", plan, counted, kernels, moved)


def counts(compiled: jax.stages.Compiled) -> tuple[float, float] | None:
    """Returns operations and bytes by the compiler's own count, if it has one."""
    analysis = compiled.cost_analysis()
    if not analysis:
        # A GPU that is not here has no analysis of its own; that of the CPU reads any program.
        (module,) = compiled.runtime_executable().hlo_modules()
        client = jax.devices("cpu")[0].client
        analysis = _jax.hlo_module_cost_analysis(client, module)
    return analysis.get("flops", 0.0), analysis.get("bytes accessed", 0.0)


def reporting_options(folder: Path) -> dict[str, Any]:
    """Returns compiler options that leave ptxas' reports and the launches of kernels in ``folder``.

    XLA is pointed at a tool folder whose ``ptxas`` calls the real one and keeps what it says.
    """
    real, tools = ptxas(), folder / "cuda" / "bin"
    tools.mkdir(parents=True)
    (tools.parent / "nvvm").symlink_to(real.parent.parent / "nvvm")
    script = tools / "ptxas"
    script.write_text(f'#!/bin/sh\nexec "{real}" -v "$@" 2>"$(mktemp "{folder}/XXXXXX.ptxas")"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {
        "xla_gpu_cuda_data_dir": str(tools.parent),
        # Whatever flags say: a lower level gives other kernels.
        "xla_backend_optimization_level": 3,
        "xla_gpu_enable_libnvptxcompiler": False,
        "xla_dump_to": str(folder / "dump"),
    }


@contextlib.contextmanager
def reports_of_mosaic(path: Path) -> Iterator[None]:
    """Keeps what ``ptxas`` says of Mosaic's kernels, which Mosaic itself compiles and prints."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_PTXAS="1"))
        file = stack.enter_context(path.open("w"))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            kept = os.dup(number)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, number)
            os.dup2(file.fileno(), number)
        yield


ENTRY = re.compile(r"Compiling entry function '(\S+)'")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
SERIALIZED = re.compile(r"wgmma\S* instructions are serialized .* function '(\S+)'")
REGISTERS = re.compile(r"Used (\d+) registers")
MOSAIC = "_mosaic_gpu_kernel"
LAUNCH = re.compile(r"\] (\S+) grid: .* threads: \[(\d+), (\d+), (\d+)\]\s+shared_memory: (\d+)")


def read_kernels(folder: Path) -> Iterator[KernelReport]:
    """Yields kernels that the reports in ``folder`` describe and that the program launches."""
    launches = {}
    for path in sorted((folder / "dump").glob("*thunk_sequence.txt")):
        for name, x, y, z, shared in LAUNCH.findall(path.read_text()):
            launches[name] = int(x) * int(y) * int(z), int(shared)
    reports = {}
    for path in sorted(folder.glob("*.ptxas")):
        text = path.read_text()
        serialized = set(SERIALIZED.findall(text))
        _, *parts = ENTRY.split(text)
        for name, report in zip(parts[::2], parts[1::2], strict=True):
            spills, registers = SPILLS.search(report), REGISTERS.search(report)
            if spills and registers:
                spilled = int(spills[1]), int(spills[2])
                reports[name] = int(registers[1]), spilled, name in serialized
    for name, (registers, spills, serialized) in reports.items():
        # Mosaic launches its kernels itself.
        if name in launches or name.endswith(MOSAIC):
            threads, shared = launches.get(name, (None, None))
            short = name.removesuffix(MOSAIC)
            yield KernelReport(short, registers, spills, shared, threads, serialized)


def program_table(results: Sequence[Compilation]) -> str:
    """Returns the table of programs, one line for each."""
    header = (
        "program", "target", "compiled", "kernels", "that spill", "arguments MiB", "outputs MiB",
        "temporary MiB", "needed GFLOP", "counted GFLOP", "counted MiB",
    )  # fmt: skip
    rows = []
    for got in results:
        plan, counted = got.memory, got.counted or (None, None)
        spilling = sum(any(kernel.spills) for kernel in got.kernels)
        rows.append(
            (
                got.program.name,
                got.target,
                f"no: {got.error[:160]}" if got.error else f"{got.seconds:.0f} s",
                len(got.kernels) or "-",
                spilling if got.kernels else "-",
                *(
                    mebibytes(size)
                    for size in (
                        (plan.arguments, plan.outputs, plan.temporary) if plan else (None,) * 3
                    )
                ),
                f"{got.program.needed / 1e9:.1f}",
                "-" if counted[0] is None else f"{counted[0] / 1e9:.1f}",
                mebibytes(counted[1]),
            )
        )
    return markdown(header, rows)


def move_table(results: Sequence[Compilation]) -> str:
    """Returns a table of training steps: how often each only moves numbers, and MiB written."""
    rows = [
        (
            got.program.name,
            got.target,
            *(f"{move.count}, {mebibytes(move.written)}" for move in got.moves.values()),
        )
        for got in results
        if got.moves and got.program.name.startswith("step")
    ]
    return markdown(("program", "target", "all instructions, MiB written", *KINDS), rows)


def kernel_table(results: Sequence[Compilation]) -> str:
    """Returns a table of the kernels of attention and the update, and of all others that spill."""
    header = ("kernel", "program", "target", "threads", "registers", "spilled bytes", "shared KiB")
    rows = []
    for got in results:
        for kernel in got.kernels:
            named = any(word in kernel.name for word in ("attention", "tape_", "mosaic"))
            ours = named or any(kernel.spills)
            if ours:
                note = ", products wait" if kernel.serialized else ""
                rows.append(
                    (
                        kernel.name + note,
                        got.program.name,
                        got.target,
                        kernel.threads or "-",
                        kernel.registers,
                        f"{kernel.spills[0]} + {kernel.spills[1]}",
                        f"{kernel.shared_memory / 1024:.1f}" if kernel.shared_memory else "-",
                    )
                )
    return markdown(header, rows)


def versions() -> str:
    """Returns the packages that the results depend on."""
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "libtpu", "tokamax")
    found = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles, prints and writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--targets", nargs="+", choices=CHOSEN, default=["sm_90a", "v5e"])
    parser.add_argument(
        "--programs", nargs="+", metavar="WORD", help="only programs whose names have all of these"
    )
    parser.add_argument("--out", type=Path, help="also write Markdown to this file")
    options = parser.parse_args(argv)
    gpus = [name for name in options.targets if isinstance(CHOSEN[name], Cuda)]
    if len(gpus) > 1:
        # jax 0.11.2 does so silently.
        parser.error(f"Mosaic GPU compiles all kernels of a process for one GPU; got {gpus}")
    jax.config.update("jax_platforms", "cpu")
    results: list[Compilation] = []
    command = " ".join(["python -m benchmarks.aot", *(sys.argv[1:] if argv is None else argv)])
    text = ""
    for name in options.targets:
        try:
            device, *_ = CHOSEN[name].devices()
        except NotImplementedError as error:
            parser.error(f"{name}: {error}")
        for program in programs(CHOSEN[name]):
            if not all(word in program.name for word in options.programs or []):
                continue
            results.append(compile_for(name, device, program))
            done = results[-1]
            print(f"{name}: {program.name}: {done.error or 'compiled'}", flush=True)
            tables = program_table(results), move_table(results), kernel_table(results)
            text = "\n\n".join([versions(), *tables]) + "\n"
            if options.out:
                write_atomically(options.out, f"Command: `{command}`\n\n{text}")
    print(f"\n{text}")


if __name__ == "__main__":
    main()
