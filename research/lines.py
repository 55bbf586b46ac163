"""Files of JSON lines: first the fields that all records share, then a line for each record.

The first line is ``{"format": ..., "shared": {...}}``. Every other line is a record without the
shared fields. A field inside a field is named by its path, as in ``{"name": "tape-seed1",
"experiment.seed": 1}``, and replaces the shared value. If several lines have one name, the last one
counts.

Lines are appended by one process at a time. A process that is killed while it writes can leave only
a part of the last line: readers skip it, and the next writer removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from train.checks import require
from train.files import json_object, sync, write_atomically

Fields = Mapping[str, Any]


class Contents(NamedTuple):
    """The contents of a file.

    Attributes:
      records: by name.
      problems: a sentence for each line that cannot be read, and is left out.
    """

    records: dict[str, dict[str, Any]]
    problems: list[str]


def read(path: Path, format: str) -> Contents:
    """Returns the records of a file of this format; none if there is no file."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            data = file.read()
    except FileNotFoundError:
        return Contents({}, [])
    return _parsed(data, path, format)


def append(path: Path, format: str, record: Fields, shared: Sequence[str]) -> None:
    """Adds a record, and returns once it is on the disk.

    Args:
      path: the file, made with its folder if it does not exist.
      format: of the file.
      record: in JSON types, with a ``name``.
      shared: fields that the records to come are expected to share with the first one.

    Raises:
      ValueError: the file has another format, or a number is not finite.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path) as file:
        data = file.read()
        end = data.rfind(b"\n") + 1
        before = ""
        if end and json_object(data[end:]):
            before = "\n"
        elif end < len(data):
            file.truncate(end)
        if end:
            common = _shared(data[: data.index(b"\n")], path, format)
        else:
            common = {key: record[key] for key in shared}
            before = _header(format, common)
        # The file is open for appending: this goes to the end, whatever was read.
        file.write((before + _line(difference(common, record))).encode())
        file.flush()
        os.fsync(file.fileno())
    if not end:
        sync(path.parent)


def rewrite(path: Path, format: str, shared: Sequence[str]) -> None:
    """Rewrites a file, so that its first line has whatever its records share of these fields.

    A file with a line that cannot be read is left as it is.
    """
    with _locked(path) as file:
        contents = _parsed(file.read(), path, format)
        if contents.records and not contents.problems:
            write_atomically(path, text(format, list(contents.records.values()), shared))


def text(format: str, records: Sequence[Fields], shared: Sequence[str]) -> str:
    """Returns a file's content, with what all records share of some fields in its first line.

    A record whose field is None is ignored there if others have a value.
    """
    header: dict[str, Any] = {}
    for key in shared:
        has = [{key: record[key]} for record in records if key in record]
        header |= common([one for one in has if one[key] is not None] or has)
    lines = (_line(difference(header, record)) for record in records)
    return _header(format, header) + "".join(lines)


def common(records: Sequence[Fields]) -> dict[str, Any]:
    """Returns the fields in which all records agree, and the parts of fields in which they do.

    A field is divided if one record's fields of it are in every other: those made later may have
    more.
    """
    if not records:
        return {}
    agreed = {}
    for key, value in records[0].items():
        values = [record[key] for record in records if key in record]
        if len(values) < len(records):
            continue
        if all(other == value for other in values):
            agreed[key] = value
        elif all(isinstance(other, dict) for other in values):
            fewest = min(values, key=len).keys()
            if all(fewest <= other.keys() for other in values):
                agreed[key] = common(values)
    return agreed


def difference(shared: Fields, record: Fields, start: str = "") -> dict[str, Any]:
    """Returns a record's fields that are not shared, by path; names have no dots."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        require("." not in key, f"a field of a record has a dot in its name: {key!r}")
        if key in shared and shared[key] == value:
            continue
        there = shared.get(key)
        if isinstance(value, dict) and isinstance(there, dict) and there.keys() <= value.keys():
            found |= difference(there, value, f"{start}{key}.")
        else:
            found[start + key] = value
    return found


def restored(shared: Fields, line: Fields) -> dict[str, Any]:
    """Returns the record that :func:`difference` made a line of."""
    record = _copied(shared)
    for path, value in line.items():
        *groups, key = path.split(".")
        place = record
        for group in groups:
            place = place.setdefault(group, {})
        place[key] = value
    return record


def _copied(value: Any) -> Any:
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, dict) else value


def _parsed(data: bytes, path: Path, format: str) -> Contents:
    *lines, last = data.split(b"\n")
    records: dict[str, dict[str, Any]] = {}
    problems = []
    if json_object(last):
        lines.append(last)
    elif last:
        problems.append(f"{path}: the last line was not written to its end")
    if not lines:
        return Contents(records, problems)
    try:
        shared = _shared(lines[0], path, format)
    except ValueError as error:
        return Contents(records, [str(error)])
    for number, line in enumerate(lines[1:], 2):
        try:
            record = restored(shared, json.loads(line))
            records[record["name"]] = record
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            problems.append(f"{path}: line {number} is damaged: {type(error).__name__}: {error}")
    return Contents(records, problems)


def _shared(line: bytes, path: Path, format: str) -> dict[str, Any]:
    """Returns the shared fields of the first line; ValueError if it has another format."""
    header = json_object(line)
    require(
        header is not None and header.get("format") == format and "shared" in header,
        f"{path} is not a results file of this version: it begins with {line[:60]!r}, expected "
        f"the format {format!r}",
    )
    assert header is not None
    return header["shared"]


def _header(format: str, shared: Fields) -> str:
    return _line({"format": format, "shared": shared})


def _line(fields: Fields) -> str:
    return json.dumps(fields, separators=(",", ":"), allow_nan=False) + "\n"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Opens a file to read and append, locked against other processes until this ends."""
    while True:
        with open(path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # While this process waited, another may have put a new file in its place.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.seek(0)
                yield file
                return
