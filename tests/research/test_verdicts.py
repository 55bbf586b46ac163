"""Verdicts: what counts as confirmed, contradicted, or neither."""

import dataclasses

import pytest

from research.verdicts import (
    Kind,
    Verdict,
    best_of,
    every,
    family,
    leads,
    limited,
    together,
    wins,
)
from tests.research.results import BEYOND, diverge, finish_all
from train.statistics import difference, estimate


@pytest.fixture
def planned(design, place):
    return design.at(place)


def seeds(*values):
    return dict(zip((2, 3, 4, 5, 6), values, strict=False))


FLAT = seeds(1.0, 1.1, 0.9, 1.05, 0.95)
ABOVE = seeds(3.0, 3.2, 2.9, 3.0, 3.1)
BELOW = seeds(-1.0, -0.9, -1.1, -1.2, -1.0)
WILD = seeds(9.0, -5.0, 3.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("rivals", "kind", "words"),
    [
        ({"a": FLAT, "b": BELOW}, Kind.CONFIRMED, ["better", "better"]),
        ({"a": FLAT, "b": WILD}, Kind.NOT_TOLD, ["better", "not told"]),
        ({"a": seeds(6.0, 6.1, 6.3, 6.2, 6.0), "b": FLAT}, Kind.CONTRADICTED, ["worse", "better"]),
        ({"a": ABOVE}, Kind.NOT_TOLD, ["not told"]),
    ],
)
def test_best_of(rivals, kind, words):
    found = best_of(ABOVE, rivals, name="tape", score="points")
    assert found.kind is kind
    assert [cells[-1] for cells in found.rows] == words
    assert [cells[:3] for cells in found.rows] == [["tape", rival, "points"] for rival in rivals]


def test_a_family_asks_for_more():
    """What is clear alone is not among many rivals, though the interval leaves out zero."""
    almost = difference(seeds(1.0, 3.0, 1.5, 2.5, 0.3), seeds(0.0, 0.0, 0.0, 0.0, 0.0))
    assert almost.low > 0
    assert family({"a": almost})["a"].better
    crowd = family(dict.fromkeys("abcdefgh", almost))
    assert crowd["a"].word == "not told"
    assert crowd["a"].smallest > family({"a": almost})["a"].smallest


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ((-3.0, -3.1, -3.2), Kind.CONFIRMED),
        ((-7.0, -7.1, -7.2), Kind.CONTRADICTED),
        # The mean is within the limit, the interval is not.
        ((-4.0, -4.9, -5.5), Kind.NOT_TOLD),
        ((-6.0, -5.1, -4.5), Kind.NOT_TOLD),
    ],
)
def test_an_interval_meets_a_limit(values, kind):
    found = limited(estimate(values), -5.0, name="tape", against="itself", score="keys")
    assert found.kind is kind


def test_a_time_whose_interval_reaches_beyond_the_limit():
    """Steps of 1.116, 1.139 and 1.162 times RoPE's: the mean is below 1.15, the interval not."""
    saved = estimate([1 - x for x in (1.116, 1.139, 1.162)])
    assert 1 - saved.low == pytest.approx(1.196, abs=1e-3)
    found = limited(saved, 1 - 1.15, name="tape", against="rope", score="time", multiple=True)
    assert found.kind is Kind.NOT_TOLD
    (cells,) = found.rows
    assert cells[1:5] == ["rope, limit 1.150", "time", "1.139", "1.082 to 1.196"]


def test_a_run_that_diverged_has_the_worst_value(planned):
    finish_all(planned, {"tape": 0.3, "rope": 0.3, "none": 0.3})
    for job in planned.reports("rope", BEYOND):
        diverge(planned, job)
    assert planned.values("rope", BEYOND) == dict.fromkeys(range(2, 7), 0.0)
    assert wins(planned, BEYOND, ["rope"]).kind is Kind.CONFIRMED
    for job in planned.reports("tape", BEYOND)[1:3]:
        diverge(planned, job)
    assert planned.diverged("tape", BEYOND) == {3: 7, 4: 7}
    assert wins(planned, BEYOND, ["rope"]).kind is Kind.NOT_TOLD


