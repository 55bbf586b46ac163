"""Compares this model, number by number, with files recorded from the published implementation.

    python -m tape_jax.parity FILE.npz [FILE.npz ...]

It prints the largest absolute errors of logits, loss, hidden states, position states and gradients
in float32 and float64, one per line; for files of other authors' encodings, those of every
recorded output and gradient. Exit code 1: a tolerance is exceeded; 2: a file cannot be read.
"""

import sys

from tape_jax._src.parity.report import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
