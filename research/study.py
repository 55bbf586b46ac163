"""Studies, which are sets of similar runs, and measurements, which are made one by one.

A study knows its runs before any is made. Each run's record is written the moment it ends, so you
can stop a study anywhere and continue it, here or on another machine.
"""

from __future__ import annotations

import abc
import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from matplotlib.figure import Figure

from research.records import Item, Made, Record, Store, describe_source
from train import experiment
from train.compare.environment import describe_environment
from train.training.metrics import Progress
from train.training.signals import Signals, Stopped

Fields = Mapping[str, Any]
Finished = Callable[[Item], None]


class Base(NamedTuple):
    """A run that others start from: each from the one with its seed.

    Attributes:
      config: its config file.
      fields: in which it differs from the file.
      by_scale: further fields, by scale.
    """

    config: Path
    fields: Fields
    by_scale: Mapping[str, Fields]


class Place(NamedTuple):
    """The folders and the scale with which the suite is run.

    Attributes:
      store: of the results.
      runs: the folder of the run folders.
      side_by_side: trainings at a time.
      scale: of the configs (``--config.scale``).
    """

    store: Store
    runs: Path
    side_by_side: int = 2
    scale: str = experiment.THIS_SCALE

    @property
    def overrides(self) -> tuple[str, ...]:
        """The options that the scale adds to the command line of every run."""
        return (f"--config.scale={self.scale}",) if self.apart else ()

    @property
    def apart(self) -> str:
        """The suffix of its files and folders; empty for the default scale."""
        return apart(self.scale)


def apart(scale: str) -> str:
    """Returns the suffix of a scale's files and folders; empty for the default scale."""
    return "" if scale == experiment.THIS_SCALE else f"-{scale}"


class State(NamedTuple):
    """The progress of a study.

    Attributes:
      total: number of runs known so far.
      finished: those with results, including rates that were not chosen.
      unfinished: names of the others known so far.
    """

    total: int
    finished: Sequence[Record]
    unfinished: Sequence[str]


class Study(abc.ABC):
    """A set of runs that are compared with each other, at a place.

    Attributes:
      name: a word, fit for a folder.
      place: where.
      caption: of its pictures, if anything.
    """

    name: str
    place: Place
    caption = ""

    @property
    @abc.abstractmethod
    def items(self) -> Sequence[Item]:
        """The runs known so far."""

    @property
    @abc.abstractmethod
    def state(self) -> State:
        """The progress of the study."""

    @property
    @abc.abstractmethod
    def size(self) -> str:
        """The size of its runs, in words."""

    @property
    @abc.abstractmethod
    def hours(self) -> float:
        """The hours of one idle core that the missing runs are expected to take."""

    @abc.abstractmethod
    def run(self, finished: Finished, *, quick: bool = False) -> None:
        """Makes what is missing, or the quick part of it.

        Args:
          finished: called after each run, when its record is written.
          quick: whether only a few runs are made.

        Raises:
          Stopped: if a run fails, or on a signal to stop.
        """

    @abc.abstractmethod
    def check(self, record: Record) -> None:
        """Raises ValueError, TypeError or KeyError if what came out of a run cannot be read."""

    def tables(self) -> Iterator[str]:
        """Yields the results, in paragraphs of Markdown."""
        yield from ()

    def pictures(self, heading: str, red: Collection[str]) -> dict[str, Callable[[], Figure]]:
        """Returns the pictures that can be drawn by now, by file name.

        Args:
          heading: of a picture.
          red: the rivals that are drawn in red.
        """
        return {}

    def says_of_states(self, studies: Sequence[str], form: str) -> Iterator[str]:
        """Yields sentences on what a form's states do, for claims that read these studies."""
        yield from ()

    def says_of_layers(self, study: str, form: str) -> str | None:
        """Says which layers' updates a form needs in a study; None before it is known."""
        return None

    def recorded(self, item: Item) -> Record | None:
        """Returns a run's record; None if there is none, or it is left out (:meth:`remarks`)."""
        record = self.place.store.get(item)
        return None if record is None or self._complaint(record) else record

    def remarks(self) -> Iterator[str]:
        """Yields a line for each part of the study's file that is left out, with the reason."""
        store = self.place.store
        for problem in store.problems(self.name):
            yield f"left out: {problem}"
        for item in self.items:
            record = store.get(item)
            said = store.misfit(item) if record is None else self._complaint(record)
            if said:
                yield f"left out: {store.path(self.name)}: {item.name}: {said}"

    @property
    def unused(self) -> list[str]:
        """The records of the study's file that none of its runs uses."""
        known = {item.name for item in self.items}
        return [name for name in self.place.store.names(self.name) if name not in known]

    @functools.cached_property
    def _complaint(self) -> Callable[[Record], str | None]:
        """A function that returns why a record cannot be read; None if it can."""

        @functools.cache
        def complaint(record: Record) -> str | None:
            try:
                self.check(record)
            except (ValueError, TypeError, KeyError) as error:
                return f"{type(error).__name__}: {error}"
            return None

        return complaint


class Measurements(Study):
    """A study whose runs are measurements, made one after another in this process.

    Attributes:
      minutes: how long a measurement takes, for plans.
      quick: how many of them, from the first, belong to the quick part.
    """

    minutes: float
    quick = 0
    _items: Sequence[Item] = ()

    @property
    def items(self) -> Sequence[Item]:
        """The measurements known so far."""
        return self._items

    @abc.abstractmethod
    def measure(self, item: Item) -> dict[str, Any]:
        """Makes one measurement, in JSON types."""

    @property
    def state(self) -> State:
        """The progress of the study."""
        records = {item.name: self.recorded(item) for item in self.items}
        return State(
            total=len(records),
            finished=[record for record in records.values() if record],
            unfinished=[name for name, record in records.items() if not record],
        )

    @property
    def hours(self) -> float:
        """The hours of one idle core that the missing runs are expected to take."""
        return len(self.state.unfinished) * self.minutes / 60

    def run(self, finished: Finished, *, quick: bool = False) -> None:
        """Makes what is missing."""
        self.make(self.items[: self.quick] if quick else self.items, finished)

    def make(self, items: Sequence[Item], finished: Finished) -> None:
        """Makes the measurements among ``items`` that have no record."""
        missing = [item for item in items if not self.recorded(item)]
        if not missing:
            return
        environment, code = describe_environment(), describe_source()
        with Signals() as signals, Progress.of(self.name) as progress:
            for number, item in enumerate(missing):
                progress(number, len(missing))
                start = time.process_time()
                found = self.measure(item)
                made = Made(environment, code, time.process_time() - start)
                self.place.store.put(item, found, made)
                finished(item)
                if signals.received:
                    raise Stopped(
                        "stopped; what was measured is saved, and the same command continues",
                        128 + signals.received,
                    )


class Design(Protocol):
    """A study, wherever it is run."""

    @property
    def name(self) -> str: ...

    def at(self, place: Place) -> Study:
        """Returns the study at a place."""


def options(fields: Fields) -> tuple[str, ...]:
    """Returns fields of a config as command-line options."""
    return tuple(f"--config.{name}={value}" for name, value in fields.items())
