"""Run folders: makes, recognises, guards and reads them.

A run holds ``experiment.json`` (the description), ``checkpoints/``, ``metrics.jsonl``,
``tensorboard/`` and, once evaluated, ``evaluation.*``. A run that adapts a trained model holds only
the trained parameters, at its end also as ``adapter.safetensors``, and the base's fingerprint. Only
``experiment.json`` with its format marker makes a folder a run; everything else is left alone. A
training process holds ``.lock``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

import tape_jax as tape
from tape_jax import Transformer
from tape_jax.adapt import (
    Adapted,
    Fingerprint,
    describe_trainable,
    full_attention,
    merge,
    save_adapter,
)
from tape_jax.pretrained import pretrained_config
from tape_jax.sharding import Sharding, ShardingConfig
from train.checks import require
from train.evaluation.programs import Programs
from train.experiment import FORMAT, Experiment, adaptation, from_mapping, read_record, to_json
from train.files import locked, write_atomically
from train.training import checkpoint
from train.training.checkpoint import Checkpoints, Report

ADAPTER = "adapter.safetensors"
LOCK = ".lock"
SHOWN = 5
# Seconds until all hosts must see a folder that one host has made.
APPEARANCE = 60
ONE_TOKEN = jax.ShapeDtypeStruct((1, 1), "int32")
# Files left by a killed process, and files of a run before its first step.
_LEFT_OVER = re.compile(rf"{re.escape(LOCK)}|\.experiment\.json\.\d+\.tmp")
_OF_A_START = {"experiment.json", "metrics.jsonl", "tensorboard", "checkpoints"}


def create(folder: Path, experiment: Experiment, base: Fingerprint | None = None) -> None:
    """Makes a run folder.

    Args:
      folder: the run's.
      experiment: what is trained.
      base: the fingerprint of the adapted model, if any.

    Raises:
      ValueError: if the folder is not free (:func:`require_free`).
    """
    require_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # The file that makes it a run comes last: nothing of an earlier one may seem to be part of it.
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    for name in ("tensorboard", "checkpoints"):
        place = folder / name
        for path in place.glob("*"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        # A link to another disk stays.
        if place.is_dir() and not place.is_symlink():
            place.rmdir()
    record = {"format": FORMAT, "experiment": to_json(experiment)}
    if base is not None:
        record["base"] = dataclasses.asdict(base)
    _write(folder, record)


def require_free(folder: Path) -> None:
    """Raises ValueError unless a run may be made in a folder.

    It does not exist, is empty, or holds a run without a step, whose start is made again.
    """
    if folder.is_dir():
        names = {path.name for path in folder.iterdir() if not _LEFT_OVER.fullmatch(path.name)}
        if not names or (exists(folder) and names <= _OF_A_START and _has_only_its_start(folder)):
            return
    elif not folder.exists():
        return
    advice = "continue it with --resume, or " if exists(folder) else ""
    raise ValueError(f"{folder} exists already: {advice}choose another --run")


def _has_only_its_start(folder: Path) -> bool:
    """Returns whether there are neither checkpoints nor metrics of a step."""
    metrics = folder / "metrics.jsonl"
    return not (metrics.exists() and metrics.stat().st_size) and all(
        path.name.startswith(f"{0:08d}") for path in (folder / "checkpoints").glob("*")
    )


def exists(folder: Path) -> bool:
    """Returns whether there is a run in a folder."""
    return read_record(folder) is not None


def seen(folder: Path) -> str:
    """Returns the identity of a folder's run; waits, as a network may show it late."""
    path, end = folder / "experiment.json", time.monotonic() + APPEARANCE
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.2)
    return path.read_text(encoding="utf-8") if path.exists() else ""


def has_trained(folder: Path) -> bool:
    """Returns whether a run is so far that it must have a checkpoint."""
    with checkpoints(folder) as saved:
        return (folder / "metrics.jsonl").exists() or bool(saved.steps())


def require_begun(folder: Path, begun: bool) -> None:
    """Raises ValueError if :func:`has_trained` has changed, because of another process."""
    require(
        has_trained(folder) == begun,
        f"another process has trained the run {folder} meanwhile: continue it again with --resume",
    )


