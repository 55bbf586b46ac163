"""A picture of what was measured; needs matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from tape_jax._src.attention.tuning import store
from tape_jax._src.attention.tuning.cases import CallShape


def draw(table: store.Table, shapes: Sequence[CallShape]) -> bytes:
    """Time by length as PNG: one panel for each kind of call, one line for each implementation.

    Raises:
      ImportError: if there is no matplotlib.
    """
    from matplotlib.figure import Figure

    kinds: dict[str, list[CallShape]] = {}
    for shape in shapes:
        one = shape.batch == shape.heads == 1
        title = f"D {shape.head_dim}, {shape.dtype}, {'state' if shape.state else 'no state'}, "
        title += "one head" if one else f"{shape.heads} heads, batches"
        kinds.setdefault(title, []).append(shape)
    columns = min(4, len(kinds))
    rows = math.ceil(len(kinds) / columns)
    figure = Figure(figsize=(4 * columns, 3 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (title, group) in zip(panels, kinds.items(), strict=False):
        lines: dict[str, dict[int, float]] = {}
        for shape in group:
            for result in table[shape]:
                if result.timed and result.struck is None:
                    line = lines.setdefault(result.contender.implementation, {})
                    best = line.get(shape.length, math.inf)
                    line[shape.length] = min(best, 1e3 * result.gradients)
        for name, line in sorted(lines.items()):
            axes.plot(*zip(*sorted(line.items()), strict=True), marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("length")
        axes.set_ylabel("ms, forward and backward")
        if lines:
            axes.legend(fontsize=8)
    return as_png(figure)


def as_png(figure: Any) -> bytes:
    """A figure of matplotlib as PNG, whatever backend it has chosen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
