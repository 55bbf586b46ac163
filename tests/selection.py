"""Which of a test's many cases are tried at every change."""

from collections.abc import Iterable
from typing import Any

import pytest

from tape_jax.positions import registry

# One encoding for each set of what encodings act on, and those that read something of their own:
# for what does not depend on the encoding, but on how a model asks it.
BY_WHAT_THEY_ACT_ON = {kind.acts_on: name for name, kind in reversed(registry.items())}
OF_EACH_SORT = tuple(
    dict.fromkeys(
        ("tape", "random_rope", "mrope", "learned", "abacus", *BY_WHAT_THEY_ACT_ON.values())
    )
)


def mostly_slow(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """The cases of a test: these are quick ones, all the others slow.

    Where the first ones will do as well as any, the marker ``mostly_slow`` says it in a line.

    Args:
      cases: the values of a parameter, the keys of a table of cases, or tuples of several
        parameters.
      quick: those that ``make test`` tries; one that each way through the code has.

    Raises:
      ValueError: if one of ``quick`` is not among the cases.
    """
    cases = list(cases)
    if unknown := [case for case in quick if case not in cases]:
        raise ValueError(f"quick cases must be among the cases {cases}; got {unknown}")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else pytest.mark.slow,
        )
        for case in cases
    ]
