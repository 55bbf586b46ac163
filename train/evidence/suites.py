"""The suites: studies, what is asked of them, and the words of the page that answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from train.evidence import claims, places, suite
from train.evidence.claims import Claim
from train.evidence.studies import Design
from train.evidence.verdicts import Kind


class Suite(NamedTuple):
    """Studies that have one page.

    Attributes:
      name: of the page, and of the folders of records and runs.
      designs: the studies, in the order in which they are made.
      claims: what is judged by them.
      title: of the page.
      introduction: its first paragraph.
      order: in which runs are made, in words.
      make: the command of the Makefile.
      command: the command for a part.
      subject: what a claim is called.
      closing: what the introduction ends with, if anything.
      words: what verdicts are called here, where that is not their value.
      overview: whether the page has a table and a picture of all studies together, which have
        the same rivals and scores.
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
    words: Mapping[Kind, str] = {}
    overview: bool = False

    def word(self, kind: Kind) -> str:
        """What a verdict is called."""
        return self.words.get(kind, kind.value)


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
            "larger test that would settle it."
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
            "content says, and controls that need neither. By [the protocol](protocol.md) and "
            "[its addendum for these tasks](protocol.md#addendum-tasks-of-places), written before "
            "any run that it judges; at one size that fits on two CPU cores, three layers of width "
            "64. Each form of TAPE is *ahead* at a task if it answers more questions beyond the "
            "trained length than every rival does, *behind* if fewer than one of them, by paired "
            "differences of five seeds and Holm's method. `tape_demo` is the form of `make demo`: "
            "it was chosen on addressing, and is judged by the other tasks."
        ),
        order="a task after the other",
        make="make evidence-places",
        command="python -m train.main evidence --suite=places",
        subject="task",
        words={Kind.CONFIRMED: "ahead", Kind.CONTRADICTED: "behind"},
        overview=True,
    ),
}
