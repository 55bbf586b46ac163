"""Pictures of studies: every seed is a dot."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from train.compare.plots import BODY, SMALL, TITLE
from train.statistics import estimate
from train.tasks import Score

# Grey: no share has it.
NO_VALUE = "0.8"


def dots(
    title: str,
    values: Mapping[str, Mapping[str, Mapping[int, float]]],
    scores: Sequence[Score],
    *,
    red: Collection[str],
) -> Figure:
    """Draws a panel per score, with a row per rival, a dot per seed and a line for the interval.

    The axis is logarithmic if less is better. Intervals of shares stop at a share's limits.

    Args:
      title: of the picture.
      values: by rival, key of the score, and seed.
      scores: of the panels.
      red: the rivals that are drawn in red.
    """
    figure = Figure(figsize=(2 + 3.6 * len(scores), 1.4 + 0.3 * len(values)), layout="constrained")
    panels = figure.subplots(1, len(scores), sharey=True, squeeze=False)[0]
    rows = np.arange(len(values))[::-1]
    for panel, score in zip(panels, scores, strict=True):
        for row, (name, found) in zip(rows, values.items(), strict=True):
            of_seeds = [*found.get(score.key, {}).values()]
            if not of_seeds:
                continue
            colour = "C3" if name in red else "C0"
            panel.plot(of_seeds, [row] * len(of_seeds), "o", color=colour, alpha=0.5, markersize=6)
            mean = estimate(of_seeds)
            low, high = mean.low, mean.high
            if score.factor == 100:
                low, high = max(low, 0), min(high, 100)
            panel.plot([low, high], [row, row], color=colour, linewidth=1.5)
            panel.plot([mean.mean] * 2, [row - 0.3, row + 0.3], color=colour, linewidth=2)
        if not score.higher_is_better:
            panel.set_xscale("log")
            panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_formatter("")
        panel.set_yticks(rows, list(values), fontsize=BODY)
        panel.set_ylim(-0.7, len(values) - 0.3)
        panel.set_xlabel(score.label, fontsize=BODY)
        panel.tick_params(axis="x", which="both", labelsize=SMALL)
        panel.grid(axis="x", which="both", alpha=0.25)
    figure.suptitle(title, fontsize=TITLE)
    return figure


def heat_map(
    title: str,
    values: Mapping[str, Mapping[str, float | None]],
    *,
    brackets: Collection[tuple[str, str]] = (),
    meaning: str = "",
) -> Figure:
    """Draws rivals by studies: each cell has a colour and a number from 0 to 100, or is grey.

    Args:
      title: of the picture.
      values: by rival and study; None if there is no value.
      brackets: rivals and studies whose numbers stand in brackets.
      meaning: what brackets mean.
    """
    columns = list(next(iter(values.values())))
    cells = np.array([list(row.values()) for row in values.values()], float)
    figure = Figure(figsize=(2.2 + len(columns), 1.2 + 0.3 * len(values)), layout="constrained")
    panel = figure.subplots()
    colours = matplotlib.colormaps["Blues"].with_extremes(bad=NO_VALUE)
    panel.imshow(cells, cmap=colours, vmin=0, vmax=100, aspect="auto")
    for (row, rival), (column, study) in itertools.product(enumerate(values), enumerate(columns)):
        value = cells[row, column]
        if not np.isnan(value):
            colour = "white" if value > 60 else "black"
            words = f"({value:.0f})" if (rival, study) in brackets else f"{value:.0f}"
            text = panel.text(column, row, words, fontsize=SMALL, color=colour)
            text.set(ha="center", va="center")
    panel.set_xticks(range(len(columns)), columns, fontsize=BODY, rotation=30, ha="right")
    panel.set_yticks(range(len(values)), list(values), fontsize=BODY)
    handles = [Patch(color=NO_VALUE, label="not run, or not complete")]
    if brackets:
        handles.insert(0, Patch(color="none", label=f"( )  {meaning}"))
    figure.legend(handles=handles, loc="outside lower right", fontsize=SMALL, ncols=2)
    figure.suptitle(title, fontsize=TITLE)
    return figure
