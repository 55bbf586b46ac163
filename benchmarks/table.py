"""What the tables of benchmarks are made of."""

from __future__ import annotations

from tape_jax._src.table import markdown

__all__ = ["markdown", "mebibytes", "ratio"]


def mebibytes(size: float | None) -> str:
    """A number of bytes in MiB; ``-`` for None."""
    return "-" if size is None else f"{size / 2**20:.1f}"


def ratio(value: float | None, base: float | None) -> str:
    """How often ``base`` goes into ``value``; ``-`` where either is missing or zero."""
    return f"{value / base:.3f}" if value and base else "-"
