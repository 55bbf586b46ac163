"""Verdicts: what counts as confirmed, and what does not."""

import pytest

from tests.train.evidence.results import BEYOND, INSIDE, all_trials, diverge, finish, finish_all
from train.evidence.verdicts import Kind, Verdict, compare, every, keeps, unfinished, wins

RIVALS = ("rope", "none")


@pytest.fixture
def planned(design, place):
    return design.at(place)


def test_unfinished_runs_count_nowhere(planned):
    found = wins(planned, BEYOND, RIVALS)
    assert found.kind is Kind.UNFINISHED
    assert found.because == "copying: tape 0 of 3, rope 0 of 3, none 0 of 3 seeds."
    for job in all_trials(planned):
        finish(planned, job, {"tape": 0.9}.get(job.name, 0.1))
    assert wins(planned, BEYOND, RIVALS).kind is Kind.UNFINISHED
    assert unfinished(planned).kind is Kind.UNFINISHED


@pytest.mark.parametrize(
    ("right", "kind", "because"),
    [
        ({"tape": 0.6, "rope": 0.3, "none": 0.2}, Kind.CONFIRMED, "tape 61.00 ± 1.00"),
        (
            {"tape": 0.3, "rope": 0.6, "none": 0.2},
            Kind.NOT_CONFIRMED,
            "tape is clearly behind rope. copying",
        ),
        (
            {"tape": 0.3, "rope": 0.6, "none": 0.3},
            Kind.NOT_CONFIRMED,
            "tape is clearly behind rope and not told from none by these seeds",
        ),
        ({"tape": 0.02, "rope": 0.0, "none": 0.0}, Kind.NOT_TESTED, "All are below 5 %"),
        ({"tape": 0.98, "rope": 0.96, "none": 0.97}, Kind.NOT_TESTED, "All are above 95 %"),
    ],
)
def test_wins(planned, right, kind, because):
    finish_all(planned, right)
    found = wins(planned, BEYOND, RIVALS)
    assert (found.kind, because in found.because) == (kind, True), found


def test_chance_does_not_win(planned):
    """One seed far ahead is not enough."""
    finish_all(planned, {"tape": 0.3, "rope": 0.3, "none": 0.0})
    finish(planned, planned.finals("tape")[2], 0.9)
    found = wins(planned, BEYOND, ["rope"])
    assert found.kind is Kind.NOT_CONFIRMED
    assert "not told from rope" in found.because


def test_a_training_that_diverged_has_lost(planned):
    finish_all(planned, {"tape": 0.3, "rope": 0.3, "none": 0.3})
    for rival in RIVALS:
        diverge(planned, planned.finals(rival)[1])
    assert wins(planned, BEYOND, RIVALS).kind is Kind.CONFIRMED
    diverge(planned, planned.finals("tape")[1])
    diverge(planned, planned.finals("tape")[2])
    assert "clearly behind rope, none" in wins(planned, BEYOND, RIVALS).because


def test_perplexities_are_compared_by_their_logarithms(planned):
    score = planned.scores[0]._replace(higher_is_better=False)
    values = {
        "low": {0: 2.0, 1: 2.1, 2: 2.2},
        "high": {0: 20.0, 1: 200.0, 2: 100.0},
        "same": {0: 2.1, 1: 2.0, 2: 2.3},
    }
    standing = compare(values, "low", score)
    assert (standing.worse, standing.better, standing.unclear) == (["high"], [], ["same"])
    standing = compare(values, "high", score)
    assert (standing.worse, standing.better) == ([], ["low", "same"])


def test_keeps(planned):
    assert keeps(planned, INSIDE, BEYOND, loss=5).kind is Kind.UNFINISHED
    finish_all(planned, {"tape": 0.95, "rope": 0.3, "none": 0.2})
    found = keeps(planned, INSIDE, BEYOND, loss=5)
    assert found.kind is Kind.CONFIRMED
    assert found.because.startswith("tape: 100.0 ± 0.0 up to length 3")
    assert keeps(planned, INSIDE, BEYOND, loss=3).kind is Kind.NOT_CONFIRMED
    assert keeps(planned, INSIDE, BEYOND, name="rope", loss=5).kind is Kind.NOT_CONFIRMED


def test_every():
    parts = [Verdict(Kind.CONFIRMED, "a."), Verdict(Kind.NOT_TESTED, "b.")]
    assert every(*parts) == Verdict(Kind.NOT_TESTED, "a. b.")
    assert every(*parts, Verdict(Kind.NOT_CONFIRMED, "c.")).kind is Kind.NOT_CONFIRMED
    waiting = Verdict(Kind.UNFINISHED, "d.")
    assert every(waiting, *parts) == Verdict(Kind.UNFINISHED, "a. b. d.")
