"""Growth of states and gradients through depth, and where training diverges, as a study."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train import experiment
from train.analysis import stability
from train.analysis.stability import Trace
from train.comparison import sweep
from train.evidence.records import Item, Record
from train.evidence.studies import Measurements, Place


@dataclasses.dataclass(frozen=True)
class Growth:
    """Variants of a config at several depths (:mod:`train.analysis.stability`).

    Attributes:
      name: a word, fit for a folder.
      section: of the page.
      config: a config file with variants.
      variants: names of some.
      depths: numbers of layers.
      steps: of training.
      noise: that disturbs an update before it is trained.
      seeds: number of them.
    """

    name: str
    section: str
    config: Path
    variants: Sequence[str]
    depths: Sequence[int]
    steps: int
    noise: float = 0.1
    seeds: int = 3

    def at(self, place: Place) -> PlannedGrowth:
        """The study at a place."""
        return PlannedGrowth(self, place)


class PlannedGrowth(Measurements):
    """A study of growth at a place."""

    quick = 1

    def __init__(self, design: Growth, place: Place):
        self.name, self.section = design.name, design.section
        self.design, self.place = design, place
        self.items = []
        settings = sweep.variants(design.config, design.variants)
        for seed, depth, setting in itertools.product(range(design.seeds), design.depths, settings):
            options = (
                *place.overrides,
                *setting.overrides,
                f"--config.model.num_layers={depth}",
                f"--config.train.steps={design.steps}",
                f"--config.seed={seed}",
            )
            planned = experiment.from_file(design.config, options, lambda _: None)
            name = f"{setting.name}-{depth}-seed{seed}"
            protocol = {"noise": design.noise}
            self.items.append(Item(self.name, name, setting.name, planned, protocol=protocol))

    @property
    def budget(self) -> str:
        """The size of its runs, in words."""
        depths = ", ".join(map(str, self.design.depths))
        return (
            f"`{self.design.config}`: {len(self.design.variants)} variants, {self.design.seeds} "
            f"seeds, {depths} layers, {self.design.steps} steps"
        )

    def measure(self, item: Item) -> dict[str, Any]:
        """A trace of one variant at one depth."""
        found = stability.trace(item.experiment, item.rival, noise=self.design.noise)
        return dataclasses.asdict(found)

    def check(self, record: Record) -> None:
        """Raises ValueError if it is no trace."""
        Trace.from_json(record.found)

    def traces(self, seed: int | None = None) -> list[Trace]:
        """What has been measured, with one seed or all."""
        records = [self.recorded(item) for item in self.items]
        wanted = [r for r in records if r and seed in (None, r.seed)]
        return [Trace.from_json(record.found) for record in wanted]
