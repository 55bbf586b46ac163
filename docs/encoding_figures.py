"""Draws the picture of docs/encodings.md, docs/images/encodings.png: what each encoding attends.

Run ``python -m docs.encoding_figures [--out FOLDER] [KIND ...]``; all of them take a few minutes.

Each panel has the last layer of a small model as it is initialised, but for the encoding's own
parameters, to which noise is added. Shown is the logarithm of the weight that the last token gives
to the one at a distance, less its mean. Thin lines are random texts; the thick line is a text that
repeats one token, where content says nothing.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from matplotlib.figure import Figure
from PIL import Image

import tape_jax as tape
from docs.figures import CONTENT, POSITION, new_figure
from docs.symmetries import DIGITS, VOCAB, model_of
from tape_jax import positions, testing
from tape_jax._src.core.files import write_atomically

SIZES = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 128}
LENGTH, TEXTS, HEAD, COLUMNS = 64, 2, 1, 6
NAME = "encodings.png"


def panels() -> list[str]:
    """The registry but for TAPE's ablations, which look as TAPE does."""
    return [kind for kind in positions.registry if not kind.startswith("tape_")]


def weights(model: tape.Transformer) -> np.ndarray:
    """Of the last layer and one head, what the last token gives each: ``[texts, T]``."""
    random = jax.random.randint(jax.random.key(0), (TEXTS, LENGTH), 0, VOCAB)
    tokens = jnp.concatenate([random, jnp.full((1, LENGTH), DIGITS[0])])
    variables = model.init(jax.random.key(1), tokens)
    # What starts at zero would show nothing.
    moved = flatten_dict(testing.random_params(None, variables, std=0.4)["params"], sep="/")
    start = flatten_dict(variables["params"], sep="/")
    own = {path for path, spec in model.parameters().items() if spec.role == "position"}
    params = {path: (moved if path in own else start)[path] for path in start}
    variables = {"params": unflatten_dict(params, sep="/")}

    @jax.jit
    def run(variables: Any) -> jax.Array:
        _, maps = model.apply(variables, tokens, mutable="maps")
        return jax.tree.leaves(maps)[0]

    maps = np.asarray(run(variables))
    return maps[-1, :, -1, HEAD] if maps.ndim == 5 else maps[:, -1, HEAD]


def draw(kinds: Sequence[str]) -> Figure:
    """A panel for each encoding."""
    rows = -(-len(kinds) // COLUMNS)
    figure = new_figure(2 * COLUMNS, 1.6 * rows + 0.4)
    grid = figure.subplots(rows, COLUMNS, sharex=True, squeeze=False).ravel()
    for axes, kind in zip(grid, kinds, strict=False):
        with np.errstate(divide="ignore"):
            logs = np.log(weights(model_of(kind, SIZES, attention_implementation="reference")))
        logs = np.where(np.isfinite(logs), logs, np.nan)[:, ::-1]
        logs -= np.nanmean(logs, axis=-1, keepdims=True)
        for line in logs[:-1]:
            axes.plot(line, color=CONTENT, lw=0.7, alpha=0.7)
        axes.plot(logs[-1], color=POSITION, lw=2.2)
        axes.set_title(kind, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(kinds) :]:
        axes.set_axis_off()
    figure.supxlabel("distance in tokens", fontsize=9)
    figure.supylabel("log weight, less its mean", fontsize=9)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="encodings (all)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    drawn, buffer = io.BytesIO(), io.BytesIO()
    draw(args.kinds or panels()).savefig(drawn, format="png", dpi=90)
    # Few colours are a third of the bytes.
    Image.open(drawn).convert("RGB").quantize(48).save(buffer, format="png", optimize=True)
    write_atomically(args.out / NAME, buffer.getvalue())
    print(args.out / NAME, len(buffer.getvalue()), "bytes")


if __name__ == "__main__":
    main()
