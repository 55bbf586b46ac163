"""The suites: studies, what is asked of them, and the words of the page that answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from train.evidence import claims, places, suite
from train.evidence.claims import Claim
from train.evidence.studies import Design


class Suite(NamedTuple):
    """Studies that have one page.

    Attributes:
      name: of the page.
      designs: the studies, in the order in which they are made.
      claims: what is judged by them.
      title: of the page.
      introduction: its first paragraph.
      order: in which runs are made, in words.
      make: the command of the Makefile.
      command: the command for a part.
      subject: what a claim is called.
      closing: what the introduction ends with, if anything.
      overview: whether the page has a table and a picture of all studies of exact match.
      read: studies of another page that its claims are judged by too, by its name.
    """

    name: str
    designs: Sequence[Design]
    claims: Sequence[Claim]
    title: str
    introduction: str
    order: str
    make: str
    command: str
    subject: str = "claim"
    closing: str = ""
    overview: bool = False
    read: Mapping[str, Sequence[Design]] = {}


SUITES: dict[str, Suite] = {
    "claims": Suite(
        name="evidence",
        designs=suite.STUDIES,
        claims=claims.CLAIMS,
        title="Does TAPE do what is claimed?",
        introduction=(
            "Every claim that the paper makes of TAPE, or others make of it, tested by experiments "
            "that fit on two CPU cores, by [a protocol](protocol.md) that was written before them. "
            "They are small: a verdict holds at the size that was trained, and each names the "
            "larger test that would settle it. `tape` mixes heads as the published code does, by "
            '`attention_mix="head_scale"`; `tape_heads` as the paper writes, by the default '
            '`"heads"`.'
        ),
        order="claims first",
        make="make evidence",
        command="python -m train.main evidence",
        closing=(
            "What was found before the protocol is on [a page of its own](evidence_before.md), and "
            "decides nothing here."
        ),
    ),
    "places": Suite(
        name="places",
        designs=places.STUDIES,
        claims=places.CLAIMS,
        title="Where is TAPE ahead, and where is it not?",
        introduction=(
            "Tasks in which a place is to be found by content, or positions are to count what the "
            "content says, and controls that need neither, at one size that fits on two CPU "
            "cores, three layers of width 64; then text, sums and keys, with the configurations "
            "and runs of [the claims](evidence.md); then whether one form is ahead in all of it. "
            "By [the protocol](protocol.md) and its addenda [for these "
            "tasks](protocol.md#addendum-tasks-of-places) and [for one "
            "TAPE](protocol.md#addendum-one-tape-for-all), written before any run of the tasks, "
            "but for [what walks ask](protocol.md#what-was-changed-in-place); what was known of "
            "text, sums and keys then is said there. Each form of TAPE is "
            "*ahead* if it is clearly better than RoPE, ALiBi, FIRE and no encoding, and, with a "
            "bias, than the same without its update; *behind* if clearly worse than one of them, "
            "by paired differences of five seeds and Holm's method. Contextual rivals are judged "
            "apart. `tape` and `tape_scale_alibi` mix heads as the published code does, by "
            '`attention_mix="head_scale"`, all others as the paper writes, which is the default. '
            "`tape_demo` is the form of `make demo`: it was chosen on addressing, and is "
            "judged by the other tasks. `tape_chosen` is that form with stretched positions in "
            "training, chosen among twelve options on [four further "
            "tasks](../benchmarks/results/2026-11-24-remedies.md); `chosen_no_update` is the same "
            "without its update, RoPE with the bias and stretched positions. Tasks with `4x` in "
            "their names are [the same with longer "
            "trainings](protocol.md#addendum-longer-trainings-at-places)."
        ),
        order="a task after the other",
        make="make evidence-places",
        command="python -m train.main evidence --suite=places",
        subject="task",
        overview=True,
        read={"evidence": places.OF_CLAIMS},
    ),
}
