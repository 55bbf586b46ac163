"""Files of results that are on the disk at once, so that work that was killed can go on."""

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
    """Results as lines of JSON, after a first one that says on what they depend.

    Nothing is written before there is a result.
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
          format: what the first line says that the file is.
          about: on what the results depend, in JSON types. What the file does not name, none of its
            results depended on.
          fresh: forget what is there.
          replace: of ``about``, where it was something else: forget what is there. Else it is an
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
            # The last part is what a kill left of a line; else it is empty.
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
          ValueError: a line of which it makes nothing.
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
        """Writes lines down, and returns when they are on the disk."""
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
    """Keeps a second process from the journal at a path meanwhile, by a hidden file beside it.

    Raises:
      ValueError: another process has it.
    """
    lock = path.with_name(f".{path.name}.lock")
    with locked(lock, f"another evaluation is writing {path}: wait until it has ended"):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
