import jax
import pytest

from train.training import clock
from train.training.clock import Clock, spoken


@pytest.fixture
def now(monkeypatch):
    """A clock that is moved by hand."""
    time = [100.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: time[0])
    return time


def test_compilation_is_counted_apart(now):
    watch = Clock(98.0)
    watch.lap("to start")
    now[0] += 10
    for event in clock.COMPILATION:
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
