"""Measurements of this machine in a file of the user's cache folder.

One file holds all that was measured on one kind of device with one version of everything that may
change the outcome: jax, jaxlib, the libraries that bring kernels, and the code of the
implementations. Whatever else lies there is not used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from tape_jax._src.attention.tuning.cases import CallShape, Contender, Measured
from tape_jax._src.core.checks import require
from tape_jax._src.core.files import cache_folder, write_atomically

FORMAT = "tape-jax attention measurements 2"
# Packages other than jax whose kernels, or whose compiler, are measured.
LIBRARIES = (
    "tokamax",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "libtpu",
)
Table = dict[CallShape, list[Measured]]


def folder() -> Path:
    """Where the files are."""
    return cache_folder() / "attention"


def path() -> Path:
    """The file of this machine; it need not be there."""
    digest = hashlib.sha256(json.dumps(key(), sort_keys=True).encode()).hexdigest()
    return folder() / f"{_slug()}-{digest[:12]}.json"


@functools.cache
def key() -> dict[str, Any]:
    """What the measurements of a file hold for."""
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "device": device(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "libraries": versions,
        "kernels": source_hash(),
    }


@functools.cache
def device() -> str:
    """The kind of device; of a CPU the model and the cores that this process may use."""
    kind = jax.local_devices()[0].device_kind
    if jax.default_backend() != "cpu":
        return kind
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{kind} {_processor()}, {cores} cores"


def _processor() -> str:
    try:
        told = re.search(
            r"^(?:model name|CPU part)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:
        told = None
    return told[1].strip() if told else platform.processor() or platform.machine()


def _slug() -> str:
    return "-".join(re.findall(r"\w+", device())).lower()


@functools.cache
def source_hash() -> str:
    """A hash of the code of all implementations."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def write(table: Table) -> Path:
    """Replaces this machine's file."""
    to = path()
    to.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(to, dumps(table))
    return to


def read() -> tuple[Table | None, dict[Path, str]]:
    """What was measured on this machine, or None, and by file why others of it are not used."""
    ignored: dict[Path, str] = {}
    table = None
    try:
        if not folder().is_dir():
            return None, ignored
    except OSError:  # There is none, or it is somebody else's.
        return None, ignored
    own = path()
    for file in sorted(folder().glob(f"{_slug()}-*.json")):
        try:
            found = loads(file.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            ignored[file] = str(error)
        else:
            if file == own:
                table = found
            else:
                ignored[file] = "its name is another file's"
    return table, ignored


def dumps(table: Table) -> str:
    """The content of a file."""
    cases = [
        {
            "shape": dataclasses.asdict(shape),
            "results": [_record(result) for result in results],
        }
        for shape, results in sorted(table.items())
    ]
    record = {"format": FORMAT, "key": key(), "cases": cases, "digest": _digest(cases)}
    return json.dumps(record, indent=1) + "\n"


def loads(text: str, *, check: bool = True) -> Table:
    """The measurements in the content of a file.

    Args:
      text: the content.
      check: whether they must be of this machine as it is now.

    Raises:
      ValueError: if it is damaged, not of this format, or not of this machine (if ``check``).
    """
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"damaged: {error}") from error
    require(
        isinstance(record, dict) and record.get("format") == FORMAT,
        f"not a file of this format, {FORMAT!r}",
    )
    theirs = record.get("key")
    require(isinstance(theirs, dict), "damaged: it does not say what it holds for")
    for name, value in key().items() if check else ():
        require(
            theirs.get(name) == value,
            f"of another {name}: {_brief(theirs.get(name))}, here {_brief(value)}",
        )
    cases = record.get("cases")
    require(_digest(cases) == record.get("digest"), "damaged: its hash is another")
    try:
        return {
            CallShape(**case["shape"]): [_result(each) for each in case["results"]]
            for case in cases
        }
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"damaged: {error}") from error


def _record(result: Measured) -> dict[str, Any]:
    """A result in JSON types, which have no infinity."""
    record = dataclasses.asdict(result)
    return {name: None if value == math.inf else value for name, value in record.items()}


def _result(record: Mapping[str, Any]) -> Measured:
    given = dict(record) | {"contender": Contender(**record["contender"])}
    given["spreads"] = tuple(given["spreads"])
    for name in ("forward", "gradients"):
        given[name] = math.inf if given[name] is None else given[name]
        require(given[name] > 0, f"damaged: a time of {given[name]} s")
    return Measured(**given)


def _brief(value: Any) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)


def _digest(cases: Any) -> str:
    return hashlib.sha256(json.dumps(cases, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Keeps other processes from measuring on this kind of device at the same time."""
    try:
        import fcntl
    except ImportError:  # Not on Windows.
        yield
        return
    folder().mkdir(parents=True, exist_ok=True)
    with open(folder() / f"{_slug()}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
