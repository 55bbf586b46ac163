"""Sources: what they give, and what they say of input that is not as it should be."""

import codecs
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from train.data import tokenizers
from train.data.sources import get_source

BYTES = tokenizers.load("bytes")


def source(name, field="text"):
    return get_source(str(name), field, BYTES)


def texts(name, field="text"):
    return [document.content for document in source(name, field).documents()]


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def zstandard_of(*frames):
    import zstandard

    return b"".join(zstandard.ZstdCompressor().compress(frame) for frame in frames)


def prepare_corpus(folder, splits):
    """A corpus like those of ``tfds build --file_format=array_record``, without TensorFlow."""
    import tensorflow_datasets as tfds
    from array_record.python.array_record_module import ArrayRecordWriter
    from google.protobuf import json_format
    from tensorflow_datasets.core.proto import dataset_info_pb2

    version = folder / "tiny" / "en" / "1.0.0"
    version.mkdir(parents=True)
    features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "n": np.int64})
    infos = []
    for split, contents in splits.items():
        name = f"tiny-{split}.array_record-00000-of-00001"
        writer = ArrayRecordWriter(str(version / name), "group_size:1")
        for number, content in enumerate(contents):
            writer.write(features.serialize_example({"text": content, "n": number}))
        writer.close()
        infos.append(
            dataset_info_pb2.SplitInfo(
                name=split,
                shard_lengths=[len(contents)],
                num_bytes=1,
                filepath_template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
            )
        )
    info = dataset_info_pb2.DatasetInfo(
        name="tiny", config_name="en", version="1.0.0", file_format="array_record", splits=infos
    )
    (version / "dataset_info.json").write_text(json_format.MessageToJson(info))
    features.save_config(version)


def test_the_standard_library_is_python_in_a_fixed_order():
    """Without tests, packages and tables."""
    documents = {document.key: document.content for document in source("stdlib").documents()}
    assert list(documents) == sorted(documents)
    assert {b"argparse.py", b"json/decoder.py", b"collections/__init__.py"} <= documents.keys()
    file = Path(os.__file__).with_name("argparse.py")
    assert documents[b"argparse.py"] == file.read_text(encoding="utf-8")
    folders = {part for key in documents for part in key.split(b"/")[:-1]}
    assert not folders & {b"test", b"tests", b"site-packages", b"encodings", b"pydoc_data"}


