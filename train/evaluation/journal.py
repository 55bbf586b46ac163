"""Files of results that are written to disk at once, so that killed work can resume."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from train.checks import require
from train.files import json_object, locked, sync, write_atomically


class Journal:
    """Results as lines of JSON; the first line says what they depend on.

    Nothing is written before the first result.
    """

    def __init__(
        self,
        path: Path,
        format: str,
        about: dict[str, Any],
        *,
        fresh: bool = False,
        replace: Collection[str] = (),
    ):
        """
        Args:
          path: of the file, which need not exist.
          format: the format that the first line states.
          about: what the results depend on, in JSON types. No result in the file depended on
            entries that it lacks.
          fresh: forget what is there.
          replace: names in ``about``: if one has changed, forget what is there. Else a change is an
            error.

        Raises:
          ValueError: a file of another program, or of results that depend on something else.
        """
        self._path, self._lines = path, list[bytes]()
        self._header = {"format": format, **about}
        self._begun = False
        if path.exists():
            first, *lines = path.read_bytes().split(b"\n")
            found = json_object(first) or {}
            require(
                found.get("format") == format,
                f"{path} was not written by this program: it is left alone; move it away",
            )
            different = {
                name: f"{name} was {found[name]}, and is {value}"
                for name, value in self._header.items()
                if name in found and found[name] != value
            }
            forgotten = fresh or any(name in replace for name in different)
            # The last part is a line cut short by a kill; else it is empty.
            self._lines = [] if forgotten else lines[:-1]
            require(
                not (self._lines and different),
                f"{path} has answers to other questions ({'; '.join(different.values())}): move it "
                "away, or give --fresh to forget them",
            )
            if self._lines:
                self._header = {**found, **self._header}

    def read(self, parse: Callable[[dict[str, Any]], Any]) -> Iterator[Any]:
        """Yields what ``parse`` makes of each line that was there before.

        Raises:
          ValueError: a line that ``parse`` cannot read.
        """
        for number, line in enumerate(self._lines, start=2):
            try:
                yield parse(json_object(line) or {})
            except (KeyError, TypeError, ValueError):
                raise ValueError(
                    f"{self._path} is damaged in line {number}: move it away, or give --fresh to "
                    "forget it"
                ) from None

    def add(self, lines: Iterable[dict[str, Any]]) -> None:
        """Writes lines, and returns when they are on disk."""
        if not self._begun:
            whole = json.dumps(self._header).encode(), *self._lines
            write_atomically(self._path, b"".join(line + b"\n" for line in whole))
            self._begun = True
        with open(self._path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        sync(self._path.parent)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Locks the journal at a path against other processes, by a hidden file beside it.

    Raises:
      ValueError: another process has it.
    """
    lock = path.with_name(f".{path.name}.lock")
    with locked(lock, f"another evaluation is writing {path}: wait until it has ended"):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
