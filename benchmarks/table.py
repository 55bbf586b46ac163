"""Functions that write and read the tables of benchmarks."""

from __future__ import annotations

import itertools

from tape_jax._src.core.table import markdown

__all__ = ["markdown", "mebibytes", "ratio", "tables"]


def mebibytes(size: float | None) -> str:
    """Writes bytes in MiB; ``-`` for None."""
    return "-" if size is None else f"{size / 2**20:.1f}"


def ratio(value: float | None, base: float | None) -> str:
    """Returns ``value / base`` to three decimals; ``-`` if either is missing or zero."""
    return f"{value / base:.3f}" if value and base else "-"


def tables(text: str) -> list[dict[str, str]]:
    """Returns rows of all Markdown tables in a text, each by its table's header."""
    lines = (line for line in text.splitlines() if line.startswith("|"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found: list[dict[str, str]] = []
    header: list[str] = []
    for row, following in itertools.zip_longest(cells, cells[1:]):
        if following and following[0].startswith("--"):
            header = row
        elif not row[0].startswith("--"):
            found.append(dict(zip(header, row, strict=True)))
    return found
