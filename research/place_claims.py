"""Where is TAPE ahead, and is one form of it ahead in all? (research/protocol.md, addenda.)"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from research import protocol
from research.choosing import Curve
from research.claims import Claim, Studies
from research.configs import places
from research.studies import CONTEXTUAL, OWN, PROBLEMS, SHALLOW, encodings
from research.studies import STUDIES as STUDIES_OF_CLAIMS
from research.trainings import BEYOND, INSIDE, PlannedTrainings, Trainings
from research.verdicts import (
    Kind,
    Verdict,
    differences,
    family,
    limited,
    missing,
    row,
    together,
    wins,
)
from train.statistics import estimate
from train.tasks import task_type


class Size(NamedTuple):
    """The size of a task's study: minutes, budget and questions.

    Attributes:
      minutes: of a run with the configuration's steps, averaged over all rivals.
      most: the largest multiple of these steps that the hours allow (research/protocol.md).
      samples: questions of each cell of its grid.
    """

    minutes: float
    most: int = 1
    samples: int = 20


# In the order in which they are made.
TASKS = {
    "address": Size(1.15, most=2),
    "table": Size(1.3),
    "navigation": Size(1.15),
    "line_numbers": Size(1.5),
    # Controls, of a few cells.
    "flip_flop": Size(0.85, samples=100),
    "recall": Size(1.15),
    # Added later.
    "counting": Size(0.35),
    "selective_copy": Size(0.35),
}
# By name, the tasks that are also trained for longer (research/protocol.md).
MULTIPLE = 4
LONGER = {f"{task}_{MULTIPLE}x": task for task in ("address", "recall")}
# One of them again, with other seeds and another choice of rates: version 2 of the protocol.
AGAIN, BEFORE = "address_4x_again", "address_4x"

# Every form is judged separately. The first two have no bias.
FORMS = (
    "tape_head_scale",
    "tape",
    "tape_head_scale_alibi",
    "tape_alibi",
    "tape_demo",
    "tape_fox",
    "tape_fox_open",
    "tape_fox_open_alibi",
    "tape_chosen",
)
SHARED_FORMS = tuple(form for form in FORMS if form != "tape_head_scale_alibi")
LONGER_FORMS = ("tape_alibi", "tape_demo")
RIVALS = ("rope", "alibi", "fire", "none")
# Each form without its update: RoPE with the same bias; the chosen one keeps its option too.
WITHOUT_UPDATE = {
    "tape_head_scale_alibi": "rope_alibi",
    "tape_alibi": "rope_alibi",
    "tape_demo": "rope_alibi",
    "tape_fox": "rope_fox",
    "tape_fox_open": "rope_fox_open",
    "tape_fox_open_alibi": "rope_fox_open_alibi",
    "tape_chosen": "chosen_no_update",
}
# MapFormer's own task has a further contextual rival.
MAPS = (*CONTEXTUAL, "mapformer_wm")
CURVE = ("tape_alibi", "rope_alibi")


class Question(NamedTuple):
    """A question on which forms are judged, each separately.

    Attributes:
      study: name of its study.
      title: what is asked.
      forms: forms that are judged.
      key: of the score.
      rivals: of every form; None: :func:`rivals_of`.
      beside: contextual rivals that the forms are also compared with.
      note: text that follows its test.
      of_all: whether "One TAPE for all" counts it; questions added later are not counted.
    """

    study: str
    title: str
    forms: tuple[str, ...] = FORMS
    key: str = BEYOND
    rivals: tuple[str, ...] | None = None
    beside: tuple[str, ...] = CONTEXTUAL
    note: str = ""
    of_all: bool = False


def _task(task: str, **changes: Any) -> Question:
    return Question(task, task_type(task)(**places.TASKS[task]).heading, **changes)


def _shared(study: str, title: str, key: str = BEYOND) -> Question:
    """Returns a question that a study of the claims answers, with more rivals in it."""
    beside = CONTEXTUAL if study == "text" else ()
    return Question(study, title, SHARED_FORMS, key, beside=beside, of_all=True)


def _more_steps(task: str) -> Question:
    title = f"{_task(task).title.removesuffix('.')}, with {MULTIPLE}x the steps"
    return Question(f"{task}_{MULTIPLE}x", title, LONGER_FORMS, beside=())


def _again(words: str, forms: tuple[str, ...], rivals: tuple[str, ...], **more: Any) -> Question:
    return Question(AGAIN, f"{_more_steps('address').title}, {words}", forms, rivals=rivals, **more)


QUESTIONS = {
    "address": _task("address", of_all=True),
    "table": _task("table", of_all=True),
    "navigation": _task("navigation", beside=MAPS, of_all=True),
    "line_numbers": _task("line_numbers", of_all=True),
    "flip_flop": _task("flip_flop", of_all=True),
    "recall": _task("recall", of_all=True),
    "counting": _task("counting"),
    "selective_copy": _task("selective_copy"),
    "text": _shared("text", "Bytes of text, at the trained length", "perplexity_1x"),
    "text, 8x": _shared(
        "text", "Bytes of text, at eight times the trained length", "perplexity_8x"
    ),
    "addition": _shared("addition", "Sums longer than those trained on"),
    "passkey": _shared("passkey", "Passkeys in longer texts than those trained on"),
    "address_4x": _more_steps("address"),
    "recall_4x": _more_steps("recall"),
    AGAIN: _again(
        "asked again",
        ("tape_demo",),
        ("rope_alibi", "alibi", "fire"),
        note=f" A second try, by version 2 of the protocol, made because `{BEFORE}` did not tell "
        "it apart, against the three best rivals there; both are to be quoted.",
    ),
    f"{AGAIN}, bias": _again(
        "asked again, all with ALiBi's bias",
        ("tape_demo", "tape_alibi"),
        tuple(f"{name}_alibi" for name in CONTEXTUAL),
        beside=(),
        note=" All have ALiBi's bias; the options of `tape_demo` were chosen on this task.",
    ),
    f"{AGAIN}, plain": _again(
        "asked again, none with a bias",
        ("tape",),
        CONTEXTUAL,
        beside=(),
        note=" None has a bias.",
    ),
}
OF_ALL = {name: asked for name, asked in QUESTIONS.items() if asked.of_all}
SHARED = tuple((asked.study, asked.key) for asked in OF_ALL.values() if asked.study not in TASKS)

# One TAPE for all: where it must be ahead, at how many other tasks at least, and the per cent of
# longer sums that it must have right.
CANDIDATES = ("tape_alibi", "tape_demo", "tape_chosen")
REQUIRED, OTHERS, SUMS_RIGHT = ("text", "text, 8x", "address"), 2, 50.0

# The scores that compare the paper's mixing of heads with the published code's.
MIXED = (
    *SHARED,
    ("context", "perplexity_overlapping_1x"),
    ("context", "passkey_1x"),
    ("ablations", BEYOND),
    *((f"length-{problem}", BEYOND) for problem in PROBLEMS),
)

# FoX's decay beside ALiBi's bias: forms with both, the same with only the bias, and where.
DECAYED = {"tape_fox_open_alibi": "tape_alibi", "rope_fox_open_alibi": "rope_alibi"}
DECAYED_AT = (
    ("text", "perplexity_1x"),
    ("text", "perplexity_8x"),
    ("addition", BEYOND),
    ("passkey", BEYOND),
    ("line_numbers", BEYOND),
    ("flip_flop", BEYOND),
)

# Names of verdicts: on tasks, and on one form beside another.
WORDS = {Kind.CONFIRMED: "ahead", Kind.CONTRADICTED: "behind"}
COMPARED = {Kind.CONFIRMED: "better", Kind.CONTRADICTED: "worse"}


def rivals_of(form: str) -> list[str]:
    """Returns a form's rivals; with a bias or a decay, also the same form without its update."""
    return [*RIVALS, *([WITHOUT_UPDATE[form]] if form in WITHOUT_UPDATE else [])]


