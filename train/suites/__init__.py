"""Suites: long-context questions of other benchmarks, for any model with a tokenizer.

A task of a suite is a frozen dataclass that writes questions as text (:class:`SuiteTask`), and one
line in ``SUITES``. :mod:`train.suites.questions` fits them to a number of tokens,
:mod:`train.suites.evaluation` asks a model.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from train.checks import choose, require
from train.suites.background import Background

# Where each suite's tasks are, by name.
SUITES: dict[str, dict[str, str]] = {
    "ruler": {
        "niah_single_1": "train.suites.needles:SINGLE_NOISE",
        "niah_single_2": "train.suites.needles:SINGLE_NUMBER",
        "niah_single_3": "train.suites.needles:SINGLE_UUID",
        "niah_multikey_1": "train.suites.needles:MULTIKEY_TEXT",
        "niah_multikey_2": "train.suites.needles:MULTIKEY_NEEDLES",
        "niah_multikey_3": "train.suites.needles:MULTIKEY_UUIDS",
        "niah_multivalue": "train.suites.needles:MULTIVALUE",
        "niah_multiquery": "train.suites.needles:MULTIQUERY",
        "vt": "train.suites.tracking:TRACKING",
        "cwe": "train.suites.words:COMMON",
        "fwe": "train.suites.words:FREQUENT",
        "qa_1": "train.suites.reading:SQUAD",
        "qa_2": "train.suites.reading:HOTPOTQA",
    },
    "babilong": {
        "qa1": "train.suites.facts:ONE_FACT",
        "qa2": "train.suites.facts:TWO_FACTS",
        "qa3": "train.suites.facts:THREE_FACTS",
        "qa6": "train.suites.facts:YES_NO",
        "qa7": "train.suites.facts:COUNTING",
    },
}
# Tasks that read questions from a user's file, and the option that names it.
FILES = {"qa_1": "squad", "qa_2": "hotpotqa"}
FORMS = ("long", "short")


class SuiteQuestion(NamedTuple):
    """A question in writing.

    Attributes:
      prompt: the text before the answer.
      references: what the answer must hold.
      labels: all answers that the task knows, for rules that ask which of them was given.
    """

    prompt: str
    references: tuple[str, ...]
    labels: tuple[str, ...] = ()


class SuiteTask(Protocol):
    """A task that writes questions of any length, in characters, not tokens.

    Attributes:
      rule: how answers are scored, ``all``, ``part`` or ``label``
        (:func:`train.suites.evaluation.score`).
      answer_tokens: room for the answer, by form.
    """

    @property
    def rule(self) -> str: ...

    @property
    def answer_tokens(self) -> dict[str, int]: ...

    def ask(
        self, rng: np.random.Generator, background: Background, size: int, form: str
    ) -> SuiteQuestion:
        """A question with a prompt of at most ``size`` characters, and hardly fewer.

        Args:
          rng: decides everything except the size: with another size, the same facts are hidden.
          background: the text to hide them in, and the words to make them of.
          size: characters.
          form: of :data:`FORMS`; ``short`` says the same in fewer characters.

        Raises:
          ValueError: a size too small for the question, or a background too small for it.
        """


def get_suite(
    name: str, tasks: Sequence[str] = (), files: Mapping[str, str | None] | None = None
) -> dict[str, SuiteTask]:
    """All or some tasks of a suite, by name.

    Args:
      name: of the suite.
      tasks: of it; empty: all except those whose file is not given.
      files: paths by the options of :data:`FILES`.

    Raises:
      ValueError: an unknown suite or task, or one whose file is not given.
    """
    choose("suite", name, SUITES)
    known, given = SUITES[name], {k: path for k, path in (files or {}).items() if path is not None}
    for task in tasks:
        choose(f"task of {name}", task, known)
        option = FILES.get(task)
        require(
            option is None or option in given,
            f"{task} asks what is in a file of yours: give one with --{option}=FILE",
        )
    able = [task for task in known if task not in FILES or FILES[task] in given]
    return {
        task: _load(known[task], given.get(FILES.get(task, "")))
        for task in dict.fromkeys(tasks or able)
    }


def _load(where: str, path: str | None) -> SuiteTask:
    module, _, attribute = where.partition(":")
    task = getattr(importlib.import_module(module), attribute)
    return task if path is None else dataclasses.replace(task, path=path)