class TestTextFiles:
    def test_kinds(self, tmp_path):
        (tmp_path / "b.txt").write_text("plain Grün")
        (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"packed"))
        (tmp_path / "c.jsonl").write_bytes(lines({"text": "one"}, {"text": "zwölf"}) + b"\n")
        (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines({"text": "two\nlines"})))
        frames = lines({"text": "three"}), lines({"text": "four"})[:5], lines({"text": "four"})[5:]
        (tmp_path / "e.jsonl.zst").write_bytes(zstandard_of(*frames))
        assert texts(tmp_path / "*") == [
            *("packed", "plain Grün"),
            *("one", "zwölf", "two\nlines", "three", "four"),
        ]
        assert texts(tmp_path / "c.jsonl") == ["one", "zwölf"]

    def test_what_counts(self, tmp_path):
        """The last part of a name, the chosen field, and a last line without end."""
        (tmp_path / "a.json.gz").write_bytes(gzip.compress(lines({"text": "one"}, {"text": "two"})))
        (tmp_path / "b.jsonl.txt").write_text('{"text": "not a line"}')
        assert texts(tmp_path / "*") == ["one", "two", '{"text": "not a line"}']
        (tmp_path / "a.jsonl").write_bytes(b'{"body": "x"}\n{"body": "y", "text": 3}')
        assert texts(tmp_path / "a.jsonl", "body") == ["x", "y"]
        keys = [document.key for document in source(tmp_path / "a.jsonl", "body").documents()]
        assert keys == [b"x", b"y"], "lines are known by their text"

    def test_names_of_files(self, tmp_path):
        """One with brackets, one in capitals, another extension; each once for two ``**``."""
        (tmp_path / "draft [1].txt").write_text("this")
        (tmp_path / "draft 1.txt").write_text("another")
        assert texts(tmp_path / "draft [1].txt") == ["this"]
        for name in ("A.JSONL", "b.ndjson", "c.jsonl.GZ"):
            content = lines({"text": "one"}, {"text": "two"})
            (tmp_path / name).write_bytes(gzip.compress(content) if "GZ" in name else content)
            assert texts(tmp_path / name) == ["one", "two"]
        assert texts(tmp_path / "**" / "**" / "*.txt") == ["another", "this"]

    def test_marks_of_byte_order(self, tmp_path):
        for name in ("a.txt", "a.jsonl"):
            content = lines({"text": "one"}) if name == "a.jsonl" else b"one"
            (tmp_path / name).write_bytes(codecs.BOM_UTF8 + content)
            assert texts(tmp_path / name) == ["one"]
        (tmp_path / "b.jsonl").write_bytes(codecs.BOM_UTF8 + b"\n" + lines({"text": "one"}))
        assert texts(tmp_path / "b.jsonl") == ["one"]
        (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"ab\xff")
        with pytest.raises(ValueError, match="byte 0xff at offset 5"):
            texts(tmp_path / "a.txt")

    def test_many_blocks(self, tmp_path):
        """Lines and frames that span the blocks in which files are read."""
        records = [{"text": f"{i} " + "ab" * 300_000} for i in range(4)]
        for name, content in (
            ("a.jsonl", lines(*records)),
            ("a.jsonl.gz", gzip.compress(lines(*records), 1)),
            ("a.jsonl.zst", zstandard_of(lines(*records))),
        ):
            (tmp_path / name).write_bytes(content)
            assert texts(tmp_path / name) == [record["text"] for record in records]

    def test_names_are_relative_to_the_glob(self, tmp_path):
        for folder in (tmp_path / "here", tmp_path / "there"):
            (folder / "sub").mkdir(parents=True)
            (folder / "sub" / "a.txt").write_text("x")
            keys = [document.key for document in source(folder / "**" / "*.txt").documents()]
            assert keys == [b"sub/a.txt"]

    def test_a_name_that_is_not_utf_8_is_known_by_its_bytes(self, tmp_path):
        for name in (b"Gr\xfcn.txt", "Grün.txt".encode()):
            Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text("x")
        found = source(tmp_path / "*.txt")
        assert {document.key for document in found.documents()} == {
            b"Gr\xfcn.txt",
            "Grün.txt".encode(),
        }
        json.dumps(found.describe()).encode()

    def test_description_follows_the_files(self, tmp_path):
        path = tmp_path / "a.txt"
        path.write_text("x")
        seen = [source(path).describe()]
        path.write_text("xy")
        seen.append(source(path).describe())
        os.utime(path, ns=(0, 0))
        seen.append(source(path).describe())
        seen.append(source(path, "body").describe())
        (tmp_path / "b.txt").write_text("x")
        seen.append(source(tmp_path / "*.txt").describe())
        assert all(a != b for i, a in enumerate(seen) for b in seen[:i])
        assert seen[-1] == source(tmp_path / "*.txt").describe()


