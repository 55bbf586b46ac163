"""Pictures of the inside of a trained model: its position states and attention maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from train.checks import require
from train.compare.plots import BODY, COLOURS, SMALL, TINY, TITLE
from train.evaluation.grids import text_table
from train.evaluation.inside import Inside
from train.experiment import Experiment
from train.training.step import Batch

MOST_PANELS = 8
MOST_TOKENS = 64
UNSEEN_SEED = 2**31


def figures(inside: Inside) -> dict[str, Figure]:
    """Draws all pictures of the first sequence, by file name; of states only if there are any."""
    pictures = {"attention.png": attention_maps(inside)}
    if inside.states is not None:
        pictures["patterns.png"] = patterns(inside)
        pictures["drift.png"] = drift(inside)
        if len(inside.layers) > 1:
            pictures["moves.png"] = token_moves(inside)
    return pictures


def patterns(inside: Inside) -> Figure:
    """Draws dot products of the first sequence's states, by head and layer (TAPE, figure 4).

    Entry (i, j) is ``<e_i, e_j>`` over the mean ``|e|^2`` of the start. For RoPE that is the mean
    of the cosines of all frequencies at distance ``i - j``. The first column is the start, which
    RoPE has in all layers.
    """
    e = inside.flat_states[:, 0].transpose(0, 2, 1, 3)
    products = np.einsum("lhid,lhjd->lhij", e, e) / np.square(e[0]).sum(-1).mean()
    reach = max(1.0, float(np.quantile(np.abs(products), 0.99)))
    figure = _panels(
        products,
        ["start", *(f"entering layer {n}" for n in inside.layers[1:])],
        "dot product of states",
        limits=(-reach, reach),
        colours="RdBu_r",
    )
    figure.suptitle("Position states: dot products by head and layer", fontsize=TITLE)
    return figure


def attention_maps(inside: Inside) -> Figure:
    """Draws the first sequence's attention probabilities by head and layer, as square roots."""
    maps = np.sqrt(inside.maps[:, 0].transpose(0, 2, 1, 3))
    names = [f"layer {i + 1}" for i in range(len(maps))]
    figure = _panels(maps, names, "square root of the probability", limits=(0.0, 1.0))
    figure.suptitle("Attention maps by head and layer", fontsize=TITLE)
    return figure


def _panels(
    grids: np.ndarray,
    columns: Sequence[str],
    bar_label: str,
    *,
    limits: tuple[float, float],
    colours: str = COLOURS,
) -> Figure:
    """Draws images [layers, heads, T, T]: a column for each layer, a row for each head."""
    layers, heads = _spread(grids.shape[0]), _spread(grids.shape[1])
    size = (1.6 + 1.9 * len(layers), 1.0 + 1.9 * len(heads))
    figure = Figure(figsize=size, layout="compressed")
    axes = figure.subplots(len(heads), len(layers), squeeze=False, sharex=True, sharey=True)
    for row, head in enumerate(heads):
        for column, layer in enumerate(layers):
            panel: Axes = axes[row, column]
            image = panel.imshow(
                grids[layer, head], vmin=limits[0], vmax=limits[1], cmap=colours, rasterized=True
            )
            panel.tick_params(labelsize=TINY)
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_locator(MaxNLocator(5, integer=True))
            if row == 0:
                panel.set_title(columns[layer], fontsize=SMALL)
            if row == len(heads) - 1:
                panel.set_xlabel("key", fontsize=SMALL)
        axes[row, 0].set_ylabel(f"head {head + 1}\nquery", fontsize=SMALL)
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
    bar.set_label(bar_label, fontsize=SMALL)
    bar.ax.tick_params(labelsize=TINY)
    return figure


