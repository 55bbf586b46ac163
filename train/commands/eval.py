"""Evaluates the newest checkpoint of a run, and writes what comes out into it.

Files: evaluation.json, evaluation.txt, and the figures and files of the task.

python -m train.main eval --run=runs/x --config.evaluation.longest=12

It runs on the mesh of the run, as far as the devices of this machine fit it, else on the first of
them. Another mesh: --config.sharding.data=-1 or --config.sharding.fsdp=-1. Sequences are not split.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from tape_jax.config import require
from tape_jax.files import write_atomically
from tape_jax.sharding import ShardingConfig
from train import experiment, plots, runs
from train.data import Result
from train.metrics import Progress

FORMAT = "tape-jax evaluation, version 1"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.set_defaults(overrides=())


def run(args: argparse.Namespace) -> None:
    """Evaluates."""
    options, mesh = experiment.change_evaluation(runs.load(args.run), args.overrides)
    result = evaluate(args.run, options, mesh)
    print(result.table())
    print(f"\nwritten: {', '.join(str(p) for p in sorted(args.run.glob('evaluation*')))}")


def evaluate(folder: Path, options: Any, mesh: ShardingConfig | None = None) -> Result:
    """Evaluates a run and writes the result into its folder.

    Args:
      folder: of the run.
      options: an instance of the task's ``Evaluation``.
      mesh: on which; None: the run's own, if the devices here fit it, else the first of them.

    Raises:
      ValueError: if the folder is not a run, a file there is not of this program, or the devices do
        not fit ``mesh``.
    """
    path = folder / "evaluation.json"
    again = saved(folder) is not None
    require(
        again or not path.exists(),
        f"{path} is not an evaluation written by this program: it is not replaced",
    )
    trained = runs.restore_for_evaluation(folder, mesh)
    task = trained.experiment.task
    with Progress.of(f"evaluating {folder.name}") as progress:
        result = task.evaluate(trained, options, progress)
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
    }
    write_atomically(path, json.dumps(record) + "\n")
    write_atomically(folder / "evaluation.txt", f"step {trained.step}\n\n{result.table()}\n")
    for name, content in files.items():
        write_atomically(folder / name, content)
    figures = task.compare({trained.experiment.label: [result]}).figures
    for name, figure in figures.items():
        plots.save(figure, folder / f"evaluation_{name}")
    return result


def options_to_json(options: Any) -> dict[str, Any]:
    """The options of an evaluation as they come back from a file."""
    return json.loads(json.dumps(dataclasses.asdict(options)))


def saved(folder: Path) -> dict[str, Any] | None:
    """What :func:`evaluate` wrote: ``step``, ``options`` and ``result``; None if it did not."""
    try:
        record = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("format") == FORMAT else None
