"""Records of the runs of a study, a file for each study (:mod:`research.lines`).

Records of another experiment or protocol (research/protocol.md) than the study's are left out, and
:meth:`Store.misfit` says why. Measured numbers are kept with six digits. Titles and labels are in
the code, not in results.

A record's ``code`` has the commit that made it (:func:`describe_source`). ``make evidence-quick``
measures whether today's code still gives the numbers on record.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from research import lines
from train import experiment
from train.checks import require
from train.evaluation.grids import read_record
from train.experiment import Experiment
from train.experiment.adaptation import Adaptation
from train.experiment.fields import build, flatten

FORMAT = "tape-jax evidence, version 4"
DIGITS = 6
# The name of a base, wherever the runs are.
BASE = "base"
# Fields of a record in which runs have much in common, and those that are known beforehand.
SHARED = ("experiment", "base", "protocol", "environment", "code", "found")
KNOWN = SHARED[:-1]
ROOT = Path(__file__).parents[1]
# Folders with code that a number can depend on.
CODE = ("tape_jax", "train", "research", "configs")


class Item(NamedTuple):
    """One run of a study.

    Attributes:
      study: its name.
      name: of the run, unique in the study, fit for a file.
      rival: what is compared.
      experiment: what is run, seed included; what it adapts is called ``BASE``.
      base: what it adapts, if anything.
      protocol: what else decides the result, in JSON types.
    """

    study: str
    name: str
    rival: str
    experiment: Experiment
    base: Experiment | None = None
    protocol: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """The record of a run.

    Attributes:
      name, rival, protocol: of the :class:`Item`.
      experiment, base: in JSON types.
      found: the result, in JSON types; the study decides its form.
      environment: versions and hardware.
      code: the code that made it.
      seconds: of processor time that the last process of the run took.
    """

    name: str
    rival: str
    experiment: Mapping[str, Any]
    base: Mapping[str, Any] | None
    protocol: Mapping[str, Any]
    found: Mapping[str, Any]
    environment: Mapping[str, str]
    code: Mapping[str, Any]
    seconds: float

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.experiment["seed"]


class Made(NamedTuple):
    """The provenance of a record: fields of :class:`Record`."""

    environment: Mapping[str, str]
    code: Mapping[str, Any]
    seconds: float


class _Study(NamedTuple):
    """The records of a study by name, and what cannot be read."""

    records: Mapping[str, Record]
    problems: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Store:
    """The records in a folder, a file for each study.

    Attributes:
      folder: made when the first record is written.
    """

    folder: Path

    def path(self, study: str) -> Path:
        """Returns the file with the records of a study."""
        return self.folder / f"{study}.jsonl"

    def get(self, item: Item) -> Record | None:
        """Returns the record of a run; None if none fits."""
        record = self._study(item.study).records.get(item.name)
        return None if record is None or self._differences(record, item) else record

    def misfit(self, item: Item) -> str | None:
        """Returns how the record under a run's name differs from it; None if equal or missing."""
        record = self._study(item.study).records.get(item.name)
        return None if record is None else "; ".join(self._differences(record, item)) or None

    def records(self, study: str) -> list[Record]:
        """Returns all records of a study, whether they fit one of its runs or not."""
        return [*self._study(study).records.values()]

    def names(self, study: str) -> list[str]:
        """Returns the runs of a study that have records, whether they fit or not."""
        return list(self._study(study).records)

    def problems(self, study: str) -> Sequence[str]:
        """Returns a sentence for each part of a study's file that is left out as unreadable."""
        return self._study(study).problems

    def put(self, item: Item, found: Mapping[str, Any], made: Made) -> None:
        """Writes a run's record, which replaces any earlier one."""
        record = {
            "name": item.name,
            "rival": item.rival,
            "experiment": _in_json(item.experiment),
            "base": None if item.base is None else _in_json(item.base),
            "protocol": dict(item.protocol),
            "environment": dict(made.environment),
            "code": dict(made.code),
            "seconds": round(made.seconds, 1),
            "found": rounded(found),
        }
        lines.append(self.path(item.study), FORMAT, record, KNOWN)
        # A run whose record does not fit would be made again and again.
        why = self.misfit(item) or "; ".join(self.problems(item.study))
        require(
            self.get(item) is not None,
            f"{self.path(item.study)}: {item.name} was written and cannot be read back: {why}",
        )

    def tidy(self, study: str) -> None:
        """Rewrites a study's file, with all that its runs share in its first line."""
        lines.rewrite(self.path(study), FORMAT, SHARED)

    def _study(self, study: str) -> _Study:
        path = self.path(study)
        try:
            status = path.stat()
        except FileNotFoundError:
            return _Study({}, [])
        return _read(path, status.st_ino, status.st_size, status.st_mtime_ns)

    def _differences(self, record: Record, item: Item) -> list[str]:
        """Returns the fields in which a record and a run differ, with both values."""
        there, here = _plain(record), _plain(item)
        found = [
            f"{name}: {there.get(name)!r} there, {here.get(name)!r} here"
            for name in dict.fromkeys([*there, *here])
            if there.get(name) != here.get(name)
        ]
        return [*found, *_of_experiments(record, item.experiment, item.base)]