def drift(inside: Inside) -> Figure:
    """Draws the states' norms and angles to the start, layer by layer, over all tokens."""
    angles = inside.phase_drift
    figure = Figure(figsize=(5.2 if angles is None else 14.0, 4.2), layout="constrained")
    panels = figure.subplots(1, 1 if angles is None else 3, squeeze=False)[0]
    layers = np.array(inside.layers)
    _quantiles(panels[0], layers, inside.relative_norms, "norm relative to the start")
    panels[0].set_title("Norm", fontsize=BODY)
    if angles is not None:
        degrees = np.degrees(angles)
        _quantiles(panels[1], layers, degrees, "angle to the start, degrees")
        panels[1].set_title("Phase drift", fontsize=BODY)
        by_frequency = degrees.mean(axis=(1, 2, 3))
        image = panels[2].imshow(by_frequency.T, aspect="auto", cmap=COLOURS, origin="lower")
        panels[2].set_xticks(range(len(layers)), layers)
        panels[2].set_ylabel("frequency, 0 the fastest", fontsize=SMALL)
        panels[2].set_title("Mean phase drift by frequency", fontsize=BODY)
        figure.colorbar(image, ax=panels[2]).set_label("degrees", fontsize=SMALL)
    for panel in panels:
        panel.set_xlabel("entering layer", fontsize=SMALL)
        panel.tick_params(labelsize=SMALL)
    figure.suptitle("Position states by layer", fontsize=TITLE)
    return figure


def _quantiles(panel: Axes, layers: np.ndarray, values: np.ndarray, label: str) -> None:
    """Plots the median and the central 90 % over all axes but the first."""
    low, middle, high = np.quantile(values.reshape(len(values), -1), (0.05, 0.5, 0.95), axis=1)
    panel.plot(layers, middle, marker="o", markersize=4, label="median")
    panel.fill_between(layers, low, high, alpha=0.25, label="central 90 %")
    panel.set_xticks(layers)
    panel.set_ylabel(label, fontsize=SMALL)
    panel.grid(alpha=0.25)
    panel.legend(fontsize=SMALL)


def token_moves(inside: Inside) -> Figure:
    """Draws how far each layer moves the states of the first tokens, as means over heads."""
    labels = inside.labels[0][:MOST_TOKENS]
    moves = inside.moves[:, 0, : len(labels)].mean(-1)
    figure = Figure(
        figsize=(2.5 + 0.24 * len(labels), 1.8 + 0.35 * len(moves)), layout="constrained"
    )
    panel = figure.subplots()
    image = panel.imshow(moves, aspect="auto", cmap=COLOURS)
    panel.set_xticks(range(len(labels)), labels, fontsize=TINY, family="monospace")
    if max(map(len, labels)) > 2:
        panel.tick_params(axis="x", labelrotation=90)
    panel.set_yticks(range(len(moves)), map(str, inside.layers[:-1]), fontsize=SMALL)
    panel.set_ylabel("layer", fontsize=SMALL)
    panel.set_xlabel("token", fontsize=SMALL)
    panel.set_title("How far each layer moves a token's state, relative to its norm", fontsize=BODY)
    figure.colorbar(image, ax=panel, pad=0.01).ax.tick_params(labelsize=TINY)
    return figure


def movers(inside: Inside) -> str:
    """Returns a table of the ten tokens whose states all layers together move most, on average.

    Tokens that occur once are left out if others occur more often.
    """
    total = inside.moves.sum(axis=0).mean(-1)
    by_label: dict[str, list[float]] = {}
    for labels, moved in zip(inside.labels, total, strict=True):
        for label, distance in zip(labels, moved, strict=True):
            by_label.setdefault(label, []).append(float(distance))
    often = {label: d for label, d in by_label.items() if len(d) > 1} or by_label
    ranking = sorted(often, key=lambda label: -np.mean(often[label]))[:10]
    rows = [[repr(x), str(len(often[x])), f"{np.mean(often[x]):.3f}"] for x in ranking]
    return text_table(["token", "occurrences", "mean distance moved"], rows)


def _spread(count: int) -> list[int]:
    """Returns all indices, or ``MOST_PANELS`` evenly spaced ones with the first and the last."""
    return sorted({int(i) for i in np.linspace(0, count - 1, min(count, MOST_PANELS)).round()})


def examples(experiment: Experiment, count: int) -> Batch:
    """Draws examples of the task with a separate seed."""
    return next(iter(experiment.task.dataset((experiment.seed + UNSEEN_SEED) % 2**32, count)))


def prompted(experiment: Experiment, prompt: str) -> np.ndarray:
    """Returns the tokens [1, T] of a prompt."""
    tokens = np.asarray(experiment.task.encode(prompt))
    require(len(tokens) >= 2, f"inspect: --prompt must have at least 2 tokens; got {prompt!r}")
    return tokens[None]


def printable(text: str) -> str:
    """Returns a token's text as a label that shows spaces and line ends."""
    return text.replace(" ", "\u2423").replace("\n", "\u21b5").replace("\t", "\u2192") or "\u2205"
