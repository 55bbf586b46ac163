"""The report on addressing: how often models are right, and where they point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from train.compare.plots import BODY, COLOURS, SMALL, TITLE, heat_map, trained_frame
from train.compare.tasks import Comparison
from train.evaluation import Trained
from train.evaluation.grids import (
    INTERVALS,
    Grid,
    averages_table,
    length_table,
    pool,
    require_same_questions,
)
from train.tasks.address import Address
from train.tasks.address_result import AddressResult, Pointing

MARGIN = 3
POINTED = "attention, or likeness of states"
UNTRAINED = "{}, encoding as before training"


def compare(task: Address, results: Mapping[str, Sequence[AddressResult]]) -> Comparison:
    """Reports exact match as heat maps and by length, and where each name's first model points.

    Shares are of all seeds' answers together; their intervals are over the seeds.
    """
    grids, every = {}, {}
    for name, seeds in results.items():
        every[name] = grids[name] = pool([result.grid for result in seeds])
        without = [result.without for result in seeds if result.without is not None]
        if without:
            every[UNTRAINED.format(name)] = pool(without)
    first = require_same_questions(grids)
    pointing = {name: seeds[0].pointing for name, seeds in results.items()}
    picture = figure_of(grids, {name: x for name, x in pointing.items() if x is not None})
    return Comparison(
        title=task.heading,
        introduction=(
            f"{task.introduction(first)} The combinations of offset, token and answer that are "
            "asked for were held out of training."
        ),
        sections={
            "Exact match": f"{averages_table(every)}\n\n![Exact match](exact_match.png)",
            "The picture": (
                f"Left, how many questions are answered right. Right, in lists of {task.longest} "
                "tokens, where the first seed of each looks from the token at which the answer is "
                "due: what it attends to in each layer, and which tokens its position state is "
                "most like as it enters a layer, for every offset. The token that is asked about "
                "stands at 0, the answer is marked by a ring. Of a layer's heads the clearest is "
                "shown. With the parameters of its encoding as before training, which takes TAPE's "
                "update out, a trained model must do without what its states brought along."
            ),
            "By length": f"{INTERVALS}.\n\n{length_table(grids)}",
        },
        figures={"exact_match.png": picture},
    )


def figure_of(grids: Mapping[str, Grid], pointing: Mapping[str, Pointing]) -> Figure:
    """Draws exact match and, beside it, where questions point, in a row for each name.

    Args:
      grids: by name.
      pointing: by name; a name may lack it.
    """
    first = next(iter(grids.values()))
    rows = {name: _rows(pointing[name]) if name in pointing else [] for name in grids}
    lines = [(name, *row) for name, found in rows.items() for row in found]
    height, layers = len(lines), max((len(x.attention) for x in pointing.values()), default=0)
    size = max(2.0 * height, 3.0 * len(grids))
    figure = Figure(figsize=(6 + 2.4 * layers, 1.2 + size), layout="compressed")
    # Both sides have the whole height, whatever number of panels.
    places = GridSpec(
        len(grids) * max(1, height), 1 + layers, figure, width_ratios=[1.9, *[1] * layers]
    )
    heats, pointers = [], []
    for number, (name, grid) in enumerate(grids.items()):
        panel = figure.add_subplot(
            places[slice(number * max(1, height), (number + 1) * max(1, height)), 0]
        )
        heat = heat_map(panel, name, grid)
        panel.set_box_aspect(0.75)
        panel.set_ylabel(first.wording.rows, fontsize=BODY)
        heats.append(panel)
    for row, (name, what, values) in enumerate(lines):
        band = slice(row * len(grids), (row + 1) * len(grids))
        panels = [figure.add_subplot(places[band, 1 + layer]) for layer in range(len(values))]
        image = _layers(panels, name, what, pointing[name].places, values)
        pointers += panels
    if pointers:
        _name_places(panels)
    figure.suptitle(first.wording.title, fontsize=TITLE)
    bars = [(heat, heats, f"{first.wording.questions} answered right, %", "left")]
    if pointers:
        bars.append((image, pointers, POINTED, "right"))
    for drawn, panels, label, side in bars:
        bar = figure.colorbar(drawn, ax=panels, location=side, shrink=0.6)
        bar.set_label(label, fontsize=SMALL)
        bar.ax.tick_params(labelsize=SMALL)
    frame = trained_frame((0, 0), 1, 1, label=f"trained: {first.wording.trained}")
    figure.legend(handles=[frame], loc="outside lower center", fontsize=SMALL, frameon=False)
    return figure


def inside(task: Address, trained: Trained) -> dict[str, Figure]:
    """Draws, by file name, where questions of the trained length point; none if too long."""
    pointing = task.pointing(trained, seed=0)
    if pointing is None:
        return {}
    rows, layers = _rows(pointing), len(pointing.attention)
    figure = Figure(figsize=(1.5 + 2.4 * layers, 1 + 2.2 * len(rows)), layout="compressed")
    grid = figure.subplots(len(rows), layers, squeeze=False)
    for panels, (what, values) in zip(grid, rows, strict=True):
        image = _layers(panels, "", what, pointing.places, values)
    _name_places(panels)
    bar = figure.colorbar(image, ax=grid, shrink=0.6)
    bar.set_label(POINTED, fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)
    figure.suptitle(task.heading, fontsize=TITLE)
    return {"pointing.png": figure}


def _layers(
    panels: Sequence[Axes], name: str, what: str, places: np.ndarray, values: np.ndarray
) -> AxesImage:
    """Draws a panel for each layer of values [L, K, R]."""
    for layer, (panel, shown) in enumerate(zip(panels, values, strict=True), 1):
        image = _points(panel, places, shown)
        panel.set_title(f"{what} layer {layer}", fontsize=SMALL)
    panels[0].set_ylabel(f"{name}\noffset".strip(), fontsize=SMALL)
    return image


def _name_places(panels: Sequence[Axes]) -> None:
    """Labels the places below a row of panels."""
    middle = panels[len(panels) // 2]
    middle.set_xlabel("places after the token asked about", fontsize=SMALL)


def _rows(pointing: Pointing) -> list[tuple[str, np.ndarray]]:
    """Returns what to draw of a model: labels, and each layer's clearest head, [L, K, R]."""
    found = [("attention of", _clearest(pointing.attention, pointing.places))]
    states = pointing.states
    if states is not None:
        read = states[~np.isnan(states).all(axis=(1, 2, 3))]
        # States that stay as they are show nothing.
        if len(read) and not np.allclose(read[0], read[-1], atol=1e-3, equal_nan=True):
            found.append(("state entering", _clearest(states, pointing.places)))
    return found


