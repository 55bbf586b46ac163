"""The files of SCROLLS (Shaham et al. 2022, arXiv:2201.03533): subsets, records and questions.

The benchmark has one archive per subset, with a file for each split::

    qasper.zip: qasper/train.jsonl, qasper/validation.jsonl, qasper/test.jsonl

Each line is a record: ``id``, ``pid`` (not used), ``input``, ``output``. An id that appears several
times has several right outputs; those of test files are not published. Archives may be packed or
unpacked; members of an archive are only read, never extracted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from train.checks import choose, require

SPLITS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True)
class Subset:
    """One of the benchmark's data sets.

    Attributes:
      metric: the metric of the benchmark: ``f1``, ``exact_match`` or ``rouge``.
      answer_length: tokens that an answer may take by default.
      question: matches the question at the start of an input, up to the blank line after it; None:
        no question, the document is to be summarised.
    """

    metric: str
    answer_length: int
    question: re.Pattern[str] | None = re.compile(r"(.*?)\n\n", re.DOTALL)


# The options of a multiple choice belong to the question.
_WITH_OPTIONS = re.compile(r"(.*?\(A\).*?\(B\).*?\(C\).*?\(D\).*?)\n\n", re.DOTALL)

SUBSETS = {
    "narrative_qa": Subset("f1", 64),
    "qasper": Subset("f1", 64),
    "quality": Subset("exact_match", 64, _WITH_OPTIONS),
    "contract_nli": Subset("exact_match", 16),
    "qmsum": Subset("rouge", 256),
    "summ_screen_fd": Subset("rouge", 256, None),
    "gov_report": Subset("rouge", 512, None),
}


class ScrollsRecord(NamedTuple):
    """A line of a file.

    Attributes:
      where: file and line, for error messages.
      id: of the example.
      question: how to judge the document or what to look for in it; empty to summarise it.
      document: the text.
      output: a right answer; None if it is not published.
    """

    where: str
    id: str
    question: str
    document: str
    output: str | None


def read(data: str | Path, subset: str, split: str) -> Iterator[ScrollsRecord]:
    """Yields the records of a split in file order, one at a time.

    Args:
      data: a folder with ``SUBSET/SPLIT.jsonl`` or ``SUBSET.zip`` in it, or the archive itself.
      subset: one of ``SUBSETS``.
      split: one of ``SPLITS``.

    Raises:
      ValueError: a subset or split that is unknown or not there, a damaged file, or a line that is
        not a record of this subset.
    """
    choose("subset of SCROLLS", subset, SUBSETS)
    choose("split of SCROLLS", split, SPLITS)
    with _open(Path(data).expanduser(), subset, split) as (name, file):
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _record(f"{name}, line {number}", line, subset, split)


@contextlib.contextmanager
def _open(data: Path, subset: str, split: str) -> Iterator[tuple[str, BinaryIO]]:
    """The file of a split and its name."""
    file = f"{split}.jsonl"
    unpacked, archive = data / subset / file, data / f"{subset}.zip"
    if data.is_file():
        unpacked, archive = data / file, data
    if unpacked.is_file():
        with open(unpacked, "rb") as lines:
            yield str(unpacked), lines
        return
    require(archive.is_file(), f"there is neither {unpacked} nor {archive}")
    try:
        with zipfile.ZipFile(archive) as members:
            name = _member(archive, members.namelist(), subset, file)
            with members.open(name) as lines:
                yield f"{archive}:{name}", lines  # type: ignore[misc]
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f"{archive} cannot be read: {error}") from error


def _member(archive: Path, names: list[str], subset: str, file: str) -> str:
    """The name under which an archive holds ``file``."""
    for name in names:
        path = PurePosixPath(name.replace("\\", "/"))
        require(
            not path.is_absolute() and ".." not in path.parts,
            f"{archive} is not to be trusted: its member {name!r} points outside of the archive",
        )
    found = [name for name in (f"{subset}/{file}", file) if name in names]
    require(bool(found), f"{archive} holds no {subset}/{file}; it holds: {', '.join(names)}")
    return found[0]


def _record(where: str, line: bytes, subset: str, split: str) -> ScrollsRecord:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    require(isinstance(fields, dict), f"{where}: expected an object with fields; got {fields!r}")
    fields = {"output": None, **fields} if split == "test" else fields
    for name in ("id", "input", "output"):
        require(
            name in fields,
            f"{where}: there is no field {name!r}; it has: {', '.join(fields) or 'none'}",
        )
        value = fields[name]
        valid = isinstance(value, str) or (name == "output" and split == "test" and value is None)
        require(valid, f"{where}: expected text in {name!r}; got {value!r}")
    question, document = _divide(where, fields["input"], subset)
    return ScrollsRecord(where, fields["id"], question, document, fields["output"])


def _divide(where: str, text: str, subset: str) -> tuple[str, str]:
    """Question and document of an input."""
    pattern = SUBSETS[subset].question
    if pattern is None:
        return "", text
    match = pattern.match(text)
    wanted = "(A) to (D) and a blank line" if pattern is _WITH_OPTIONS else "a blank line"
    if match is None:
        raise ValueError(
            f"{where}: expected a question, {wanted} before the document; the input starts with "
            f"{text[:80]!r}"
        )
    return match[1], text[match.end() :]
