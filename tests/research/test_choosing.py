"""The walk along the learning rates, and the budget."""

import math

import pytest

from research.choosing import Budget, RateStep, choose_budget, next_rates
from research.protocol import RATES


def walk(score, first="3e-3", ladder=RATES):
    """All rates that a walk tries, in order, and its last step."""
    scores, tried = {}, []
    while (found := next_rates(scores, first, ladder)).missing:
        assert not set(found.missing) & set(scores)
        tried.append(found.missing)
        scores |= {rate: score(rate) for rate in found.missing}
    return tried, found


def peak(best):
    """Scores that fall with the distance from a rate."""
    return lambda rate: -abs(RATES.index(rate) - RATES.index(best))


@pytest.mark.parametrize(
    ("best", "further"),
    [("3e-3", []), ("1e-3", [("3e-4",)]), ("3e-4", [("3e-4",), ("1e-4",)]), ("1e-2", [("3e-2",)])],
)
def test_it_goes_on_towards_the_best(best, further):
    tried, found = walk(peak(best))
    assert tried == [("1e-3", "3e-3", "1e-2"), *further]
    assert found == RateStep((), best)


@pytest.mark.parametrize(("best", "count"), [("1e-5", 7), ("1e1", 9)])
def test_ends(best, count):
    """A best rate at an end is said, and has no further neighbour."""
    tried, found = walk(peak(best))
    assert found == RateStep((), best, at_end=True)
    assert sum(map(len, tried)) == count


def test_ties_and_divergence():
    """Where all are alike, as where all diverge, the first counts; else what does not diverge."""
    for value in (0.0, -math.inf):
        assert walk(lambda rate, value=value: value)[1].chosen == "3e-3"
    only = {"1e-3": 1.0, "3e-3": 0.0, "1e-2": 1.0, "3e-4": 0.0}
    assert next_rates(only, "3e-3", RATES).chosen == "1e-3"
    # It ends at the first that has both its neighbours behind it, whatever lies further.
    assert walk(lambda rate: {"3e-3": 2.0, "1e-4": 9.0}.get(rate, 1.0))[1].chosen == "3e-3"
    fast = {"1e-2": -math.inf, "3e-2": -math.inf}
    assert walk(lambda rate: fast.get(rate, peak("1e-2")(rate)))[1].chosen == "3e-3"


def test_the_smallest_of_those_that_are_nearly_the_best():
    """Of all that were tried; the walk is that towards the best, and is none the longer."""
    scores = {"1e-3": 88.0, "3e-3": 87.0, "1e-2": 89.5, "3e-2": 4.0}
    assert next_rates(scores, "3e-3", RATES).chosen == "1e-2"
    assert next_rates(scores, "3e-3", RATES, within=2.0) == RateStep((), "1e-3")
    assert next_rates(scores, "3e-3", RATES, within=1.0) == RateStep((), "1e-2")
    assert next_rates(scores | {"1e-3": 87.5}, "3e-3", RATES, within=2.0) == RateStep((), "1e-3")
    assert next_rates(scores | {"1e-3": 87.4}, "3e-3", RATES, within=2.0) == RateStep((), "1e-2")
    nothing = dict.fromkeys(("1e-3", "3e-3", "1e-2"), -math.inf)
    assert next_rates(nothing, "3e-3", RATES, within=2.0) == RateStep((), "1e-3")
    del scores["3e-2"]
    assert next_rates(scores, "3e-3", RATES, within=2.0).missing == ("3e-2",)
    end = next_rates(dict(zip(RATES, range(len(RATES)), strict=True)), "3e-3", RATES, within=2.0)
    assert end == RateStep((), RATES[-1], at_end=True)


def test_unknown_rates():
    with pytest.raises(ValueError, match="unknown rate of the ladder '2e-3'"):
        next_rates({"2e-3": 1.0}, "3e-3", RATES)
    with pytest.raises(ValueError, match="unknown rate of the ladder '5'"):
        next_rates({}, "5", RATES)


@pytest.mark.parametrize(
    ("rope", "alibi", "most", "expected"),
    [
        # A doubling that gains 2 per cent or less is not worth it, for both.
        ((4.0, 3.95, 3.9), (4.2, 4.15, 4.14), 4, Budget(1, False)),
        ((4.0, 3.95, 3.9), (4.2, 4.0, 3.99), 4, Budget(2, False)),
        ((4.0, 3.6, 3.3), (4.4, 3.7, 3.4), 4, Budget(4, None)),
        ((4.0, 3.6, 3.3), (4.4, 3.7, 3.4), 2, Budget(2, True)),
        ((4.0, 3.6, 3.3), (4.4, 3.7, 3.4), 1, Budget(1, True)),
        # To become worse is no gain.
        ((4.0, 4.5, 4.6), (4.2, 4.4, 4.5), 4, Budget(1, False)),
    ],
)
def test_perplexity(rope, alibi, most, expected):
    found = {"rope": rope, "alibi": alibi}
    values = {name: dict(zip((1, 2, 4), x, strict=True)) for name, x in found.items()}
    assert choose_budget(values, most, higher_is_better=False) == expected


def test_what_is_learned_all_at_once():
    """A doubling that gains nothing is no end where the next one does."""
    values = {"tape_alibi": {1: 10.0, 2: 11.0, 4: 99.0}, "rope_alibi": {1: 9.0, 2: 9.0, 4: 9.0}}
    assert choose_budget(values, 4, higher_is_better=True) == Budget(1, False)
    assert choose_budget(values, 4, higher_is_better=True, sudden=True) == Budget(4, None)
    assert choose_budget(values, 2, higher_is_better=True, sudden=True) == Budget(2, True)
    learned = {"tape_alibi": {1: 99.0, 2: 99.5, 4: 100.0}, "rope_alibi": {1: 9.0, 2: 9.0, 4: 9.0}}
    assert choose_budget(learned, 4, higher_is_better=True, sudden=True) == Budget(1, False)