def _clearest(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Picks each layer's head of [L, H, K, R] with most at the token asked about, or the answer."""
    offsets = np.arange(1, values.shape[2] + 1)
    zero = int(np.flatnonzero(places == 0)[0])
    known = np.where(np.isnan(values).all(axis=(1, 2, 3), keepdims=True), 0, values)
    asked = np.nanmean(known[..., zero], axis=-1)
    answer = np.nanmean(known[:, :, offsets - 1, zero + offsets], axis=-1)
    heads = np.maximum(asked, answer).argmax(axis=1)
    return values[np.arange(len(values)), heads]


def _points(panel: Axes, places: np.ndarray, values: np.ndarray) -> AxesImage:
    """Draws one panel of offsets by places."""
    offsets = len(values)
    shown = (places >= -MARGIN) & (places <= offsets + MARGIN)
    image = panel.imshow(
        values[:, shown],
        origin="lower",
        vmin=0,
        vmax=1,
        cmap=COLOURS,
        aspect="auto",
        extent=(-MARGIN - 0.5, offsets + MARGIN + 0.5, 0.5, offsets + 0.5),
    )
    asked = np.arange(1, offsets + 1)
    panel.plot(asked, asked, "o", color="white", fillstyle="none", markersize=5)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(5, integer=True))
    panel.tick_params(labelsize=SMALL)
    return image
