"""Sources of text: the standard library, local files, prepared corpora, token files.

A source is named by a string:

* ``stdlib``: the Python files of the running interpreter's standard library, without tests and
  generated files. Every machine has them, but they differ between Python versions.
* ``tfds:c4/en`` or ``tfds:c4/en:validation``: a prepared TensorFlow Datasets corpus and its split
  (``train`` unless given; slices such as ``train[:4%]`` work). Reading needs no TensorFlow.
* ``tokens:books/*.bin``: flat files of little-endian uint16 token ids (``tokens32:`` for uint32),
  cut into documents at the tokenizer's start and end tokens; one that is both ends documents.
* anything else: a path or a glob (``**`` crosses folders) of text files. A ``.jsonl``, ``.ndjson``
  or ``.json`` file has one document a line, any other file is one document; ``.gz`` and ``.zst``
  are decompressed.
"""

from __future__ import annotations

import codecs
import dataclasses
import glob
import gzip
import json
import os
import reprlib
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from train.checks import nearest, require
from train.data.tokenizers import Tokenizer

_READ = 1 << 20
_SKIPPED_FOLDERS = {
    *("test", "tests", "idle_test"),
    *("encodings", "pydoc_data"),
    *("site-packages", "dist-packages", "__pycache__"),
}


class Document(NamedTuple):
    """One document of a source.

    Attributes:
      where: for error messages.
      key: bytes that decide whether it is held out: the file's name relative to its source, or the
        document itself if a file holds many.
      content: its text, or its token ids.
    """

    where: str
    key: bytes | np.ndarray
    content: str | np.ndarray


class Source(Protocol):
    """A corpus that can be read from its start, any number of times."""

    def describe(self) -> Any:
        """Returns everything the documents depend on as JSON types, without reading them."""

    def documents(self) -> Iterator[Document]:
        """The documents, always in the same order."""


def get_source(name: str, text_field: str, tokenizer: Tokenizer) -> Source:
    """Returns the source ``name`` (see the module's text).

    Args:
      name: the source.
      text_field: field of a jsonl line, or feature of a tfds corpus, that holds the text.
      tokenizer: gives the tokens that cut token files.
    """
    if name == "stdlib":
        return StandardLibrary()
    kind, colon, rest = name.partition(":")
    if colon and kind == "tfds":
        corpus, _, split = rest.partition(":")
        return TensorFlowDataset(corpus, split or "train", text_field)
    if colon and kind in ("tokens", "tokens32"):
        return TokenFiles(rest, "<u2" if kind == "tokens" else "<u4", tokenizer)
    return TextFiles(name, text_field)


@dataclasses.dataclass(frozen=True)
class StandardLibrary:
    """The ``*.py`` of the standard library in the order of their names.

    It leaves out the tests, which are most of the library and which some systems install apart. It
    also leaves out generated files: tables of characters (``encodings``), the manual's text
    (``pydoc_data``), and the build settings (``_sysconfigdata*``).
    """

    @property
    def root(self) -> Path:
        return Path(sysconfig.get_paths()["stdlib"])

    def paths(self) -> list[Path]:
        found = []
        for folder, subfolders, files in os.walk(self.root):
            subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
            found += [
                Path(folder, name)
                for name in files
                if name.endswith(".py") and not name.startswith("_sysconfigdata")
            ]
        require(bool(found), f"the standard library in {self.root} has no *.py files")
        return sorted(found, key=lambda path: path.relative_to(self.root).as_posix())

    def describe(self) -> Any:
        return ["stdlib", _describe_files(self.paths(), self.root)]

    def documents(self) -> Iterator[Document]:
        for path in self.paths():
            yield _whole_file(path, self.root)


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """Local text files.

    Attributes:
      pattern: a path or a glob.
      text_field: of a jsonl line.
    """

    pattern: str
    text_field: str

    def describe(self) -> Any:
        paths, root = _find(self.pattern)
        return [_kind("files", paths), self.text_field, _describe_files(paths, root)]

    def documents(self) -> Iterator[Document]:
        paths, root = _find(self.pattern)
        for path in paths:
            packed = path.suffix.lower() in _DECOMPRESSED
            inner = path.with_suffix("") if packed else path
            if inner.suffix.lower() in (".jsonl", ".ndjson", ".json"):
                yield from self._lines(path)
            else:
                yield _whole_file(path, root)

    def _lines(self, path: Path) -> Iterator[Document]:
        offset = 0
        for number, line in enumerate(_split_lines(_chunks(path)), start=1):
            where = f"{path}, line {number}"
            if (text := _decode(line, where, offset)).strip():
                yield _record(where, _parse(where, text), self.text_field)
            offset += len(line)


