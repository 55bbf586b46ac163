"""Draws how the fused kernels cut attention into tiles: docs/images/kernel_tiles.png.

Run ``python -m benchmarks.draw_tiles [--out FILE.png]``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tape_jax._src.attention.tuning.command import as_png
from tape_jax._src.core.files import write_atomically

WHOLE, PARTLY, SKIPPED = "#9ecae1", "#deebf7", "#f7f7f7"
READ, USED, KEPT, WRITTEN = "#c7e9c0", "#deebf7", "#fdd0a2", "#dadaeb"
BLOCKS, ROW, COLUMN = 6, 3, 1


def draw() -> bytes:
    """Returns the picture as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.25])
    _pairs(left)
    _program(right)
    return as_png(figure)


def _pairs(axes) -> None:
    """Draws the tiles of query-key pairs that are visited, and the programs that visit them."""
    from matplotlib.patches import Patch, Rectangle

    for i in range(BLOCKS):
        for j in range(BLOCKS):
            colour = WHOLE if j < i else PARTLY if j == i else SKIPPED
            axes.add_patch(Rectangle((j, i), 1, 1, facecolor=colour, edgecolor="white", lw=2))
    frame: dict[str, Any] = {"fill": False, "lw": 3, "zorder": 3}
    axes.add_patch(Rectangle((0, ROW), ROW + 1, 1, edgecolor="#d94801", **frame))
    axes.add_patch(Rectangle((COLUMN, COLUMN), 1, BLOCKS - COLUMN, edgecolor="#54278f", **frame))
    axes.set(xlim=(-0.05, BLOCKS + 0.05), ylim=(BLOCKS + 0.05, -0.05), aspect="equal")
    axes.set(xlabel="blocks of keys", ylabel="blocks of queries", xticks=[], yticks=[])
    axes.set_title("Pairs of one head, causal")
    handles = [
        Patch(facecolor=WHOLE, label="visited, all pairs visible"),
        Patch(facecolor=PARTLY, label="visited, masked by pair"),
        Patch(facecolor=SKIPPED, edgecolor="#cccccc", label="not visited"),
        Patch(fill=False, edgecolor="#d94801", lw=2, label="one program: forward, or dq"),
        Patch(fill=False, edgecolor="#54278f", lw=2, label="one program: dk, dv, de"),
    ]
    axes.legend(handles=handles, loc="upper right", framealpha=1, fontsize=9)


def _program(axes) -> None:
    """Draws what one program of the forward kernel reads, keeps and writes."""
    from matplotlib.patches import Rectangle

    def box(x: float, y: float, text: str, colour: str, width: float = 2.1) -> None:
        patch = Rectangle((x, y), width, 0.75, facecolor=colour, edgecolor="#555555")
        axes.add_patch(patch)
        axes.text(x + width / 2, y + 0.375, text, ha="center", va="center", fontsize=10)

    def arrow(start: tuple[float, float], end: tuple[float, float]) -> None:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#555555"})

    axes.set_title("One program of the forward kernel")
    axes.text(0, 7.25, "once", fontsize=11, weight="bold")
    box(0, 6.2, "q, state of q", READ)
    box(3.4, 6.2, "rotated q", KEPT)
    arrow((2.1, 6.575), (3.4, 6.575))
    axes.add_patch(Rectangle((-0.2, 1.55), 10.2, 4.2, fill=False, ls="--", edgecolor="#888888"))
    axes.text(0, 5.35, "for each block of keys", fontsize=11, weight="bold")
    box(0, 4.3, "k", READ)
    box(0, 3.1, "e", READ)
    box(0, 1.9, "v", READ)
    box(3.4, 4.3, "rotated k", USED)
    box(3.4, 3.1, "p = 2^(s - max)", USED)
    box(7, 4.3, "max, sum", KEPT, 2.7)
    box(7, 3.1, "a += p e", KEPT, 2.7)
    box(7, 1.9, "o += p v", KEPT, 2.7)
    arrow((2.1, 4.675), (3.4, 4.675))
    arrow((2.1, 3.65), (3.4, 4.45))
    arrow((4.45, 4.3), (4.45, 3.85))
    arrow((5.5, 3.65), (7, 4.45))
    arrow((5.5, 3.475), (7, 3.475))
    arrow((5.5, 3.3), (7, 2.45))
    axes.annotate(
        "", (7, 3.2), (2.1, 3.2),
        arrowprops={
            "arrowstyle": "-|>", "color": "#238b45", "connectionstyle": "arc3,rad=0.25", "lw": 1.6,
        },
    )  # fmt: skip
    axes.text(3.45, 2.1, "the same tile of e", color="#238b45", fontsize=9)
    axes.annotate("", (7, 2.0), (2.1, 2.05), arrowprops={"arrowstyle": "-|>", "color": "#555555"})
    axes.text(0, 1.05, "once", fontsize=11, weight="bold")
    box(0, 0.1, "o / sum", WRITTEN)
    box(3.4, 0.1, "a / sum", WRITTEN)
    box(7, 0.1, "log-sum-exp", WRITTEN, 2.7)
    for x, label, colour in (
        (3.1, "read", READ), (4.55, "computed", USED),
        (6.6, "kept", KEPT), (8.0, "written", WRITTEN),
    ):  # fmt: skip
        axes.add_patch(Rectangle((x, 7.2), 0.35, 0.35, facecolor=colour, edgecolor="#555555"))
        axes.text(x + 0.45, 7.37, label, va="center", fontsize=9)
    axes.set(xlim=(-0.3, 10.1), ylim=(-0.1, 7.8), aspect="equal")
    axes.axis("off")


def main(argv: Sequence[str] | None = None) -> None:
    """Draws the picture into a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images/kernel_tiles.png"))
    options = parser.parse_args(argv)
    write_atomically(options.out, draw())
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
