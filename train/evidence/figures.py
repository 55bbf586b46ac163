"""Pictures of studies: every seed is a dot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from train.comparison.plots import BODY, SMALL, TITLE
from train.evidence.statistics import estimate
from train.tasks import Score


def dots(
    title: str, values: Mapping[str, Mapping[str, Mapping[int, float]]], scores: Sequence[Score]
) -> Figure:
    """A panel for each score, a row for each rival, a dot for each seed, a line for the interval.

    Where less is better the axis is logarithmic.

    Args:
      title: of the picture.
      values: by rival, key of the score, and seed.
      scores: of the panels.
    """
    figure = Figure(figsize=(2 + 3.6 * len(scores), 1.4 + 0.3 * len(values)), layout="constrained")
    panels = figure.subplots(1, len(scores), sharey=True, squeeze=False)[0]
    rows = np.arange(len(values))[::-1]
    for panel, score in zip(panels, scores, strict=True):
        for row, (name, found) in zip(rows, values.items(), strict=True):
            of_seeds = [*found.get(score.key, {}).values()]
            if not of_seeds:
                continue
            colour = "C3" if name.startswith("tape") else "C0"
            panel.plot(of_seeds, [row] * len(of_seeds), "o", color=colour, alpha=0.5, markersize=6)
            mean = estimate(of_seeds)
            panel.plot([mean.low, mean.high], [row, row], color=colour, linewidth=1.5)
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


def heat_map(title: str, values: Mapping[str, Mapping[str, float | None]]) -> Figure:
    """A row for each rival, a column for each study, a colour and a number from 0 to 100.

    Args:
      title: of the picture.
      values: by rival and study; None where there is none yet.
    """
    columns = list(next(iter(values.values())))
    cells = np.array([list(row.values()) for row in values.values()], float)
    figure = Figure(figsize=(2.2 + len(columns), 1.2 + 0.3 * len(values)), layout="constrained")
    panel = figure.subplots()
    panel.imshow(cells, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    for (row, column), value in np.ndenumerate(cells):
        if not np.isnan(value):
            colour = "white" if value > 60 else "black"
            text = panel.text(column, row, f"{value:.0f}", fontsize=SMALL, color=colour)
            text.set(ha="center", va="center")
    panel.set_xticks(range(len(columns)), columns, fontsize=BODY, rotation=30, ha="right")
    panel.set_yticks(range(len(values)), list(values), fontsize=BODY)
    figure.suptitle(title, fontsize=TITLE)
    return figure