def _studies_of(scores: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the studies of scores, each once."""
    return tuple(dict.fromkeys(study for study, _ in scores))


def _judge(name: str) -> Callable[[Studies, str], Verdict]:
    """Returns a function that judges whether a form is ahead at a question."""
    return _judge_of(QUESTIONS[name])


def _judge_of(asked: Question) -> Callable[[Studies, str], Verdict]:
    return lambda studies, form: wins(
        studies[asked.study], asked.key, asked.rivals or rivals_of(form), name=form
    )


def one_for_all(studies: Studies, form: str) -> Verdict:
    """Judges whether a form is ahead wherever it must be and at other tasks, and behind nowhere.

    One family of all differences shows where it is behind; if it is, the others need not be known.
    """
    asked = [
        (studies[one.study], one.key, rival) for one in OF_ALL.values() for rival in rivals_of(form)
    ]
    known = [one for one in asked if not missing(form, [one])]
    compared = family(differences(form, known), len(asked))
    behind = [
        row(form, rival, f"{study.name}, {study.score(key).label}, all together", one)
        for (study, key, rival), one in zip(known, compared.values(), strict=True)
        if one.worse
    ]
    found = {name: _judge(name)(studies, form) for name in OF_ALL}
    sums = _sums_right(studies["addition"], form)
    ahead = {name for name, one in found.items() if one.kind is Kind.CONFIRMED}
    enough = ahead.issuperset(REQUIRED) and len(ahead.difference(REQUIRED)) >= OTHERS
    waiting = dict.fromkeys(what for one in (*found.values(), sums) for what in one.missing)
    if behind or sums.kind is Kind.CONTRADICTED:
        kind = Kind.CONTRADICTED
    elif waiting:
        kind = Kind.UNFINISHED
    else:
        kind = Kind.CONFIRMED if enough and sums.kind is Kind.CONFIRMED else Kind.NOT_TOLD
    rows = [
        [form, "all", name, *[""] * 4, WORDS.get(one.kind, one.kind.value)]
        for name, one in found.items()
        if one.kind is not Kind.UNFINISHED
    ]
    return Verdict(kind, [*rows, *behind, *sums.rows], tuple(waiting))


def _sums_right(study: PlannedTrainings, form: str) -> Verdict:
    """Judges whether enough sums are right among those longer than any trained on."""
    if what := study.missing(form, BEYOND):
        return Verdict(Kind.UNFINISHED, [], (f"{study.name}, {what}",))
    values, label = study.values(form, BEYOND), study.score(BEYOND).label
    assert values is not None
    found = estimate([*values.values()])
    return limited(found, SUMS_RIGHT, name=form, against="a share", score=f"{study.name}, {label}")


def mixing(studies: Studies, form: str) -> Verdict:
    """Judges whether mixing heads as the paper writes is better somewhere, and worse nowhere."""
    return _set_beside(studies, form, "tape_head_scale", MIXED)


def decayed(studies: Studies, form: str) -> Verdict:
    """Judges whether a decay beside the bias is better somewhere, and worse nowhere."""
    return _set_beside(studies, form, DECAYED[form], DECAYED_AT)


def _set_beside(
    studies: Studies, form: str, rival: str, scores: Sequence[tuple[str, str]]
) -> Verdict:
    """Judges whether a form beats one rival by at least one score, and loses by none."""
    return together(form, [[(studies[study], key, rival)] for study, key in scores])


def _study(task: str) -> Trainings:
    size, fields = TASKS[task], {f"task.{name}": x for name, x in places.TASKS[task].items()}
    return Trainings(
        name=task,
        config=OWN / "places.py",
        rivals=encodings(*FORMS, *WITHOUT_UPDATE.values(), *RIVALS, *QUESTIONS[task].beside),
        fields={"task.name": task, **fields, "evaluation.samples": size.samples},
        by_scale=SHALLOW,
        scores=(BEYOND,),
        shown=(INSIDE,),
        curve=Curve(INSIDE, most=size.most, rivals=CURVE, sudden=True),
        minutes=size.minutes,
        # ``pointing`` is for pictures, and larger than all the rest.
        not_kept=("pointing",) if task == "address" else (),
        quick=CURVE if task == "flip_flop" else (),
    )


def _longer(name: str) -> Trainings:
    """Returns a task's study with another budget and fewer rivals."""
    rivals = dict.fromkeys(r for form in LONGER_FORMS for r in (form, *rivals_of(form)))
    return dataclasses.replace(
        _study(LONGER[name]),
        name=name,
        rivals=encodings(*rivals),
        curve=None,
        multiple=MULTIPLE,
        quick=(),
    )


def _asked_again() -> Trainings:
    """Returns a longer study by another procedure, with all that it judges."""
    asked = [one for one in QUESTIONS.values() if one.study == AGAIN]
    compared = [name for one in asked for name in (*one.forms, *(one.rivals or ()))]
    return dataclasses.replace(
        _longer(BEFORE),
        name=AGAIN,
        rivals=encodings(*compared),
        procedure=protocol.AGAIN,
    )


def _with_more(study: str) -> Trainings:
    """Returns a study of the claims with these rivals too; records serve both."""
    (design,) = (one for one in STUDIES_OF_CLAIMS if one.name == study)
    assert isinstance(design, Trainings)
    more = encodings(*SHARED_FORMS, *(r for form in SHARED_FORMS for r in rivals_of(form)))
    return dataclasses.replace(design, rivals={**design.rivals, **more}, quick=())


STUDIES = (
    *(_study(task) for task in TASKS),
    *map(_with_more, _studies_of(SHARED)),
    *map(_longer, LONGER),
    _asked_again(),
)
_READ = {*_studies_of(MIXED)}.difference(study.name for study in STUDIES)
# Studies that the suite of claims makes and describes.
OF_CLAIMS = tuple(design for design in STUDIES_OF_CLAIMS if design.name in _READ)

GPU = "`python -m research.main evidence --suite=places --config.scale=gpu`"
FIXED = (
    f"{', '.join(f'`{rival}`' for rival in RIVALS)} and, of a form with a bias, the same without "
    "its update"
)


def _test(asked: Question) -> str:
    """Returns the test of a question: its score and the rivals."""
    beyond = asked.key == BEYOND
    score = "Exact match beyond the trained length; above" if beyond else "Perplexity; below"
    rivals = ", ".join(f"`{rival}`" for rival in asked.rivals or ()) or FIXED
    return f"{score} {rivals}.{asked.note}"


def claim_of(name: str, asked: Question, needs: str = GPU) -> Claim:
    """Returns the claim that a question makes of each of its forms, under a name."""
    return Claim(
        title=asked.title,
        test=_test(asked),
        needs=needs,
        studies=(asked.study,),
        judge=_judge_of(asked),
        forms=asked.forms,
        beside=(asked.study, asked.key, asked.beside) if asked.beside else None,
        name=name,
        words=WORDS,
    )


CLAIMS = (
    *(claim_of(name, asked) for name, asked in QUESTIONS.items()),
    Claim(
        title="One TAPE for all",
        test=(
            f"Ahead at {'; '.join(REQUIRED)}; and at {OTHERS} other tasks above at least; behind "
            f"at none; more than {SUMS_RIGHT:g} % of longer sums right."
        ),
        needs=GPU,
        studies=tuple(dict.fromkeys(one.study for one in OF_ALL.values())),
        judge=one_for_all,
        forms=CANDIDATES,
        name="all",
        words={Kind.CONFIRMED: "reached", Kind.CONTRADICTED: "missed"},
    ),
    Claim(
        title="Heads mixed as the paper writes, not as its code does",
        test=(
            'TAPE with `attention_mix="heads"` beside `"head_scale"`, with equal seeds: clearly '
            "better somewhere, and clearly worse nowhere. One family. It becomes the default "
            "unless it is worse."
        ),
        needs=f"{GPU}, and the same without `--suite`",
        studies=_studies_of(MIXED),
        judge=mixing,
        forms=("tape",),
        name="mixing",
        words=COMPARED,
    ),
    Claim(
        title="FoX's decay beside ALiBi's bias, not the bias alone",
        test=(
            f"{'; '.join(f'`{form}` beside `{alone}`' for form, alone in DECAYED.items())}, with "
            "equal seeds: clearly better somewhere, and clearly worse nowhere. One family for each."
        ),
        needs=GPU,
        studies=_studies_of(DECAYED_AT),
        judge=decayed,
        forms=tuple(DECAYED),
        name="decay",
        words=COMPARED,
    ),
)
