"""What one encoding costs beside another: time and memory of a step, parameters, operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from research import protocol
from research.inside.step_cost import again, measure
from research.records import Item, Record
from research.studies import Fields, Measurements, Place, options
from tape_jax._src.core.checks import require
from train import experiment
from train.training import runs
from train.training.flops import model_flops

# What every measurement has; memory only where the compiler says it.
MEASURED = ("length", "milliseconds", "time", "noise", "parameters", "operations")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Training steps of two encodings, in turns in one process, several times.

    Attributes:
      name: a word, fit for a folder.
      config: the config file.
      fields: by scale, the fields in which the models differ from it.
      lengths: by scale, of the sequences.
      tokens: by scale, in a batch.
      rivals: by name, the fields of the config that make those whose cost it is.
      reference: beside which they are measured.
      seeds: each a measurement of every rival and length.
      repeats: timed steps of a measurement.
      minutes: that one takes, for plans.
    """

    name: str
    config: Path
    fields: Mapping[str, Fields]
    lengths: Mapping[str, Sequence[int]]
    tokens: Mapping[str, int]
    rivals: Mapping[str, Fields]
    reference: str = "rope"
    seeds: Sequence[int] = protocol.REPORTING
    repeats: int = 20
    minutes: float = 1.5

    def at(self, place: Place) -> PlannedCost:
        """The study at a place."""
        return PlannedCost(self, place)


class PlannedCost(Measurements):
    """A study of cost at a place."""

    def __init__(self, design: Cost, place: Place):
        self.name = design.name
        self.design, self.place, self.minutes = design, place, design.minutes
        described = {
            "version": protocol.VERSION,
            "reference": design.reference,
            "repeats": design.repeats,
        }
        self._items = [
            Item(
                self.name,
                f"{rival}-{length}-seed{seed}",
                rival,
                self._experiment(length, seed, fields),
                protocol=described,
            )
            for rival, fields in design.rivals.items()
            for length in design.lengths[place.scale]
            for seed in design.seeds
        ]

    def _experiment(self, length: int, seed: int, encoding: Fields) -> experiment.Experiment:
        design, scale = self.design, self.place.scale
        fields = {
            **design.fields.get(scale, {}),
            **encoding,
            "task.sequence_length": length,
            "train.batch_size": max(1, design.tokens[scale] // length),
            "seed": seed,
        }
        given = (*self.place.overrides, *options(fields))
        return experiment.from_file(design.config, given, lambda _: None)

    @property
    def size(self) -> str:
        """The size of its runs, in words."""
        return (
            f"`{self.design.config}`: {len(self.design.seeds)} measurements of "
            f"{self.design.repeats} steps in turns, at each length"
        )

    def measure(self, item: Item) -> dict[str, Any]:
        """Ratios of the encoding to the reference, and of the reference to itself."""
        mine, (length, batch) = item.experiment, self._shape(item)
        reference = {"model.position.kind": self.design.reference}
        theirs = self._experiment(length, mine.seed, reference)
        models = {self.design.reference: theirs.model, item.rival: mine.model}
        found, _ = measure(models, batch, length, repeats=self.design.repeats)
        first, second = found[self.design.reference], found[item.rival]
        noise = found[again(self.design.reference)].timing.ratio(first.timing)
        ratios = {
            "length": length,
            "milliseconds": 1e3 * second.timing.median,
            "time": second.timing.ratio(first.timing),
            "noise": noise,
            "parameters": runs.count_parameters(mine)[0] / runs.count_parameters(theirs)[0],
            "operations": model_flops(mine.model, batch, length)
            / model_flops(theirs.model, batch, length),
        }
        if first.memory is not None and second.memory is not None:
            ratios["memory"] = second.memory.total / first.memory.total
        return ratios

    def _shape(self, item: Item) -> tuple[int, int]:
        return item.experiment.task.sequence_length, item.experiment.train.batch_size

    def check(self, record: Record) -> None:
        """Raises ValueError if it is no measurement of cost."""
        missing = [name for name in MEASURED if name not in record.found]
        require(not missing, f"a measurement without {', '.join(missing)}")

    def measured(self, rival: str) -> dict[int, list[Mapping[str, float]]]:
        """What has been measured of a rival, by length."""
        found: dict[int, list[Mapping[str, float]]] = {}
        for item in self.items:
            if item.rival == rival and (record := self.recorded(item)):
                found.setdefault(int(record.found["length"]), []).append(record.found)
        return found
