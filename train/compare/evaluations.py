"""Evaluates runs, and writes the results into their run folders."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tape_jax.sharding import ShardingConfig
from train.checks import require
from train.compare import plots
from train.compare.tasks import compare
from train.evaluation.inside import untrained
from train.evaluation.journal import Journal, alone
from train.evaluation.programs import KeptResults, Programs
from train.files import json_object, write_atomically
from train.suites.evaluation import SuiteOptions, tokenizer_of
from train.suites.evaluation import evaluate as ask_suite
from train.suites.results import FORMAT as SUITE_FORMAT
from train.suites.results import SuiteResult
from train.tasks import Result
from train.training import runs
from train.training.metrics import Progress

FORMAT = "tape-jax evaluation, version 1"
# The results so far of a stopped evaluation.
PARTIAL, PARTIAL_FORMAT = "evaluation.partial.jsonl", "tape-jax part of an evaluation, version 1"


def evaluate(
    folder: Path, options: Any, mesh: ShardingConfig | None = None, *, fresh: bool = False
) -> Result:
    """Evaluates a run and writes the result into its folder.

    Until it is done, its results so far are in :data:`PARTIAL` there, so that a stopped evaluation
    of the same checkpoint can continue.

    Args:
      folder: the run folder.
      options: an instance of the task's ``Evaluation``.
      mesh: the mesh to use; None: the run's own, if the devices here fit it, else the first of
        them.
      fresh: whether to discard the results of a stopped evaluation.

    Raises:
      ValueError: if the folder is not a run, a file there is damaged or not of this program, the
        devices do not fit ``mesh``, or a pass does not fit into the memory.
    """
    path = folder / "evaluation.json"
    require(
        saved(folder) is not None or not path.exists(),
        f"{path} is not an evaluation written by this program: it is not replaced",
    )
    trained = runs.restore_for_evaluation(folder, mesh)
    about = {"checkpoint": _digest(folder, trained.step)}
    partial = folder / PARTIAL
    with alone(partial):
        journal = Journal(partial, PARTIAL_FORMAT, about, fresh=fresh, replace=about)
        programs = Programs(kept=KeptResults(journal))
        with Progress.of(f"evaluating {folder.name}") as progress:
            task = trained.experiment.task
            result = task.evaluate(trained._replace(programs=programs), options, progress)
        _write(folder, trained, options, result, str(programs))
        partial.unlink(missing_ok=True)
    return result


def _write(folder: Path, trained: runs.TrainedRun, options: Any, result: Result, how: str) -> None:
    """Writes a result, and how it was computed, into the folder of its run.

    Raises:
      ValueError: for a file in the way, unless the run was evaluated before.
    """
    again = saved(folder) is not None
    files: dict[str, str] = getattr(result, "files", dict)()
    for name in files:
        require(
            again or not (folder / name).exists(),
            f"{folder / name} is not of an evaluation by this program: it is not replaced",
        )
    record = {
        "format": FORMAT,
        "step": trained.step,
        "options": options_to_json(options),
        "result": result.to_json(),
        "computing": how,
    }
    write_atomically(folder / "evaluation.json", json.dumps(record) + "\n")
    text = f"step {trained.step}\n\n{result.table()}\n\n{how}\n"
    write_atomically(folder / "evaluation.txt", text)
    for name, content in files.items():
        write_atomically(folder / name, content)
    figures = compare(trained.experiment.task, {trained.experiment.label: [result]}).figures
    for name, figure in figures.items():
        plots.save(figure, folder / f"evaluation_{name}")


def evaluate_untrained(folder: Path, options: Any, mesh: ShardingConfig | None = None) -> Result:
    """Evaluates a run with its position encoding as before training, and writes nothing.

    TAPE's updates are cut off, so its states stay at their start.

    Args:
      folder: the run folder.
      options: an instance of the task's ``Evaluation``.
      mesh: as for :func:`evaluate`.

    Raises:
      ValueError: as :func:`evaluate` does, or if the encoding has learned nothing.
    """
    trained = runs.restore_for_evaluation(folder, mesh)
    without = untrained(trained)
    if without is None:
        kind = trained.experiment.model.position.kind
        raise ValueError(f"{folder}: the encoding {kind!r} has no parameters, and so no updates")
    with Progress.of(f"evaluating {folder.name} without updates") as progress:
        return trained.experiment.task.evaluate(without, options, progress)


def evaluate_suite(
    folder: Path, options: SuiteOptions, mesh: ShardingConfig | None = None, *, fresh: bool = False
) -> SuiteResult:
    """Evaluates a run on a suite and writes the results into its folder, ``evaluation_SUITE.*``.

    Args:
      folder: the run folder.
      options: the suite and its options.
      mesh: as for :func:`evaluate`.
      fresh: whether to discard the answers of an earlier evaluation.

    Raises:
      ValueError: as :func:`train.suites.evaluation.evaluate` does, if the run's task has no
        tokenizer, or a file there is not of this program.
    """
    codec = tokenizer_of(runs.load(folder).task, str(folder))
    path = folder / f"evaluation_{options.suite}.json"
    require(
        not path.exists() or saved_record(path, SUITE_FORMAT) is not None,
        f"{path} is not an evaluation written by this program: it is not replaced; move it away",
    )
    figure = path.with_suffix(".png")
    plots.require_ours(figure)
    trained, answers = runs.restore_for_evaluation(folder, mesh), path.with_suffix(".jsonl")
    with alone(answers), Progress.of(f"asking {folder.name}") as progress:
        result = ask_suite(
            trained,
            codec,
            options,
            answers,
            step=trained.step,
            checkpoint=_digest(folder, trained.step),
            trained_length=trained.experiment.task.sequence_length,
            fresh=fresh,
            progress=progress,
        )
    write_atomically(path, json.dumps(result.to_json()) + "\n")
    write_atomically(path.with_suffix(".txt"), f"step {trained.step}\n\n{result.table()}\n")
    plots.save(result.figure(), figure)
    return result


def _digest(folder: Path, step: int) -> str:
    """Returns what tells a run's checkpoint from others."""
    with runs.checkpoints(folder) as checkpoints:
        return checkpoints.digest(step)


def options_to_json(options: Any) -> dict[str, Any]:
    """Returns an evaluation's options as they are read back from a file."""
    return json.loads(json.dumps(dataclasses.asdict(options)))


def saved(folder: Path) -> dict[str, Any] | None:
    """Returns what :func:`evaluate` wrote: ``step``, ``options`` and ``result``; or None."""
    return saved_record(folder / "evaluation.json", FORMAT)


def saved_record(path: Path, format: str) -> dict[str, Any] | None:
    """Returns the record of this format in a file, or None."""
    try:
        record = json_object(path.read_bytes()) or {}
    except OSError:
        return None
    return record if record.get("format") == format else None
