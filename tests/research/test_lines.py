"""Files of lines: as short as what differs, safe against each other's writers and against kills."""

import json
import multiprocessing
import os
import signal
import threading
import time

import pytest

from research import lines

FORMAT, SHARED = "a test, version 1", ("config", "found")
SIDE_BY_SIDE, EACH = 3, 15


def record(name, seed=0, **config):
    return {
        "name": name,
        "config": {"seed": seed, "model": {"layers": 2, **config}, "empty": {}},
        "found": {"counts": [1, 2], "right": [seed, 0.5]},
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results" / "study.jsonl"


@pytest.fixture(scope="module")
def context():
    """Of processes that are not forks of this one, which has threads."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([__name__])
    return found


def append(path, *records):
    for one in records:
        lines.append(path, FORMAT, one, ("config",))


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_round_trip(path):
    assert lines.read(path, FORMAT) == ({}, [])
    records = [record("a"), record("b", 1), record("c", 2, window=8), record("d", layers=3)]
    append(path, *records)
    assert lines.read(path, FORMAT) == ({one["name"]: one for one in records}, [])
    header, first, second, third, _ = written(path)
    assert header == {"format": FORMAT, "shared": {"config": records[0]["config"]}}
    assert first == {"name": "a", "found": records[0]["found"]}
    assert second == {"name": "b", "config.seed": 1, "found": records[1]["found"]}
    assert third["config.model.window"] == 8


def test_what_is_shared(path):
    """Rewritten, the first line has what all agree in, where some have further fields too.

    A field of which two records each have a name that the other has not is given whole.
    """
    records = [record("a"), record("b", 1, kind="x"), record("c", 2)]
    append(path, *records)
    lines.rewrite(path, FORMAT, SHARED)
    assert lines.read(path, FORMAT) == ({one["name"]: one for one in records}, [])
    header, first, second, _ = written(path)
    assert header["shared"] == {
        "config": {"model": {"layers": 2}, "empty": {}},
        "found": {"counts": [1, 2]},
    }
    assert first == {"name": "a", "config.seed": 0, "found.right": [0, 0.5]}
    assert second["config.model.kind"] == "x"
    other = [record("a", window=8), record("b", kind="x")]
    assert "model" not in lines.common(other)["config"]
    append(path, record("e", 9), record("b", 5), {**record("f"), "found": None})
    newer = {"a": records[0], "b": record("b", 5), "c": records[2], "e": record("e", 9)}
    newer["f"] = {**record("f"), "found": None}
    for _ in range(2):
        assert lines.read(path, FORMAT).records == newer, "the last line of a name counts"
        lines.rewrite(path, FORMAT, SHARED)
    assert len(written(path)) == 1 + 5
    assert written(path)[0]["shared"]["found"] == {"counts": [1, 2]}, "None keeps nobody from it"


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_half_a_line(path, cut):
    """It is left out and named, and the next writer removes it; what stands before is safe."""
    append(path, record("a"), record("b", 1))
    path.write_bytes(path.read_bytes()[:-cut])
    found = lines.read(path, FORMAT)
    if cut == 1:
        assert found == ({"a": record("a"), "b": record("b", 1)}, [])
    else:
        assert found.records == {"a": record("a")}
        assert found.problems == [f"{path}: the last line was not written to its end"]
    lines.rewrite(path, FORMAT, SHARED)
    assert lines.read(path, FORMAT) == found
    append(path, record("c", 2))
    records = {**found.records, "c": record("c", 2)}
    assert lines.read(path, FORMAT) == (records, [])
    with pytest.raises(ValueError, match="not JSON compliant"):
        append(path, {"name": "d", "config": record("d")["config"], "loss": float("nan")})
    with pytest.raises(ValueError, match=r"a dot in its name: 'a\.b'"):
        append(path, {**record("d"), "a.b": 1})
    assert lines.read(path, FORMAT) == (records, [])
    path.write_bytes(path.read_bytes()[:20])
    assert lines.read(path, FORMAT).records == {}, "half of the first line"
    append(path, record("e"))
    assert lines.read(path, FORMAT) == ({"e": record("e")}, [])


@pytest.mark.parametrize("line", ["<<<<<<< ours", "[1]", '{"found.right": 1}'])
def test_a_damaged_line_is_named_and_kept(path, line):
    append(path, record("a"), record("b"))
    text = path.read_text().splitlines()
    path.write_text("\n".join([*text[:2], line, *text[2:], ""]))
    append(path, record("c"))
    lines.rewrite(path, FORMAT, SHARED)
    found = lines.read(path, FORMAT)
    assert list(found.records) == ["a", "b", "c"]
    (problem,) = found.problems
    assert problem.startswith(f"{path}: line 3 is damaged: ")
    assert line in path.read_text().splitlines()


@pytest.mark.parametrize("text", ['{"format": "a test, version 0", "shared": {}}\n', "x\n"])
def test_a_file_of_another_format(path, text):
    path.parent.mkdir()
    path.write_text(text)
    found = lines.read(path, FORMAT)
    assert found.records == {}
    assert "is not a results file of this version" in found.problems[0]
    with pytest.raises(ValueError, match=r"study\.jsonl is not a results file of this version"):
        append(path, record("a"))
    assert path.read_text() == text


def many(path, writer, started=None):
    """Appends records, and rewrites the file now and then."""
    for number in range(EACH):
        append(path, record(f"{writer}-{number}", number))
        if number % 5 == writer:
            lines.rewrite(path, FORMAT, SHARED)
        if started is not None:
            started.set()


def test_several_processes_at_once(path, context):
    writers = [context.Process(target=many, args=(path, i)) for i in range(SIDE_BY_SIDE)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        found = lines.read(path, FORMAT)
        assert found.problems == []
    assert [writer.exitcode for writer in writers] == [0] * SIDE_BY_SIDE
    assert lines.read(path, FORMAT).records == {
        f"{i}-{n}": record(f"{i}-{n}", n) for i in range(SIDE_BY_SIDE) for n in range(EACH)
    }


def test_a_reader_waits_for_a_writer(path):
    """It never takes a line that is being written for one that was not finished."""
    append(path, record("a"))
    found: list[lines.Contents] = []
    reader = threading.Thread(target=lambda: found.append(lines.read(path, FORMAT)))
    with lines._locked(path) as file:
        file.write(b'{"name": "b"')
        file.flush()
        reader.start()
        reader.join(0.1)
        assert reader.is_alive()
        file.write(b"}\n")
    reader.join(300)
    assert list(found[0].records) == ["a", "b"]
    assert found[0].problems == []


def for_ever(path, started):
    while True:
        many(path, 0, started)


def test_a_kill(path, context):
    """What had been saved before stays, and the lock does not outlive its holder."""
    append(path, record("before"))
    for delay in (0.0, 0.02):
        started = context.Event()
        writer = context.Process(target=for_ever, args=(path, started))
        writer.start()
        assert started.wait(300)
        time.sleep(delay)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        before = lines.read(path, FORMAT).records
        assert {"before", "0-0"} <= set(before)
        append(path, record(f"after-{delay}"))
        assert lines.read(path, FORMAT) == (
            {**before, f"after-{delay}": record(f"after-{delay}")}, []
        )  # fmt: skip
