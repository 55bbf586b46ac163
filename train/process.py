"""Lets a process keep freed memory, and keep compiled programs for all commands."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

from train.files import cache_folder

# The least recently used programs go first.
MOST_BYTES = 1 << 30
LEAST_SECONDS = 0.1


def keep_programs() -> None:
    """Lets jax, if it is not yet loaded, keep what it compiles in the user's cache folder.

    Settings of jax's persistent cache in the environment stay, and hold for processes that this one
    starts: ``JAX_ENABLE_COMPILATION_CACHE=0`` keeps nothing.
    """
    if "jax" in sys.modules or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        folder = cache_folder() / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(MOST_BYTES))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", str(LEAST_SECONDS))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")


def compile_in_turn(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program; the next call of the lowered function finds it.

    If jax keeps what it compiles, processes that are about to compile the same program take turns:
    all except the first find it there.
    """
    with _turn(lowered):
        return lowered.compile()


@contextlib.contextmanager
def _turn(lowered: jax.stages.Lowered) -> Iterator[None]:
    import jax

    folder, kept = (
        jax.config.values[f"jax_{name}"]
        for name in ("compilation_cache_dir", "enable_compilation_cache")
    )
    kept = kept and folder and "://" not in folder
    # Processes of one program wait for one another anyway, and the first keeps what is compiled.
    if not kept or jax.process_count() > 1:
        yield
        return
    digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # jax warns of a folder that it cannot write to.
            locks = Path(folder) / "turns"
            locks.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(locks / digest[:2], "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Parameters of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8


def keep_freed_memory() -> None:
    """Lets glibc keep freed memory for the next allocation; elsewhere it does nothing.

    XLA allocates the temporary memory of a step anew for every step on the CPU. By default glibc
    fetches this memory from the kernel each time, page by page, and hands it back. That took 18 of
    the 48 milliseconds of processor time of a step of ``configs/addition_demo.py``. On one core all
    threads share an arena, since a thread's own holds no block over 64 MB; on several they would
    wait for one another.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    for parameter in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
        libc.mallopt(parameter, (1 << 31) - 1)
    libc.mallopt(_TOP_PAD, 1 << 26)
    if len(os.sched_getaffinity(0)) == 1:
        libc.mallopt(_ARENA_MAX, 1)
