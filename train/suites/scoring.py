"""How written answers are scored: RULER's rules, and BABILong's.

All take the answer, what it must hold, and all answers that the task knows; capital letters do not
count. They give a share from 0 to 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train.suites import SuiteQuestion


def match_all(answer: str, references: Sequence[str], labels: Sequence[str] = ()) -> float:
    """The share of the references that the answer holds (RULER's ``string_match_all``)."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def match_part(answer: str, references: Sequence[str], labels: Sequence[str] = ()) -> float:
    """1 if the answer holds one of the references (RULER's ``string_match_part``)."""
    return float(any(reference.lower() in answer.lower() for reference in references))


def match_label(answer: str, references: Sequence[str], labels: Sequence[str] = ()) -> float:
    """1 if the first sentence names the right label as a word, and no other (BABILong)."""
    sentence = re.split(r"[.\n]", answer.strip().lower(), maxsplit=1)[0]
    named = {label for label in labels if re.search(rf"\b{re.escape(label.lower())}\b", sentence)}
    return float(named == set(references))


RULES: dict[str, Callable[..., float]] = {
    "all": match_all,
    "part": match_part,
    "label": match_label,
}


def score(rule: str, answer: str, question: SuiteQuestion) -> float:
    """The score of an answer, from 0 to 1."""
    return RULES[rule](answer, question.references, question.labels)