def test_runs_that_were_judged_by_other_texts_are_not_paired(planned, monkeypatch):
    finish_all(planned, {"tape": 0.6, "rope": 0.3, "none": 0.2})
    texts = {"tape": {2: "a", 3: "a"}, "rope": {2: "a", 3: "b", 4: "c"}, "none": {}}
    monkeypatch.setattr(planned, "texts", lambda rival, key: texts[rival])
    assert wins(planned, BEYOND, ["none"]).kind is Kind.CONFIRMED
    found = wins(planned, BEYOND, ["rope", "none"])
    said = "copying, tape and rope again by one text: seeds 3 were judged by two (a and b)"
    assert found == Verdict(Kind.UNFINISHED, [], (said,))


def test_perplexities_are_compared_by_their_logarithms(planned):
    score = planned.score(BEYOND)._replace(key="loss", higher_is_better=False)
    assert planned.comparable(2.0, score) > planned.comparable(2.1, score)
    text = "perplexity at 1x"
    low = {seed: planned.comparable(x, score) for seed, x in seeds(2.0, 2.1, 2.2, 2, 2).items()}
    high = {seed: planned.comparable(2 * x, score) for seed, x in seeds(2, 2.1, 2.2, 2, 2).items()}
    (cells,) = best_of(low, {"high": high}, name="low", score=text).rows
    assert (cells[3], cells[-1]) == ("+100.0 %", "better")
    assert planned._worst(score) == planned.task.vocab_size


def test_every():
    confirmed, not_told = Verdict(Kind.CONFIRMED, [["a"]]), Verdict(Kind.NOT_TOLD, [["b"]])
    contradicted = Verdict(Kind.CONTRADICTED, [["c"]])
    waiting = Verdict(Kind.UNFINISHED, [], ("d",))
    assert every(confirmed, confirmed).kind is Kind.CONFIRMED
    assert every(confirmed, not_told) == Verdict(Kind.NOT_TOLD, [["a"], ["b"]])
    assert every(not_told, contradicted).kind is Kind.CONTRADICTED
    found = every(waiting, contradicted, waiting)
    assert found == Verdict(Kind.UNFINISHED, [["c"]], ("d",))


@pytest.mark.parametrize(
    ("parity", "reverse", "kind"),
    [
        ([ABOVE] * 4, [FLAT] * 4, Kind.CONFIRMED),
        ([ABOVE] * 3 + [FLAT], [FLAT] * 4, Kind.NOT_TOLD),
        ([ABOVE] * 4, [FLAT] * 3 + [BELOW], Kind.CONTRADICTED),
    ],
)
def test_ahead_somewhere_and_behind_nowhere(parity, reverse, kind):
    """The rivals are all at zero, but for noise that is the same everywhere."""
    zero = seeds(0.3, -0.3, 0.5, -0.5, 0.0)
    told = {
        f"{problem} {rival}": difference(own, FLAT if own is FLAT else zero)
        for problem, owns in (("parity", parity), ("reverse", reverse))
        for rival, own in zip(("rope", "alibi", "fire", "none"), owns, strict=True)
    }
    problems = "parity", "reverse"
    groups = [[name for name in told if name.startswith(problem)] for problem in problems]
    assert leads(family(told), groups) is kind


def test_one_family_of_several_studies(planned, place):
    other = dataclasses.replace(planned.design, name="other").at(place)
    groups = [[(planned, BEYOND, "rope")], [(other, BEYOND, "rope"), (other, BEYOND, "none")]]
    finish_all(planned, {"tape": 0.6, "rope": 0.3, "none": 0.2})
    found = together("tape", groups)
    assert found.kind is Kind.UNFINISHED
    assert all(what.startswith("other, ") for what in found.missing)
    finish_all(other, {"tape": 0.4, "rope": 0.4, "none": 0.4})
    found = together("tape", groups)
    assert found.kind is Kind.CONFIRMED
    assert [cells[-1] for cells in found.rows] == ["better", "not told", "not told"]
    assert found.rows[0][1:3] == ["rope", "copying, beyond length 3, %"]
    assert together("tape", groups[1:]).kind is Kind.NOT_TOLD
    finish_all(other, {"tape": 0.4, "rope": 0.4, "none": 0.9})
    assert together("tape", groups).kind is Kind.CONTRADICTED
