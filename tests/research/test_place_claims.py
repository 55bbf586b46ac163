"""Tasks of places, and whether one form is ahead in all."""

from types import SimpleNamespace

import chex
import flax
import jax
import numpy as np
import pytest

import tape_jax as tape
from research import place_claims, verdicts
from research.configs.places import CHOSEN, NO_UPDATE
from research.studies import KIND, OWN
from research.verdicts import Kind, Verdict
from tests.research.results import BEYOND, finish_all
from train import experiment
from train.statistics import Estimate
from train.tasks import Score

ALL = dict.fromkeys(place_claims.OF_ALL, Kind.CONFIRMED)
LEAST = dict.fromkeys(place_claims.OF_ALL, Kind.NOT_TOLD) | dict.fromkeys(
    (*place_claims.REQUIRED, "table", "passkey"), Kind.CONFIRMED
)


def _study(name, missing):
    """What verdicts read of a study."""
    return SimpleNamespace(
        name=name,
        missing=missing,
        score=lambda key: Score(key, "beyond", True),
        texts=lambda rival, key: {},
    )


@pytest.mark.parametrize(("form", "alone"), place_claims.DECAYED.items())
@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        ({}, Kind.NOT_TOLD),
        ({"passkey": (1.0, 1e-4)}, Kind.CONFIRMED),
        ({"passkey": (1.0, 1e-4), "flip_flop": (-1.0, 1e-4)}, Kind.CONTRADICTED),
        # One of six: 0.02 by itself is 0.12.
        ({"passkey": (1.0, 0.02)}, Kind.NOT_TOLD),
        ({"passkey": (1.0, 0.008)}, Kind.CONFIRMED),
    ],
)
def test_a_decay_is_better_somewhere_and_worse_nowhere(monkeypatch, form, alone, seen, kind):
    def found(form, asked):
        known = {}
        for study, key, rival in asked:
            mean, p = seen.get(study.name, (0.0, 0.5))
            known[verdicts._name((study, key, rival))] = Estimate(mean, -2.0, 2.0, p, 1.0, 5)
        return known

    monkeypatch.setattr(verdicts, "differences", found)
    studies = {name: _study(name, lambda rival, key: None) for name, _ in place_claims.DECAYED_AT}
    verdict = place_claims.decayed(studies, form)
    assert verdict.kind is kind
    assert {cells[1] for cells in verdict.rows} == {alone}
    assert len(verdict.rows) == 6


@pytest.mark.slow
def test_without_its_update_the_chosen_form_is_rope_with_its_bias():
    """And is trained with its drawn positions."""

    def made(fields):
        given = [f"--config.{name}={value}" for name, value in fields.items()]
        return experiment.from_file(OWN / "places.py", given).model

    still, chosen = made(NO_UPDATE), made(CHOSEN)
    rope = made({KIND: "rope+alibi"})
    assert still.random_positions == chosen.random_positions is not None
    tokens = np.arange(12)[None]
    variables = jax.jit(tape.Transformer(rope).init)(jax.random.key(0), tokens)
    chex.assert_trees_all_close(
        tape.Transformer(still).apply(variables, tokens),
        tape.Transformer(rope).apply(variables, tokens),
        atol=1e-6,
    )
    with pytest.raises(flax.errors.ScopeParamNotFoundError):
        tape.Transformer(chosen).apply(variables, tokens)


def test_every_rival_is_compared_and_every_comparison_has_its_runs():
    ours = {design.name: set(design.rivals) for design in place_claims.STUDIES}
    compared = {name: set[str]() for name in ours}
    for asked in place_claims.QUESTIONS.values():
        for form in asked.forms:
            rivals = asked.rivals or place_claims.rivals_of(form)
            compared[asked.study] |= {form, *rivals, *asked.beside}
    for task in (*place_claims.TASKS, place_claims.AGAIN):
        assert compared[task] == ours[task]
    assert all(ours[name] >= some for name, some in compared.items())
    assert all(compared.values())
    assert "mapformer_wm" in compared["navigation"]


@pytest.mark.parametrize(
    ("kinds", "sums", "worst", "kind"),
    [
        (LEAST, Kind.CONFIRMED, 0, Kind.CONFIRMED),
        (LEAST | {"table": Kind.NOT_TOLD}, Kind.CONFIRMED, 0, Kind.NOT_TOLD),
        (ALL | {"text, 8x": Kind.NOT_TOLD}, Kind.CONFIRMED, 0, Kind.NOT_TOLD),
        (ALL, Kind.NOT_TOLD, 0, Kind.NOT_TOLD),
        (ALL, Kind.CONTRADICTED, 0, Kind.CONTRADICTED),
        (ALL | {"recall": Kind.UNFINISHED}, Kind.CONFIRMED, 0, Kind.UNFINISHED),
        (ALL, Kind.UNFINISHED, 0, Kind.UNFINISHED),
        # Behind, by the one study that has run: clearly enough for all fifty together, or not.
        (ALL | {"recall": Kind.UNFINISHED}, Kind.CONFIRMED, 1e-4, Kind.CONTRADICTED),
        (ALL | {"recall": Kind.UNFINISHED}, Kind.CONFIRMED, 0.004, Kind.UNFINISHED),
    ],
)
def test_one_for_all(monkeypatch, kinds, sums, worst, kind):
    """By the verdicts of the tasks, and by one p-value where a form is behind."""

    def verdict(name, kind):
        return Verdict(kind, [], (name,) if kind is Kind.UNFINISHED else ())

    def study(name):
        known = ("tape_alibi", "rope") if worst and name == "table" else ()
        return _study(name, lambda rival, key: None if rival in known else "all")

    monkeypatch.setattr(place_claims, "_judge", lambda name: lambda *_: verdict(name, kinds[name]))
    monkeypatch.setattr(place_claims, "_sums_right", lambda *_: verdict("sums", sums))
    behind = Estimate(mean=-1.0, low=-2.0, high=-0.5, p=worst, spread=1.0, number=5)
    monkeypatch.setattr(
        place_claims, "differences", lambda form, known: dict.fromkeys(["it"] * bool(known), behind)
    )
    studies = {one.study: study(one.study) for one in place_claims.OF_ALL.values()}
    found = place_claims.one_for_all(studies, "tape_alibi")
    assert found.kind is kind
    waiting = [name for name, one in (*kinds.items(), ("sums", sums)) if one is Kind.UNFINISHED]
    assert found.missing == tuple(waiting)


@pytest.mark.parametrize(
    ("share", "kind"),
    [(0.4, Kind.CONTRADICTED), (0.49, Kind.NOT_TOLD), (0.6, Kind.CONFIRMED)],
)
def test_longer_sums(design, place, share, kind):
    """All of the interval is on one side."""
    planned = design.at(place)
    assert place_claims._sums_right(planned, "tape").kind is Kind.UNFINISHED
    finish_all(planned, {"tape": share})
    found = place_claims._sums_right(planned, "tape")
    assert found.kind is kind
    assert found.rows[0][1] == "a share, limit +50.00"
    assert planned.score(BEYOND).label in found.rows[0][2]
