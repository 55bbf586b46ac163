"""Draws the pictures of the documentation, docs/images/*.png, in about a minute.

Run ``python -m docs.figures [--out FOLDER] [--steps N]``.
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch

import tape_jax as tape
from docs import records
from examples.data import next_token_loss, repeated_halves
from research.trainings import BEYOND
from tape_jax._src.core.files import write_atomically
from train.statistics import half_width
from train.training import flops, shipped

CONFIG = tape.ModelConfig(
    vocab_size=16, hidden_size=64, num_layers=4, num_heads=4, intermediate_size=128
)
LENGTH, SHIFT = 32, 1000
# A palette that the colour-blind can tell apart (Okabe and Ito).
INK, CONTENT, POSITION, BOTH = "#222222", "#d55e00", "#0072b2", "#f4f4f4"
GREEN, GREY = "#009e73", "#aaaaaa"
COLOURS = "viridis"
# At a width of 7 inches, shown at 700 pixels.
WIDTH, DOTS, FONT = 7.0, 200, 9
STYLE = {
    "font.size": FONT,
    "axes.titlesize": FONT,
    "axes.labelsize": FONT,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
QUESTION = "q d m c x a k f t b h z +5 c?"
ANSWER = "t"
TASKS = {
    "places in lists, %": ("address_4x_again", BEYOND),
    "passkeys, %": ("passkey", BEYOND),
    "recall of a key's value, %": ("recall", BEYOND),
    "counting, %": ("counting", BEYOND),
    "text, perplexity": ("text", "perplexity_1x"),
    "text at 8 times the length, perplexity": ("text", "perplexity_8x"),
}


def new_figure(width: float, height: float) -> Figure:
    """A figure that needs no window."""
    figure = Figure(figsize=(WIDTH, WIDTH * height / width), layout="constrained")
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
    """Draws complex numbers of consecutive tokens around the unit circle."""
    axes.add_patch(Circle((0, 0), 1, fill=False, color="#bbbbbb"))
    axes.axhline(0, color="#dddddd", lw=0.8)
    axes.axvline(0, color="#dddddd", lw=0.8)
    axes.scatter(numbers.real, numbers.imag, c=range(len(numbers)), cmap=COLOURS, s=26, zorder=3)
    axes.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal", xticks=[], yticks=[])


def draw_state() -> Figure:
    """The start state: one complex number for each frequency."""
    figure = new_figure(11, 3.1)
    chosen = (0, 4, 8, 16)
    e = as_complex(tape.rotary_state(jnp.arange(16), 64))
    for axes, j in zip(figure.subplots(1, len(chosen)), chosen, strict=True):
        plane(axes, e[:, j], 1.3)
        for t in (0, 1, 2) if j < 8 else ():
            at = 1.15 * e[t, j]
            axes.text(at.real, at.imag, str(t), ha="center", va="center")
        axes.set_title(f"{10_000 ** (-j / 32):.2g} rad a token")
    bar = figure.colorbar(
        axes.collections[0], ax=figure.axes, shrink=0.8, pad=0.01, ticks=[0, 5, 10, 15]
    )
    bar.set_label("position of the token")
    return figure


def box(axes: Any, x: float, y: float, width: float, text: str, colour: str) -> None:
    """Draws a box with a text, 0.8 high."""
    style = {"boxstyle": "round,pad=0.06", "facecolor": BOTH, "edgecolor": colour, "lw": 1.5}
    axes.add_patch(FancyBboxPatch((x, y), width, 0.8, **style))
    axes.text(x + width / 2, y + 0.4, text, ha="center", va="center", color=INK)


def arrow(axes: Any, points: Sequence[tuple[float, float]], colour: str) -> None:
    """Draws an arrow along straight lines."""
    for start, stop in itertools.pairwise(points[:-1]):
        axes.plot(*zip(start, stop, strict=True), color=colour, lw=1.4, solid_capstyle="round")
    style = {"arrowstyle": "-|>", "color": colour, "lw": 1.4, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", points[-1], points[-2], arrowprops=style)


def draw_layer() -> Figure:
    """Draws the computation of one layer on the residual stream and on the state."""
    figure = new_figure(10.4, 6.0)
    axes = figure.subplots()
    axes.set(xlim=(0, 10.4), ylim=(-0.9, 5.1))
    axes.set_axis_off()
    box(axes, 1.0, 3.1, 1.0, "q, k, v", CONTENT)
    box(axes, 1.0, 0.9, 1.6, "rotate q, k\nby e", POSITION)
    box(axes, 3.3, 2.0, 1.6, "A = softmax\n(q kᵀ)", INK)
    box(axes, 5.6, 3.1, 1.0, "o = A v", CONTENT)
    box(axes, 5.6, 0.9, 1.0, "a = A e", POSITION)
    box(axes, 7.35, 3.1, 0.9, "MLP", CONTENT)
    box(axes, 7.0, 0.9, 2.6, "e' = (I + $\\alpha$ G(x))\n(e + $\\alpha$ Mix(a))", POSITION)
    # The residual stream.
    arrow(axes, [(0.1, 4.7), (10.3, 4.7)], CONTENT)
    arrow(axes, [(0.5, 4.7), (0.5, 3.5), (0.94, 3.5)], CONTENT)
    arrow(axes, [(6.66, 3.5), (6.95, 3.5), (6.95, 4.7)], CONTENT)
    arrow(axes, [(7.2, 4.7), (7.2, 3.5), (7.29, 3.5)], CONTENT)
    arrow(axes, [(8.31, 3.5), (8.8, 3.5), (8.8, 4.7)], CONTENT)
    arrow(axes, [(8.8, 3.5), (8.8, 1.77)], CONTENT)
    arrow(axes, [(2.06, 3.5), (5.54, 3.5)], CONTENT)
    arrow(axes, [(1.5, 3.04), (1.5, 1.77)], CONTENT)
    # The state.
    arrow(axes, [(0.1, 1.3), (0.94, 1.3)], POSITION)
    arrow(axes, [(0.5, 1.3), (0.5, 0.3), (6.1, 0.3), (6.1, 0.84)], POSITION)
    arrow(axes, [(6.1, 0.3), (7.6, 0.3), (7.6, 0.84)], POSITION)
    arrow(axes, [(6.66, 1.3), (6.94, 1.3)], POSITION)
    arrow(axes, [(9.66, 1.3), (10.3, 1.3)], POSITION)
    # The probabilities.
    arrow(axes, [(2.66, 1.3), (4.1, 1.3), (4.1, 1.94)], INK)
    arrow(axes, [(4.96, 2.4), (5.85, 2.4), (5.85, 3.04)], INK)
    arrow(axes, [(4.96, 2.4), (5.85, 2.4), (5.85, 1.77)], INK)
    words = [
        (0.1, 4.82, "h, the residual stream", CONTENT),
        (6.6, 4.82, "+", CONTENT),
        (8.45, 4.82, "+", CONTENT),
        (9.1, 4.82, "next layer", CONTENT),
        (3.6, 3.57, "v", CONTENT),
        (1.6, 2.4, "q, k", CONTENT),
        (8.9, 2.4, "x", CONTENT),
        (0.1, 1.4, "e", POSITION),
        (3.0, 0.37, "e, the position state", POSITION),
        (9.68, 1.4, "e', next layer", POSITION),
    ]
    for x, y, text, colour in words[:-1]:
        axes.text(x, y, text, color=colour, va="bottom")
    legend = (
        "A: attention's softmax.  G(x), made from x, and Mix: matrices over heads, zero before"
        " training.\n$\\alpha$: step size.  I: identity.  "
        "Turn every e by one angle: A and o stay the same, e' turns alike."
    )
    axes.text(0.1, -0.15, legend, color=INK, va="top", linespacing=1.6)
    axes.text(10.35, 0.95, "e'\nnext layer", color=POSITION, va="top", ha="right")
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
    figure = new_figure(11, 6.2)
    states = states_of(model, variables)
    panels = figure.subplots(2, len(states))
    head, frequency = 0, 2
    chosen = [e[:, head, frequency] for e in states]
    limit = 1.15 * max(np.abs(e).max() for e in chosen)
    for layer, (e, (above, below)) in enumerate(zip(chosen, panels.T, strict=True), 1):
        plane(above, e, limit)
        plane(below, e / chosen[0], limit)
        above.set_title(f"layer {layer}" + (": RoPE" if layer == 1 else ""))
    panels[0, 0].set_ylabel("the state e")
    panels[1, 0].set_ylabel("e divided by RoPE's")
    bar = figure.colorbar(above.collections[0], ax=panels, shrink=0.7, pad=0.01)
    bar.set_label("position of the token")
    figure.suptitle("Below, angles hardly move: on this task states mostly stretch")
    return figure


def draw_cost() -> Figure:
    """Products of attention, forward and backward, by way of attending the state."""
    figure = new_figure(9, 3.0)
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
        axes.text(first + second + 0.2, y, f"{relative:.2f} x", va="center")
    axes.set(xlabel="products of queries x keys x head dimension", xlim=(0, 24))
    axes.legend(frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def shapes() -> dict[str, np.ndarray]:
    """Returns the effect of encodings on a logit over the distance, with typical parameters."""
    d, frequency = np.arange(64), 10_000.0 ** -(np.arange(32) / 32)
    cosines = np.cos(d[:, None] * frequency)
    zeta = (np.arange(32) / 32 + 0.4) / 1.4
    gates = np.where(d % 20 == 19, 0.3, 0.99)
    phases = np.linspace(0, -math.pi, 32)
    channels = np.linspace(0.9, 1, 16)[:, None] ** np.cumsum(1 + 9 * (d % 20 == 19))
    buckets = np.where(d < 16, d, 16 + 16 * np.log(np.maximum(d, 1) / 16) / np.log(8)).astype(int)
    return {
        "none": 0.0 * d,
        "rope": cosines.mean(1),
        "xpos": (cosines * zeta ** (d[:, None] / 64)).mean(1),
        "alibi": -d / 4,
        "kerple": -np.log1p(d),
        "t5, as it might be learned": -0.1 * buckets,
        "pope, as it might be learned": np.cos(d[:, None] * frequency + phases).mean(1),
        "inkling: a token's own mix": np.where(d < 48, 2 * np.exp(-(((d - 20) / 6) ** 2)) - 1, 0),
        "fox: gates close at line ends": np.cumsum(np.log(gates)),
        "dda_per_row: for this query": np.cumsum(np.log(np.where(abs(d - 30) < 4, 0.5, 0.99))),
        "wall: each channel for itself": channels.mean(0),
        "tape: it attended 24 back": np.cos((d - 24)[:, None] * frequency).mean(1),
    }


def draw_encodings() -> Figure:
    """Kinds of shapes of a logit over distance."""
    figure = new_figure(10, 8.1)
    panels = figure.subplots(3, 4, sharex=True).ravel()
    for axes, (name, values) in zip(panels, shapes().items(), strict=True):
        axes.plot(values, color=CONTENT if ": " in name else POSITION, lw=2)
        axes.set_title(name.replace(": ", ":\n").replace(", ", ",\n"))
        axes.set(yticks=[0], xticks=[0, 30, 60])
    figure.supxlabel("distance in tokens; orange: the content moves it")
    figure.supylabel("logit")
    return figure


def draw_results() -> Figure:
    """Means and 95 % intervals of five seeds, sorted; grey where the task was not learned."""
    figure = new_figure(10, 7)
    for axes, (task, asked) in zip(figure.subplots(3, 2).ravel(), TASKS.items(), strict=True):
        is_text = asked[1] != BEYOND
        found = {name: records.scores(*asked, name) for name in records.FORMS}
        known = {name: one for name, one in found.items() if one is not None}
        order = sorted(known, key=lambda name: statistics.mean(known[name][0]))
        for y, name in enumerate(order[::-1] if is_text else order):
            values, learned = known[name]
            half = half_width(values)
            colour = (CONTENT if "TAPE" in name else POSITION) if learned else GREY
            mean = statistics.mean(values)
            below, above = half, half
            if not is_text:
                # A share is from 0 to 100 %.
                below, above = min(half, mean), min(half, 100 - mean)
            axes.errorbar(mean, y, xerr=[[below], [above]], fmt="o", color=colour, capsize=3)
        names = order[::-1] if is_text else order
        axes.set(yticks=range(len(names)), ylim=(-0.6, len(names) - 0.4), title=task)
        axes.set_yticklabels(names)
        if not is_text:
            axes.set(xlim=(0, 103))
    return figure


def pointing() -> np.ndarray:
    """Returns the last token's attention in the shipped TAPE: ``[layers, heads, T]``."""
    trained = shipped.read(Path(__file__).parent / "play" / "models" / "tape.js")
    tokens = jnp.asarray(trained.experiment.task.question(QUESTION))[None]
    _, maps = trained.model.apply(trained.variables, tokens, mutable="maps")
    # Of each loop over layers, [layers, batch, T, heads, T].
    layers = [m.reshape(-1, *m.shape[-3:]) for m in map(np.asarray, jax.tree.leaves(maps))]
    return np.concatenate(layers)[:, -1]


