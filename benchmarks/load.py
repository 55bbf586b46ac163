"""Measures the memory to load and save a checkpoint, relative to its size.

    python -m benchmarks.load [--megabytes=600]

It writes a synthetic checkpoint into a temporary folder, and loads and saves it in separate
processes. It prints how far a process's resident memory rose at its highest (``VmHWM`` of Linux)
above its level before, with the backend started, divided by the size of the tensors. For saving,
the parameters themselves are left out: they are there before.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tape_jax as tape
from tape_jax._src.core.timing import describe_device

LAYERS, WIDTH = 8, 1024
# With MLPs of width 1.
LEAST_MEGABYTES = math.ceil(2 * LAYERS * (4 * WIDTH**2 + 3 * WIDTH) / 0.9 / 2**20)


def model_of(megabytes: int) -> tape.Transformer:
    """Returns a model with parameters of about that size in bfloat16, a tenth of it embeddings."""
    total = megabytes * 2**20 / 2
    layer = 0.9 * total / LAYERS - 4 * WIDTH**2
    config = tape.ModelConfig(
        vocab_size=int(0.05 * total / WIDTH),
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=8,
        intermediate_size=int(layer / 3 / WIDTH),
        position="rope",
        dtype="bfloat16",
        param_dtype="bfloat16",
    )
    return tape.Transformer(config)


def write(path: Path, megabytes: int) -> int:
    """Writes the checkpoint and returns its size in bytes; its parameters take no memory."""
    model = model_of(megabytes)
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
    values = jax.tree.map(lambda x: np.broadcast_to(np.ones((), x.dtype), x.shape), shapes)
    tape.save_pretrained(path, model, values)
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def memory(field: str) -> int:
    """Bytes of this process: ``VmRSS``, resident now, or ``VmHWM``, at the highest so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise NotImplementedError(f"/proc/self/status has no {field}: this benchmark needs Linux")


def measure(path: Path) -> dict[str, Any]:
    """Measures the rise of this process's memory while it loads, and while it saves, in bytes."""
    jnp.zeros(()).block_until_ready()
    before = memory("VmRSS")
    model, variables = tape.from_pretrained(path)
    jax.block_until_ready(variables)
    loaded = memory("VmHWM")
    resident = memory("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        tape.save_pretrained(Path(folder) / "saved", model, variables, like=path)
    size = sum(x.nbytes for x in jax.tree.leaves(variables))
    saving = memory("VmHWM") - max(loaded, resident)
    return {"size": size, "load": loaded - before, "save": saving, "start": before}


def main(argv: list[str] | None = None) -> None:
    """Prints the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=600, help="size of the checkpoint")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure is not None:
        print(json.dumps(measure(args.measure)))
        return
    if args.megabytes < LEAST_MEGABYTES:
        parser.error(f"--megabytes {args.megabytes}: at least {LEAST_MEGABYTES}")
    print(describe_device())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        write(path, args.megabytes)
        command = [sys.executable, "-m", "benchmarks.load", f"--measure={path}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    size = found["size"]
    print(f"parameters  {size / 2**20:7.0f} MiB")
    for what in ("load", "save"):
        print(f"{what:10}  {found[what] / 2**20:7.0f} MiB  {found[what] / size:5.2f}")


if __name__ == "__main__":
    main()
