"""Results files: one for each finished run, written at once, refused if it is of anything else."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tape_jax.config import require
from tape_jax.files import write_atomically
from train import experiment
from train.experiment import Experiment
from train.grids import read_record

FORMAT = "tape-jax evidence, version 1"


class Item(NamedTuple):
    """One run of a study.

    Attributes:
      study: its name.
      name: of the run, unique in the study, fit for a file.
      rival: what is compared.
      experiment: what is run, seed included.
    """

    study: str
    name: str
    rival: str
    experiment: Experiment


@dataclasses.dataclass(frozen=True)
class Record:
    """What a results file holds.

    Attributes:
      study, name, rival: of the :class:`Item`.
      experiment: in JSON types.
      found: what came out, in JSON types; its form is the study's.
      environment: versions and hardware.
      seconds: of processor time that the last process of the run took.
    """

    study: str
    name: str
    rival: str
    experiment: Mapping[str, Any]
    found: Mapping[str, Any]
    environment: Mapping[str, str]
    seconds: float

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.experiment["seed"]


@dataclasses.dataclass(frozen=True)
class Store:
    """The results files in a folder, one folder for each study.

    Attributes:
      folder: is made when the first is written.
    """

    folder: Path

    def path(self, item: Item) -> Path:
        """Where the results of a run are."""
        return self.folder / item.study / f"{item.name}.json"

    def get(self, item: Item) -> Record | None:
        """The results of a run; None if there are none yet.

        Raises:
          ValueError: the file is of another version, another experiment, or none of ours.
        """
        path = self.path(item)
        if not path.exists():
            return None
        record, made = _read(path, path.stat().st_mtime_ns)
        there = experiment.differences(made, item.experiment) if made != item.experiment else []
        names = ("study", "name", "rival")
        there += [
            f"{name}: {getattr(record, name)!r} there, {getattr(item, name)!r} here"
            for name in names
            if getattr(record, name) != getattr(item, name)
        ]
        require(
            not there,
            f"{path} holds the results of another experiment ({'; '.join(there)}): remove it, and "
            "the run is made again",
        )
        return record

    def put(
        self, item: Item, found: Mapping[str, Any], environment: Mapping[str, str], seconds: float
    ) -> None:
        """Writes the results of a run, all at once."""
        path = self.path(item)
        path.parent.mkdir(parents=True, exist_ok=True)
        described = experiment.to_json(item.experiment)
        record = Record(
            item.study, item.name, item.rival, described, found, environment, round(seconds, 1)
        )
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(record)}, allow_nan=False)
        write_atomically(path, text + "\n")


@functools.lru_cache(maxsize=4096)
def _read(path: Path, modified: int) -> tuple[Record, Experiment]:
    record = read(path)
    return record, experiment.from_mapping(record.experiment)


def read(path: Path) -> Record:
    """The content of a results file.

    Raises:
      ValueError: it is of another version, damaged, or none of ours.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a results file: {error}") from error
    version = content.get("format") if isinstance(content, dict) else None
    require(
        version == FORMAT,
        f"{path} is not a results file of this version: its format is {version!r}, expected "
        f"{FORMAT!r}; remove it, and the run is made again",
    )
    try:
        return Record(**read_record(content, Record, FORMAT))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
