"""Figures and the report of an experiment.

Figures are drawn with matplotlib's object interface: no window system and no global state. Every
file written here carries ``MARK``, and a file without it is never replaced.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import itertools
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from tape_jax.config import require
from train.evaluate import Answer, Grid, length_table, require_same_questions, text_table
from train.files import write_atomically

MARK = "written by tape-jax"
COLOURS = "cividis"

_PANELS_PER_ROW = 4
_MOST_LABELS = 12
_TITLE, _BODY, _SMALL, _TINY = 13, 11, 9, 7


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What the report says of one run.

    Attributes:
      name: short, such as the position encoding; unique in the report.
      grid: its evaluation.
      steps: [S] training steps at which the loss was logged.
      losses: [S] cross entropy, in nats for each token of the answers.
      command: repeats the run.
      facts: more about the run, such as the number of its parameters; the same names in all runs.
      answers: sums that the trained model has done.
    """

    name: str
    grid: Grid
    steps: Sequence[int]
    losses: Sequence[float]
    command: str
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    answers: Sequence[Answer] = ()


def heat_maps(grids: Mapping[str, Grid], path: Path) -> None:
    """Draws exact match by operand lengths as a PNG, one panel for each grid.

    The range of trained lengths is outlined. The colours keep their order in greyscale.

    Raises:
      ValueError: no grids, grids of different questions, or a ``path`` that is not ours.
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
    _save(figure, path)


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


def loss_curves(runs: Mapping[str, tuple[Sequence[int], Sequence[float]]], path: Path) -> None:
    """Draws the training losses of several runs as a PNG, with a logarithmic loss axis.

    Args:
      runs: steps and losses of each, the losses in nats for each token of the answers.
      path: where to.

    Raises:
      ValueError: no runs, steps and losses of different number, or a ``path`` that is not ours.
    """
    require(len(runs) > 0, "no runs to draw")
    for name, curve in runs.items():
        _require_curve(name, *curve)
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for (name, (steps, losses)), style in zip(
        runs.items(), itertools.cycle(("-", "--", "-.", ":"))
    ):
        axes.plot(steps, losses, style, label=name, linewidth=1.5)
    axes.set_yscale("log")
    axes.set_title("Training loss", fontsize=_TITLE)
    axes.set_xlabel("training step", fontsize=_BODY)
    axes.set_ylabel("cross entropy, nats for each answer token", fontsize=_BODY)
    axes.tick_params(labelsize=_SMALL)
    axes.grid(which="both", alpha=0.25)
    axes.legend(fontsize=_BODY)
    _save(figure, path)


def write_report(
    folder: Path,
    runs: Sequence[RunRecord],
    *,
    title: str = "Addition beyond the trained length",
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Writes ``report.md`` and its figures ``exact_match.png`` and ``loss.png``.

    Args:
      folder: created if it does not exist.
      runs: at least one; all of them were asked the same sums.
      title: of the report.
      environment: versions and hardware by name; None: those of this process.

    Returns:
      The path of the report.

    Raises:
      ValueError: runs that cannot be compared, or a file in the way that is not ours; then nothing
        is written.
    """
    grids = {run.name: run.grid for run in runs}
    require(len(grids) == len(runs), f"runs of the same name: {[run.name for run in runs]}")
    first = require_same_questions(grids)
    names = [list(run.facts) for run in runs]
    require(names.count(names[0]) == len(names), f"the runs state different facts: {names}")
    report, maps, curves = (folder / n for n in ("report.md", "exact_match.png", "loss.png"))
    for path in (report, maps, curves):
        _require_ours(path)
    for run in runs:
        _require_curve(run.name, run.steps, run.losses)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"{folder} is not a folder and cannot become one: {error}") from error

    heat_maps(grids, maps)
    loss_curves({run.name: (run.steps, run.losses) for run in runs}, curves)
    sections = [
        f"<!-- {MARK} -->\n# {title}",
        f"Trained on sums of numbers of 1 to {first.trained} digits and asked sums of numbers of 1 "
        f"to {first.longest.max()} digits: up to {first.counts.max()} for each pair of operand "
        f"lengths, {first.counts.sum():,} in all. An answer is right if it is to the last digit, "
        "and ends there. Inside the trained range, the sums asked were held out of training; "
        "where * or \u2022 stands, there are too few to hold any out.",
        _averages(grids),
        f"![Exact match by operand lengths]({maps.name})",
        "## By length\n\nPercentages with their 95 % intervals, by the digits of the longer "
        f"operand.\n\n{length_table(grids)}",
        f"## Training\n\n![Training loss]({curves.name})",
        _facts(runs),
        _answers(runs),
        "## Commands\n\n```\n" + "\n".join(run.command for run in runs) + "\n```",
        "## Versions and hardware\n\n"
        + _two_columns(describe_environment() if environment is None else environment),
    ]
    write_atomically(report, "\n\n".join(filter(None, sections)) + "\n")
    return report


def _averages(grids: Mapping[str, Grid]) -> str:
    rows = [
        [name, str(g.inside), str(g.inside_held_out), str(g.outside)] for name, g in grids.items()
    ]
    trained = next(iter(grids.values())).trained
    header = ["%", f"up to {trained} digits", "of these, held out only", "beyond"]
    return text_table(header, rows)


def _facts(runs: Sequence[RunRecord]) -> str:
    """The facts of all runs, a column for each run."""
    rows = [[fact, *(run.facts[fact] for run in runs)] for fact in runs[0].facts]
    return text_table(["", *(run.name for run in runs)], rows) if rows else ""


def _answers(runs: Sequence[RunRecord]) -> str:
    lines = [f"* {run.name}: {answer}" for run in runs for answer in run.answers]
    return "\n".join(["## Sums just done\n", *lines]) if lines else ""


def _two_columns(values: Mapping[str, str]) -> str:
    return text_table(["what", "which"], [list(item) for item in values.items()])


def describe_environment() -> dict[str, str]:
    """Versions of what computes, and the hardware that it runs on, by name."""
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    devices = Counter(device.device_kind for device in jax.devices())
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "devices": ", ".join(f"{count} x {kind}" for kind, count in devices.items()),
    }


def _require_curve(name: str, steps: Sequence[int], losses: Sequence[float]) -> None:
    require(
        len(steps) == len(losses),
        f"run {name!r} has {len(steps)} steps but {len(losses)} losses",
    )


def _save(figure: Figure, path: Path) -> None:
    """Writes a PNG all at once."""
    _require_ours(path)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150, bbox_inches="tight", metadata={"Software": MARK})
    write_atomically(path, png.getvalue())


def _require_ours(path: Path) -> None:
    """Raises ValueError if ``path`` exists and was not written here."""
    if path.exists():
        require(path.is_file(), f"{path} exists and is not a file")
        with open(path, "rb") as file:
            ours = MARK.encode() in file.read(4096)
        require(ours, f"{path} exists and was not written by this program: it is left alone")
