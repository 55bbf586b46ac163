"""The command line: ``python -m research.main COMMAND ...``.

It has the commands of ``python -m train.main``, which here know the tasks of ``research`` too, and
those that judge encodings.
"""

import sys
from collections.abc import Sequence

from train import main as trainer

COMMANDS = trainer.COMMANDS | {
    "evidence": ("research.evidence", "test what is claimed of TAPE, and write it down"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command, as :func:`train.main.main` does."""
    return trainer.main(argv, COMMANDS, "research.main")


if __name__ == "__main__":
    trainer.quiet()
    sys.exit(main())
