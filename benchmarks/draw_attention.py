"""Draws what attention costs over plain attention, from a file of ``benchmarks/results``.

    python -m benchmarks.draw_attention FILE.md OUT.png

Reads the first table of each head dimension and length, forward and backward, that
:mod:`benchmarks.attention` has printed, with a title ``D = 64, T = 1024, ...``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.table import tables
from tape_jax._src.attention.tuning.command import as_png
from tape_jax._src.attention.tuning.measure import GRADIENTS
from tape_jax._src.core.files import write_atomically
from train.training.flops import PLAIN, STATE

TITLE = re.compile(r"^\W*D = (\d+), T = (\d+), batch \d+, ([\w ]+)\W*$", re.MULTILINE)
# Rows that are drawn, their names and colours.
ROWS = {
    "tokamax_mosaic": ("tokamax, Mosaic", "#08519c"),
    "cudnn": ("cuDNN, two calls", "#4292c6"),
    "tokamax_triton": ("tokamax, Triton", "#9ecae1"),
    "pallas": ("our kernel, Pallas for Triton", "#74c476"),
    "three calls": ("three calls of cuDNN, as published", "#fdae6b"),
}


def read(text: str) -> dict[tuple[int, int], dict[str, float]]:
    """Returns times over plain attention, by head dimension and length, then by row."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    _, *parts = TITLE.split(text)
    for dim, length, direction, body in zip(*(parts[n::4] for n in range(4)), strict=True):
        rows = [row for row in tables(body) if row.get("attention") in ROWS]
        if direction == GRADIENTS:
            times = {row["attention"]: float(row["x plain"]) for row in rows}
            found.setdefault((int(dim), int(length)), times)
    return found


def draw(found: dict[tuple[int, int], dict[str, float]]) -> bytes:
    """Returns the picture as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(ROWS)
    for n, (row, (label, colour)) in enumerate(ROWS.items()):
        places = [at + (n - (len(ROWS) - 1) / 2) * width for at in range(len(found))]
        heights = [rows.get(row, float("nan")) for rows in found.values()]
        bars = axes.bar(places, heights, 0.9 * width, color=colour, label=label)
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.axhline(1, label="1: plain attention by cuDNN, which RoPE needs", color="#555555", lw=1)
    floor = STATE.both / PLAIN.both
    axes.axhline(floor, color="#555555", lw=1, ls=":", label=f"{floor:.2f}, by count of products")
    axes.set_xticks(range(len(found)), [f"heads of {dim}, T = {n:,}" for dim, n in found])
    axes.set(ylabel="time over plain attention by cuDNN", xlim=(-0.5, len(found) - 0.5))
    axes.set_title("Attention that attends the state, forward and backward")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, frameon=False, loc="upper left")
    return as_png(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Draws the picture of a results file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draw_attention")
    parser.add_argument("file", type=Path, help="what benchmarks.attention printed")
    parser.add_argument("out", type=Path, help="the picture")
    options = parser.parse_args(argv)
    found = read(options.file.read_text())
    if not found:
        parser.error(f"{options.file} has no table of benchmarks.attention, forward and backward")
    write_atomically(options.out, draw(found))
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
