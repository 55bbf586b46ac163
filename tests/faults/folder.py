"""What is found in the folder of a run, in whatever state a fault has left it."""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np

from tests.faults.process import Lost
from train.training import runs


def saved(run: Path) -> int:
    """The step of the newest checkpoint that counts; -1: none."""
    folder = run / "checkpoints"
    names = [path.stem for path in folder.glob("*.sha256")] if folder.is_dir() else []
    return max(map(int, names), default=-1)


def newest_checkpoint(run: Path) -> Path:
    """The folder of the newest checkpoint that counts."""
    return run / "checkpoints" / f"{saved(run):08d}"


def checkpoint_entries(run: Path) -> list[str]:
    """Names in the folder of the checkpoints."""
    try:
        return os.listdir(run / "checkpoints")
    except FileNotFoundError:
        return []


def is_writing(run: Path) -> bool:
    """Whether a checkpoint is half written."""
    return any(not re.fullmatch(r"\d{8}(\.sha256)?", name) for name in checkpoint_entries(run))


def is_unsealed(run: Path) -> bool:
    """Whether a checkpoint has no manifest yet."""
    names = set(checkpoint_entries(run))
    return any(re.fullmatch(r"\d{8}", name) and f"{name}.sha256" not in names for name in names)


def is_there(run: Path) -> bool:
    """Whether the run was made."""
    return (run / "experiment.json").exists()


def describe(run: Path) -> str:
    """What a kill left behind."""
    if not is_there(run):
        return "before the run was made"
    if is_writing(run):
        return "with a checkpoint half written"
    if is_unsealed(run):
        return "with a checkpoint not yet counted"
    return "elsewhere"


def restored(run: Path) -> runs.TrainedRun:
    """The newest checkpoint of a run, which must be intact and finite."""
    damaged: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        # A copy, so that nothing depends on what else the folder is used for.
        copy = Path(shutil.copytree(run, Path(scratch) / "run"))
        trained = runs.restore_model(copy, damaged.append)
    if damaged:
        raise Lost(damaged[0])
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(trained.variables)):
        raise Lost(f"a parameter of step {trained.step} is not finite")
    return trained


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def flip(path: Path, draw: random.Random) -> None:
    """Flips one bit of a file."""
    data = np.fromfile(path, np.uint8)
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    data.tofile(path)
