"""Loads a checkpoint, tensor by tensor, on to the devices."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from tape_jax._src.core.checks import choose, require, require_x64, typed
from tape_jax._src.model.config import ModelConfig
from tape_jax._src.model.decoder import Transformer
from tape_jax._src.pretrained.families import family_of
from tape_jax._src.pretrained.folder import (
    DTYPES,
    File,
    Folder,
    check,
    common_type,
    dtype_name,
    read_folder,
)
from tape_jax._src.pretrained.llama import (
    EMBEDDING,
    HEAD,
    StoredParameter,
    is_buffer,
    model_config,
    parameters,
)

Array = jax.Array
# jax's, not the library's own, which is a mesh with rules.
JaxSharding = jax.sharding.Sharding
Index = tuple[slice, ...]

# Fields of ModelConfig that say how a model is computed, not what it is.
OPTIONS = (
    "attention_implementation",
    "max_length",
    "remat",
    "scan_layers",
    "state_dtype",
)


@typed
def from_pretrained(
    path: str | os.PathLike,
    *,
    dtype: Any = None,
    sharding: JaxSharding | Callable[[str, tuple[int, ...]], JaxSharding | None] | Any = None,
    **options: Any,
) -> tuple[Transformer, dict[str, Any]]:
    """Loads a model of Llama or its relatives, and its variables, from a Hugging Face folder.

    Tensors are read one by one, and each goes straight to its place in the (stacked, sharded)
    parameters, so the extra memory is about one tensor. Other processes' shards are not kept.

    Args:
      path: a folder with ``config.json`` and safetensors, single or with an index.
      dtype: type of the parameters and of the computation; None: every parameter as it is stored,
        and the computation in the most common type.
      sharding: where the parameters go: one ``jax.sharding.Sharding`` for all; a function of a
        parameter's path, such as ``"layers_0/mlp/up/kernel"``, and shape; or a tree of them like
        the variables. None, also for one parameter: the default device.
      **options: how the model is computed: ``attention_implementation``, ``max_length``,
        ``remat``, ``scan_layers`` or ``state_dtype`` of :class:`tape_jax.ModelConfig`. As in
        transformers, the length of ``config.json`` is not a limit, unless given as ``max_length``.

    Returns:
      The model, with the encoding ``rope`` or, if layers differ, a schedule, and ``{"params":
      ...}`` as ``model.init`` returns them.

    Raises:
      ValueError: if the folder is not a checkpoint, is damaged, incomplete or of another
        architecture, or has an unknown rotary scaling; if an option is unknown, or a sharding does
        not fit.
      NotImplementedError: if safetensors is not installed.
    """
    folder = read_folder(path)
    config = _config(folder, dtype, options)
    compute, model = config.dtype, Transformer(config)
    wanted = parameters(model, family_of(folder.config)[1])
    check_tensors(folder, wanted, tied=config.tie_embeddings)
    types = {p.path: _stored_type(folder, p) if dtype is None else compute for p in wanted}
    for path, kind in types.items():
        require_x64(", or give dtype='float32'", **{f"{folder.path}: type of {path}": kind})
    places = _places(wanted, sharding)
    if config.tie_embeddings and HEAD in folder.where:
        _check_tied(folder)
    # Parameters that need the most temporary memory come first, when most is free.
    largest_first = sorted(wanted, key=lambda p: -int(np.prod(p.tensor_shape)))
    params = {p.path: _load(folder, p, types[p.path], places[p.path]) for p in largest_first}
    return model, {"params": unflatten_dict(params, sep="/")}


@typed
def pretrained_config(path: str | os.PathLike, **options: Any) -> ModelConfig:
    """Returns the config of the model that :func:`from_pretrained` loads; reads no tensor.

    Args:
      path: a folder with ``config.json`` and safetensors.
      **options: those of :func:`from_pretrained`, except ``dtype`` and ``sharding``.

    Raises:
      ValueError: if the folder is not a checkpoint or of another architecture, or an option is
        unknown.
    """
    return _config(read_folder(path), None, options)


def _config(folder: Folder, dtype: Any, options: dict[str, Any]) -> ModelConfig:
    for name in options:
        choose("option of from_pretrained", name, OPTIONS)
    compute = _most_common_type(folder) if dtype is None else dtype_name(dtype)
    return model_config(folder.config, dtype=compute, param_dtype=compute, **options)


def check_tensors(folder: Folder, wanted: list[StoredParameter], *, tied: bool) -> None:
    """Raises ValueError unless the folder holds the tensors of the parameters, and nothing else."""
    shapes = {name: p.tensor_shape for p in wanted for name in p.tensors}
    if tied and HEAD in folder.where:
        shapes[HEAD] = shapes[EMBEDDING]
    check(folder, shapes, known=is_buffer)


def _check_tied(folder: Folder) -> None:
    head, table = (folder.where[name].read_bytes(name) for name in (HEAD, EMBEDDING))
    require(
        np.array_equal(head, table),
        f"{folder.path}: config.json ties {HEAD} to {EMBEDDING}, but the two differ",
    )


def _most_common_type(folder: Folder) -> str:
    """The type that most of the stored numbers have."""
    sizes: collections.Counter[str] = collections.Counter()
    for file in folder.files:
        for tensor in file.tensors.values():
            if tensor.dtype in DTYPES:
                sizes[DTYPES[tensor.dtype]] += int(np.prod(tensor.shape))
    require(bool(sizes), f"{folder.path} has no tensors of a type among {', '.join(DTYPES)}")
    return sizes.most_common(1)[0][0]


def _stored_type(folder: Folder, parameter: StoredParameter) -> str:
    """The type of a parameter's tensors; one that holds all of them if they differ."""
    where = folder.where
    return DTYPES[common_type({where[name].tensors[name].dtype for name in parameter.tensors})]


