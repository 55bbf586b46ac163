"""Pictures of studies: every seed is a dot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from train.comparison.plots import BODY, SMALL, TITLE
from train.comparison.report import RunRecord, by_seed
from train.tasks import Score

MOST_PANELS = 3


def dots(title: str, results: Mapping[str, Sequence[RunRecord]], scores: Sequence[Score]) -> Figure:
    """A panel for each of the first scores, a row for each rival, a dot for each seed.

    Bars mark means. Where less is better the axis is logarithmic.
    """
    shown = scores[:MOST_PANELS]
    figure = Figure(figsize=(2 + 3.6 * len(shown), 1.4 + 0.3 * len(results)), layout="constrained")
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    rows = np.arange(len(results))[::-1]
    for panel, score in zip(panels, shown, strict=True):
        for row, (name, runs) in zip(rows, results.items(), strict=True):
            values = [x for x in by_seed(runs, score).values() if math.isfinite(x)]
            colour = "C3" if name.startswith("tape") else "C0"
            panel.plot(values, [row] * len(values), "o", color=colour, alpha=0.6, markersize=6)
            if values:
                mean = statistics.fmean(values)
                panel.plot([mean, mean], [row - 0.3, row + 0.3], color=colour, linewidth=2)
        if not score.higher_is_better:
            panel.set_xscale("log")
        panel.set_yticks(rows, list(results), fontsize=BODY)
        panel.set_ylim(-0.7, len(results) - 0.3)
        panel.set_xlabel(score.label, fontsize=BODY)
        panel.tick_params(axis="x", which="both", labelsize=SMALL)
        panel.grid(axis="x", which="both", alpha=0.25)
    figure.suptitle(title, fontsize=TITLE)
    return figure
