"""Adapter files: trained parameters, and the fingerprint of the model that they belong to."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from tape_jax._src import positions
from tape_jax._src.adapt.identity import (
    Fingerprint,
    digest,
    encoding_to_json,
    fingerprint,
    gathered,
    is_flat,
)
from tape_jax._src.adapt.rules import Rule, parse_rule, table, trainable_mask
from tape_jax._src.core.checks import from_mapping, require, typed
from tape_jax._src.core.files import import_safetensors, write_atomically
from tape_jax._src.model.config import Lora
from tape_jax._src.model.decoder import Transformer
from tape_jax._src.model.inputs import check_variables
from tape_jax._src.model.layout import block_name, by_path, restack, unrolled, with_position

FORMAT = "tape-jax adapter"
VERSION = 1
# Fields of the configuration that an adapter brings along; the others are those of its base.
ADAPTED_FIELDS = ("position", "lora", "shifted_groups", "max_length", "local_window_size")


@typed
def save_adapter(
    path: str | os.PathLike,
    model: Transformer,
    variables: Any,
    rules: Iterable[Rule | str],
    *,
    base: Fingerprint,
    method: str | None = None,
) -> None:
    """Writes the trained parameters as one safetensors file, all at once or not at all.

    The file holds the parameters that the rules choose in any layer, and those that the base lacks,
    of all layers, one tensor per layer. Its metadata says how to make the model from the base, and
    holds the base's fingerprint.

    If parameters are split over processes, all of these must call it; the first of them writes.

    Args:
      path: the file; an existing one is replaced.
      model: the adapted model.
      variables: its trained variables.
      rules: which parameters were trained.
      base: the fingerprint of the base model: ``Adapted.base``, or :func:`fingerprint`.
      method: name of the method, for :func:`describe_adapter`.

    Raises:
      ValueError: if a parameter that no rule chooses, or the size of the model, differs from the
        base, as far as the fingerprint tells.
      NotImplementedError: if safetensors is not installed.
    """
    check_variables(variables)
    safetensors = import_safetensors("adapter files")
    rules = [parse_rule(rule) for rule in rules]
    mask = by_path(trainable_mask(model, rules))
    chosen = {name for name, layers in mask.items() if any(layers.values())}
    _check_rest(base, fingerprint(model, variables), chosen)
    kept = {
        block_name(first, name): gathered(x)
        for name, leaves in by_path(variables["params"]).items()
        for first, x in leaves.items()
        if name in chosen or name not in base.tensors
    }
    if jax.process_index() != _writer(variables["params"]):
        return
    by_layer = restack(unflatten_dict(kept, sep="/"), model, unrolled(model))
    tensors = {
        name: np.asarray(x, order="C") for name, x in flatten_dict(by_layer, sep="/").items()
    }
    changes = {name: getattr(model.config, name) for name in ADAPTED_FIELDS}
    changes["position"] = encoding_to_json(model.encoding)
    changes["lora"] = changes["lora"] and dataclasses.asdict(changes["lora"])
    adapter = {
        "method": method,
        "rules": [str(rule) for rule in rules],
        "changes": changes,
        "base": dataclasses.asdict(base),
        "sha256": {name: digest(x) for name, x in tensors.items()},
    }
    text = json.dumps(adapter)
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "adapter": text,
        "sha256": _text_digest(text),
    }

    def write(temporary: Path) -> None:
        safetensors.numpy.save_file(tensors, temporary, metadata)

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(path), write)


def _writer(params: Any) -> int:
    """Returns the first of the processes that hold parts of arrays; if none is split, this one."""
    devices: set[Any] = set()
    for x in jax.tree.leaves(params):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            devices |= x.sharding.device_set
    return min((device.process_index for device in devices), default=jax.process_index())


def _check_rest(base: Fingerprint, own: Fingerprint, chosen: Collection[str]) -> None:
    """Raises ValueError if anything that an adapter does not hold differs from the base."""
    changed = [
        name
        for name in {**base.architecture, **own.architecture}
        if own.architecture.get(name) != base.architecture.get(name) and name not in ADAPTED_FIELDS
    ]
    changed += [
        name
        for name, tensor in base.tensors.items()
        if own.tensors.get(name, tensor) != tensor and name not in chosen
    ]
    require(
        not changed,
        f"an adapter does not hold what no rule chooses, but these differ from the base: "
        f"{', '.join(changed)}",
    )


@typed
def load_adapter(
    path: str | os.PathLike, base_model: Transformer, base_variables: Any
) -> tuple[Transformer, dict[str, Any]]:
    """Loads the adapted model from a file of :func:`save_adapter` and its base.

    Args:
      path: the file.
      base_model: the base model; its layout, compute type and backend are kept.
      base_variables: its variables.

    Returns:
      The model and its variables. Trained parameters replace the base's, on their devices; all
      others are the base's own.

    Raises:
      ValueError: if the file is not an adapter, is of another version or damaged, or belongs to
        another base (the message names what differs).
      NotImplementedError: if safetensors is not installed.
    """
    header, tensors = _read_adapter(path)
    recorded = Fingerprint(**header["base"])
    found = recorded.differences(fingerprint(base_model, base_variables))
    require(
        not found,
        f"{path} belongs to another base; the adapter's, and the one given, differ in "
        f"{'; '.join(found)}",
    )
    for name, x in tensors.items():
        require(
            digest(x) == header["sha256"].get(name),
            f"{path} is damaged: the values of {name} do not have their checksum",
        )
    changes = dict(header["changes"])
    position, old = changes["position"], is_flat(changes["position"])
    require(
        not old or position == recorded.architecture["position"],
        f"{path} has one set of options for all layers of the schedule {position['kind']!r}, as an "
        "earlier version wrote it: save the adapter again, from its run",
    )
    changes["position"] = base_model.encoding if old else positions.create(position)
    if changes["lora"] is not None:
        lora = {**changes["lora"], "targets": tuple(changes["lora"]["targets"])}
        changes["lora"] = from_mapping(Lora, lora, what="lora")
    encoding = changes.pop("position")
    model = with_position(base_model, encoding, **changes)
    params = _merged(base_variables["params"], base_model, tensors, model)
    return model, {**base_variables, "params": params}


def _merged(
    params: Any, base_model: Transformer, tensors: dict[str, np.ndarray], model: Transformer
) -> dict[str, Any]:
    """Returns the parameters of ``model``: of each layer those of the file, else the base's.

    Args:
      params: the base's.
      base_model: the base.
      tensors: those of the file, by name, one per layer.
      model: the adapted model.
    """
    single, base_single = unrolled(model), unrolled(base_model)
    wanted, had = by_path(single.parameters()), by_path(base_single.parameters())
    stored = by_path(tensors)
    whole: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for path, leaves in by_path(params).items():
        layers, own = wanted.get(path, {}).keys(), stored.get(path, {}).keys()
        by_name = {block_name(first, path): x for first, x in leaves.items()}
        if layers == had[path].keys():
            whole |= by_name
        if layers - own and (own or layers != had[path].keys()):
            parts |= by_name
    by_layer = flatten_dict(restack(parts, base_model, base_single), sep="/")
    by_layer = {name: x for name, x in by_layer.items() if name in single.parameters()} | tensors
    flat = flatten_dict(restack(whole, base_model, model), sep="/")
    for name, x in flatten_dict(restack(by_layer, single, model), sep="/").items():
        flat[name] = _like(x, flat.get(name))
    return unflatten_dict({name: flat[name] for name in model.parameters()}, sep="/")


def _like(x: Any, old: Any) -> Any:
    """Puts ``x`` on the devices of ``old``, or leaves it if ``old`` is a numpy array too."""
    if isinstance(old, np.ndarray):
        return x
    placed = isinstance(old, jax.Array) and old.committed
    return jax.device_put(x, old.sharding) if placed else jnp.asarray(x)


@typed
def describe_adapter(path: str | os.PathLike) -> str:
    """Describes a file of :func:`save_adapter` as a table of parameters; values are not read.

    Raises:
      ValueError: if the file is not an adapter, is of another version, or truncated.
      NotImplementedError: if safetensors is not installed.
    """
    header, shapes = _read_adapter(path, values=False)
    in_base = {name: tensor["shape"] for name, tensor in header["base"]["tensors"].items()}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    nested = by_path(unflatten_dict(sizes, sep="/"))
    trained = {name: list(leaves.values()) for name, leaves in nested.items()}
    total = sum(math.prod(shape) for shape in in_base.values())
    total += sum(sum(counts) for name, counts in trained.items() if name not in in_base)
    title = f"method {header['method'] or 'unnamed'}, rules {', '.join(header['rules'])}"
    return f"{title}\n{table(trained, total)}"


def _read_adapter(
    path: str | os.PathLike, *, values: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header of an adapter, and its tensors or only their shapes."""
    safetensors = import_safetensors("adapter files")
    require(Path(path).is_file(), f"no adapter at {path}: expected a safetensors file")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            read = file.get_tensor if values else lambda name: file.get_slice(name).get_shape()
            tensors = {name: read(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no safetensors file, or damaged: {error}") from error
    require(
        metadata.get("format") == FORMAT,
        f"{path} is no adapter: its metadata lack the format {FORMAT!r}",
    )
    require(
        metadata.get("version") == str(VERSION),
        f"{path} has version {metadata.get('version')} of the format; this code reads {VERSION}",
    )
    text = metadata.get("adapter", "")
    require(
        _text_digest(text) == metadata.get("sha256"),
        f"{path} is damaged: its metadata do not have their checksum",
    )
    header = json.loads(text)
    names = set(header["sha256"]) ^ set(tensors)
    require(not names, f"{path} is damaged: it lacks, or should not have, {sorted(names)}")
    return header, tensors


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
