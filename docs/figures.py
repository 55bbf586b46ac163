"""Draws the pictures of docs/idea.md: docs/images/idea_*.png, in about a minute.

Run ``python -m docs.figures [--out FOLDER] [--steps N]``.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch

import tape_jax as tape
from examples.data import next_token_loss, repeated_halves
from tape_jax._src.core.files import write_atomically
from train.training import flops

CONFIG = tape.ModelConfig(
    vocab_size=16, hidden_size=64, num_layers=4, num_heads=4, intermediate_size=128
)
LENGTH, SHIFT = 32, 1000
INK, CONTENT, POSITION, BOTH = "#222222", "#d94801", "#3f51b5", "#efefef"
COLOURS = "viridis"


def new_figure(width: float, height: float) -> Figure:
    """A figure that needs no window."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def train(steps: int) -> tuple[tape.Transformer, Any, float]:
    """A small TAPE model that has learned to repeat what it has read, and its last loss in nats."""
    model = tape.Transformer(CONFIG)
    optimizer = optax.adam(3e-3)

    def loss(variables: Any, tokens: jax.Array) -> jax.Array:
        return next_token_loss(model.apply(variables, tokens), tokens)

    @jax.jit
    def step(variables: Any, moments: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        tokens = repeated_halves(key, 32, LENGTH, CONFIG.vocab_size)
        value, gradients = jax.value_and_grad(loss)(variables, tokens)
        changes, moments = optimizer.update(gradients, moments)
        return optax.apply_updates(variables, changes), moments, value

    variables = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))
    moments, value = optimizer.init(variables), jnp.inf
    for key in jax.random.split(jax.random.key(1), steps):
        variables, moments, value = step(variables, moments, key)
    return model, variables, float(value)


def as_complex(e: jax.Array) -> np.ndarray:
    """Rotary states ``[..., D]`` as complex numbers ``[..., D/2]``."""
    real, imaginary = np.split(np.asarray(e), 2, axis=-1)
    return real + 1j * imaginary


def states_of(model: tape.Transformer, variables: Any, shift: int = 0) -> list[np.ndarray]:
    """Complex states ``[T, H, D/2]`` entering each layer, for one text at shifted positions."""
    tokens = repeated_halves(jax.random.key(2), 1, LENGTH, CONFIG.vocab_size)
    places = jnp.arange(LENGTH) + shift
    _, states = model.apply(variables, tokens, positions=places, return_states=True)
    shape = (1, LENGTH, CONFIG.kv_heads, CONFIG.dim)
    return [
        as_complex(model.encoding.carry(e, shape[:2], CONFIG.sizes))[0] for e in states.position
    ]


def plane(axes: Any, numbers: np.ndarray, limit: float) -> None:
    """Complex numbers of consecutive tokens around the unit circle."""
    axes.add_patch(Circle((0, 0), 1, fill=False, color="#bbbbbb"))
    axes.axhline(0, color="#dddddd", lw=0.8)
    axes.axvline(0, color="#dddddd", lw=0.8)
    axes.scatter(numbers.real, numbers.imag, c=range(len(numbers)), cmap=COLOURS, s=26, zorder=3)
    axes.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal", xticks=[], yticks=[])


def draw_state() -> Figure:
    """The start state: one complex number for each frequency."""
    figure = new_figure(11, 2.85)
    chosen = (0, 4, 8, 16)
    e = as_complex(tape.rotary_state(jnp.arange(16), 64))
    for axes, j in zip(figure.subplots(1, len(chosen)), chosen, strict=True):
        plane(axes, e[:, j], 1.3)
        for t in (0, 1, 2) if j < 8 else ():
            at = 1.15 * e[t, j]
            axes.text(at.real, at.imag, str(t), ha="center", va="center", fontsize=9)
        axes.set_title(f"frequency {j}: {10_000 ** (-j / 32):.3g} rad per token", fontsize=10)
    bar = figure.colorbar(
        axes.collections[0], ax=figure.axes, shrink=0.8, pad=0.01, ticks=[0, 5, 10, 15]
    )
    bar.set_label("position of the token")
    return figure


