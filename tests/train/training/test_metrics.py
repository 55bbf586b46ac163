import io
import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from train.training import metrics
from train.training.metrics import Clock, Metrics, NonFiniteError, Progress, spoken


class Terminal(io.StringIO):
    def isatty(self):
        return True


def values(loss: float) -> dict:
    return {"loss": jnp.float32(loss), "gradient_norm": jnp.float32(1.0)}


def scalars(folder):
    """The (step, name, value) of all TensorBoard events in a folder."""
    found = []
    for path in sorted(folder.iterdir()):
        content, place = path.read_bytes(), 0
        while place < len(content):
            (length,) = struct.unpack_from("<Q", content, place)
            event = event_pb2.Event.FromString(content[place + 12 : place + 12 + length])
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            place += 16 + length
    return found


def run(folder, start, stop, total=10, log_every=4, sums=None):
    with Metrics(
        folder, total, start, work=metrics.Work(32), log_every=log_every, sums=sums
    ) as log:
        for step in range(start + 1, stop + 1):
            log.record(step, values(step))
        log.flush()


def test_means_since_the_line_before(tmp_path):
    run(tmp_path, 0, 10)
    lines = metrics.read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [4, 8, 10]
    assert [line["loss"] for line in lines] == [2.5, 6.5, 9.5]
    assert all(line["tokens_per_second"] > 0 for line in lines)
    losses = [s for s in scalars(tmp_path / "tensorboard") if s[1] == "loss"]
    assert losses == [(4, "loss", 2.5), (8, "loss", 6.5), (10, "loss", 9.5)]


def test_resuming_cuts_what_lies_past_the_checkpoint(tmp_path):
    run(tmp_path, 0, 9, log_every=2)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "lo')
    run(tmp_path, 5, 10, log_every=2)
    steps = [line["step"] for line in metrics.read(tmp_path / "metrics.jsonl")]
    assert steps == [2, 4, 6, 8, 10]
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize("kept", [0, 6])
def test_tensorboard_forgets_what_lies_past_the_checkpoint(tmp_path, monkeypatch, kept):
    given = []
    writer = metrics.tensorboardX.SummaryWriter
    monkeypatch.setattr(
        metrics.tensorboardX,
        "SummaryWriter",
        lambda folder, purge_step: given.append(purge_step) or writer(folder, purge_step),
    )
    run(tmp_path, kept, 10)
    assert given == [kept + 1]


@pytest.mark.parametrize("damaged", [b"\0" * 40, b"\xff\xfe", b"[1]", b'{"loss": 1}'])
def test_damaged_lines_are_cut_when_a_run_goes_on_and_named_before(tmp_path, damaged):
    """As a power cut leaves them."""
    path = tmp_path / "metrics.jsonl"
    run(tmp_path, 0, 6, log_every=2)
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, damaged, b"\n", *rest, damaged, b"\n", damaged]))
    if b"loss" not in damaged:
        with pytest.raises(ValueError, match=rf"{path}, line 2 is damaged: expected a JSON obj"):
            metrics.read(path)
    metrics.cut(path, 4)
    assert path.read_bytes() == b"".join([first, rest[0]])


def test_going_on_between_two_lines(tmp_path):
    """With the sums of the checkpoint, the lines are those of a run that was never stopped."""
    sums, saved = metrics.Sums(), metrics.Sums()
    run(tmp_path, 0, 6, total=14, sums=sums)
    saved.set_state(json.loads(json.dumps(sums.get_state())))
    run(tmp_path, 6, 14, total=14, sums=saved)
    lines = metrics.read(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["loss"]) for line in lines] == [
        *[(4, 2.5), (8, 6.5), (12, 10.5)],
        (14, 13.5),
    ]


def test_a_line_at_the_end_of_a_run_goes_when_the_run_becomes_longer(tmp_path):
    sums = metrics.Sums()
    run(tmp_path, 0, 10, total=10, sums=sums)
    state = sums.get_state()
    for total, steps in ((10, [4, 8, 10]), (16, [4, 8, 12, 16])):
        saved = metrics.Sums()
        saved.set_state(state)
        run(tmp_path, 10, total, total=total, sums=saved)
        lines = metrics.read(tmp_path / "metrics.jsonl")
        assert [line["step"] for line in lines] == steps
    assert [line["loss"] for line in lines] == [2.5, 6.5, 10.5, 14.5]
    losses = [s[::2] for s in scalars(tmp_path / "tensorboard") if s[1] == "loss"]
    assert losses[-2:] == [(12, 10.5), (16, 14.5)]


