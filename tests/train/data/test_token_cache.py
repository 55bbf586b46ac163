"""The cache of tokens: never half made, never stale, built once."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tracemalloc

import chex
import numpy as np
import pytest

from train.data import held_out, token_cache, tokenizers
from train.data.sources import Document, TextFiles, get_source
from train.data.token_cache import Corpus, open_stream
from train.files import cache_folder

BYTES = tokenizers.load("bytes")


@dataclasses.dataclass
class Numbers:
    """Documents "0", "1", ...; counts how often they are read, and may fail on the way."""

    count: int
    fails_at: int | None = None
    size: int = 1
    reads: int = 0

    def describe(self):
        return ["numbers", self.count]

    def documents(self):
        self.reads += 1
        for i in range(self.count):
            if i == self.fails_at:
                raise ValueError(f"document {i} cannot be read")
            text = str(i) * self.size
            yield Document(str(i), text.encode(), text)


def documents_of(stream):
    parts = np.split(stream.tokens, stream.offsets[1:-1])
    assert stream.offsets[0] == 0
    assert stream.offsets[-1] == len(stream.tokens)
    return [BYTES.decode(part) for part in parts]


def entries(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_built_once_with_end_tokens(tmp_path):
    corpus = Corpus(Numbers(12), BYTES)
    stream, again = open_stream(corpus, tmp_path), open_stream(corpus, tmp_path)
    assert documents_of(stream) == documents_of(again) == [f"{i}<eos>" for i in range(12)]
    assert (stream.digest, corpus.source.reads) == (again.digest, 1)
    assert stream.tokens.dtype == np.uint16
    for array in stream[:2]:
        assert isinstance(array.base, np.memmap)
        assert not array.flags.writeable
    (entry,) = entries(tmp_path)
    record = json.loads((tmp_path / entry / "entry.json").read_text())
    assert record["description"] == corpus.describe()
    assert record["description"]["tokenizer"] == BYTES.fingerprint


@pytest.mark.parametrize(
    ("text", "front", "end"),
    [
        ("0123456789", "0123456", "789"),
        ("0123456\n89", "0123456\n", "89"),
        ("01234567\n9", "0123456", "7\n9"),
    ],
)
def test_a_single_document_holds_out_its_end(tmp_path, text, front, end):
    """At the end of a line, where there is one."""
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("")
    source = get_source(f"{tmp_path}/*.txt", "text", BYTES)
    sides = [Corpus(source, BYTES, side, 0.3) for side in ("train", "held_out")]
    found = [documents_of(open_stream(side, tmp_path / "cache")) for side in sides]
    assert found == [[f"{front}<eos>"], [f"{end}<eos>"]]
    assert all(side.is_one_document for side in sides)
    whole = documents_of(open_stream(Corpus(source, BYTES), tmp_path / "cache"))
    assert whole == [f"{text}<eos>"]


def test_token_files_are_copied_as_they_are(tmp_path):
    """Of one that is a single document the end is held out, too."""

    def stream(tokens, *side):
        np.array(tokens, "<u2").tofile(tmp_path / "a.bin")
        source = get_source(f"tokens:{tmp_path}/a.bin", "text", BYTES)
        return open_stream(Corpus(source, BYTES, *side), tmp_path / "cache")

    whole = stream([5, 256, 7, 8])
    assert (whole.tokens.tolist(), whole.offsets.tolist()) == ([5, 256, 7, 8], [0, 2, 4])
    assert stream(range(10), "train", 0.2).tokens.tolist() == [*range(8)]
    assert stream(range(10), "held_out", 0.2).tokens.tolist() == [8, 9]


def test_of_several_documents_each_is_on_one_side(tmp_path):
    sides = [Corpus(Numbers(40), BYTES, side, 0.3) for side in ("train", "held_out")]
    train, out = (documents_of(open_stream(side, tmp_path)) for side in sides)
    assert sorted([*train, *out]) == sorted(f"{i}<eos>" for i in range(40))
    assert out == [f"{i}<eos>" for i in range(40) if held_out.document(str(i).encode(), 0.3)]
    assert not sides[0].is_one_document


def test_a_wide_vocabulary(tmp_path):
    class Wide(type(BYTES)):
        vocab_size = 70_000

        def encode_all(self, texts):
            return [np.full(2, 66_000, np.uint32) for _ in texts]

    stream = open_stream(Corpus(Numbers(2), Wide()), tmp_path)
    assert stream.tokens.dtype == np.uint32
    assert stream.tokens.tolist() == [66_000, 66_000, 256] * 2


def test_rebuilt_when_the_source_or_the_tokenizer_changes(tmp_path):
    class Other(type(BYTES)):
        fingerprint = "another"
        eos = 257

    path, digests = tmp_path / "a.txt", set()
    for number, text in enumerate(("one", "two", "three"), 1):
        path.write_text(text)
        os.utime(path, (number, number))  # Clocks of some file systems stand still for 4 ms.
        for tokenizer in (BYTES, Other()):
            corpus = Corpus(TextFiles(str(path), "text"), tokenizer)
            stream = open_stream(corpus, tmp_path / "cache")
            assert stream.tokens.tolist() == [*text.encode(), tokenizer.eos]
            digests.add(stream.digest)
    assert len(digests) == 6


def test_files_that_differ_in_their_folder_alone(tmp_path):
    """Those of an archive may have one size and one time."""
    texts = {"train": "aaaa", "test": "bbbb"}
    for name, text in texts.items():
        path = tmp_path / name / "data.txt"
        path.parent.mkdir()
        path.write_text(text)
        os.utime(path, (1, 1))
    for name, text in texts.items():
        corpus = Corpus(TextFiles(f"{tmp_path}/{name}/data.txt", "text"), BYTES)
        stream = open_stream(corpus, tmp_path / "cache")
        assert documents_of(stream) == [f"{text}<eos>"]


def test_an_entry_is_hashed_once_unless_it_changes(tmp_path, monkeypatch):
    """A training opens the same text several times, and reading it may take minutes."""
    hashed, digest = [], token_cache.hashlib.file_digest

    def file_digest(file, kind):
        hashed.append(os.path.basename(file.name))
        return digest(file, kind)

    monkeypatch.setattr(token_cache.hashlib, "file_digest", file_digest)
    corpus = Corpus(Numbers(9), BYTES)
    first, again = (open_stream(corpus, tmp_path) for _ in range(2))
    assert sorted(hashed) == ["offsets", "tokens"]
    chex.assert_trees_all_equal(first, again)
    (entry,) = entries(tmp_path)
    os.utime(tmp_path / entry / "tokens", (1, 1))
    assert open_stream(corpus, tmp_path).digest == first.digest
    assert sorted(hashed) == ["offsets", "offsets", "tokens", "tokens"]


@pytest.mark.parametrize("name", ["tokens", "offsets", "entry.json"])
def test_a_damaged_entry_is_rebuilt(tmp_path, name):
    """One that was cut off, that lacks a file, or of which a bit has changed."""
    source = Numbers(9)
    whole = documents_of(open_stream(Corpus(source, BYTES), tmp_path))
    (entry,) = entries(tmp_path)
    path = tmp_path / entry / name
    content = path.read_bytes()
    flipped = bytes([content[0] ^ 1, *content[1:]])
    for number, damaged in enumerate((content[:-1], flipped, None), start=2):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        assert documents_of(open_stream(Corpus(source, BYTES), tmp_path)) == whole
        assert source.reads == number


def test_a_failed_build_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="document 700 cannot be read"):
        open_stream(Corpus(Numbers(1000, fails_at=700), BYTES), tmp_path)
    assert entries(tmp_path) == []
    assert len(open_stream(Corpus(Numbers(1000), BYTES), tmp_path).offsets) == 1001


SLOW = """
import sys, time
from pathlib import Path
from tests.train.data.test_token_cache import BYTES, Numbers
from train.data.token_cache import Corpus, open_stream

