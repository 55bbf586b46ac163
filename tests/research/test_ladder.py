"""The walk along the learning rates."""

import math

import pytest

from research.ladder import Step, step
from research.protocol import RATES


def walk(score, first="3e-3", ladder=RATES):
    """All rates that a walk tries, in order, and its last step."""
    scores, tried = {}, []
    while (found := step(scores, first, ladder)).missing:
        assert not set(found.missing) & set(scores)
        tried.append(found.missing)
        scores |= {rate: score(rate) for rate in found.missing}
    return tried, found


def peak(best):
    """Scores that fall with the distance from a rate."""
    return lambda rate: -abs(RATES.index(rate) - RATES.index(best))


def test_the_best_lies_between_the_first():
    assert walk(peak("3e-3")) == ([("1e-3", "3e-3", "1e-2")], Step((), "3e-3"))


@pytest.mark.parametrize(
    ("best", "further"),
    [("1e-3", [("3e-4",)]), ("3e-4", [("3e-4",), ("1e-4",)]), ("1e-2", [("3e-2",)])],
)
def test_it_goes_on_towards_the_best(best, further):
    tried, found = walk(peak(best))
    assert tried[1:] == further
    assert found == Step((), best)


@pytest.mark.parametrize(("best", "count"), [("1e-5", 7), ("1e1", 9)])
def test_ends(best, count):
    """A best rate at an end is said, and has no further neighbour."""
    tried, found = walk(peak(best))
    assert found == Step((), best, at_end=True)
    assert sum(map(len, tried)) == count


def test_ties_and_divergence():
    """Where all are alike, as where all diverge, the first counts; else what does not diverge."""
    for value in (0.0, -math.inf):
        assert walk(lambda rate, value=value: value)[1].chosen == "3e-3"
    only = {"1e-3": 1.0, "3e-3": 0.0, "1e-2": 1.0, "3e-4": 0.0}
    assert step(only, "3e-3", RATES).chosen == "1e-3"
    fast = {"1e-2": -math.inf, "3e-2": -math.inf}
    assert walk(lambda rate: fast.get(rate, peak("1e-2")(rate)))[1].chosen == "3e-3"


def test_the_smallest_of_those_that_are_nearly_the_best():
    """Of all that were tried; the walk is that towards the best, and is none the longer."""
    scores = {"1e-3": 88.0, "3e-3": 87.0, "1e-2": 89.5, "3e-2": 4.0}
    assert step(scores, "3e-3", RATES).chosen == "1e-2"
    assert step(scores, "3e-3", RATES, within=2.0) == Step((), "1e-3")
    assert step(scores, "3e-3", RATES, within=1.0) == Step((), "1e-2")
    assert step(scores | {"1e-3": 87.5}, "3e-3", RATES, within=2.0) == Step((), "1e-3")
    assert step(scores | {"1e-3": 87.4}, "3e-3", RATES, within=2.0) == Step((), "1e-2")
    nothing = dict.fromkeys(("1e-3", "3e-3", "1e-2"), -math.inf)
    assert step(nothing, "3e-3", RATES, within=2.0) == Step((), "1e-3")
    del scores["3e-2"]
    assert step(scores, "3e-3", RATES, within=2.0).missing == ("3e-2",)
    end = step(dict(zip(RATES, range(len(RATES)), strict=True)), "3e-3", RATES, within=2.0)
    assert end == Step((), RATES[-1], at_end=True)


def test_two_peaks():
    """It ends at the first that has both its neighbours behind it, whatever lies further."""
    found = walk(lambda rate: {"3e-3": 2.0, "1e-4": 9.0}.get(rate, 1.0))[1]
    assert found == Step((), "3e-3")


def test_unknown_rates():
    with pytest.raises(ValueError, match="unknown rate of the ladder '2e-3'"):
        step({"2e-3": 1.0}, "3e-3", RATES)
    with pytest.raises(ValueError, match="unknown rate of the ladder '5'"):
        step({}, "5", RATES)