def exact_match_by_cell(name: str) -> np.ndarray:
    """Returns the per cent right by offset and length, the mean of five seeds."""
    study = records.studies()["address_4x_again"]
    jobs = study.reports(records.form_of(study.name, name), BEYOND)
    grids = [study.record(job).found["result"]["grid"] for job in jobs]
    return np.mean([100 * np.array(x["correct"]) / np.array(x["counts"]) for x in grids], axis=0)


def draw_question(attention: np.ndarray) -> Figure:
    """A question and its answer, where every head attends, and how often answers are right."""
    figure = new_figure(10, 8.6)
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.35, 1])
    words = QUESTION.split()
    axes = top.subplots()
    _, heads, time = attention.shape
    step = heads + 1
    rows = {"layer 1:\nfinds c": 2 * step, "layer 2:\n5 places on": step, "layer 3:\nthe same": 0}
    for weights, bottom_row in zip(attention, rows.values(), strict=True):
        extent = (0, time, bottom_row, bottom_row + heads)
        axes.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto", extent=extent)
    middles = [row + heads / 2 for row in rows.values()]
    axes.set(xlim=(0, time), ylim=(0, 3 * step + 4), xticks=[], yticks=middles)
    axes.set_yticklabels(rows)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    for i, word in enumerate(words):
        colour = {"c": POSITION, "c?": POSITION, ANSWER: CONTENT}.get(word, INK)
        heavy = "bold" if colour != INK else "normal"
        axes.text(i + 0.5, 3 * step, word, ha="center", color=colour, fontsize=13, weight=heavy)
    title = f"Which token stands 5 places after c?   Answer: {ANSWER}"
    axes.text(0, 3 * step + 2.6, title, fontsize=11, weight="bold", color=INK)
    axes.set_xlabel("where the last token, c?, attends: a row for each of the 4 heads")
    draw_shares(bottom)
    figure.supxlabel("3 layers, width 64, 4 heads; TAPE with alpha=8, norm='rms'", fontsize=8)
    return figure


