"""The command :mod:`tape_jax.parity`: compares recorded files by kind, and reports."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

from tape_jax._src.parity import contextual, language_models
from tape_jax._src.parity.deviations import TOLERANCE, read_arrays


def report(path: str | Path) -> tuple[list[str], bool]:
    """Compares one file in both precisions.

    Returns:
      The lines to print, and whether everything is within tolerance.

    Raises:
      ValueError: if the file cannot be read; others if its contents are not what is needed.
    """
    arrays, unused = read_arrays(path), ()
    if contextual.is_one(arrays):
        file = contextual.ContextualFile(path, arrays)
        name, results = file.name, functools.partial(contextual.compare, file)
    else:
        golden = language_models.Golden(path)
        name, results = golden.config["variant"], functools.partial(language_models.compare, golden)
        unused = golden.config.get("unused_params", ())
    lines, ok = [f"{path} ({name})"], True
    for precision in TOLERANCE:
        for result in results(precision):
            lines.append(f"  {result}")
            ok &= isinstance(result, str) or result.ok
    if unused:
        lines.append(f"  not compared, no effect on the loss: {', '.join(unused)}")
    return lines, ok


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tape_jax.parity",
        description="Compare this model with recorded runs of the published implementation.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE.npz")
    failed, unread = [], []
    for path in parser.parse_args(argv).files:
        try:
            lines, ok = report(path)
        except Exception as error:  # Whatever a damaged file leads to: the next ones are read.
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            said = f"{kind}{error}"
            print(f"error: {said if path in said else f'{path}: {said}'}", file=sys.stderr)
            unread.append(path)
            continue
        print("\n".join(lines), flush=True)
        if not ok:
            failed.append(path)
    if failed:
        print(f"past tolerance: {', '.join(failed)}")
    if unread:
        print(f"not compared: {', '.join(unread)}", file=sys.stderr)
    return 1 if failed else 2 if unread else 0