class Slow(Numbers):
    def documents(self):
        for i, document in enumerate(super().documents()):
            if i == 600:
                print("half way", flush=True)
                time.sleep(float(sys.argv[2]))
            yield document

print(open_stream(Corpus(Slow(1000), BYTES), Path(sys.argv[1])).digest)
"""


def build(folder, seconds):
    """A process that builds a stream, and waits half way."""
    command = [sys.executable, "-c", SLOW, str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_build_leaves_nothing_that_counts(tmp_path):
    process = build(tmp_path, seconds=60)
    assert process.stdout.readline() == "half way\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (left,) = entries(tmp_path)
    assert left.endswith(".partial")
    assert (tmp_path / left / "tokens").exists()
    stream = open_stream(Corpus(Numbers(1000), BYTES), tmp_path)
    assert documents_of(stream) == [f"{i}<eos>" for i in range(1000)]
    assert entries(tmp_path) == [left.removesuffix(".partial")]


@pytest.mark.slow
def test_two_processes_at_once(tmp_path):
    """One builds, while the other one waits for what it builds."""
    first = build(tmp_path, seconds=8)
    assert first.stdout.readline() == "half way\n"
    second = build(tmp_path, seconds=0)
    digests = [process.communicate()[0] for process in (second, first)]
    assert digests == [f"{open_stream(Corpus(Numbers(1000), BYTES), tmp_path).digest}\n"] * 2


def test_building_streams(tmp_path):
    """Far less than the text is ever held."""
    corpus = Corpus(Numbers(300, size=50_000), BYTES)
    tracemalloc.start()
    stream = open_stream(corpus, tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert stream.tokens.nbytes > 60e6
    assert peak < 15e6


def test_a_folder_that_keeps_nothing(tmp_path):
    """Whose place a file has, or where nothing may be written."""
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"cannot be kept in .*/file: .*task\.cache.*TAPE_JAX_CACHE"
    ):
        open_stream(Corpus(Numbers(1), BYTES), tmp_path / "file")


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "TAPE_JAX_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert cache_folder() == tmp_path / ".cache" / "tape-jax"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "tape-jax"
    monkeypatch.setenv("TAPE_JAX_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"
