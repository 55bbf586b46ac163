"""Four finite groups, by permutations: their elements as numbers, and their products.

They are those of Merrill et al. 2024 (arXiv:2404.08819): Z60, which is commutative, A4 x Z5, which
is solvable, and A5, which is not, have 60 elements each; S5 has 120. 0 is the identity.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from train.checks import choose

Permutation = tuple[int, ...]


def permutation(size: int, *cycles: Sequence[int]) -> Permutation:
    """The permutation of 0..size - 1 that sends each point of a cycle to the next one."""
    image = {a: b for cycle in cycles for a, b in itertools.pairwise((*cycle, cycle[0]))}
    return tuple(image.get(i, i) for i in range(size))


# Each group by permutations, the first two of which generate it: of orders 60 and 12, 15 and 3, 5
# and 3, 5 and 2.
GROUPS: dict[str, tuple[Permutation, ...]] = {
    "Z60": tuple(tuple((i + step) % 60 for i in range(60)) for step in (1, 5, 12)),
    "A4xZ5": (
        permutation(9, (0, 1, 2), range(4, 9)),
        permutation(9, (1, 2, 3)),
        permutation(9, (0, 1), (2, 3)),
    ),
    "A5": (
        permutation(5, range(5)),
        permutation(5, (0, 1, 2)),
        permutation(5, (0, 1), (2, 3)),
    ),
    "S5": (permutation(5, range(5)), permutation(5, (0, 1)), permutation(5, (2, 3, 4))),
}


@functools.cache
def multiplication_table(name: str) -> np.ndarray:
    """Returns ``table[a, b]``, the number of the product ``a b``: integers [order, order].

    A product of permutations applies the right one first. Elements are numbered in the order of
    their images, which makes the identity 0.

    Raises:
      ValueError: an unknown group.
    """
    number = element_numbers(name)
    images = np.array(list(number))
    table = np.array([[number[tuple(row)] for row in a[images].tolist()] for a in images])
    table.flags.writeable = False
    return table


@functools.cache
def element_numbers(name: str) -> dict[Permutation, int]:
    """The numbers of the elements of a group, ascending; ValueError for an unknown one."""
    choose("group", name, GROUPS)
    generators = [np.array(g) for g in GROUPS[name]]
    elements = fresh = {tuple(range(len(generators[0])))}
    while fresh:
        products = {tuple(g[list(element)].tolist()) for element in fresh for g in generators}
        fresh = products - elements
        elements = elements | fresh
    return {element: i for i, element in enumerate(sorted(elements))}


def running_products(table: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Returns products of all beginnings of words [..., T], in their dtype."""
    products = words.copy()
    for place in range(1, words.shape[-1]):
        products[..., place] = table[products[..., place - 1], words[..., place]]
    return products
