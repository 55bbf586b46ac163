"""Tokenised corpora on disk: built once, checked by each process, read by memory map.

An entry is a folder with ``tokens`` (the documents one after another, unsigned integers),
``offsets`` (int64: where each document starts, and the end) and ``entry.json``, which names its
inputs and the SHA-256 of both files. It is written beside its place and renamed, under a lock.
Files left by a killed process are never read, and the next process removes them. The folder's name
is a hash of everything the tokens depend on, so a changed source or tokenizer is a new entry. You
can delete unwanted entries at any time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tqdm

from train.checks import choose, require
from train.data import held_out
from train.data.sources import Document, Source
from train.data.tokenizers import Tokenizer
from train.files import sync

FORMAT = "tape-jax tokens, version 2"
SIDES = ("all", "train", "held_out")

_DOCUMENTS_AT_ONCE = 256
_CHARACTERS_AT_ONCE = 1 << 20
_COPIED_AT_ONCE = 1 << 22
# Shows nothing for small texts, and few lines if the output goes to a file.
_BAR = {"delay": 5, "mininterval": 5, "dynamic_ncols": True}


class TokenStream(NamedTuple):
    """Documents of token ids, one after another.

    Attributes:
      tokens: unsigned integers [N].
      offsets: int64 [documents + 1], where each document starts, and N.
      digest: SHA-256 of the tokens and the offsets.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    digest: str


@dataclasses.dataclass(frozen=True)
class Corpus:
    """One side of a source, in the tokens of a tokenizer.

    Attributes:
      source: the documents.
      tokenizer: its start and end tokens are put around every text.
      side: ``all`` documents, or those that are ``held_out``, or the rest, ``train``. If there is a
        single document, its end is held out.
      held_out: share of the documents that are held out.
      label: of the progress bar.
    """

    source: Source
    tokenizer: Tokenizer
    side: str = "all"
    held_out: float = 0.0
    label: str = "tokenising"

    def __post_init__(self):
        choose("side", self.side, SIDES)

    def describe(self) -> Any:
        """Returns everything the tokens depend on as JSON types."""
        return {
            "format": FORMAT,
            "source": self.source.describe(),
            "tokenizer": self.tokenizer.fingerprint,
            "side": [self.side, self.held_out if self.side != "all" else 0],
        }

    def documents(self) -> Iterator[Document]:
        """The documents of this side."""
        found = self._written()
        return found if self.side == "all" else self._own(found)

    def _written(self) -> Iterator[Document]:
        return (document for document in self.source.documents() if len(document.content))

    def _own(self, documents: Iterator[Document]) -> Iterator[Document]:
        wanted = self.side == "held_out"
        first = list(itertools.islice(documents, 2))
        if len(first) == 1:
            part = split(first[0], self.held_out)[wanted]
            if len(part.content):
                yield part
            return
        for document in itertools.chain(first, documents):
            if held_out.document(document.key, self.held_out) == wanted:
                yield document

    @property
    def is_one_document(self) -> bool:
        """True if the source has a single document that is not empty."""
        return len(list(itertools.islice(self._written(), 2))) == 1

    def tokens(self) -> Iterator[list[np.ndarray]]:
        """The tokens of each document, in parts."""
        for batch in _batches(self.documents()):
            texts = [document.content for document in batch if isinstance(document.content, str)]
            encoded = iter(self.tokenizer.encode_all(texts))
            for document in batch:
                if isinstance(document.content, str):
                    yield self.tokenizer.document(next(encoded))
                else:
                    yield [document.content]


def split(document: Document, share: float) -> tuple[Document, Document]:
    """Splits a document into its start and its end, about ``share`` of it.

    Texts are cut at the end of a line, if one is near.
    """
    content = document.content
    cut = round((1 - share) * len(content))
    if isinstance(content, str):
        cut = content.find("\n", cut, (cut + len(content)) // 2) + 1 or cut
    return document._replace(content=content[:cut]), document._replace(content=content[cut:])


def open_stream(corpus: Corpus, folder: Path) -> TokenStream:
    """Opens the tokens of ``corpus`` in the cache ``folder``, and builds missing entries.

    If several processes want the same entry, one builds it and the others wait. An entry that does
    not match its checksums is rebuilt.

    Raises:
      ValueError: if the source cannot be read, or the folder cannot be written.
    """
    description = corpus.describe()
    key = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]
    entry = folder / key
    stream = _read(entry)
    if stream is None:
        with _locked(folder / f"{key}.lock"):
            stream = _read(entry)
            if stream is None:
                shutil.rmtree(entry, ignore_errors=True)
                _build(corpus, description, entry)
                stream = _read(entry)
    require(stream is not None, f"{entry} was written and does not read back: check the disk")
    assert stream is not None
    return stream


