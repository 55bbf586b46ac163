"""Folders of safetensors: checks their content before reading, and writes them.

The safetensors package checks each file. Values are then read, and files written, tensor by tensor:
the read parts of a mapped file would stay in memory, and the package writes from a dict that holds
all of a file.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from tape_jax._src.core.checks import choose, require
from tape_jax._src.core.files import import_safetensors, sync

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")

# Names of types in safetensors.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DTYPE_NAMES = {ours: theirs for theirs, ours in DTYPES.items()}


def dtype_name(dtype: Any) -> str:
    """The name of a type that checkpoints have, such as ``bfloat16``; ValueError for others."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    return choose("dtype", name, DTYPE_NAMES)


def common_type(types: Collection[str]) -> str:
    """A type, as safetensors names it, that holds the numbers of all of these."""
    if len(set(types)) == 1:
        return next(iter(types))
    return "F64" if "F64" in types else "F32"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a safetensors file.

    Attributes:
      dtype: its type, as safetensors names it.
      shape: its shape.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes; the type must be one of ``DTYPES``."""
        return math.prod(self.shape) * jnp.dtype(DTYPES[self.dtype]).itemsize


@dataclasses.dataclass(frozen=True)
class File:
    """A safetensors file.

    Attributes:
      path: where it is.
      header: its first bytes, up to the values.
      metadata: strings by name.
      tensors: by name, in the order of their values.
      spans: first byte of each tensor's values in the file, and one past the last.
    """

    path: Path
    header: bytes
    metadata: dict[str, str]
    tensors: dict[str, Tensor]
    spans: dict[str, tuple[int, int]]

    def read(self, name: str, first: int = 0, rows: int | None = None) -> np.ndarray:
        """The values of a tensor, or of ``rows`` of its rows from ``first`` on."""
        tensor = self.tensors[name]
        dtype = jnp.dtype(DTYPES[tensor.dtype])
        shape = tensor.shape if rows is None else (rows, *tensor.shape[1:])
        start = self.spans[name][0] + first * math.prod(shape[1:]) * dtype.itemsize
        count = math.prod(shape)
        values = np.fromfile(self.path, dtype, count, offset=start)
        require(values.size == count, f"{self.path} became shorter while it was read")
        return values.reshape(shape)

    def read_bytes(self, name: str) -> np.ndarray:
        """The values of a tensor of any type, as bytes."""
        start, stop = self.spans[name]
        return np.fromfile(self.path, np.uint8, stop - start, offset=start)


@dataclasses.dataclass(frozen=True)
class Folder:
    """A checkpoint.

    Attributes:
      path: the folder.
      config: the content of ``config.json``.
      files: its safetensors files.
      index: the content of the index; None for one file without index.
    """

    path: Path
    config: dict[str, Any]
    files: tuple[File, ...]
    index: dict[str, Any] | None

    @property
    def where(self) -> dict[str, File]:
        """The file of each tensor."""
        return {name: file for file in self.files for name in file.tensors}


def read_folder(path: str | os.PathLike) -> Folder:
    """Reads the configuration of a checkpoint and the headers of its files, but no values.

    Raises:
      ValueError: if it is not a checkpoint, lacks a file, or has a damaged one; if its index leads
        out of it, or disagrees with the files.
      NotImplementedError: if safetensors is not installed.
    """
    folder = Path(path)
    require(folder.is_dir(), f"{folder} is no folder; a checkpoint must be on this machine")
    require(
        (folder / CONFIG).exists(),
        f"{folder} is no checkpoint: it has no {CONFIG}",
    )
    config = read_json(inside(folder, CONFIG))
    single, index = folder / SINGLE, folder / INDEX
    if index.exists():
        content = read_json(inside(folder, INDEX))
        files = _read_shards(folder, content)
        require(
            not single.exists() or SINGLE in content["weight_map"].values(),
            f"{folder} has both {SINGLE} and {INDEX}, which does not list it: its tensors are "
            "there twice; remove one",
        )
        return Folder(folder, config, files, content)
    if single.exists():
        return Folder(folder, config, (read_header(inside(folder, SINGLE)),), None)
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    require(
        not pickles,
        f"{folder} has its tensors in pickles only ({', '.join(pickles)}): reading a pickle runs "
        "whatever code is in it; convert them to safetensors where they are trusted",
    )
    raise ValueError(f"{folder} is no checkpoint: it has neither {SINGLE} nor {INDEX}")


def _read_shards(folder: Path, index: dict[str, Any]) -> tuple[File, ...]:
    """The files that an index lists, each with exactly the tensors that it promises."""
    mapping = index.get("weight_map")
    require(
        isinstance(mapping, dict)
        and bool(mapping)
        and all(isinstance(file, str) for file in mapping.values()),
        f"{folder / INDEX}: weight_map must give the file of each tensor",
    )
    assert isinstance(mapping, dict)
    names = sorted(set(mapping.values()))
    paths = [inside(folder, name) for name in names]
    missing = [name for name, file in zip(names, paths, strict=True) if not file.is_file()]
    require(not missing, f"{folder} lacks {', '.join(missing)}, which {INDEX} lists")
    files, problems = [], []
    for name, path in zip(names, paths, strict=True):
        file = read_header(path)
        files.append(file)
        promised = {tensor for tensor, at in mapping.items() if at == name}
        problems += [f"{name} lacks {tensor}" for tensor in sorted(promised - set(file.tensors))]
        for tensor in sorted(set(file.tensors) - promised):
            other = mapping.get(tensor)
            problems.append(
                f"{name} has {tensor}, which the index "
                + ("does not list" if other is None else f"says to be in {other}")
            )
    require(not problems, f"{folder}: {INDEX} and the files disagree: {'; '.join(problems)}")
    return tuple(files)


def inside(folder: Path, name: str) -> Path:
    """Returns the file of that name in the folder.

    Raises:
      ValueError: if that is not a plain name, or a link out of the folder. The download cache of
        huggingface_hub is allowed: its ``snapshots/*/NAME`` links to ``blobs/*``.
    """
    require(
        Path(name).name == name and name not in ("", ".", "..") and "\0" not in name,
        f"{folder}: files of a checkpoint must be in its folder; got {name!r}",
    )
    roots = [folder]
    if folder.absolute().parent.name == "snapshots":
        roots.append(folder.absolute().parents[1] / "blobs")
    target = Path(os.path.realpath(folder / name))
    require(
        any(target.is_relative_to(os.path.realpath(root)) for root in roots),
        f"{folder}: files of a checkpoint must be in its folder; {name} is a link out of it",
    )
    return folder / name


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      ValueError: if it is not an object, or has a name twice.
    """
    try:
        return _parse(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON object: {error}") from error


def _parse(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = collections.Counter(name for name, _ in pairs)
        twice = [repr(name) for name, count in counts.items() if count > 1]
        require(not twice, f"it has {', '.join(twice)} twice")
        return dict(pairs)

    content = json.loads(text, object_pairs_hook=unique)
    require(isinstance(content, dict), f"got {type(content).__name__}")
    return content


def read_header(path: Path) -> File:
    """Reads the header of a safetensors file, but no values.

    Raises:
      ValueError: if it is not a safetensors file, is damaged, or has a tensor twice.
      NotImplementedError: if safetensors is not installed.
    """
    safetensors = import_safetensors("checkpoints")
    try:
        with safetensors.safe_open(path, framework="np"), open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            text = file.read(size)
        content = _parse(text)
    except (safetensors.SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no safetensors file, or damaged: {error}") from error
    metadata = content.pop("__metadata__", None) or {}
    entries = sorted(content.items(), key=lambda entry: entry[1]["data_offsets"])
    return File(
        path=path,
        header=size.to_bytes(8, "little") + text,
        metadata=metadata,
        tensors={name: Tensor(x["dtype"], tuple(x["shape"])) for name, x in entries},
        spans={
            name: (8 + size + x["data_offsets"][0], 8 + size + x["data_offsets"][1])
            for name, x in entries
        },
    )


def make_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The header of a safetensors file with the values in the order of ``tensors``."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.nbytes
        offsets = [start, stop]
        content[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        start = stop
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, chunks: Iterable[bytes | np.ndarray]) -> None:
    """Writes bytes and arrays one after the other; on the disk before this returns."""
    with open(path, "xb") as file:
        for chunk in chunks:
            if isinstance(chunk, bytes):
                file.write(chunk)
            else:
                # Not every type of numpy's extensions has the buffer protocol; bytes have.
                file.write(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)
            # Freed before the next one is made.
            del chunk
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to be filled, renamed to ``path`` when the block ends without an error.

    Raises:
      ValueError: if ``path`` exists and is not an empty folder.
    """
    free = not os.path.lexists(path) or (
        path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    )
    require(free, f"{path} exists and is no empty folder; nothing is overwritten")
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: a process that was killed may have had the same number.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(path.parent)


def check(folder: Folder, wanted: Mapping[str, tuple[int, ...]], known: Callable[[str], bool]):
    """Raises ValueError, with all faults, unless the folder holds the wanted tensors.

    Args:
      folder: the checkpoint.
      wanted: shapes by name.
      known: says whether a tensor that is not wanted is allowed.
    """
    where = folder.where
    problems = [("missing: ", name, "") for name in wanted if name not in where]
    problems += [
        ("unknown: ", name, "") for name in where if name not in wanted and not known(name)
    ]
    for name, file in where.items():
        tensor = file.tensors[name]
        if name in wanted and tensor.shape != wanted[name]:
            problems.append(("", name, f" has shape {tensor.shape}, expected {wanted[name]}"))
        if tensor.dtype not in DTYPES:
            types = ", ".join(DTYPES)
            problems.append(("", name, f" has type {tensor.dtype}, expected one of {types}"))
    lines = "".join(f"\n  {line}" for line in _by_layers(problems))
    require(not problems, f"{folder.path} does not fit its {CONFIG}:{lines}")


def _by_layers(problems: Iterable[tuple[str, str, str]]) -> list[str]:
    """Joins equal messages about a tensor in several layers, such as ``layers.0-3,7.``."""
    layers: dict[tuple[str, ...], list[int]] = collections.defaultdict(list)
    for before, name, after in problems:
        found = re.fullmatch(r"(?:(.*?\.)(\d+)(?=\.))?(.*)", name)
        assert found is not None
        head, number, tail = found.groups("")
        layers[before, head, tail, after].extend([int(number)] if number else [])
    return [
        f"{before}{head}{_ranges(numbers)}{tail}{after}"
        for (before, head, tail, after), numbers in layers.items()
    ]


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers as ``0-3,7``."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    return ",".join("-".join(map(str, run)) for run in runs)
