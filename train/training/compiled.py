"""Compiled programs, kept between commands."""

from __future__ import annotations

import os
import sys

from train.data.cache_folder import cache_folder

# The least recently used programs go first.
MOST_BYTES = 1 << 30
LEAST_SECONDS = 0.1


def keep() -> None:
    """Lets jax, where it is yet to be loaded, keep what it compiles in the user's cache folder.

    What the environment says already of jax's persistent cache stays, and holds for processes that
    this one starts: ``JAX_ENABLE_COMPILATION_CACHE=0`` keeps nothing.
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
