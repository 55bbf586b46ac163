"""Figures of experiments.

Figures are drawn with matplotlib's object interface: no window system and no global state. Every
file written here carries ``MARK``, and a file without it is never replaced.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from tape_jax.config import require
from train.evaluate import Grid, require_same_questions
from train.files import write_atomically

MARK = "written by tape-jax"
COLOURS = "cividis"

Curve = tuple[Sequence[int], Sequence[float]]

_PANELS_PER_ROW = 4
_MOST_LABELS = 12
_TITLE, _BODY, _SMALL, _TINY = 13, 11, 9, 7


def heat_maps(grids: Mapping[str, Grid]) -> Figure:
    """Exact match by operand lengths, one panel for each grid.

    The range of trained lengths is outlined. The colours keep their order in greyscale.

    Raises:
      ValueError: no grids, or grids of different questions.
    """
    first = require_same_questions(grids)
    rows = -(-len(grids) // _PANELS_PER_ROW)
    columns = -(-len(grids) // rows)
    figure = Figure(figsize=(1.5 + 3.7 * columns, 1.4 + 4.1 * rows), layout="compressed")
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel, (name, grid) in zip(panels.flat, grids.items(), strict=False):
        image = _heat_map(panel, name, grid)
    for panel in panels.flat[len(grids) :]:
        panel.set_axis_off()
    for panel in panels[:, 0]:
        panel.set_ylabel("digits of the first operand", fontsize=_BODY)
    bar = figure.colorbar(image, ax=panels, shrink=0.9, pad=0.02)
    bar.set_label("sums answered right, %", fontsize=_BODY)
    bar.ax.tick_params(labelsize=_SMALL)
    figure.suptitle("Addition: exact match by operand lengths", fontsize=_TITLE)
    keys: list[Artist] = [_frame((0, 0), 1, 1, label=f"trained: 1 to {first.trained} digits")]
    if np.any(first.shared):
        keys.append(_dots([], [], label="too few sums to hold any out: may have been trained on"))
    figure.legend(
        handles=keys, loc="outside lower center", fontsize=_BODY, ncols=columns, frameon=False
    )
    return figure


def _heat_map(panel: Axes, name: str, grid: Grid) -> AxesImage:
    """One panel; its coordinates are row and column of the grid."""
    image = panel.imshow(100 * grid.accuracy, origin="lower", vmin=0, vmax=100, cmap=COLOURS)
    averages = [("trained range", grid.inside), ("beyond", grid.outside)]
    parts = [f"{label} {100 * p.value:.1f} %" for label, p in averages if p.count]
    panel.set_title(f"{name}\n{', '.join(parts)}", fontsize=_BODY)
    panel.set_xlabel("digits of the second operand", fontsize=_BODY)
    for axis, lengths in ((panel.yaxis, grid.lengths_a), (panel.xaxis, grid.lengths_b)):
        every = -(-len(lengths) // _MOST_LABELS)
        ticks = range(every - 1, len(lengths), every)
        axis.set_ticks(list(ticks), [str(lengths[t]) for t in ticks], fontsize=_SMALL)
    if max(grid.counts.shape) <= _MOST_LABELS:
        for row, column in np.argwhere(grid.counts):
            # Rounded down: only what is perfect reads 100.
            percent = 100 * grid.correct[row, column] // grid.counts[row, column]
            ink = "black" if percent > 50 else "white"
            panel.text(column, row, percent, ha="center", va="center", fontsize=_TINY, color=ink)
    rows, columns = np.nonzero(grid.shared)
    panel.add_line(_dots(columns + 0.34, rows + 0.34))
    height, width = (sum(n <= grid.trained for n in x) for x in (grid.lengths_a, grid.lengths_b))
    panel.add_patch(_frame((-0.5, -0.5), width, height))
    return image


def _frame(corner: tuple[float, float], width: float, height: float, label: str = "") -> Rectangle:
    """The outline of the trained range, visible on every colour."""
    return Rectangle(
        corner,
        width,
        height,
        label=label,
        fill=False,
        edgecolor="white",
        linewidth=2,
        path_effects=[withStroke(linewidth=4, foreground="black")],
        clip_on=False,
    )


def _dots(columns: np.ndarray | list, rows: np.ndarray | list, label: str = "") -> Line2D:
    """The mark of cells whose sums are shared with training."""
    return Line2D(columns, rows, label=label, color="black", marker="o", markersize=2, linestyle="")


def loss_curves(runs: Mapping[str, Sequence[Curve]]) -> Figure:
    """The training losses of several models, with a logarithmic loss axis.

    Args:
      runs: for each name the steps and losses of each seed, the losses in nats for each token that
        counts. The seeds of one name share its colour.

    Raises:
      ValueError: no runs, or steps and losses of different number.
    """
    require(len(runs) > 0, "no runs to draw")
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    styles = itertools.cycle(("-", "--", "-.", ":"))
    for number, ((name, curves), style) in enumerate(zip(runs.items(), styles, strict=False)):
        for i, (steps, losses) in enumerate(curves):
            _require_curve(name, steps, losses)
            label = "_" if i else name
            axes.plot(steps, losses, style, color=f"C{number}", label=label, linewidth=1.5)
    axes.set_yscale("log")
    axes.set_title("Training loss", fontsize=_TITLE)
    axes.set_xlabel("training step", fontsize=_BODY)
    axes.set_ylabel("cross entropy, nats for each scored token", fontsize=_BODY)
    axes.tick_params(labelsize=_SMALL)
    axes.grid(which="both", alpha=0.25)
    axes.legend(fontsize=_BODY)
    return figure


def _require_curve(name: str, steps: Sequence[int], losses: Sequence[float]) -> None:
    require(
        len(steps) == len(losses),
        f"run {name!r} has {len(steps)} steps but {len(losses)} losses",
    )


def save(figure: Figure, path: Path) -> None:
    """Writes a figure as a PNG, all at once.

    Raises:
      ValueError: ``path`` exists and was not written here.
    """
    require_ours(path)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150, bbox_inches="tight", metadata={"Software": MARK})
    write_atomically(path, png.getvalue())


def require_ours(path: Path) -> None:
    """Raises ValueError if ``path`` exists and was not written here."""
    if path.exists():
        require(path.is_file(), f"{path} exists and is not a file")
        with open(path, "rb") as file:
            ours = MARK.encode() in file.read(4096)
        require(ours, f"{path} exists and was not written by this program: it is left alone")
