"""Tests recent models' encodings, schedules, and TAPE without RoPE's start on other suites' tasks.

research/protocol.md says what is asked and why. Records are those of the other suites.
"""

from __future__ import annotations

import dataclasses

from research import place_claims
from research.place_claims import AGAIN, Question, claim_of
from research.studies import RECENT, encodings
from research.trainings import Trainings

# Each of them with ALiBi's bias.
BIASED = tuple(f"{name}_alibi" for name in RECENT)
SCHEDULES = ("rope_none", "rope_windows", "tape_late_alibi")
FORMS = (*RECENT, *BIASED, *SCHEDULES)
RIVALS = ("rope_alibi", "tape_alibi")
ASKED = ("counting", "selective_copy", "recall", "text", "text, 8x")

# Other starts of TAPE's states; WITHOUT has RoPE's start, and forms without the update.
STARTS = ("tape_shift", "tape_phases", "tape_polar")
WITHOUT = ("tape_demo", "rope_alibi", "pope_alibi")
STARTED = ("counting", "selective_copy", "navigation")


def _asked(name: str, forms: tuple[str, ...], rivals: tuple[str, ...], words: str = "") -> Question:
    """Returns a question of the suite ``places``, asked of other forms and rivals."""
    before = place_claims.QUESTIONS[name]
    title = f"{before.title}{words}"
    return before._replace(
        title=title, forms=forms, rivals=rivals, beside=(), note="", of_all=False
    )


QUESTIONS = {
    **{f"{name}, starts": _asked(name, STARTS, WITHOUT, ", with other starts") for name in STARTED},
    **{name: _asked(name, FORMS, RIVALS) for name in ASKED},
    # This task chose the demo's form of TAPE.
    AGAIN: _asked(AGAIN, FORMS, (*RIVALS, "tape_demo")),
}


def _study(name: str) -> Trainings:
    """Returns a study of the suite ``places``, with the forms asked about here and their rivals."""
    (design,) = (one for one in place_claims.STUDIES if one.name == name)
    asked = [one for one in QUESTIONS.values() if one.study == name]
    curve = () if design.curve is None else design.curve.rivals
    compared = [*(x for one in asked for x in (*one.forms, *(one.rivals or ()))), *curve]
    quick = curve if name == "counting" else ()
    return dataclasses.replace(design, rivals=encodings(*compared), quick=quick)


STUDIES = tuple(map(_study, dict.fromkeys(one.study for one in QUESTIONS.values())))
GPU = "`python -m research.main evidence --suite=arena --config.scale=gpu`"
CLAIMS = tuple(claim_of(name, asked, GPU) for name, asked in QUESTIONS.items())
