"""Where what can be made again is kept between commands."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``TAPE_JAX_CACHE``, else ``tape-jax`` in the user's cache folder.

    That is ``XDG_CACHE_HOME``, else ``~/.cache``. As ``tape_jax._src.core.files.cache_folder``,
    without loading jax.

    Raises:
      OSError: if there is none: a user may have no home.
    """
    try:
        if own := os.environ.get("TAPE_JAX_CACHE"):
            return Path(own).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tape-jax"
    except RuntimeError as error:
        raise OSError(f"{error} TAPE_JAX_CACHE names a folder for what is kept") from error
