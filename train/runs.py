"""Run folders: how one is made, recognised, guarded and read back.

A run holds ``experiment.json`` (what was asked for), ``checkpoints/``, ``metrics.jsonl``,
``tensorboard/`` and, once evaluated, ``evaluation.*``. Only ``experiment.json`` with its format
marker makes a folder a run; everything else is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from tape_jax.config import require
from tape_jax.files import write_atomically
from tape_jax.model import Transformer
from train.checkpoint import Checkpoints, Report
from train.experiment import Experiment, differences, from_mapping, to_json

FORMAT = "tape-jax run, version 1"


def create(folder: Path, experiment: Experiment) -> None:
    """Makes a run folder.

    Raises:
      ValueError: if ``folder`` exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        advice = "continue it with --resume, or " if _is_run(folder) else ""
        raise ValueError(f"{folder} exists already: {advice}choose another --run")
    folder.mkdir(parents=True, exist_ok=True)
    record = {"format": FORMAT, "experiment": to_json(experiment)}
    write_atomically(folder / "experiment.json", json.dumps(record, indent=2) + "\n")


def load(folder: Path) -> Experiment:
    """The experiment of a run folder.

    Raises:
      ValueError: if there is no such folder, or it is not a run.
    """
    require(folder.is_dir(), f"there is no run folder {folder}")
    record = _record(folder)
    require(record is not None, f"{folder} is not a run: it has no experiment.json of this project")
    assert record is not None
    return from_mapping(record["experiment"])


def check_same(folder: Path, experiment: Experiment) -> None:
    """Raises ValueError, naming the fields, unless ``folder`` holds a run of ``experiment``.

    How the run is to be evaluated may differ.
    """
    different = [
        difference
        for difference in differences(load(folder), experiment)
        if not difference.startswith("evaluation.")
    ]
    require(
        not different,
        f"the run {folder} was started with another experiment ({'; '.join(different)}): "
        f"leave --config out to continue it as it is, or choose another --run",
    )


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Keeps a second process from writing to the run at the same time.

    Raises:
      ValueError: if another process is doing so.
    """
    with open(folder / "experiment.json", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is training the run {folder}") from None
        yield


def checkpoints(folder: Path, *, keep: int = 3, report: Report = print) -> Checkpoints:
    """The checkpoints of a run."""
    return Checkpoints(folder / "checkpoints", keep=keep, report=report)


class Trained(NamedTuple):
    """A model as a run left it.

    Attributes:
      experiment: of the run.
      step: optimiser steps taken.
      model: the Flax module.
      variables: its variables.
    """

    experiment: Experiment
    step: int
    model: Transformer
    variables: dict[str, Any]

    @property
    def apply(self) -> Callable[..., Any]:
        """``apply(variables, tokens [B, T]) -> logits [B, T, V]``."""
        return self.model.apply

    @property
    def max_length(self) -> int | None:
        """The longest sequence, in tokens, that the model accepts; None: any."""
        config = self.experiment.model
        limits = (config.max_length, config.position.max_length())
        return min((limit for limit in limits if limit is not None), default=None)


def restore_model(folder: Path, report: Report = print) -> Trained:
    """The model of a run's newest intact checkpoint.

    Raises:
      ValueError: if ``folder`` is not a run or has no intact checkpoint.
    """
    experiment = load(folder)
    with checkpoints(folder, report=report) as saved:
        step, variables = saved.restore(abstract_variables(experiment), partial=True)
    return Trained(experiment, step, Transformer(experiment.model), variables)


def initial_params(experiment: Experiment, report: Report = print) -> Any:
    """The parameters that ``train.initial`` names: those of that run's newest intact checkpoint.

    Raises:
      ValueError: if there is none; or, listing all that differs, if they do not fit the model.
    """
    assert experiment.train.initial is not None
    folder = Path(experiment.train.initial.replace("{encoding}", experiment.model.position.kind))
    other = load(folder)
    there, here = (_shapes(abstract_variables(e)["params"]) for e in (other, experiment))
    different = [
        f"{name}: {there.get(name, 'absent')} there, {here.get(name, 'absent')} here"
        for name in dict.fromkeys([*there, *here])
        if there.get(name) != here.get(name)
    ]
    tokenizers = {getattr(e.task, "tokenizer_fingerprint", None) for e in (other, experiment)}
    if len(tokenizers - {None}) > 1:
        different.append("the tokenizer: another one there than here")
    require(
        not different,
        f"the parameters of {folder} do not fit this model:\n  " + "\n  ".join(different),
    )
    params = restore_model(folder, report).variables["params"]
    wanted = abstract_variables(experiment)["params"]
    return jax.tree.map(lambda x, like: x.astype(like.dtype), params, wanted)


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter by its path."""
    leaves = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x.shape for p, x in leaves}


def abstract_variables(experiment: Experiment) -> dict[str, Any]:
    """Shapes and types of the model's variables, without computing anything."""
    return jax.eval_shape(lambda: init_variables(experiment))


def init_variables(experiment: Experiment) -> dict[str, Any]:
    """The model's variables at the start of training; to be traced by ``jax.jit``."""
    params_key, positions_key = jax.random.split(jax.random.key(experiment.seed))
    tokens = jax.numpy.zeros((1, experiment.task.sequence_length), "int32")
    rngs = {"params": params_key, "positions": positions_key}
    return dict(Transformer(experiment.model).init(rngs, tokens))


def _is_run(folder: Path) -> bool:
    return folder.is_dir() and _record(folder) is not None


def _record(folder: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("format") == FORMAT else None
