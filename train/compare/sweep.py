"""Settings of an experiment: the product of swept fields, the variants of a config, the best one.

A rival that was not tuned is easily beaten. A sweep trains every rival with every setting, in its
own run folder, and chooses each rival's setting by a separate validation: by newly drawn questions,
apart from those of the reported test.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import runpy
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.stats

from train.checks import choose, require
from train.compare.evaluations import options_to_json, saved_record
from train.evaluation import Progress
from train.evaluation.grids import text_table
from train.experiment import Experiment
from train.files import write_atomically
from train.statistics import mean
from train.tasks import Result, Score, Task, task_name
from train.training import loop, runs

FORMAT = "tape-jax validation, version 1"


class Setting(NamedTuple):
    """Options that belong together.

    Attributes:
      name: short, and fit for a folder; empty if nothing is set.
      overrides: options such as ``--config.a.b=value``.
    """

    name: str = ""
    overrides: tuple[str, ...] = ()

    def folder(self, name: str) -> str:
        """Returns the name of the run folder for this setting of ``name``."""
        return f"{name}-{self.name}" if self.name else name


class Sweep(NamedTuple):
    """A field of the config and the values that it takes in turn.

    Attributes:
      field: such as ``train.learning_rate``.
      values: as they are written on the command line.
    """

    field: str
    values: tuple[str, ...]


def parse(text: str) -> Sweep:
    """Parses a sweep such as ``"train.learning_rate=1e-4,3e-4"``.

    Commas inside brackets and quotes belong to a value: ``"model.position.layers=(0,1),(1,2)"``.
    Making the experiment checks that the field exists.

    Raises:
      ValueError: not of this form, or a value that is missing or given twice.
    """
    field, equals, written = text.partition("=")
    field = field.strip().removeprefix("--").removeprefix("config.")
    require(
        bool(field and equals),
        f"expected a sweep such as 'train.learning_rate=1e-4,3e-4'; got {text!r}",
    )
    values = tuple(value.strip() for value in split(written))
    require(all(values), f"the sweep {text!r} has an empty value")
    repeated = [value for value, count in Counter(values).items() if count > 1]
    require(not repeated, f"the sweep {text!r} has values twice: {', '.join(repeated)}")
    return Sweep(field, values)


def split(text: str) -> list[str]:
    """Splits a text at the commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    require(not depth and not quote, f"brackets or quotes of {text!r} are not closed")
    return parts


def settings(sweeps: Sequence[str]) -> list[Setting]:
    """Returns every combination of the values of several sweeps; without any, one empty setting.

    Names have the last component of a field, or all of it if two would be alike.

    Raises:
      ValueError: an invalid sweep (:func:`parse`), a field that is swept twice, or values that
        give the same folder name.
    """
    parsed = [parse(text) for text in sweeps]
    fields = [sweep.field for sweep in parsed]
    require(len(set(fields)) == len(fields), f"a field is swept twice: {', '.join(fields)}")
    last = [field.rpartition(".")[2] for field in fields]
    names = last if len(set(last)) == len(last) else fields
    found = []
    for values in itertools.product(*(sweep.values for sweep in parsed)):
        pairs = ",".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        overrides = (f"--config.{f}={v}" for f, v in zip(fields, values, strict=True))
        found.append(Setting(re.sub(r"[^\w=.,+-]+", "_", pairs), tuple(overrides)))
    folders = [setting.name for setting in found]
    require(
        len(set(folders)) == len(folders),
        f"the sweep has values that cannot be told apart in folder names: {', '.join(folders)}",
    )
    return found


def variants(config: str | Path, names: Sequence[str] | None = None) -> list[Setting]:
    """Returns the variants of a config file: its mapping ``VARIANTS`` from names to fields.

    Args:
      config: a Python file with ``VARIANTS: dict[str, dict[str, Any]]``, values by field.
      names: the wanted ones; None: all.

    Raises:
      ValueError: a file without variants, or an unknown name.
    """
    path = Path(config)
    require(path.is_file(), f"there is no config file {path}")
    known = runpy.run_path(str(path)).get("VARIANTS")
    require(isinstance(known, Mapping), f"the config file {path} has no variants")
    assert known is not None
    for name in names or ():
        choose(f"variant of {path}", name, known)
    return [
        Setting(name, tuple(f"--config.{field}={value}" for field, value in known[name].items()))
        for name in (known if names is None else names)
    ]


