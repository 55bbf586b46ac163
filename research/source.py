"""Which code made a result: the commit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Where there is code that a number can depend on.
CODE = ("tape_jax", "train", "research", "configs")


def describe_source() -> dict[str, Any]:
    """Describe the code as it is now.

    Returns:
      ``commit``, and ``dirty``: whether the code differs from it; None where there is no git.
    """
    changes = _git("status", "--porcelain", "--", *(f"{folder}/**.py" for folder in CODE))
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
    }


def _git(*arguments: str) -> str | None:
    """Return what git says of this checkout; None if there is no git, or this is none."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