def draw_shares(figure: Any) -> None:
    """Right answers by length of the list and offset, of TAPE and of RoPE."""
    panels = figure.subplots(1, 2, sharey=True)
    for axes, name in zip(panels, ("TAPE + ALiBi", "RoPE + ALiBi"), strict=True):
        image = axes.imshow(
            exact_match_by_cell(name),
            cmap="cividis",
            vmin=0,
            vmax=100,
            aspect="auto",
            origin="lower",
            extent=(9.5, 32.5, 0.5, 8.5),
        )
        axes.axvline(16.5, color="white", lw=1.5, ls="--")
        axes.set(title=name, xlabel="tokens in the list", xticks=(10, 16, 24, 32))
        axes.set_xticklabels(["10", "16: longest\ntrained", "24", "32"])
    panels[0].set_ylabel("places after c")
    figure.colorbar(image, ax=panels, label="right, %")
    figure.suptitle(
        "Right answers after a longer training (4,000 steps; above 2,500)",
        fontsize=11,
        weight="bold",
        color=INK,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Draws everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    parser.add_argument("--steps", type=int, default=400, help="of training (400)")
    args = parser.parse_args(argv)
    model, variables, loss = train(args.steps)
    print(f"the model repeats with a loss of {loss:.3f} nats per token")
    figures: dict[str, Callable[[], Figure]] = {
        "idea_state": draw_state,
        "idea_layer": draw_layer,
        "idea_symmetry": lambda: draw_symmetry(model, variables),
        "idea_drift": lambda: draw_drift(model, variables),
        "idea_cost": draw_cost,
        "encodings": draw_encodings,
        "results": draw_results,
        "question": lambda: draw_question(pointing()),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name, draw in figures.items():
        buffer = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            draw().savefig(buffer, format="png", dpi=DOTS)
        write_atomically(args.out / f"{name}.png", buffer.getvalue())
        print(args.out / f"{name}.png", len(buffer.getvalue()), "bytes")


if __name__ == "__main__":
    main()