def draw_layer() -> Figure:
    """What one layer does to the residual stream and to the state."""
    figure = new_figure(11, 4.3)
    axes = figure.subplots()
    axes.set(xlim=(0, 11), ylim=(0, 4.4))
    axes.set_axis_off()

    def box(x: float, y: float, width: float, text: str, colour: str) -> None:
        style = {"boxstyle": "round,pad=0.06", "facecolor": BOTH, "edgecolor": colour, "lw": 1.8}
        axes.add_patch(FancyBboxPatch((x, y), width, 0.75, **style))
        axes.text(x + width / 2, y + 0.375, text, ha="center", va="center", fontsize=10, color=INK)

    def arrow(start: tuple, stop: tuple, colour: str, label: str = "", bend: float = 0) -> None:
        style = {"arrowstyle": "-|>", "color": colour, "lw": 1.6, "shrinkA": 0, "shrinkB": 3}
        style["connectionstyle"] = f"arc3,rad={bend}"
        axes.annotate("", stop, start, arrowprops=style)
        if label:
            x, y = (start[0] + stop[0]) / 2, (start[1] + stop[1]) / 2
            axes.text(x, y + 0.1, label, ha="center", va="bottom", color=colour, fontsize=10)

    box(1.5, 3.2, 1.3, "q, k, v", CONTENT)
    box(1.5, 0.6, 1.3, "rotate by e", POSITION)
    box(3.7, 1.9, 1.5, "softmax(q kᵀ)\n= A", INK)
    box(6.1, 3.2, 1.9, "o = A v, then MLP", CONTENT)
    box(6.1, 0.6, 1.9, "a = A e", POSITION)
    box(8.75, 1.9, 1.5, "update of e", INK)
    arrow((0.1, 3.575), (1.44, 3.575), CONTENT, "h")
    arrow((0.1, 0.975), (1.44, 0.975), POSITION, "e")
    arrow((2.15, 3.14), (2.15, 1.41), CONTENT)
    axes.text(2.25, 2.25, "q, k", color=CONTENT, fontsize=10, va="center")
    arrow((2.86, 1.1), (3.64, 2.15), INK)
    arrow((5.26, 2.4), (6.04, 3.3), INK, bend=0)
    arrow((5.26, 2.15), (6.04, 1.25), INK)
    arrow((2.86, 3.575), (6.04, 3.575), CONTENT, "v")
    arrow((2.86, 0.8), (6.04, 0.8), POSITION, "e")
    arrow((8.06, 3.575), (10.9, 3.575), CONTENT, "h + W o + x")
    arrow((8.06, 3.3), (8.95, 2.71), CONTENT)
    axes.text(8.72, 3.08, "x", color=CONTENT, fontsize=10, ha="left", va="center")
    arrow((8.06, 1.1), (8.95, 1.84), POSITION)
    axes.text(8.72, 1.35, "a, e", color=POSITION, fontsize=10, ha="left", va="center")
    arrow((10.31, 2.15), (10.9, 1.2), POSITION)
    axes.text(10.7, 1.95, "e'", color=POSITION, fontsize=11, ha="left")
    axes.text(0.1, 4.12, "content", color=CONTENT, fontsize=11, weight="bold")
    axes.text(0.1, 0.15, "position", color=POSITION, fontsize=11, weight="bold")
    return figure


def draw_symmetry(model: tape.Transformer, variables: Any) -> Figure:
    """States before and after a shift of all positions, and the products that attention sees."""
    figure = new_figure(10, 5.6)
    panels = figure.subplots(2, 2, width_ratios=[1.5, 1])
    products = []
    for row, shift in zip(panels, (0, SHIFT), strict=True):
        e = states_of(model, variables, shift)[2][:, 0]
        products.append((e @ e.conj().T).real)
        row[0].imshow(e.real.T, cmap="RdBu", vmin=-2, vmax=2, aspect="auto")
        row[0].set(ylabel="frequency", title=f"state, positions {shift} … {shift + LENGTH - 1}")
        image = row[1].imshow(products[-1], cmap="cividis", aspect="auto")
        row[1].set(ylabel="token", title="products of the states")
        figure.colorbar(image, ax=row[1])
        for axes in row:
            axes.set(xlabel="token")
    difference = np.abs(products[0] - products[1]).max() / np.abs(products[0]).max()
    panels[1, 1].set_title(f"the same, but for {difference:.0e} of the largest")
    return figure


def draw_drift(model: tape.Transformer, variables: Any) -> Figure:
    """States of one frequency layer by layer, and what is left when RoPE is divided out."""
    figure = new_figure(11, 5.6)
    states = states_of(model, variables)
    panels = figure.subplots(2, len(states))
    head, frequency = 0, 2
    chosen = [e[:, head, frequency] for e in states]
    limit = 1.15 * max(np.abs(e).max() for e in chosen)
    for layer, (e, (above, below)) in enumerate(zip(chosen, panels.T, strict=True), 1):
        plane(above, e, limit)
        plane(below, e / chosen[0], limit)
        above.set_title(f"entering layer {layer}" + (": RoPE" if layer == 1 else ""), fontsize=11)
    panels[0, 0].set_ylabel("the state e")
    panels[1, 0].set_ylabel("e divided by RoPE's")
    bar = figure.colorbar(above.collections[0], ax=panels, shrink=0.7, pad=0.01)
    bar.set_label("position of the token")
    return figure


def draw_cost() -> Figure:
    """Products of attention, forward and backward, by way of attending the state."""
    figure = new_figure(9, 2.7)
    axes = figure.subplots()
    ways = {
        "RoPE: values alone": flops.PLAIN,
        "TAPE here: values and states together": flops.STATE,
        "two attentions": flops.TWO_CALLS,
        "three attentions (published code)": flops.THREE_CALLS,
    }
    names = list(ways)[::-1]
    forward = [ways[name].forward for name in names]
    backward = [ways[name].backward for name in names]
    axes.barh(names, forward, color=POSITION, label="forward")
    axes.barh(names, backward, left=forward, color="#9fa8da", label="backward")
    for y, (first, second) in enumerate(zip(forward, backward, strict=True)):
        relative = (first + second) / flops.PLAIN.both
        axes.text(first + second + 0.2, y, f"{relative:.2f} x", va="center", fontsize=10)
    axes.set(xlabel="products of queries x keys x head dimension", xlim=(0, 24))
    axes.legend(frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Draws everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    parser.add_argument("--steps", type=int, default=400, help="of training (400)")
    args = parser.parse_args(argv)
    model, variables, loss = train(args.steps)
    print(f"the model repeats with a loss of {loss:.3f} nats per token")
    figures: dict[str, Callable[[], Figure]] = {
        "state": draw_state,
        "layer": draw_layer,
        "symmetry": lambda: draw_symmetry(model, variables),
        "drift": lambda: draw_drift(model, variables),
        "cost": draw_cost,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name, draw in figures.items():
        buffer = io.BytesIO()
        draw().savefig(buffer, format="png", dpi=100)
        write_atomically(args.out / f"idea_{name}.png", buffer.getvalue())
        print(args.out / f"idea_{name}.png", len(buffer.getvalue()), "bytes")


if __name__ == "__main__":
    main()