def _places(wanted: list[StoredParameter], sharding: Any) -> dict[str, JaxSharding | None]:
    """The sharding of each parameter, checked."""
    if sharding is None or isinstance(sharding, JaxSharding):
        found = {p.path: sharding for p in wanted}
    elif callable(sharding):
        found = {p.path: sharding(p.path, p.shape) for p in wanted}
    else:
        found = _flat(sharding)
        paths = {p.path for p in wanted}
        require(
            set(found) == paths,
            "sharding must be a tree like the parameters; it lacks "
            f"{sorted(paths - set(found))} and has {sorted(set(found) - paths)} beyond them",
        )
    for p in wanted:
        place = found[p.path]
        require(
            place is None or isinstance(place, JaxSharding),
            f"the sharding of {p.path} must be a jax.sharding.Sharding or None; got {place!r}",
        )
        if place is not None:
            try:
                place.shard_shape(p.shape)
            except ValueError as error:
                raise ValueError(f"{p.path} of shape {p.shape}: {error}") from error
    return found


def _flat(sharding: Any) -> dict[str, Any]:
    require(
        isinstance(sharding, Mapping),
        "sharding must be a jax.sharding.Sharding, a function of path and shape, or a tree like "
        f"the variables; got {sharding!r}",
    )
    return flatten_dict(sharding.get("params", sharding), sep="/")


def _load(
    folder: Folder, parameter: StoredParameter, dtype: str, sharding: JaxSharding | None
) -> Array:
    """A parameter in its place, from one tensor after the other."""
    shape = parameter.shape
    shards: dict[Any, Index] = {None: tuple(slice(0, n) for n in shape)}
    if sharding is not None:
        indices = sharding.addressable_devices_indices_map(shape)
        shards = {device: _bounds(index, shape) for device, index in indices.items() if index}
    where = folder.where
    arrays: dict[Any, Array] = {}
    for layer, name in enumerate(parameter.tensors):
        values = None
        for device, index in shards.items():
            rows, part = (index[0], index[1:]) if parameter.stacked else (slice(0, 1), index)
            if not rows.start <= layer < rows.stop:
                continue
            if values is None:
                values = _read(where[name], name, parameter)
            piece = values[part[::-1] if parameter.transposed else part]
            piece = jax.device_put(np.ascontiguousarray(piece), device)
            if parameter.stacked:
                if device not in arrays:
                    sizes = tuple(s.stop - s.start for s in index)
                    arrays[device] = jnp.zeros(sizes, dtype, device=device)
                piece = _with_layer(
                    arrays[device], piece, layer - rows.start, transposed=parameter.transposed
                )
            else:
                piece = _converted(piece, dtype, transposed=parameter.transposed)
            arrays[device] = piece
        # Without waiting, tensors would be read faster than they are used.
        jax.block_until_ready(list(arrays.values()))
    if sharding is None:
        return arrays[None]
    return jax.make_array_from_single_device_arrays(shape, sharding, list(arrays.values()))


def _read(file: File, name: str, parameter: StoredParameter) -> np.ndarray:
    """The part of a tensor that belongs to a parameter, in its order."""
    if parameter.rows is None:
        return parameter.ordered(file.read(name))
    first, rows = parameter.rows[0], parameter.part_shape[0]
    return parameter.ordered(file.read(name, first, rows))


def _bounds(index: Index, shape: tuple[int, ...]) -> Index:
    """The slices with their bounds written out."""
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))


@functools.partial(jax.jit, static_argnames=("dtype", "transposed"))
def _converted(piece: Array, dtype: str, *, transposed: bool) -> Array:
    return (piece.T if transposed else piece).astype(dtype)


@functools.partial(jax.jit, static_argnames="transposed", donate_argnums=0)
def _with_layer(stack: Array, piece: Array, layer: int, *, transposed: bool) -> Array:
    """``stack`` with one layer written, in the same memory."""
    piece = _converted(piece, stack.dtype.name, transposed=transposed)
    return jax.lax.dynamic_update_index_in_dim(stack, piece, layer, axis=0)
