import io
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from train.training import metrics
from train.training.metrics import Clock, Metrics, NonFiniteError


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


def run(folder, start, stop, total=10, log_every=4):
    with Metrics(folder, total, start, work=metrics.Work(32), log_every=log_every) as log:
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
    assert [line["step"] for line in metrics.read(tmp_path / "metrics.jsonl")] == [2, 4, 6, 8]
    run(tmp_path, 5, 10, log_every=2)
    steps = [line["step"] for line in metrics.read(tmp_path / "metrics.jsonl")]
    assert steps == [2, 4, 6, 8, 10]
    assert list(tmp_path.glob(".*")) == []


def test_numbers_are_fetched_one_step_late(tmp_path, monkeypatch):
    """Nobody waits for the step that has just begun; a number that is not finite is then told."""
    fetched = []
    get = metrics.jax.device_get
    monkeypatch.setattr(metrics.jax, "device_get", lambda v: fetched.append(v["loss"]) or get(v))
    with Metrics(tmp_path, 3, 0, work=metrics.Work(1), log_every=1) as log:
        log.record(1, values(1))
        assert fetched == []
        log.record(2, values(2) | {"gradient_norm": jnp.float32(np.inf)})
        assert np.array_equal(fetched, [1])
        with pytest.raises(NonFiniteError, match="the gradient norm is not finite at step 2"):
            log.flush()
        log.flush()
        assert np.array_equal(fetched, [1, 2])
    assert [line["step"] for line in metrics.read(tmp_path / "metrics.jsonl")] == [1]


def test_a_line_now_and_then_where_there_is_no_terminal(tmp_path, monkeypatch):
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


def test_compilation_is_counted_apart(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    watch = Clock(98.0)
    watch.lap("to start")
    now[0] += 10
    for event in metrics.COMPILATION:
        jax.monitoring.record_event_duration_secs(event, 2.0)
    jax.monitoring.record_event_duration_secs("/jax/something/else", 5.0)
    watch.lap("to train")
    assert str(watch) == "12.0 s: 2.0 s to start, 6.0 s to compile, 4.0 s to train"
    before = metrics.compiling_seconds()
    jax.jit(lambda x: x + 17.25)(1.0)
    assert metrics.compiling_seconds() > before, "jax still has events of these names"