def test_prepared_corpora(tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    prepare_corpus(tmp_path, {"train": ["one", "Grün", "three"], "validation": ["four"]})
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    assert texts("tfds:tiny/en") == ["one", "Grün", "three"]
    assert texts("tfds:tiny/en:validation") == ["four"]
    assert texts("tfds:tiny/en:train[1:]") == ["Grün", "three"]
    whole, part = (source(f"tfds:tiny/en:train{s}").describe() for s in ("", "[:1]"))
    assert whole != part
    assert json.loads(json.dumps(whole)) == source("tfds:tiny/en").describe()
    for name, field, message in (
        ("tiny/en:vali", "text", r"no split 'vali'.*it has: train, validation"),
        ("tiny/en", "body", r"example 0: there is no field 'body'; it has: .*text"),
        ("tiny/en", "n", r"example 0: expected text in 'n', got"),
        ("pg19", "text", "tfds build pg19 --file_format=array_record"),
    ):
        with pytest.raises(ValueError, match=message):
            texts(f"tfds:{name}", field)


class TestTokenFiles:
    def test_documents_end_at_the_tokens_that_say_so(self, tmp_path):
        np.array([5, 6, 256, 7, 256, 256, 8], "<u2").tofile(tmp_path / "a.bin")
        np.array([9], "<u2").tofile(tmp_path / "b.bin")
        found = [content.tolist() for content in texts(f"tokens:{tmp_path}/*.bin")]
        assert found == [[5, 6, 256], [7, 256], [256], [8], [9]]

    def test_start_tokens(self, tmp_path):
        class WithStart(type(BYTES)):
            bos, eos = 255, None

        np.array([255, 1, 255, 2, 3], "<u4").tofile(tmp_path / "a.bin")
        documents = get_source(f"tokens32:{tmp_path}/a.bin", "text", WithStart()).documents()
        assert [d.content.tolist() for d in documents] == [[255, 1], [255, 2, 3]]

    def test_a_token_that_is_both_ends_documents(self, tmp_path):
        """As in GPT-2's files; the description says so, and no other description changes."""
        np.array([5, 6, 256, 7, 256, 8], "<u2").tofile(tmp_path / "a.bin")
        described = []
        for bos, eos in ((256, 256), (None, 256), (None, None)):
            tokenizer = type("Marked", (type(BYTES),), {"bos": bos, "eos": eos})()
            found = get_source(f"tokens:{tmp_path}/a.bin", "text", tokenizer)
            described.append(found.describe())
            contents = [document.content.tolist() for document in found.documents()]
            assert contents == ([[5, 6, 256], [7, 256], [8]] if eos else [[5, 6, 256, 7, 256, 8]])
        both, end, neither = described
        assert both != end == neither
        assert end[0] == "tokens, one"
        assert json.loads(json.dumps(both)) == both


class TestErrors:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("absent.txt", "there is no '.*absent.txt'"),
            ("*.none", r"no file matches '.*\*.none'"),
            (".", "is a folder; give a glob such as"),
        ],
    )
    def test_no_files(self, tmp_path, name, message):
        with pytest.raises(ValueError, match=message):
            texts(tmp_path / name)

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.txt", "Grün".encode("latin-1"), "byte 0xfc at offset 2 is not valid UTF-8"),
            ("a.jsonl", b'{"text": "x"}\n\n{"text": "\xff"}\n', "line 3: byte 0xff at offset 25 "),
            ("a.jsonl", b'\n{"txt": "x"}', r"line 2: there is no field 'text' \(did you .* 'txt'"),
            ("a.jsonl", b'{"text": 3}', "line 1: expected text in 'text', got 3"),
            (
                "a.jsonl",
                b'["x"]',
                r"expected an object with fields, got \['x'\]: write one",
            ),
            ("a.jsonl", b"[%s]" % (b"9," * 99 + b"9"), r"got \[9, 9, 9, 9, 9, 9, \.\.\.\]: write"),
            ("a.jsonl", b'{"text": ', "line 1: not JSON"),
            ("a.jsonl", b'{"text": "\\ud800"}', "line 1: 'text' is not valid Unicode"),
            ("a.bin", np.array([5, 300], "<u2").tobytes(), "token 1 is 300, but .* has 258"),
            ("a.bin", b"", "has 0 bytes; expected a multiple of"),
            ("a.bin", b"abc", "has 3 bytes; expected a multiple of"),
        ],
    )
    def test_bad_content(self, tmp_path, name, content, message):
        (tmp_path / name).write_bytes(content)
        kind = "tokens:" if name == "a.bin" else ""
        with pytest.raises(ValueError, match=f"{name}.*{message}"):
            texts(f"{kind}{tmp_path}/{name}")

    @pytest.mark.parametrize("suffix", ["gz", "zst"])
    @pytest.mark.parametrize("damage", ["truncated", "other content"])
    def test_damaged(self, tmp_path, suffix, damage):
        rng = np.random.default_rng(0)
        content = lines(*({"text": rng.bytes(500).hex()} for _ in range(20)))
        whole = gzip.compress(content) if suffix == "gz" else zstandard_of(content, content)
        path = tmp_path / f"a.jsonl.{suffix}"
        path.write_bytes(whole[:-5] if damage == "truncated" else b"plain text\n")
        with pytest.raises(ValueError, match=f"{path.name} is truncated or damaged: "):
            texts(path)