def load(folder: Path) -> Experiment:
    """Loads a run folder's experiment.

    Raises:
      ValueError: if there is no such folder, or it is not a run.
    """
    return from_mapping(_record(folder)["experiment"])


def rewrite(folder: Path, experiment: Experiment, change: Mapping[str, Any]) -> None:
    """Gives a run another experiment from now on, and records the change.

    Args:
      folder: the run's.
      experiment: what is trained now.
      change: the difference, in JSON types.
    """
    record = _record(folder)
    record["changes"] = [*record.get("changes", []), change]
    _write(folder, record | {"experiment": to_json(experiment)})


def _write(folder: Path, record: Mapping[str, Any]) -> None:
    write_atomically(folder / "experiment.json", json.dumps(record, indent=2) + "\n")


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Keeps a second process from writing to the run at the same time; makes its folder.

    The lock is a separate file, since others are replaced.

    Raises:
      ValueError: if another process is writing to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK, f"another process is training the run {folder}"):
        yield


def checkpoints(folder: Path, *, keep: int = 3, report: Report = print) -> Checkpoints:
    """The checkpoints of a run."""
    return Checkpoints(folder / "checkpoints", keep=keep, report=report)


def saved_steps(folder: Path) -> list[int]:
    """The steps of a run's checkpoints, ascending."""
    return checkpoint.saved_steps(folder / "checkpoints")


class TrainedRun(NamedTuple):
    """A model as a run left it.

    Attributes:
      experiment: of the run.
      step: optimiser steps taken.
      model: the Flax module.
      variables: its variables.
      programs: plan, keep and time its evaluation; None: each part has its own.
    """

    experiment: Experiment
    step: int
    model: Transformer
    variables: dict[str, Any]
    programs: Programs | None = None

    @property
    def apply(self) -> Callable[..., Any]:
        """``apply(variables, tokens [B, T]) -> logits [B, T, V]``."""
        return self.model.apply

    @property
    def max_length(self) -> int | None:
        """The longest sequence, in tokens, that the model accepts; None: any."""
        return max_length(self.experiment.model)


def max_length(config: tape.ModelConfig) -> int | None:
    """The longest sequence, in tokens, that a model accepts; None: any."""
    limits = (config.max_length, config.position.max_length())
    return min((limit for limit in limits if limit is not None), default=None)


def evaluation_sharding(
    experiment: Experiment, given: ShardingConfig | None = None
) -> Sharding | None:
    """Builds a mesh of this process's devices, to evaluate a run; None: the first device.

    The time axis is not split, nor axes that the mesh does not divide.

    Args:
      experiment: of the run; its own mesh is taken if the devices here fit it.
      given: the mesh to take instead.

    Raises:
      ValueError: if the devices do not fit ``given``.
    """
    config = given or experiment.sharding
    if config is None:
        return None
    whole = dataclasses.replace(config, rules=(("sequence", None), *config.rules))
    try:
        return dataclasses.replace(whole.build(jax.local_devices()), strict=False)
    except ValueError:
        if given:
            raise
        return None


def restore_model(
    folder: Path, report: Report = print, sharding: Sharding | None = None
) -> TrainedRun:
    """Restores a run's newest intact checkpoint, with the base if the run adapts one.

    Args:
      folder: the run's.
      report: called with a sentence about each notable event.
      sharding: of :func:`evaluation_sharding`; None: the first device.

    Raises:
      ValueError: if ``folder`` is not a run, has no intact checkpoint, or its base is not there or
        has changed.
    """
    experiment = load(folder)
    template, frozen = abstract_variables(experiment), None
    if experiment.adapt:
        trainable, frozen = adaptation.split(adapted(experiment, folder, report, sharding))
        frozen = _put(frozen, experiment, sharding)
        template = {"params": trainable}
    model = full_attention(Transformer(experiment.model, sharding=sharding))
    if sharding is not None:
        template = placed(template, sharding.of(model, template))
    with checkpoints(folder, report=report) as saved:
        step, variables = saved.restore(template, partial=True)
    if frozen is not None:
        variables = {"params": merge(variables["params"], frozen)}
    return TrainedRun(experiment, step, model, variables)


