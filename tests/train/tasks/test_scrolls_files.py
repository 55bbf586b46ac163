import json
import re

import pytest

from tests.train.tasks.scrolls_archives import HARBOUR, RECORDS, archive, lines, qa, write
from train.tasks.scrolls_files import read


def test_an_archive_and_a_folder_give_the_same(tmp_path):
    packed = write(tmp_path / "packed", unpacked=())
    unpacked = write(tmp_path / "unpacked", unpacked=tuple(RECORDS))
    for split, records in RECORDS["qasper"].items():
        found = [list(read(data, "qasper", split)) for data in (packed, unpacked)]
        assert [r[1:] for r in found[0]] == [r[1:] for r in found[1]]
        assert [(r.id, r.output) for r in found[0]] == [(r["id"], r["output"]) for r in records]
    first = next(read(packed, "qasper", "train"))
    assert first.where == f"{packed / 'qasper.zip'}:qasper/train.jsonl, line 1"
    assert first.question == "What do fishermen mend?"
    assert first.document == HARBOUR
    assert next(read(packed / "qasper.zip", "qasper", "test")).output is None
    archive(tmp_path / "qasper.zip", {"validation.jsonl": lines([qa("x", "nets")])})
    assert [r.id for r in read(tmp_path, "qasper", "validation")] == ["x"]


@pytest.mark.parametrize(
    ("subset", "text", "question", "document"),
    [
        ("narrative_qa", "Who?\n\nOne.\n\nTwo.", "Who?", "One.\n\nTwo."),
        ("qmsum", "What was said?\n\nA: hello", "What was said?", "A: hello"),
        ("contract_nli", "It ends.\n\n1. Terms", "It ends.", "1. Terms"),
        (
            "quality",
            "Who?\n\n (A) I\n (B) you\n (C) he\n (D) she\n\nA story.\n\nIts end.",
            "Who?\n\n (A) I\n (B) you\n (C) he\n (D) she",
            "A story.\n\nIts end.",
        ),
        ("gov_report", "One.\n\nTwo.", "", "One.\n\nTwo."),
        ("summ_screen_fd", "A: hi\n\nB: hi", "", "A: hi\n\nB: hi"),
    ],
)
def test_question_and_document(tmp_path, subset, text, question, document):
    content = [{"id": "x", "pid": "x", "input": text, "output": "y"}]
    write(tmp_path, records={subset: {"train": content}})
    found = next(read(tmp_path, subset, "train"))
    assert (found.question, found.document) == (question, document)


def without(name):
    return json.dumps({k: v for k, v in qa("x", "y").items() if k != name})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"train.jsonl, line 2: not JSON"),
        (b"\xff", r"train.jsonl, line 2: not JSON"),
        ("3", r"line 2: expected an object with fields; got 3"),
        (without("id"), r"line 2: there is no field 'id'; it has: pid, input, output"),
        (json.dumps(qa("x", None)), r"line 2: expected text in 'output'; got None"),
        (json.dumps(qa("x", "y") | {"input": "Who?"}), r"line 2: expected a question, a blank"),
    ],
)
def test_lines_that_are_no_records(tmp_path, line, message):
    folder = tmp_path / "qasper"
    folder.mkdir()
    line = line if isinstance(line, bytes) else line.encode()
    (folder / "train.jsonl").write_bytes(lines([qa("w", "y")]).encode() + line + b"\n")
    with pytest.raises(ValueError, match=message):
        list(read(tmp_path, "qasper", "train"))


@pytest.mark.parametrize(
    ("subset", "split", "message"),
    [
        ("quasper", "train", "unknown subset of SCROLLS 'quasper'.*did you mean 'qasper'"),
        ("qasper", "dev", "unknown split of SCROLLS 'dev'"),
        ("qmsum", "train", "there is neither .*qmsum/train.jsonl nor .*qmsum.zip"),
        ("qasper", "test", "holds no qasper/test.jsonl; it holds: qasper/train.jsonl"),
        ("quality", "train", r"line 1: expected a question, \(A\) to \(D\)"),
        ("contract_nli", "train", "contract_nli.zip cannot be read: File is not a zip file"),
        ("gov_report", "train", "gov_report.zip cannot be read"),
    ],
)
def test_what_is_not_there(tmp_path, subset, split, message):
    records = {"train": [qa("x", "y")]}
    write(tmp_path, records=dict.fromkeys(("qasper", "quality", "gov_report"), records))
    (tmp_path / "contract_nli.zip").write_text("no archive")
    damaged = tmp_path / "gov_report.zip"
    content = bytearray(damaged.read_bytes())
    content[content.index(b"jsonl") + 20] ^= 255
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read(tmp_path, subset, split))


@pytest.mark.parametrize("name", ["../train.jsonl", "/etc/train.jsonl", "qasper\\..\\..\\x"])
def test_members_outside_of_the_archive(tmp_path, name):
    archive(tmp_path / "qasper.zip", {"qasper/train.jsonl": lines([qa("x", "y")]), name: ""})
    before = sorted(tmp_path.rglob("*"))
    message = re.escape(f"its member {name!r} points outside of the archive")
    with pytest.raises(ValueError, match=message):
        list(read(tmp_path, "qasper", "train"))
    assert sorted(tmp_path.rglob("*")) == before
