"""Functions take turns."""

import pytest

from tape_jax._src.core import timing
from tape_jax._src.core.timing import Timing, take_turns


@pytest.fixture
def clock(monkeypatch):
    """A clock that each call of the returned function moves on by a second."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call(seconds=1.0):
        now[0] += seconds

    return call


def test_take_turns(clock):
    got = take_turns({"slow": lambda: clock(3), "fast": clock}, repeats=4)
    assert (got["slow"].seconds, got["fast"].seconds) == ((3.0,) * 4, (1.0,) * 4)
    assert got["slow"].ratio(got["fast"]) == 3


def test_fast_functions_are_called_more_often(clock):
    calls = []
    got = take_turns({"f": lambda: (clock(), calls.append(1))[0]}, repeats=2, least=2.5)
    assert (got["f"].seconds, len(calls)) == ((1.0, 1.0), 1 + 2 * 3)


def test_spread():
    assert Timing((1.0, 2.0, 3.0, 4.0, 5.0)).spread == 0.5