def restore_for_evaluation(folder: Path, mesh: ShardingConfig | None = None) -> TrainedRun:
    """Restores a run's model, placed for evaluation by this process alone.

    Args:
      folder: the run's.
      mesh: see :func:`evaluation_sharding`.

    Raises:
      ValueError: as :func:`evaluation_sharding` and :func:`restore_model` do.
    """
    return restore_model(folder, sharding=evaluation_sharding(load(folder), mesh))


def placed(shapes: Any, places: Any) -> Any:
    """Adds places to shapes and types."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places
    )


class Start(NamedTuple):
    """The parameters that a training starts from.

    Attributes:
      params: those that train, with None in place of the others; None: random ones, all of which
        train.
      frozen: the others, with None in place of those that train; None: there are none.
      adapted: the base as it was adapted, without values; None: nothing is adapted.
    """

    params: Any = None
    frozen: Any = None
    adapted: Adapted | None = None

    def describe(self) -> str:
        """Returns a table of the parameters that train in an adapted model, with shares."""
        made = self.adapted
        assert made is not None
        if not made.rules:
            return f"method {made.method}: nothing trains"
        return f"method {made.method}, which trains\n{describe_trainable(made.model, made.rules)}"


def start(
    experiment: Experiment,
    folder: Path | None = None,
    report: Report = print,
    sharding: Sharding | None = None,
    *,
    begun: bool = False,
) -> Start:
    """Returns the parameters that the training of an experiment starts from.

    Args:
      experiment: what is trained.
      folder: the run to continue; None: a new one.
      report: called with a sentence about each notable event.
      sharding: where parameters go; None: the first device.
      begun: whether the run has a checkpoint, in which case ``train.initial`` is not read.

    Raises:
      ValueError: if the base or the run that the experiment names is not there, does not fit or,
        if a run is continued, has changed.
    """
    if experiment.adapt is None:
        wanted = experiment.train.initial and not begun
        params = initial_params(experiment, report, sharding) if wanted else None
        return Start(_put(params, experiment, sharding))
    abstract_variables(experiment)  # Raises if the sequences do not fit the model.
    made = adapted(experiment, folder, report, sharding)
    trainable, frozen = (_put(x, experiment, sharding) for x in adaptation.split(made))
    return Start(trainable, frozen, dataclasses.replace(made, variables=None))


def _put(params: Any, experiment: Experiment, sharding: Sharding | None) -> Any:
    """Puts parameters of an experiment's model on their devices."""
    if sharding is None or params is None:
        return params
    return jax.device_put(params, sharding.of(Transformer(experiment.model), params))


def adapted(
    experiment: Experiment,
    folder: Path | None = None,
    report: Report = print,
    sharding: Sharding | None = None,
) -> Adapted:
    """Returns an experiment's base, adapted as at the start of training.

    Args:
      experiment: has the section ``adapt``.
      folder: the experiment's run, whose record the base must agree with; None: there is none yet.
      report: called with a sentence about each notable event.
      sharding: where the tensors of a Llama folder go; None: the first device.

    Raises:
      ValueError: if the base does not fit, or has changed since the run was started.
    """
    section = experiment.adapt
    assert section is not None
    path = Path(section.base)
    if read_record(path):
        trained = restore_model(path, report, sharding)
        require(
            _same_tokenizer(trained.experiment, experiment),
            f"adapt.base: the run {path} has another tokenizer than the task",
        )
        model, variables = Transformer(trained.model.config), trained.variables
    else:
        places = None
        if sharding is not None:
            base = Transformer(pretrained_config(path))
            places = sharding.of(base, jax.eval_shape(base.init, jax.random.key(0), ONE_TOKEN))
        model, variables = tape.from_pretrained(path, sharding=places)
    made = adaptation.apply(
        section,
        *adaptation.computed_as(model, variables, experiment.model),
        key=jax.random.fold_in(jax.random.key(experiment.seed), 2),
        position=experiment.model.position,
    )
    if folder is not None:
        recorded, found = Fingerprint(**_record(folder)["base"]), made.base
        assert found is not None
        different = recorded.differences(found)
        require(
            not different,
            f"{path}, the base of {folder}, is not what it was when the run was started; recorded "
            f"then, and found now: {'; '.join(different)}",
        )
    return made


