"""Which of a test's many cases are tried at every change."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """The cases of a test: these are quick ones, all the others slow.

    Args:
      cases: the values of a parameter, or the keys of a table of cases.
      quick: those that ``make test`` tries; one that each way through the code has.

    Raises:
      ValueError: if one of ``quick`` is not among the cases.
    """
    cases = list(cases)
    if unknown := [case for case in quick if case not in cases]:
        raise ValueError(f"quick cases must be among the cases {cases}; got {unknown}")
    slow = pytest.mark.slow
    return [case if case in quick else pytest.param(case, marks=slow) for case in cases]
