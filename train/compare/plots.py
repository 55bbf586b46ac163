"""Figures of experiments.

Figures are drawn with matplotlib's object interface: no window system and no global state. Every
file written here carries ``MARK``, and a file without it is never replaced.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogFormatter, MaxNLocator

from train.checks import require
from train.evaluation.grids import Grid, require_same_questions
from train.files import write_atomically

MARK = "written by tape-jax"
COLOURS = "cividis"

Curve = tuple[Sequence[int], Sequence[float]]

_PANELS_PER_ROW = 4
_MOST_LABELS = 12
TITLE, BODY, SMALL, TINY = 13, 11, 9, 7


def heat_maps(grids: Mapping[str, Grid]) -> Figure:
    """Draws exact match by rows and columns, one panel for each grid.

    The trained range is outlined. The colours keep their order in greyscale.

    Raises:
      ValueError: no grids, or grids of different questions.
    """
    first = require_same_questions(grids)
    rows = -(-len(grids) // _PANELS_PER_ROW)
    columns = -(-len(grids) // rows)
    figure = Figure(figsize=(1.5 + 3.7 * columns, 1.4 + 4.1 * rows), layout="compressed")
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel, (name, grid) in zip(panels.flat, grids.items(), strict=False):
        image = heat_map(panel, name, grid)
    for panel in panels.flat[len(grids) :]:
        panel.set_axis_off()
    for panel in panels[:, 0]:
        panel.set_ylabel(first.wording.rows, fontsize=BODY)
    bar = figure.colorbar(image, ax=panels, shrink=0.9, pad=0.02)
    bar.set_label(f"{first.wording.questions} answered right, %", fontsize=BODY)
    bar.ax.tick_params(labelsize=SMALL)
    figure.suptitle(first.wording.title, fontsize=TITLE)
    keys: list[Artist] = [trained_frame((0, 0), 1, 1, label=f"trained: {first.wording.trained}")]
    if np.any(first.shared):
        few = f"too few {first.wording.questions} to hold any out: may have been trained on"
        keys.append(_dots([], [], label=few))
    figure.legend(
        handles=keys, loc="outside lower center", fontsize=BODY, ncols=columns, frameon=False
    )
    return figure


def heat_map(panel: Axes, name: str, grid: Grid) -> AxesImage:
    """Draws one panel, whose coordinates are row and column of the grid."""
    image = panel.imshow(
        100 * grid.accuracy, origin="lower", vmin=0, vmax=100, cmap=COLOURS, aspect="auto"
    )
    panel.set_box_aspect(1)
    averages = [("trained range", grid.inside), ("beyond", grid.outside)]
    parts = [f"{label} {100 * p.value:.1f} %" for label, p in averages if p.count]
    panel.set_title(f"{name}\n{', '.join(parts) or 'not asked'}", fontsize=BODY)
    panel.set_xlabel(grid.wording.columns, fontsize=BODY)
    for axis, labels in ((panel.yaxis, grid.rows), (panel.xaxis, grid.columns)):
        every = -(-len(labels) // _MOST_LABELS)
        ticks = range(every - 1, len(labels), every)
        axis.set_ticks(list(ticks), [str(labels[t]) for t in ticks], fontsize=SMALL)
    if max(grid.counts.shape) <= _MOST_LABELS:
        for row, column in np.argwhere(grid.counts):
            # Rounded down: only what is perfect reads 100.
            percent = 100 * grid.correct[row, column] // grid.counts[row, column]
            ink = "black" if percent > 50 else "white"
            panel.text(column, row, percent, ha="center", va="center", fontsize=TINY, color=ink)
    rows, columns = np.nonzero(grid.shared)
    panel.add_line(_dots(columns + 0.34, rows + 0.34))
    height, width = (int(grid.is_inside.any(axis).sum()) for axis in (1, 0))
    if np.any(grid.is_inside):
        panel.add_patch(trained_frame((-0.5, -0.5), width, height))
    return image


def trained_frame(
    corner: tuple[float, float], width: float, height: float, label: str = ""
) -> Rectangle:
    """Returns the outline of the trained range, visible on every colour."""
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
    """Marks cells whose questions are shared with training."""
    return Line2D(columns, rows, label=label, color="black", marker="o", markersize=2, linestyle="")


def loss_curves(runs: Mapping[str, Sequence[Curve]]) -> Figure:
    """Draws the training losses of several models on a logarithmic axis.

    Args:
      runs: steps and losses of each seed, by name; losses in nats for each token that counts. The
        seeds of one name share its colour.

    Raises:
      ValueError: no runs, or unequal numbers of steps and losses.
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
    axes.set_title("Training loss", fontsize=TITLE)
    axes.set_xlabel("training step", fontsize=BODY)
    axes.set_ylabel("cross entropy, nats for each scored token", fontsize=BODY)
    axes.tick_params(labelsize=SMALL)
    axes.grid(which="both", alpha=0.25)
    axes.legend(fontsize=BODY)
    return figure


