"""Where is TAPE ahead? Tasks in which a place is to be found by content (docs/protocol.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from configs import places
from train.evidence.budgets import Curve
from train.evidence.claims import Claim, Studies
from train.evidence.suite import BEYOND, CONFIGS, INSIDE, KIND, MIX, SHALLOW, encodings
from train.evidence.trainings import Trainings
from train.evidence.verdicts import Verdict, wins
from train.tasks import task_type


class Size(NamedTuple):
    """What a task takes.

    Attributes:
      minutes: of a run with the configuration's steps, on average of all rivals.
      most: the largest multiple of these steps that the hours allow (docs/protocol.md).
      samples: questions of each cell of its grid.
    """

    minutes: float
    most: int = 1
    samples: int = 20


# In the order in which they are made: controls last.
TASKS = {
    "address": Size(1.15, most=2),
    "table": Size(1.3),
    "navigation": Size(1.15),
    "line_numbers": Size(1.5),
    # Of a few cells.
    "flip_flop": Size(0.85, samples=100),
    "recall": Size(1.15),
}

# Every form is judged by itself. The first two have no bias.
FORMS: dict[str, dict[str, Any]] = {
    "tape": {KIND: "tape"},
    "tape_heads": {KIND: "tape", MIX: "heads"},
    "tape_scale_alibi": {KIND: "tape+alibi", MIX: "head_scale"},
    "tape_alibi": {KIND: "tape+alibi", MIX: "heads"},
    # Of configs/addressing_demo.py: it was chosen on addressing.
    "tape_demo": {
        KIND: "tape+alibi",
        MIX: "heads",
        "model.position.alpha": 8.0,
        "model.position.norm": "rms",
    },
    "tape_fox": {KIND: "tape+fox", MIX: "heads"},
}
RIVALS = ("rope", "alibi", "fire", "none", "fox", "path", "cope", "selective_rope")
# RoPE with the same bias, which is the form without its update.
WITHOUT_UPDATE = {
    "tape_scale_alibi": "rope_alibi",
    "tape_alibi": "rope_alibi",
    "tape_demo": "rope_alibi",
    "tape_fox": "rope_fox",
}
CURVE = ("tape_alibi", "rope_alibi")


def rivals_of(form: str) -> list[str]:
    """What a form is compared with: of one with a bias, RoPE with the same bias too."""
    return [*RIVALS, *([WITHOUT_UPDATE[form]] if form in WITHOUT_UPDATE else [])]


def _judge(task: str) -> Callable[[Studies, str], Verdict]:
    """Whether a form is ahead at a task."""
    return lambda studies, form: wins(studies[task], BEYOND, rivals_of(form), name=form)


def _study(task: str) -> Trainings:
    size, fields = TASKS[task], {f"task.{name}": x for name, x in places.TASKS[task].items()}
    return Trainings(
        name=task,
        config=CONFIGS / "places.py",
        rivals={
            **FORMS,
            "rope_alibi": {KIND: "rope+alibi"},
            "rope_fox": {KIND: "rope+fox"},
            **encodings(*RIVALS),
        },
        fields={"task.name": task, **fields, "evaluation.samples": size.samples},
        by_scale=SHALLOW,
        scores=(BEYOND,),
        shown=(INSIDE,),
        curve=Curve(INSIDE, most=size.most, rivals=CURVE, sudden=True),
        minutes=size.minutes,
        # Where questions point is for pictures, and more than all the rest.
        not_kept=("pointing",) if task == "address" else (),
        quick=CURVE if task == "flip_flop" else (),
    )


STUDIES = tuple(_study(task) for task in TASKS)

CLAIMS = tuple(
    Claim(
        title=f"{task_type(task)(**places.TASKS[task]).heading} (`{task}`)",
        test=(
            "Exact match beyond the trained length; above that of "
            f"{', '.join(f'`{rival}`' for rival in RIVALS)} and, for a form with a bias, of RoPE "
            "with the same bias."
        ),
        needs="`python -m train.main evidence --suite=places --config.scale=gpu`",
        studies=(task,),
        judge=_judge(task),
        forms=tuple(FORMS),
    )
    for task in TASKS
)