def test_an_unfinished_line_is_not_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert metrics.read(path) == []
    path.write_text(json.dumps({"step": 1}) + '\n{"st')
    assert metrics.read(path) == [{"step": 1}]


def test_numbers_are_fetched_one_step_late(tmp_path, monkeypatch):
    fetched = []
    get = metrics.jax.device_get
    monkeypatch.setattr(metrics.jax, "device_get", lambda v: fetched.append(v["loss"]) or get(v))
    with Metrics(tmp_path, 3, 0, work=metrics.Work(1), log_every=1) as log:
        log.record(1, values(1))
        assert fetched == []
        log.record(2, values(2))
        assert np.array_equal(fetched, [1])
        log.flush()
        log.flush()
        assert np.array_equal(fetched, [1, 2])


@pytest.mark.parametrize(("name", "bad"), [("loss", np.nan), ("gradient_norm", np.inf)])
def test_non_finite_numbers_raise(tmp_path, name, bad):
    with Metrics(tmp_path, 3, 0, work=metrics.Work(1), log_every=1) as log:
        log.record(1, values(1) | {name: jnp.float32(bad)})
        with pytest.raises(NonFiniteError, match=f"the {name.replace('_', ' ')} is not .* step 1"):
            log.record(2, values(2))
    assert metrics.read(tmp_path / "metrics.jsonl") == []


def test_a_bar_on_a_terminal():
    file = Terminal()
    progress = Progress(40, start=10, label="tape", file=file)
    progress.update(20, "loss 0.5000, 12,000 tokens/s")
    progress.close()
    text = file.getvalue()
    assert "tape:  50%" in text
    assert "20/40" in text
    assert "left, loss 0.5000, 12,000 tokens/s" in text


def test_quiet_elsewhere_but_for_a_line_now_and_then(monkeypatch):
    file, now = io.StringIO(), [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    progress = Progress(40, label="tape", file=file)
    progress.update(10, "loss 1.0000")
    assert file.getvalue() == ""
    now[0] = metrics.SECONDS_BETWEEN_LINES
    progress.update(20, "loss 0.5000")
    progress.update(30, "loss 0.2500")
    progress.close()
    assert file.getvalue() == "tape: 20/40 loss 0.5000\n"


def test_every_step_is_shown_where_lines_are_far_apart(tmp_path, monkeypatch):
    """A line of the file comes every 1,000 steps; people see a loss every ten seconds."""
    file, now = io.StringIO(), [0.0]
    monkeypatch.setattr(metrics.sys, "stderr", file)
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    with Metrics(tmp_path, 5000, 0, work=metrics.Work(1), log_every=1000) as log:
        for step in range(1, 26):
            now[0] += 1.0
            log.record(step, values(step))
    lines = file.getvalue().splitlines()
    assert [line.split(": ")[1].split()[0] for line in lines] == ["9/5000", "19/5000"]
    assert "loss 5.0000" in lines[0]
    assert metrics.read(tmp_path / "metrics.jsonl") == []


def test_progress_of_items(monkeypatch):
    file = Terminal()
    monkeypatch.setattr(metrics.sys, "stderr", file)
    with Progress.of("evaluating") as update:
        update(512, 1000)
        update(1000, 1000)
    assert "evaluating: 100%" in file.getvalue()


@pytest.fixture
def now(monkeypatch):
    """A clock that is moved by hand."""
    time = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: time[0])
    return time


def test_compilation_is_counted_apart(now):
    watch = Clock(98.0)
    watch.lap("to start")
    now[0] += 10
    for event in metrics.COMPILATION:
        jax.monitoring.record_event_duration_secs(event, 2.0)
    jax.monitoring.record_event_duration_secs("/jax/something/else", 5.0)
    watch.lap("to train")
    now[0] += 3
    watch.lap("to train")
    watch.lap("to save")
    assert str(watch) == "15.0 s: 2.0 s to start, 6.0 s to compile, 7.0 s to train"


def test_a_program_that_is_compiled_is_noticed():
    watch = Clock()
    jax.jit(lambda x: x + 17.25)(1.0)
    watch.lap("to add")
    assert watch._parts["to compile"] > 0


@pytest.mark.parametrize(
    ("seconds", "words"), [(3.21, "3.2 s"), (75, "1 min 15 s"), (7380, "2 h 3 min")]
)
def test_times_in_words(seconds, words):
    assert spoken(seconds) == words