def _require_curve(name: str, steps: Sequence[int], losses: Sequence[float]) -> None:
    require(
        len(steps) == len(losses),
        f"run {name!r} has {len(steps)} steps but {len(losses)} losses",
    )


class Series(NamedTuple):
    """One line of a figure.

    Attributes:
      x: ascending values.
      y: as many values.
      spread: of y, above and below; NaN if it is unknown.
    """

    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float]


def line_panels(
    panels: Mapping[str, Mapping[str, Series]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    trained: int,
    log: bool,
) -> Figure:
    """Draws lines with bands for their spread, in panels side by side with common axes.

    Args:
      panels: lines by heading and name. A name has the same colour in all panels.
      title, x_label, y_label: what is shown, with units.
      trained: the trained length, which is marked on the x axis.
      log: whether both axes are logarithmic; the x axis then has base 2 and the values as ticks.

    Raises:
      ValueError: no panels, or a line with unequal numbers of values.
    """
    require(len(panels) > 0, "no panels to draw")
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    figure = Figure(figsize=(1.5 + 4 * max(len(panels), 1.25), 4.5), layout="constrained")
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for panel, (heading, lines) in zip(axes, panels.items(), strict=True):
        for name, (x, y, spread) in lines.items():
            require(
                len(x) == len(y) == len(spread),
                f"line {name!r} has {len(x)} x, {len(y)} y and {len(spread)} spreads",
            )
            number = names.index(name)
            # Values that are not finite are left out: an axis could not reach them.
            middle = np.where(np.isfinite(y), y, np.nan)
            low, high = middle - spread, middle + spread
            panel.fill_between(x, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
            marker = "osD^vPX*"[number % 8] if len(x) <= _MOST_LABELS else ""
            style = ("-", "--", "-.", ":")[number % 4]
            panel.plot(
                x, middle, style, marker=marker, color=f"C{number}", linewidth=1.5, label=name
            )
        panel.axvline(trained, color="0.4", linestyle=":", linewidth=1.5, label="trained length")
        panel.set_title(heading, fontsize=BODY)
        panel.set_xlabel(x_label, fontsize=BODY)
        panel.tick_params(labelsize=SMALL)
        panel.grid(which="both", alpha=0.25)
    if log:
        ticks = sorted({x for lines in panels.values() for line in lines.values() for x in line.x})
        axes[0].set_xscale("log", base=2)
        axes[0].set_xticks(ticks, [f"{x:,.0f}" for x in ticks])
        if any(np.isfinite(line.y).any() for lines in panels.values() for line in lines.values()):
            axes[0].set_yscale("log")
            axes[0].yaxis.set_minor_formatter(
                LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5))
            )
        axes[0].yaxis.set_major_formatter("{x:g}")
        for panel in axes:
            panel.minorticks_on()
            panel.tick_params(axis="x", which="minor", bottom=False)
    axes[0].set_ylabel(y_label, fontsize=BODY)
    figure.suptitle(title, fontsize=TITLE)
    handles = {h.get_label(): h for panel in axes for h in panel.lines}
    figure.legend(
        handles=list(handles.values()),
        loc="outside lower center",
        fontsize=BODY,
        ncols=min(len(handles), 2 + 2 * len(panels)),
        frameon=False,
    )
    return figure


def length_curves(grids: Mapping[str, Mapping[str, Grid]], *, title: str, y_label: str) -> Figure:
    """Draws accuracy by length, with bands of one standard error.

    Args:
      grids: grids with one row, by panel heading and line name.
      title: the figure's.
      y_label: names what the share counts, and the unit, per cent.

    Raises:
      ValueError: no grids, or grids of different questions in one panel.
    """

    def series(grid: Grid) -> Series:
        asked = grid.counts[0] > 0
        share, count = grid.accuracy[0][asked], grid.counts[0][asked]
        error = np.sqrt(share * (1 - share) / count)
        return Series(np.array(grid.columns)[asked], 100 * share, 100 * error)

    first, *_ = (require_same_questions(lines) for lines in grids.values())
    panels = {
        heading: {name: series(grid) for name, grid in lines.items()}
        for heading, lines in grids.items()
    }
    return _length_panels(panels, first, title, y_label)


def _length_panels(
    panels: Mapping[str, Mapping[str, Series]], first: Grid, title: str, y_label: str
) -> Figure:
    figure = line_panels(
        panels,
        title=title,
        x_label=first.wording.columns,
        y_label=y_label,
        trained=first.trained,
        log=False,
    )
    figure.axes[0].set_ylim(-3, 103)
    figure.axes[0].xaxis.set_major_locator(MaxNLocator(10, integer=True))
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes a figure as a PNG, atomically.

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
