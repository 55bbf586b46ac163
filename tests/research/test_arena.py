"""What the arena asks is asked as before, of others."""

import dataclasses

import pytest

from research import arena, place_claims

BEFORE = {design.name: design for design in place_claims.STUDIES}
OURS = {design.name: design for design in arena.STUDIES}


@pytest.mark.parametrize("name", OURS)
def test_a_study_differs_in_its_rivals_alone(name):
    """So that what is on record serves both pages."""
    ours, before = OURS[name], BEFORE[name]
    same = {"rivals": before.rivals, "quick": before.quick}
    assert dataclasses.replace(ours, **same) == before
    shared = ours.rivals.keys() & before.rivals.keys()
    assert {x: ours.rivals[x] for x in shared} == {x: before.rivals[x] for x in shared}
    assert shared >= {*(ours.curve.rivals if ours.curve else ())}


@pytest.mark.parametrize("name", arena.QUESTIONS)
def test_every_comparison_has_its_runs(name):
    asked = arena.QUESTIONS[name]
    assert {*asked.forms, *asked.rivals} <= OURS[asked.study].rivals.keys()
    assert not asked.beside
    assert not asked.of_all
    before = place_claims.QUESTIONS[name.removesuffix(", starts")]
    assert (asked.study, asked.key) == (before.study, before.key)
    assert asked.title.startswith(before.title)