@dataclasses.dataclass(frozen=True)
class TensorFlowDataset:
    """A corpus prepared with ``tfds build`` in the array_record format.

    Attributes:
      name: such as ``c4/en``.
      split: such as ``train`` or ``train[:4%]``.
      text_field: name of the feature that holds the text.
    """

    name: str
    split: str
    text_field: str

    def describe(self) -> Any:
        builder = self._builder()
        info = _split_info(builder, self.name, self.split)
        files = sorted({Path(instruction.filename) for instruction in info.file_instructions})
        return [
            *("tfds", builder.info.full_name, self.split, self.text_field, info.num_examples),
            _describe_files(files, Path(builder.data_dir)),
        ]

    def documents(self) -> Iterator[Document]:
        builder = self._builder()
        _split_info(builder, self.name, self.split)
        records = builder.as_data_source(split=self.split)
        for index in range(len(records)):
            where = f"tfds:{self.name}:{self.split}, example {index}"
            record = dict(records[index])
            if isinstance(value := record.get(self.text_field), bytes):
                record[self.text_field] = _decode(value, where)
            yield _record(where, record, self.text_field)

    def _builder(self) -> Any:
        import tensorflow_datasets as tfds

        missing = (
            f"there is no corpus {self.name!r} in {tfds.core.constants.DATA_DIR} "
            "(TFDS_DATA_DIR chooses another folder). To prepare one, run\n"
            f"  tfds build {self.name} --file_format=array_record\n"
            "where TensorFlow and apache-beam are installed"
        )
        try:
            builder = tfds.builder(self.name, try_gcs=False)
        except tfds.core.DatasetNotFoundError:
            # Its message lists every data set there is.
            raise ValueError(missing) from None
        except Exception as error:
            raise ValueError(f"{missing}\n(the library says: {error})") from error
        require(
            Path(builder.data_dir).is_dir() and builder.info.file_format.value == "array_record",
            missing,
        )
        return builder


@dataclasses.dataclass(frozen=True)
class TokenFiles:
    """Flat files of token ids, cut into documents at the tokenizer's special tokens.

    Attributes:
      pattern: a path or a glob.
      dtype: of an id, such as ``<u2``.
      tokenizer: gives the tokens that start and end a document, and the largest id.
    """

    pattern: str
    dtype: str
    tokenizer: Tokenizer

    def describe(self) -> Any:
        paths, root = _find(self.pattern)
        kind = _kind("tokens", paths)
        if self._one_mark:
            kind += ", one mark"  # Earlier versions cut in front of it as well.
        return [kind, self.dtype, _describe_files(paths, root)]

    def documents(self) -> Iterator[Document]:
        size = np.dtype(self.dtype).itemsize
        for path in _find(self.pattern)[0]:
            length = path.stat().st_size
            require(
                length > 0 and length % size == 0,
                f"{path} has {length} bytes; expected a multiple of the {size} bytes of a token",
            )
            tokens = np.memmap(path, self.dtype, "r")
            start = 0
            for stop in self._ends(path, tokens):
                if stop > start:
                    part = tokens[start:stop]
                    yield Document(f"{path}, token {start}", part, part)
                start = stop

    @property
    def _one_mark(self) -> bool:
        """Whether the start and the end of a document are one token, as in GPT-2."""
        return self.tokenizer.bos is not None and self.tokenizer.bos == self.tokenizer.eos

    def _ends(self, path: Path, tokens: np.ndarray) -> Iterator[int]:
        """Yields where documents end, in order; the last is the end of the file."""
        vocab_size = self.tokenizer.vocab_size
        bos = None if self._one_mark else self.tokenizer.bos
        for start in range(0, len(tokens), _READ):
            block = tokens[start : start + _READ]
            beyond = np.flatnonzero(block >= vocab_size)
            if beyond.size:
                raise ValueError(
                    f"{path}: token {start + beyond[0]} is {block[beyond[0]]}, but the tokenizer "
                    f"{self.tokenizer.name!r} has {vocab_size} tokens"
                )
            before = np.flatnonzero(block == _or_none(bos))
            after = np.flatnonzero(block == _or_none(self.tokenizer.eos)) + 1
            yield from (start + np.union1d(before, after)).tolist()
        yield len(tokens)


def _or_none(token: int | None) -> int:
    """Replaces None by an id that no file has."""
    return -1 if token is None else token


def _find(pattern: str) -> tuple[list[Path], Path]:
    """Returns the matching files, sorted, and the folder their names are relative to."""
    pattern = os.path.expanduser(pattern)
    require(
        not os.path.isdir(pattern), f"{pattern} is a folder; give a glob such as {pattern}/**/*.txt"
    )
    paths = _matches(pattern)
    magic = glob.has_magic(pattern) and not os.path.isfile(pattern)
    require(bool(paths), f"no file matches {pattern!r}" if magic else f"there is no {pattern!r}")
    root = Path(pattern)
    while glob.has_magic(str(root)):
        root = root.parent
    return paths, root if magic else Path(pattern).parent


