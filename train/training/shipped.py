"""Trained models in one file, for Python and for a page opened without a server.

The file is a script of one assignment, ``MODELS["tape"] = {...};``, which browsers can also load
from a folder. The value is JSON: the experiment, the model's origin, the names of its tokens, the
shape of each parameter, and all of them as base64 of little-endian float16.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from tape_jax import Transformer
from train.checks import require
from train.experiment import from_mapping, to_json
from train.files import write_atomically
from train.training.runs import TrainedRun, abstract_variables

FORMAT = "tape-jax shipped model, version 1"
TYPE = np.dtype("<f2")


def write(path: Path, trained: TrainedRun, facts: Mapping[str, Any]) -> None:
    """Writes a model under the file's name, with parameters rounded to 16 bits.

    Args:
      path: the file, ``<name>.js``.
      trained: the model, whose task has names for its tokens.
      facts: where it comes from, in JSON types.
    """
    task: Any = trained.experiment.task
    params = flatten_dict(jax.device_get(trained.variables["params"]), sep="/")
    numbers = b"".join(np.asarray(x, TYPE).tobytes() for x in params.values())
    record = {
        "format": FORMAT,
        **facts,
        "step": trained.step,
        "experiment": to_json(trained.experiment),
        "symbols": task.names,
        "parameters": {name: list(x.shape) for name, x in params.items()},
        "weights": base64.b64encode(numbers).decode(),
    }
    head = f"var MODELS = MODELS || {{}};\nMODELS[{json.dumps(path.stem)}] = "
    write_atomically(path, f"{head}{json.dumps(record)};\n")


def read_record(path: Path) -> dict[str, Any]:
    """Reads a file of :func:`write`.

    Raises:
      ValueError: if there is no such file, or it is something else.
    """
    require(path.is_file(), f"there is no file {path}")
    try:
        text = path.read_text(encoding="utf-8")
        record = json.loads(text[text.index("= {") + 2 : text.rindex("}") + 1])
        ours = record["format"] == FORMAT
    except (ValueError, KeyError):
        ours = False
    require(ours, f"{path} is not a shipped model: expected the format {FORMAT!r}")
    return record


def read(path: Path) -> TrainedRun:
    """Loads the model of a :func:`write` file.

    Raises:
      ValueError: if there is no such file, it is something else, or its parameters do not fit its
        experiment.
    """
    record = read_record(path)
    experiment = from_mapping(record["experiment"])
    numbers = np.frombuffer(base64.b64decode(record["weights"]), TYPE).astype(np.float32)
    shapes = {name: tuple(shape) for name, shape in record["parameters"].items()}
    expected = flatten_dict(abstract_variables(experiment)["params"], sep="/")
    wanted = {name: x.shape for name, x in expected.items()}
    sizes = [math.prod(shape) for shape in shapes.values()]
    require(
        shapes == wanted and sum(sizes) == len(numbers),
        f"{path}: {len(numbers):,} numbers in parameters of shapes {shapes} do not fit its "
        f"experiment, which has {wanted}",
    )
    parts = np.split(numbers, np.cumsum(sizes)[:-1])
    params = {n: part.reshape(shapes[n]) for n, part in zip(shapes, parts, strict=True)}
    variables = {"params": unflatten_dict(params, sep="/")}
    return TrainedRun(experiment, record["step"], Transformer(experiment.model), variables)
