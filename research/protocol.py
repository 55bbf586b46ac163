"""The numbers of research/protocol.md, which says what they are for.

Only two depend on a result. The addendum of 23 November 2026 added the rates from 3e-1 on, because
on text the best rate of sinusoids was the end of the ladder before. Version 2 was written when a
question of version 1 had not been settled.
"""

from __future__ import annotations

from typing import NamedTuple

VERSION = 1

# Seeds that choose learning rates, and seeds that judge claims.
CHOOSING, REPORTING = (0, 1), (2, 3, 4, 5, 6)


class Procedure(NamedTuple):
    """The rules by which a study chooses learning rates and reports.

    Attributes:
      version: of the protocol.
      choosing: seeds that choose learning rates, by questions that no test asks.
      reporting: other seeds, which decide verdicts.
      within: the smallest rate tried that is at most this many points of exact match below the best
        is chosen; 0: the best itself.
    """

    version: int = VERSION
    choosing: tuple[int, ...] = CHOOSING
    reporting: tuple[int, ...] = REPORTING
    within: float = 0.0


FIRST_PROCEDURE = Procedure()
# Version 2, which asks one question of version 1 again.
AGAIN = Procedure(version=2, choosing=(7, 8, 9), reporting=(10, 11, 12, 13, 14), within=2.0)

RATES = (
    *("1e-5", "3e-5", "1e-4", "3e-4", "1e-3", "3e-3", "1e-2", "3e-2", "1e-1"),
    *("3e-1", "1e0", "3e0", "1e1"),
)
# The rate that is tried first, by scale; its neighbours are tried in any case.
FIRST = {"cpu": "3e-3", "gpu": "3e-4"}

# Multiples of a configuration's steps. A larger one is worth it if doubling the steps improves a
# score by this share of perplexity, or by this many points of exact match.
MULTIPLES = (1, 2, 4)
WORTH_PERPLEXITY, WORTH_POINTS = 0.02, 2.0

# The loss allowed from the trained length to longer ones: keys in points, or a share of perplexity.
KEYS_LOST, PERPLEXITY_GAINED = 5.0, 0.05
# A step may take this many times RoPE's time, and a model have this many times its parameters.
MOST_TIME, MOST_PARAMETERS = 1.15, 1.05
# The growth of states that counts for a training that diverged.
WORST_GROWTH = 1000.0
