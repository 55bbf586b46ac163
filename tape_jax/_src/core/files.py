"""Writing files so that a reader, or a power cut, never meets half of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: str | bytes | Callable[[Path], None]) -> None:
    """Replaces ``path`` all at once and does not return before it is on the disk.

    Args:
      path: the file.
      content: text, which becomes UTF-8, bytes, or a function that writes to the path it is given.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def import_safetensors(what: str) -> Any:
    """Imports the optional package with its numpy part.

    Raises:
      NotImplementedError: if it is not installed; ``what`` names those that need it.
    """
    try:
        import safetensors.numpy
    except ImportError as error:
        raise NotImplementedError(
            f"{what} need the package safetensors: pip install 'tape-jax[pretrained]' ({error})"
        ) from error
    return safetensors


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Returns the library's cache folder: ``TAPE_JAX_CACHE``, or one in the user's cache folder.

    Raises:
      OSError: if there is none: a user may have no home.
    """
    try:
        if own := os.environ.get("TAPE_JAX_CACHE"):
            return Path(own).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tape-jax"
    except RuntimeError as error:
        raise OSError(f"{error} TAPE_JAX_CACHE names a folder for what is kept") from error