def rounded(value: Any) -> Any:
    """Rounds every number that is not whole to ``DIGITS`` digits, in JSON types."""
    if isinstance(value, Mapping):
        return {key: rounded(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(x) for x in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def portable(e: Experiment) -> Experiment:
    """Returns an experiment without the place of the run that it adapts."""
    if e.adapt is None:
        return e
    return dataclasses.replace(e, adapt=dataclasses.replace(e.adapt, base=BASE))


@functools.lru_cache(maxsize=256)
def _read(path: Path, *version: int) -> _Study:
    """Returns the records of a file, in this version of it."""
    contents = lines.read(path, FORMAT)
    records, problems = {}, list(contents.problems)
    for name, fields in contents.records.items():
        try:
            records[name] = _record(fields)
        except ValueError as error:
            problems.append(f"{path}: {name}: {error}")
    return _Study(records, problems)


def _record(fields: Mapping[str, Any]) -> Record:
    """Returns the record of these fields; ValueError if they describe none."""
    for name in ("experiment", "protocol", "found", "environment", "code"):
        value = fields.get(name, {})
        require(isinstance(value, dict), f"{name}: expected fields, got {value!r}")
    return Record(**read_record(fields, Record))


def _plain(described: Record | Item) -> dict[str, Any]:
    """Returns the rival and the protocol of a record or a run, as flat fields."""
    return {"rival": described.rival, **flatten(described.protocol, "protocol.")}


@functools.lru_cache(maxsize=4096)
def _of_experiments(record: Record, e: Experiment, base: Experiment | None) -> list[str]:
    """Returns how the experiments of a record differ from these."""
    if (record.base is None) != (base is None):
        return ["only one of them adapts a base"]
    pairs = [("", record.experiment, e)]
    if record.base is not None and base is not None:
        pairs.append(("base.", record.base, base))
    found = []
    for prefix, there, here in pairs:
        # Most are equal to the letter, which is quick to check.
        if there == _in_json(here):
            continue
        try:
            found += [prefix + x for x in experiment.differences(_experiment(there), here)]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            found.append(f"{prefix}experiment: {type(error).__name__}: {error}")
    return found


@functools.lru_cache(maxsize=4096)
def _in_json(e: Experiment) -> dict[str, Any]:
    return json.loads(json.dumps(experiment.to_json(e)))


def _experiment(values: Mapping[str, Any]) -> Experiment:
    """Returns a record's experiment. It describes the whole model, so no base is looked up.

    A field that was added later has its default, which is what was run.
    """
    made = experiment.from_mapping({**values, "adapt": None})
    if values["adapt"] is None:
        return made
    return dataclasses.replace(made, adapt=build(Adaptation, values["adapt"], "adapt"))


def describe_source() -> dict[str, Any]:
    """Describes the code as it is now.

    Returns:
      ``commit``, and ``dirty``: whether the code differs from it; None if there is no git.
    """
    changes = _git("status", "--porcelain", "--", *(f"{folder}/**.py" for folder in CODE))
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
    }


def _git(*arguments: str) -> str | None:
    """Returns what git prints about this checkout; None without git or a checkout."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