def _build(corpus: Corpus, description: Any, entry: Path) -> None:
    temporary = entry.with_name(f"{entry.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        content = {"description": description, **_write_tokens(corpus, temporary)}
        with _durable(temporary / "entry.json") as file:
            file.write(json.dumps(content).encode())
        sync(temporary)
        temporary.rename(entry)
        sync(entry.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_tokens(corpus: Corpus, folder: Path) -> dict[str, Any]:
    """Writes both files, a few documents at a time; returns the entry's fields for them."""
    dtype = np.dtype("<u2" if corpus.tokenizer.vocab_size <= 1 << 16 else "<u4")
    count, documents = 0, 0
    with (
        _Hashed(folder / "tokens") as tokens,
        _Hashed(folder / "offsets") as offsets,
        tqdm.tqdm(desc=corpus.label, unit=" tokens", unit_scale=True, **_BAR) as bar,
    ):
        offsets.write(np.zeros(1, "<i8"))
        for parts in corpus.tokens():
            for part in itertools.chain.from_iterable(map(_blocks, parts)):
                tokens.write(part.astype(dtype))
                bar.update(len(part))
                count += len(part)
            documents += 1
            offsets.write(np.array([count], "<i8"))
    return {
        "dtype": dtype.str,
        "count": count,
        "documents": documents,
        "sha256": {"tokens": tokens.digest, "offsets": offsets.digest},
    }


def _read(entry: Path) -> TokenStream | None:
    """The entry, or None if it is not there or damaged."""
    try:
        stats = [(entry / name).stat() for name in ("tokens", "offsets")]
        states = tuple((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats)
        return _checked(entry, (entry / "entry.json").read_text(encoding="utf-8"), states)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@functools.lru_cache(maxsize=8)
def _checked(entry: Path, record: str, states: tuple[tuple[int, ...], ...]) -> TokenStream:
    """Opens an entry, and checks it once in a process, unless it changes.

    Args:
      entry: the folder.
      record: the text of ``entry.json``.
      states: change whenever the other files do: no other file has the inode of a mapped one.

    Raises:
      ValueError: if a file does not have its checksum.
    """
    content = json.loads(record)
    digests = content["sha256"]
    for name, digest in digests.items():
        with open(entry / name, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        require(found == digest, f"{entry / name} has the SHA-256 {found}; expected {digest}")
    return TokenStream(
        _memory_map(entry / "tokens", content["dtype"], content["count"]),
        _memory_map(entry / "offsets", "<i8", content["documents"] + 1),
        hashlib.sha256((digests["tokens"] + digests["offsets"]).encode()).hexdigest(),
    )


def _memory_map(path: Path, dtype: str, count: int) -> np.ndarray:
    # An empty file cannot be mapped.
    return np.asarray(np.memmap(path, dtype, "r", shape=(count,))) if count else np.empty(0, dtype)


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    return (array[i : i + _COPIED_AT_ONCE] for i in range(0, len(array), _COPIED_AT_ONCE))


def _batches(documents: Iterator[Document]) -> Iterator[Sequence[Document]]:
    """Yields groups worth tokenising at once and small enough for memory."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.content) if isinstance(document.content, str) else 0
        if len(batch) == _DOCUMENTS_AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    yield batch


class _Hashed:
    """A file that is hashed during writing and is on disk once closed."""

    def __init__(self, path: Path):
        self._stack = contextlib.ExitStack()
        self._path, self._hash = path, hashlib.sha256()

    def __enter__(self) -> _Hashed:
        self._file = self._stack.enter_context(_durable(self._path))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def write(self, array: np.ndarray) -> None:
        self._hash.update(array.data)
        self._file.write(array.data)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


@contextlib.contextmanager
def _durable(path: Path) -> Iterator[Any]:
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits until no other process holds the lock; makes its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w")  # noqa: SIM115
    except OSError as error:
        raise ValueError(
            f"tokens cannot be kept in {path.parent}: {error}. Name another folder in task.cache "
            "or in the environment, as TAPE_JAX_CACHE"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
