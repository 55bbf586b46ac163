"""Which code made a result: the commit, and a hash of what a number can depend on."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

from tape_jax._src.core.checks import require

ROOT = Path(__file__).parents[1]
# All that a training and its evaluation import, and what measures. What stands above decides which
# runs are made; every record has the whole configuration of its own.
MODULES = (
    "tape_jax",
    *("train/data", "train/evaluation", "train/tasks", "train/experiment", "train/training"),
    *("train/analysis", "train/process.py"),
    *(f"train/compare/{name}.py" for name in ("evaluations", "processes", "sweep")),
    "research/overhead.py",
)


def describe_source() -> dict[str, Any]:
    """The code as it is now.

    Returns:
      ``commit``, and ``dirty``: whether :data:`MODULES` or configs differ from it; None where there
      is no git. ``modules``: the hash.
    """
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--", *MODULES, "configs")
    return {
        "commit": commit,
        "dirty": None if changes is None else bool(changes),
        "modules": hash_of_modules(ROOT),
    }


def hash_of_modules(root: Path) -> str:
    """The start of the SHA-256 of names and content of the Python files of :data:`MODULES`."""
    digest = hashlib.sha256()
    for module in MODULES:
        here = root / module
        paths = [here] if here.is_file() else sorted(here.rglob("*.py"))
        require(bool(paths), f"{here} has no Python files")
        for path in paths:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()[:16]


def _git(*arguments: str) -> str | None:
    """What git says of this checkout; None if there is no git, or this is none."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
