"""Measures which implementation of attention is the fastest on this machine, and keeps it.

    python -m tape_jax.tune [--head-dims D ...] [--lengths T ...] [--dtypes NAME ...]

Every implementation that can run here, with its default options, is compared with the reference at
the shape that is timed, outputs and gradients; one that disagrees is struck off. The others are
timed in turns, forward and with gradients, in causal calls with a state and without; on a CPU at
fewer shapes. What is found is kept in the user's cache folder (TAPE_JAX_CACHE names another), from
where tape_jax.attention takes it with implementation=None. Each case is written as soon as it is
measured: the same command goes on where it was stopped.
"""

import sys
from collections.abc import Sequence

from tape_jax._src.attention.tuning.records import agree, forget

__all__ = ["agree", "forget", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code.

    Args:
      argv: the arguments after the program's name; None: those of this process.
    """
    from tape_jax._src.attention.tuning import command

    return command.main(argv, description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