def validation_options(task: Task, options: Any) -> Any:
    """Returns options with which ``task`` asks other questions than with ``options``.

    Raises:
      ValueError: the task cannot do so (it has no method ``validation``).
    """
    validation = getattr(task, "validation", None)
    require(
        validation is not None,
        f"the task {task_name(task)!r} has no validation apart from its test, by which a setting "
        "could be chosen",
    )
    assert validation is not None
    changed = validation(options)
    require(changed != options, f"the validation of the task {task_name(task)!r} is its test")
    return changed


def check(experiment: Experiment) -> None:
    """Raises ValueError if a run could not be validated, before it is trained."""
    options = validation_options(experiment.task, experiment.evaluation)
    loop.prepared(dataclasses.replace(experiment, evaluation=options), strict=True)


def validate(folder: Path, evaluation: Any, progress: Progress | None = None) -> Result:
    """Validates a finished run, or reads back an earlier result of the same questions.

    The result is written into the run folder as ``validation.json``.

    Args:
      folder: the run folder.
      evaluation: options of the test; the validation asks other questions like it.
      progress: shows how far it is.

    Raises:
      ValueError: if the folder is not a run, its training is not finished, its task has no
        validation, or a file in the way was not written here.
    """
    experiment = runs.load(folder)
    task, options = experiment.task, validation_options(experiment.task, evaluation)
    path, described = folder / "validation.json", options_to_json(options)
    record = saved_record(path, FORMAT)
    require(
        record is not None or not path.exists(),
        f"{path} is not a validation written by this program: it is not replaced",
    )
    if record and (record["step"], record["options"]) == (experiment.steps, described):
        return task.read_result(record["result"])
    trained = runs.restore_for_evaluation(folder)
    require(
        trained.step == experiment.steps,
        f"the run {folder} is at step {trained.step} of {experiment.steps}: finish it first",
    )
    result = task.evaluate(trained, options, progress)
    record = {
        "format": FORMAT,
        "step": trained.step,
        "options": described,
        "result": result.to_json(),
    }
    write_atomically(path, json.dumps(record) + "\n")
    return result


def best(task: Task, results: Mapping[Setting, Sequence[Result]]) -> Setting:
    """Returns the setting with the best mean rank over all validation scores.

    The first score breaks ties. With only one score, chance would often choose: beyond the trained
    length all settings may be close to zero.

    Args:
      task: the task whose ``scores`` count.
      results: validation results by setting, one for each seed; none if it diverged.

    Raises:
      ValueError: no settings, or results without any of the scores.
    """
    require(len(results) > 0, "a sweep without results")
    measured = {key for group in results.values() for result in group for key in result.summary()}
    wanted = [score.key for score in task.scores]
    require(
        not any(results.values()) or not measured.isdisjoint(wanted),
        "the validation cannot choose a setting: expected one of the scores "
        f"{', '.join(wanted)}; got {', '.join(sorted(measured)) or 'none'}",
    )
    standings = np.array([[_standing(s, group) for s in task.scores] for group in results.values()])
    ranks = scipy.stats.rankdata(-standings, axis=0).mean(axis=1)
    orders = dict(zip(results, zip(ranks, (-standings).tolist(), strict=True), strict=True))
    return min(orders, key=orders.__getitem__)


def _standing(score: Score, results: Sequence[Result]) -> float:
    """Returns the mean score, higher is better; minus infinity if it is missing or not finite."""
    values = [result.summary().get(score.key, math.nan) for result in results]
    found = mean(values) if values else math.nan
    if not math.isfinite(found):
        return -math.inf
    return found if score.higher_is_better else -found


def table(task: Task, results: Mapping[str, Mapping[Setting, Sequence[Result]]]) -> str:
    """Returns a table of all settings' validation scores, a row each, with the chosen ones marked.

    Args:
      task: the task of the scores.
      results: validation results for each compared name (see :func:`best`).
    """

    def cell(score: Score, group: Sequence[Result]) -> str:
        found = score.factor * abs(_standing(score, group))
        return "diverged" if not group else "-" if math.isinf(found) else f"{found:.4g}"

    rows = []
    for name, by_setting in results.items():
        chosen = best(task, by_setting)
        for setting, group in by_setting.items():
            cells = [cell(score, group) for score in task.scores]
            rows.append([name, setting.name, "yes" if setting == chosen else "", *cells])
    return text_table(["", "setting", "chosen", *(score.label for score in task.scores)], rows)
