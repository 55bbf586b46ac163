"""Tables that read well both in a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns, the first to the left and the others to the right."""
    cells = [[str(x) for x in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (
            x.rjust(n) if i else x.ljust(n)
            for i, (x, n) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = "|".join(f"{'-' * (n + 1)}{':' if i else '-'}" for i, n in enumerate(widths))
    return "\n".join([line(cells[0]), f"|{rule}|", *map(line, cells[1:])])
