"""Writes files so that readers and power cuts never find them half written, and locks them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from train.checks import require


def write_atomically(path: Path, content: str | bytes | Callable[[Path], None]) -> None:
    """Replaces ``path`` atomically, and returns once it is on the disk.

    Args:
      path: the file.
      content: text (written as UTF-8), bytes, or a function that writes to the path it is given.
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


def sync(path: Path) -> None:
    """Returns once a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Holds a lock, which is an empty file, and keeps other processes from it.

    The file is opened for writing, as locks on NFS must be.

    Raises:
      ValueError: with the message ``busy``, if another process has it.
    """
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file, and another process made a new one.
            free = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            free = False
        require(free, busy)
        yield


def json_object(line: bytes) -> dict[str, Any] | None:
    """Parses a line as a whole JSON object, else returns None."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def cache_folder() -> Path:
    """Returns ``TAPE_JAX_CACHE``, else ``tape-jax`` in the user's cache folder.

    The latter is ``XDG_CACHE_HOME``, else ``~/.cache``.

    Raises:
      OSError: if there is none: a user may have no home.
    """
    try:
        if own := os.environ.get("TAPE_JAX_CACHE"):
            return Path(own).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tape-jax"
    except RuntimeError as error:
        raise OSError(f"{error} TAPE_JAX_CACHE names a folder for what is kept") from error
