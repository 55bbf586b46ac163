"""Growth of states and gradients through depth, and where training diverges, as a study."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from research import protocol
from research.inside import stability
from research.inside.stability import Trace
from research.records import Item, Record
from research.studies import Measurements, Place
from train import experiment
from train.compare import sweep


@dataclasses.dataclass(frozen=True)
class Growth:
    """Variants of a config at several depths (:mod:`research.inside.stability`).

    Attributes:
      name: a word, fit for a folder.
      config: a config file with variants.
      variants: names of some.
      depths: numbers of layers.
      steps: of training.
      noise: that disturbs an update before it is trained.
      seeds: each a measurement of every variant and depth.
      minutes: that one takes, for plans.
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
        """The study at a place."""
        return PlannedGrowth(self, place)


class PlannedGrowth(Measurements):
    """A study of growth at a place."""

    quick = 1

    def __init__(self, design: Growth, place: Place):
        self.name = design.name
        self.design, self.place, self.minutes = design, place, design.minutes
        self._read_once = functools.cache(self._read)
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
        """A trace of one variant at one depth."""
        found = stability.trace(item.experiment, item.rival, noise=self.design.noise)
        return dataclasses.asdict(found)

    def check(self, record: Record) -> None:
        """Raises ValueError if it is no trace."""
        self._read_once(record)

    def traces(self, seed: int | None = None) -> list[Trace]:
        """What has been measured, with one seed or all."""
        found = self._by_seed()
        return [trace for number, trace in found if seed in (None, number)]

    def growths(self, variant: str, depth: int) -> dict[int, float] | None:
        """How much states have grown once trained, by seed; None unless all are measured."""
        found = {
            seed: protocol.WORST_GROWTH
            if trace.diverged is not None
            else min(trace.trained.growth, protocol.WORST_GROWTH)
            for seed, trace in self._by_seed()
            if (trace.variant, trace.depth) == (variant, depth)
        }
        return found if len(found) == len(self.design.seeds) else None

    def said(self) -> str | None:
        """What states do as models get deeper, in a sentence; None before all is measured."""
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
        """Of the seeds: ``growth`` or ``spread`` of a variant at a moment."""
        found = [t for t in self.traces() if (t.variant, t.depth) == (variant, depth)]
        return statistics.median(getattr(getattr(trace, moment), what) for trace in found)

    def _by_seed(self) -> list[tuple[int, Trace]]:
        records = [record for item in self.items if (record := self.recorded(item))]
        return [(record.seed, self._read_once(record)) for record in records]

    @staticmethod
    def _read(record: Record) -> Trace:
        return Trace.from_json(record.found)
