"""Studies how states and gradients grow through depth, and where training diverges.

It measures at initialisation and along a short training. An untrained update changes no state, so
all variants are alike at initialisation; ``disturbed`` shows what an update permits once its
parameters are no longer special: noise is added to all parameters of the encoding.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from research import protocol
from research.records import Item, Record
from research.study import Measurements, Place
from tape_jax import Transformer, testing
from tape_jax.adapt import restack
from train import experiment
from train.compare import sweep
from train.compare.plots import BODY, SMALL, TITLE
from train.evaluation.grids import read_record, text_table
from train.experiment import Experiment
from train.training import step as training_step

MOMENTS = ("initial", "disturbed", "trained")
PROBE_SEED = 2**31
# A training that is this much worse than its beginning has diverged.
WORSE_THAN_THE_START = 2.0

Values = tuple[float | None, ...]


@dataclasses.dataclass(frozen=True)
class Profile:
    """The states and gradients of a model on a batch, by layer; None where they are not finite.

    Attributes:
      states: the largest norm, over tokens and heads, of the position state entering each layer,
        relative to the start; empty for encodings without a state.
      gradients: the norm of the gradient of the loss by the parameters of each layer.
    """

    states: Values
    gradients: Values

    @property
    def growth(self) -> float:
        """The largest state of all layers; infinite if one is not finite, 1 without states."""
        return max((math.inf if x is None else x for x in self.states), default=1.0)

    @property
    def spread(self) -> float:
        """The largest gradient of all layers over the smallest; infinite if one is not finite.

        Gradients of zero are left out.
        """
        if None in self.gradients:
            return math.inf
        found = [x for x in self.gradients if x]
        return max(found) / min(found) if found else math.inf


@dataclasses.dataclass(frozen=True)
class Trace:
    """The measurements of one variant at one depth.

    Attributes:
      variant: its name.
      depth: number of layers.
      initial: before training.
      disturbed: the same with noise added to the encoding's parameters.
      trained: after the last step that was taken.
      losses: of every step taken, in nats for each token that counts.
      gradients: global norm of the gradient at every step.
      diverged: the first step (from 1) whose loss or gradient is not finite, or whose loss is more
        than ``WORSE_THAN_THE_START`` times the first one; None: none.
    """

    variant: str
    depth: int
    initial: Profile
    disturbed: Profile
    trained: Profile
    losses: Values
    gradients: Values
    diverged: int | None

    @classmethod
    def from_json(cls, record: Any) -> Trace:
        """Returns the trace that ``dataclasses.asdict`` described; ValueError for others."""
        values = read_record(record, cls)
        values |= {name: _tuples(Profile, values[name]) for name in MOMENTS}
        return _tuples(cls, values)


def _tuples(cls: type, values: Any) -> Any:
    """Makes a dataclass from its fields, lists as tuples."""
    record = read_record(values, cls)
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in record.items()})


Probe = Callable[[Any, Mapping[str, Any]], Profile]


def make_probe(model: Transformer) -> Probe:
    """Returns a function of parameters and a batch, compiled once, for the :class:`Profile`."""
    apart = Transformer(dataclasses.replace(model.config, scan_layers=False))

    @jax.jit
    def measure(params: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def loss(params: Any) -> tuple[jax.Array, Any]:
            result: Any = model.apply({"params": params}, batch["inputs"], return_states=True)
            logits, states = result
            total = training_step.weighted_loss(logits, batch["targets"], batch["weights"])
            return total / batch["weights"].sum(), states.position

        grads, states = jax.grad(loss, has_aux=True)(params)
        layers = restack(grads, model, apart)
        norms = [optax.tree.norm(layers[f"layers_{i}"]) for i in range(model.config.num_layers)]
        return state_norms(model, states, batch["inputs"].shape), jnp.stack(norms)

    def probe(params: Any, batch: Mapping[str, Any]) -> Profile:
        return Profile(*map(finite, jax.device_get(measure(params, batch))))

    return probe


def state_norms(model: Transformer, states: Sequence[Any], shape: tuple[int, ...]) -> jax.Array:
    """The largest relative norm of the state entering each layer: [layers], or [0] without any.

    Args:
      model: whose states they are.
      states: the position states that the model returned.
      shape: of the tokens, ``[B, T]``.
    """

    def norms(e: jax.Array) -> jax.Array:
        e = e[:, None] if e.ndim == 2 else e
        # The numbers of a head: the last axis of a rotary state, the last three in tensor form.
        tail = 1 if e.ndim <= len(shape) + 2 else 3
        return jnp.sqrt(jnp.square(e.astype(jnp.float32)).sum(tuple(range(-tail, 0))))

    found = [norms(e) for state in states if (e := model.encoding.rotation(state)[1]) is not None]
    return jnp.array([jnp.max(x / found[0]) for x in found])


def finite(values: Any) -> Values:
    """Replaces numbers that are not finite by None, as JSON cannot write them."""
    return tuple(float(x) if math.isfinite(x) else None for x in np.ravel(values))


def disturb(model: Transformer, params: Any, noise: float) -> Any:
    """Adds normal noise of this standard deviation to the parameters of the encoding."""
    own = {path for path, spec in model.parameters().items() if spec.role == "position"}
    noisy = flatten_dict(testing.random_params(None, params, std=noise), sep="/")
    given = flatten_dict(params, sep="/")
    return unflatten_dict(
        {path: (noisy if path in own else given)[path] for path in given}, sep="/"
    )


def trace(e: Experiment, variant: str, *, noise: float) -> Trace:
    """Measures an experiment, training it for ``e.train.steps`` steps or until it diverges.

    Args:
      e: the experiment.
      variant: its name.
      noise: standard deviation of the noise of :attr:`Trace.disturbed`.
    """
    model, optimizer = Transformer(e.model), training_step.make_optimizer(e.train)
    probe, step_fn = make_probe(model), training_step.make_step(model, optimizer, e.train)
    state = jax.jit(lambda: training_step.init_state(e, optimizer))()
    unseen = next(iter(e.task.dataset((e.seed + PROBE_SEED) % 2**32, e.train.batch_size)))
    initial = probe(state.params, unseen)
    disturbed = probe(disturb(model, state.params, noise), unseen)
    losses, gradients, diverged = [], [], None
    data = iter(e.task.dataset(e.seed, e.train.batch_size))
    for step in range(1, e.train.steps + 1):
        state, metrics = step_fn(state, next(data))
        losses.append(float(metrics["loss"]))
        gradients.append(float(metrics["gradient_norm"]))
        good = math.isfinite(losses[-1]) and math.isfinite(gradients[-1])
        if not good or losses[-1] > WORSE_THAN_THE_START * losses[0]:
            diverged = step
            break
    return Trace(
        variant=variant,
        depth=e.model.num_layers,
        initial=initial,
        disturbed=disturbed,
        trained=probe(state.params, unseen),
        losses=finite(losses),
        gradients=finite(gradients),
        diverged=diverged,
    )


@dataclasses.dataclass(frozen=True)
class Growth:
    """A study of a config's variants at several depths.

    Attributes:
      name: a word, fit for a folder.
      config: a config file with variants.
      variants: their names.
      depths: numbers of layers.
      steps: of training.
      noise: that disturbs an update before it is trained.
      seeds: each gives a measurement of every variant and depth.
      minutes: how long a measurement takes, for plans.
    """

    name: str
    config: Path
    variants: Sequence[str]
    depths: Sequence[int]
    steps: int
    noise: float = 0.1
    seeds: Sequence[int] = protocol.REPORTING
    minutes: float = 0.5

    def at(self, place: Place) -> PlannedGrowth:
        """Returns the study at a place."""
        return PlannedGrowth(self, place)


class PlannedGrowth(Measurements):
    """A study of growth at a place."""

    quick = 1

    def __init__(self, design: Growth, place: Place):
        self.name = design.name
        self.design, self.place, self.minutes = design, place, design.minutes
        self._read_once = functools.cache(lambda record: Trace.from_json(record.found))
        self._items = []
        settings = sweep.variants(design.config, design.variants)
        for seed, depth, setting in itertools.product(design.seeds, design.depths, settings):
            options = (
                *place.overrides,
                *setting.overrides,
                f"--config.model.num_layers={depth}",
                f"--config.train.steps={design.steps}",
                f"--config.seed={seed}",
            )
            planned = experiment.from_file(design.config, options, lambda _: None)
            name = f"{setting.name}-{depth}-seed{seed}"
            described = {"version": protocol.VERSION, "noise": design.noise}
            self._items.append(Item(self.name, name, setting.name, planned, protocol=described))

    @property
    def size(self) -> str:
        """The size of its runs, in words."""
        depths = ", ".join(map(str, self.design.depths))
        return (
            f"`{self.design.config}`: {len(self.design.variants)} variants, "
            f"{len(self.design.seeds)} seeds, {depths} layers, {self.design.steps} steps"
        )

    def measure(self, item: Item) -> dict[str, Any]:
        """Measures one variant at one depth."""
        found = trace(item.experiment, item.rival, noise=self.design.noise)
        return dataclasses.asdict(found)

    def check(self, record: Record) -> None:
        """Raises ValueError unless this is a trace."""
        self._read_once(record)

    def traces(self, seed: int | None = None) -> list[Trace]:
        """Returns the traces measured so far, with one seed or all."""
        found = self._by_seed()
        return [trace for number, trace in found if seed in (None, number)]

    def growths(self, variant: str, depth: int) -> dict[int, float] | None:
        """Returns the growth of states once trained, by seed; None unless all are measured."""
        found = {
            seed: protocol.WORST_GROWTH
            if trace.diverged is not None
            else min(trace.trained.growth, protocol.WORST_GROWTH)
            for seed, trace in self._by_seed()
            if (trace.variant, trace.depth) == (variant, depth)
        }
        return found if len(found) == len(self.design.seeds) else None

    def said(self) -> str | None:
        """Returns a sentence on states as models get deeper; None before all is measured."""
        if self.state.unfinished:
            return None
        moments, depths = ("disturbed", "trained"), self.design.depths
        parts = []
        for variant in self.design.variants:
            grown = [
                " to ".join(f"{self.median(variant, d, moment, 'growth'):.3g}" for d in depths)
                for moment in moments
            ]
            parts.append(f"`{variant}` {grown[0]} disturbed, {grown[1]} trained")
        layers = " to ".join(map(str, depths))
        return (
            f"from {layers} layers, the largest state over its start, with updates disturbed "
            f"before training and once trained, medians of the seeds: {'; '.join(parts)}"
        )

    def median(self, variant: str, depth: int, moment: str, what: str) -> float:
        """Returns the median over seeds of ``growth`` or ``spread`` of a variant at a moment."""
        found = [t for t in self.traces() if (t.variant, t.depth) == (variant, depth)]
        return statistics.median(getattr(getattr(trace, moment), what) for trace in found)

    def says_of_states(self, studies: Sequence[str], form: str) -> Iterator[str]:
        """Yields a sentence on states as models get deeper, for claims that read this study."""
        if self.name in studies and (said := self.said()):
            yield f"What states do: {said}"

    def tables(self) -> Iterator[str]:
        """Yields a table of the growth of states and the spread of gradients, once all is there."""
        if self.state.unfinished:
            return
        rows = []
        for variant, depth in itertools.product(self.design.variants, self.design.depths):
            found = [t for t in self.traces() if (t.variant, t.depth) == (variant, depth)]
            cells = [
                f"{self.median(variant, depth, moment, what):.3g}"
                for what in ("growth", "spread")
                for moment in MOMENTS
            ]
            diverged = sum(t.diverged is not None for t in found)
            rows.append([variant, str(depth), str(len(found)), *cells, str(diverged)])
        header = ["variant", "layers", "seeds", *(f"state, {m}" for m in MOMENTS)]
        header += [*(f"gradients, {m}" for m in MOMENTS), "diverged"]
        note = (
            "State: the largest norm that enters a layer, relative to the start. Gradients: the "
            "largest of a layer over the smallest. Medians of the seeds; pictures of seed "
            f"{protocol.REPORTING[0]} alone."
        )
        yield f"{note}\n\n{text_table(header, rows)}"

    def pictures(self, heading: str, red: Collection[str]) -> dict[str, Callable[[], Figure]]:
        """Returns pictures by depth and by layer, of one seed, once all is there."""
        if self.state.unfinished:
            return {}
        traces = self.traces(seed=protocol.REPORTING[0])
        return {
            f"{self.name}_depth.png": functools.partial(depth_figure, traces),
            f"{self.name}_layers.png": functools.partial(layer_figure, traces),
        }

    def _by_seed(self) -> list[tuple[int, Trace]]:
        records = [record for item in self.items if (record := self.recorded(item))]
        return [(record.seed, self._read_once(record)) for record in records]


def depth_figure(traces: Sequence[Trace]) -> Figure:
    """Draws the largest state and the spread of gradients by depth, a line per variant.

    Values that are not finite have no point. A cross marks a training that diverged.
    """
    figure, panels = _panels("States and gradients by depth")
    for row, (what, label) in enumerate(
        (
            ("growth", "largest state, relative to the start"),
            ("spread", "largest gradient of a layer over the smallest"),
        )
    ):
        for column, moment in enumerate(MOMENTS):
            panel = panels[row][column]
            for number, (name, of_variant) in enumerate(_by_variant(traces).items()):
                depths = [t.depth for t in of_variant]
                values = np.array([getattr(getattr(t, moment), what) for t in of_variant])
                values[~np.isfinite(values)] = np.nan
                _line(panel, number, depths, values, name)
                if moment == "trained":
                    bad = np.array([t.diverged is not None for t in of_variant])
                    crosses = np.array(depths)[bad], values[bad]
                    panel.plot(*crosses, "x", color="black", markersize=9)
            panel.set_xscale("log", base=2)
            ticks = sorted({t.depth for t in traces})
            panel.set_xticks(ticks, [str(depth) for depth in ticks])
            panel.set_xlabel("layers", fontsize=BODY)
        panels[row][0].set_ylabel(label, fontsize=BODY)
    return _with_legend(figure, panels)


def layer_figure(traces: Sequence[Trace]) -> Figure:
    """Draws states and gradients by layer, at the greatest depth of each variant."""
    figure, panels = _panels("States and gradients by layer, at the greatest depth")
    for row, (what, label) in enumerate(
        (("states", "largest state, relative to the start"), ("gradients", "norm of the gradient"))
    ):
        for column, moment in enumerate(MOMENTS):
            panel = panels[row][column]
            for number, (name, of_variant) in enumerate(_by_variant(traces).items()):
                deepest = max(of_variant, key=lambda t: t.depth)
                values = np.array(getattr(getattr(deepest, moment), what), np.float64)
                _line(panel, number, np.arange(1, len(values) + 1), values, name)
            panel.set_xlabel("layer", fontsize=BODY)
        panels[row][0].set_ylabel(label, fontsize=BODY)
    return _with_legend(figure, panels)


def _by_variant(traces: Sequence[Trace]) -> dict[str, list[Trace]]:
    """Returns each variant's traces by ascending depth."""
    groups: dict[str, list[Trace]] = {}
    for t in sorted(traces, key=lambda t: t.depth):
        groups.setdefault(t.variant, []).append(t)
    return groups


def _panels(title: str) -> tuple[Figure, Any]:
    """Makes two rows of panels, with logarithmic axes and a column per moment."""
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    panels = figure.subplots(2, len(MOMENTS), sharey="row")
    for panel in panels.flat:
        panel.set_yscale("log")
        panel.tick_params(labelsize=SMALL)
        panel.grid(which="both", alpha=0.25)
    for panel, moment in zip(panels[0], MOMENTS, strict=True):
        panel.set_title(moment, fontsize=BODY)
    figure.suptitle(title, fontsize=TITLE)
    return figure, panels


def _line(panel: Axes, number: int, x: Any, y: np.ndarray, name: str) -> None:
    style = ("-", "--", "-.", ":")[number // 10 % 4]
    panel.plot(x, y, style, color=f"C{number % 10}", marker=".", linewidth=1.5, label=name)


def _with_legend(figure: Figure, panels: Any) -> Figure:
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=BODY, ncols=6)
    return figure