def _matches(pattern: str) -> list[Path]:
    """Returns the file of this name, else all matches, sorted, each once even with two ``**``."""
    pattern = os.path.expanduser(pattern)
    if os.path.isfile(pattern):
        return [Path(pattern)]
    return sorted({p for p in map(Path, glob.glob(pattern, recursive=True)) if p.is_file()})


def _kind(what: str, paths: Sequence[Path]) -> str:
    """Returns ``what``, marked for a single file: earlier versions did not cut it in two."""
    return f"{what}, one" if len(paths) == 1 else what


def _describe_files(paths: Sequence[Path], root: Path) -> list[Any]:
    """The folder of all files, and name, size and time of change of each."""
    return [
        os.path.abspath(root),
        *(
            [path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns]
            for path, stat in ((path, path.stat()) for path in paths)
        ),
    ]


def common_files(first: str, second: str) -> list[str]:
    """Lists the files that two sources share, by name; for a corpus, it and its split.

    Splits of a corpus are compared by name only, also ``train`` and ``train[:4%]``.
    """
    return sorted(_members(first) & _members(second))


def _members(name: str) -> set[str]:
    """Returns a source's files, or its corpus and split; none if it is not here."""
    if name.startswith("tfds:"):
        corpus, _, split = name.removeprefix("tfds:").partition(":")
        return {f"tfds:{corpus}:{split or 'train'}"}
    if name == "stdlib":
        paths = StandardLibrary().paths()
    else:
        pattern = name.removeprefix("tokens32:").removeprefix("tokens:")
        paths = _matches(pattern)
    return {str(path.resolve()) for path in paths}


def _whole_file(path: Path, root: Path) -> Document:
    text = _decode(b"".join(_chunks(path)), str(path))
    # A non-UTF-8 name is identified by its bytes.
    key = path.relative_to(root).as_posix().encode(errors="surrogateescape")
    return Document(str(path), key, text)


def _decode(content: bytes, where: str, offset: int = 0) -> str:
    if content.startswith(codecs.BOM_UTF8):
        content, offset = content.removeprefix(codecs.BOM_UTF8), offset + len(codecs.BOM_UTF8)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: byte 0x{content[error.start]:02x} at offset {offset + error.start} is not "
            "valid UTF-8"
        ) from error


def _parse(where: str, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON, one object a line: {error}") from error


def _record(where: str, record: Any, field: str) -> Document:
    """Returns the document in ``record[field]``; its text decides its side."""
    # Messages are made only where they are needed: there may be many records, and long ones.
    if not isinstance(record, dict):
        advice = ": write one object on each line" if isinstance(record, list) else ""
        raise ValueError(
            f"{where}: expected an object with fields, got {reprlib.repr(record)}{advice}"
        )
    if field not in record:
        raise ValueError(
            f"{where}: there is no field {field!r}{nearest(field, record)}; it has: "
            f"{', '.join(record)}"
        )
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"{where}: expected text in {field!r}, got {reprlib.repr(text)}")
    try:
        return Document(where, text.encode(), text)
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {field!r} is not valid Unicode: {error}") from error


def _split_info(builder: Any, name: str, split: str) -> Any:
    known = sorted(builder.info.splits)
    try:
        return builder.info.splits[split]
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"the corpus {name!r} has no split {split!r}{nearest(split, known)}; it has: "
            f"{', '.join(known)}"
        ) from error


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yields lines with their ends."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line + b"\n" for line in lines)
    if rest:
        yield rest


def _chunks(path: Path) -> Iterator[bytes]:
    """Yields a file's content, decompressed by its suffix.

    Raises:
      ValueError: if it is truncated or damaged.
    """
    with open(path, "rb") as file:
        try:
            yield from _DECOMPRESSED.get(path.suffix.lower(), _blocks)(file)
        except (EOFError, gzip.BadGzipFile, zlib.error, _DamagedError) as error:
            raise ValueError(f"{path} is truncated or damaged: {error}") from error


def _blocks(file: Any) -> Iterator[bytes]:
    while block := file.read(_READ):
        yield block


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as content:
        yield from _blocks(content)


class _DamagedError(Exception):
    """A compressed stream that cannot be read to its end."""


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    """Yields all frames; the library's own reader would accept a truncated file."""
    import zstandard

    def new_frame() -> Any:
        return zstandard.ZstdDecompressor().decompressobj()

    frame = None
    for block in _blocks(file):
        while block:
            frame = frame or new_frame()
            try:
                yield frame.decompress(block)
            except zstandard.ZstdError as error:
                raise _DamagedError(str(error)) from error
            block = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise _DamagedError("it ends inside a frame")


_DECOMPRESSED: dict[str, Callable[[BinaryIO], Iterator[bytes]]] = {".gz": _gunzip, ".zst": _unzstd}
