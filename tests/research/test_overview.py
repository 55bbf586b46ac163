"""All studies of a suite beside each other."""

import dataclasses
import types
from typing import Any

import pytest

from research import overview, page, place_claims, suites
from research.choosing import Curve
from research.verdicts import Kind, wins
from tests.research.results import BEYOND, INSIDE, choose_all, finish, finish_all


@pytest.fixture
def two(design, monkeypatch):
    """The suite of places with two studies and two forms."""
    designs = [dataclasses.replace(design, name=name) for name in ("first", "second")]
    claims = [
        place_claims.CLAIMS[0]._replace(
            studies=(one.name,),
            judge=lambda s, form, name=one.name: wins(s[name], BEYOND, ["rope"], name=form),
            forms=("tape", "none"),
            name=one.name,
            beside=(one.name, BEYOND, ("none",)),
        )
        for one in designs
    ]
    small = suites.SUITES["places"]._replace(designs=designs, claims=claims, read={})
    monkeypatch.setitem(suites.SUITES, "places", small)
    return small


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize(
    ("curve", "learned", "others", "marked"),
    [
        ((0.5, 0.9, 1), ("rope",), 0.9, True),
        ((0.5, 0.9, 1), ("rope", "none"), 0.9, True),
        ((0.5, 0.5, 0.5), (), 0.9, False),
        ((0.5, 0.5, 0.5), (), 0.49, True),
        ((0.5, 0.5, 0.5), ("rope",), 0.49, False),
    ],
)
def test_what_hardly_anybody_has_learned_is_no_finding(two, place, curve, learned, others, marked):
    """Where longer trainings were still better, or nobody has half of it right."""
    chosen = Curve(INSIDE, most=1, rivals=("rope", "none"))
    designs = [dataclasses.replace(two.designs[0], curve=chosen), two.designs[1]]
    studies = page.studies_at(two._replace(designs=designs), place)
    first, second = studies.values()
    for job, inside in zip(first.curve_jobs, curve * 2, strict=True):
        finish(first, job, 0.1, inside)
    choose_all(first)
    for rival in first.design.rivals:
        for job in first.reports(rival, BEYOND):
            finish(first, job, 0.1, 0.96 if rival in learned else others)
    finish_all(second, {"tape": 0.6, "rope": 0.3, "none": 0.2})
    text = page.markdown(two, studies, "images")
    told = f"not told apart{'*' * marked}"
    assert f"| first  | {told} | {told} |" in text
    assert "| second | ahead " in text
    (panel,) = overview.picture(studies).axes
    assert [label.get_text() for label in panel.get_yticklabels()] == ["tape", "rope", "none"]
    assert [text.get_text() for text in panel.texts][1::2] == ["62", "32", "22"]
    assert (page.UNLEARNED in text) == marked


@pytest.mark.parametrize(
    ("best", "improving", "number"), [(94, True, 3), (96, True, 1), (60, False, 0), (40, False, 3)]
)
def test_verdicts_that_say_nothing(best, improving, number):
    study = types.SimpleNamespace(
        learned=lambda: {"rope": 5, "none": best}, budget=types.SimpleNamespace(improving=improving)
    )
    claim: Any = types.SimpleNamespace(studies=["one"])
    found = page._no_findings({"one": study}, claim)
    assert len(found) == number
    assert (Kind.NOT_TOLD in found) == bool(number)
    assert Kind.UNFINISHED not in found


@pytest.mark.slow
def test_a_run_of_a_task(place):
    """What an evaluation says is kept and read back, also where numbers are missing."""
    (design,) = (one for one in place_claims.STUDIES if one.name == "address")
    small = {"model.num_layers": 2, "train.steps": 1, "evaluation.samples": 1}
    planned = dataclasses.replace(design, by_scale={"cpu": small}).at(place)
    job = planned._job_once("tape_demo", "3e-3", 2, 1)
    planned._train([job], lambda item: None)
    record = planned.record(job)
    assert all(0 <= planned.value(record, score) <= 100 for score in planned.shown)
