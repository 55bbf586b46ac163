"""The choice of a budget."""

import pytest

from research.budgets import Budget, choose


@pytest.mark.parametrize(
    ("rope", "alibi", "most", "expected"),
    [
        # A doubling that gains 2 per cent or less is not worth it, for both.
        ((4.0, 3.95, 3.9), (4.2, 4.15, 4.14), 4, Budget(1, False)),
        ((4.0, 3.95, 3.9), (4.2, 4.0, 3.99), 4, Budget(2, False)),
        ((4.0, 3.6, 3.3), (4.4, 3.7, 3.4), 4, Budget(4, None)),
        ((4.0, 3.6, 3.3), (4.4, 3.7, 3.4), 2, Budget(2, True)),
        ((4.0, 3.6, 3.3), (4.4, 3.7, 3.4), 1, Budget(1, True)),
        # To become worse is no gain.
        ((4.0, 4.5, 4.6), (4.2, 4.4, 4.5), 4, Budget(1, False)),
    ],
)
def test_perplexity(rope, alibi, most, expected):
    found = {"rope": rope, "alibi": alibi}
    values = {name: dict(zip((1, 2, 4), x, strict=True)) for name, x in found.items()}
    assert choose(values, most, higher_is_better=False) == expected


def test_points():
    values = {"rope": {1: 60.0, 2: 97.0, 4: 98.9}, "alibi": {1: 99.0, 2: 99.5, 4: 100.0}}
    assert choose(values, 4, higher_is_better=True) == Budget(2, False)
    assert choose(values, 1, higher_is_better=True) == Budget(1, True)


def test_what_is_learned_all_at_once():
    """A doubling that gains nothing is no end where the next one does."""
    values = {"tape_alibi": {1: 10.0, 2: 11.0, 4: 99.0}, "rope_alibi": {1: 9.0, 2: 9.0, 4: 9.0}}
    assert choose(values, 4, higher_is_better=True) == Budget(1, False)
    assert choose(values, 4, higher_is_better=True, sudden=True) == Budget(4, None)
    assert choose(values, 2, higher_is_better=True, sudden=True) == Budget(2, True)
    learned = {"tape_alibi": {1: 99.0, 2: 99.5, 4: 100.0}, "rope_alibi": {1: 9.0, 2: 9.0, 4: 9.0}}
    assert choose(learned, 4, higher_is_better=True, sudden=True) == Budget(1, False)