def write_adapter(folder: Path, start: Start, params: Any) -> Path:
    """Writes an adapted run's parameters, for :func:`tape_jax.adapt.load_adapter`.

    All processes call it; the first one writes.

    Args:
      folder: the run's.
      start: what its training started from.
      params: as trained, with None in place of those that did not.

    Raises:
      NotImplementedError: if safetensors is not installed.
    """
    made = start.adapted
    assert made is not None
    assert made.base is not None
    variables = {"params": merge(params, start.frozen)}
    save_adapter(
        folder / ADAPTER, made.model, variables, made.rules, base=made.base, method=made.method
    )
    return folder / ADAPTER


def initial_params(
    experiment: Experiment, report: Report = print, sharding: Sharding | None = None
) -> Any:
    """Loads the newest intact checkpoint's parameters of the run that ``train.initial`` names.

    Raises:
      ValueError: if there is none; or, listing all differences, if they do not fit the model.
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
    if not _same_tokenizer(other, experiment):
        different.append("the tokenizer: another one there than here")
    require(
        not different,
        f"the parameters of {folder} do not fit this model:\n  " + "\n  ".join(different),
    )
    params = restore_model(folder, report, sharding).variables["params"]
    wanted = abstract_variables(experiment)["params"]
    return jax.tree.map(lambda x, like: x.astype(like.dtype), params, wanted)


def _same_tokenizer(first: Experiment, second: Experiment) -> bool:
    """Returns whether the tokenizers of two tasks are the same, as far as both are known."""
    found = {getattr(e.task, "tokenizer_fingerprint", None) for e in (first, second)}
    return len(found - {None}) <= 1


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter by its path."""
    leaves = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x.shape for p, x in leaves}


def abstract_variables(experiment: Experiment) -> dict[str, Any]:
    """Returns shapes and types of the model's variables, without computing them."""
    return jax.eval_shape(lambda: init_variables(experiment))


def abstract_params(experiment: Experiment) -> tuple[Any, Any]:
    """Shapes and types of the parameters that train, and of the others, as training has them.

    None replaces the leaves of the other; without an adapted base the second is None.
    """
    params = abstract_variables(experiment)["params"]
    if experiment.adapt is None:
        return params, None
    model, rules = Transformer(experiment.model), experiment.adapt.trained
    return jax.eval_shape(lambda params: adaptation.split_params(model, params, rules), params)


def count_parameters(experiment: Experiment) -> tuple[int, int]:
    """The numbers of the model's parameters, and of those that train."""
    trained, frozen = (
        sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
        for tree in abstract_params(experiment)
    )
    return trained + frozen, trained


def first_key(experiment: Experiment, seed: jax.Array | None = None) -> jax.Array:
    """The random key of an experiment; ``seed`` is a raw key that replaces it."""
    return jax.random.key(experiment.seed) if seed is None else jax.random.wrap_key_data(seed)


def init_variables(experiment: Experiment, seed: jax.Array | None = None) -> dict[str, Any]:
    """Initializes the model's variables for training; trace it with ``jax.jit``."""
    params_key, positions_key = jax.random.split(first_key(experiment, seed))
    tokens = jax.numpy.zeros((1, experiment.task.sequence_length), "int32")
    rngs = {"params": params_key, "positions": positions_key}
    return dict(Transformer(experiment.model).init(rngs, tokens))


def _record(folder: Path) -> dict[str, Any]:
    """Reads a run's ``experiment.json``; ValueError if the folder is not a run."""
    require(folder.is_dir(), f"there is no run folder {folder}")
    record = read_record(folder)
    if record is None:
        inside = sorted(path.parent.name for path in folder.glob("*/experiment.json"))
        more = ", ..." if len(inside) > SHOWN else ""
        hint = f"; in it are the runs {', '.join(inside[:SHOWN])}{more}" if inside else ""
        raise ValueError(f"{folder} is not a run: it has no experiment.json of this project{hint}")
    return record
