"""Saves a model as a Hugging Face folder, tensor by tensor."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from tape_jax._src.core.checks import choose, require, require_in_one_process, typed
from tape_jax._src.model.decoder import Transformer
from tape_jax._src.model.inputs import check_variables
from tape_jax._src.pretrained.families import family_of
from tape_jax._src.pretrained.family import main_rope
from tape_jax._src.pretrained.folder import (
    CONFIG,
    DTYPE_NAMES,
    DTYPES,
    INDEX,
    SINGLE,
    Folder,
    Tensor,
    common_type,
    dtype_name,
    inside,
    make_header,
    new_folder,
    read_folder,
    write_file,
)
from tape_jax._src.pretrained.llama import (
    EMBEDDING,
    HEAD,
    ROPE_FIELDS,
    StoredParameter,
    folded,
    is_buffer,
    length_of_scaling,
    model_config,
    parameters,
    to_json,
    written,
)
from tape_jax._src.pretrained.loading import check_tensors

MAX_SHARD_SIZE = 5_000_000_000

# Files of a checkpoint that are unrelated to its parameters and copied with it.
COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "LICENSE*",
    "*.py",  # ``auto_map`` may name them.
)


@dataclasses.dataclass(frozen=True)
class FilePlan:
    """A safetensors file to be written.

    Attributes:
      name: of the file.
      header: its first bytes.
      tensors: in the order of their values.
    """

    name: str
    header: bytes
    tensors: dict[str, Tensor]


@typed
def save_pretrained(
    path: str | os.PathLike,
    model: Transformer,
    variables: Any,
    *,
    like: str | os.PathLike | None = None,
    dtype: Any = None,
    config: Mapping[str, Any] | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> None:
    """Writes a model as a Hugging Face folder, all at once or not at all.

    The folder is of the family of ``like`` or, without it, the first that can describe the model.

    Args:
      path: the folder; it must not exist, or must be empty.
      model: a model with the encoding ``rope`` or ``yarn``, or a schedule of it, windows and layers
        without rotation, and only options that some family has.
      variables: its variables; arrays of jax, sharded or not, or of numpy.
      like: a checkpoint of the same tensors, such as the one that the model was loaded from. Its
        shards, their order and metadata, its ``config.json`` as far as the model agrees, its
        tokenizer and its ``generation_config.json`` are copied: unchanged values are written byte
        for byte as they were.
      dtype: type to write all parameters in. None: the types of ``like``, if no value is lost by
        that, or else each parameter's own.
      config: further fields of ``config.json``, such as ``eos_token_id``.
      max_shard_size: without ``like``, the size in bytes beyond which a file is split.

    Raises:
      ValueError: if a Llama checkpoint cannot describe something that the model has, the variables
        are not the model's, ``like`` has other tensors, a type does not hold the values, or the
        folder is not empty.
      NotImplementedError: if safetensors is not installed, or a parameter is spread over several
        processes.
    """
    check_variables(variables)
    source = None if like is None else read_folder(like)
    kind = None if source is None else family_of(source.config)[0]
    _, family, _ = written(model, kind)
    wanted = parameters(model, family)
    fetchers, own = _fetchers(wanted, variables)
    target = None if dtype is None else DTYPE_NAMES[dtype_name(dtype)]
    if source is None:
        types = {name: target or own_type for name, own_type in own.items()}
        plans = _plan(wanted, types, max_shard_size)
        described = _describe(model, None, None, types)
    else:
        check_tensors(source, wanted, tied=model.config.tie_embeddings)
        if HEAD in source.where and HEAD not in fetchers:
            fetchers[HEAD] = fetchers[EMBEDDING]
        plans = _plan_like(source, target)
        types = {name: x.dtype for p in plans for name, x in p.tensors.items()}
        described = _describe(model, source, kind, types)
    described = _with_fields(described, config)

    def chunks(plan: FilePlan) -> Iterator[bytes | np.ndarray]:
        yield plan.header
        for name, tensor in plan.tensors.items():
            if name in fetchers:
                yield _cast(name, fetchers[name](), tensor.dtype, exact=dtype is None)
            else:
                assert source is not None
                yield source.where[name].read_bytes(name)

    with new_folder(Path(path)) as folder:
        for plan in plans:
            write_file(folder / plan.name, chunks(plan))
        if source is None or described != source.config:
            write_file(folder / CONFIG, [_to_text(described)])
        for name in () if source is None else _companions(source, described):
            assert source is not None
            write_file(folder / name, [inside(source.path, name).read_bytes()])
        index = _index(plans, source)
        if index is not None:
            write_file(folder / INDEX, [index])


def _fetchers(
    wanted: list[StoredParameter], variables: Any
) -> tuple[dict[str, Callable[[], np.ndarray]], dict[str, str]]:
    """Returns for each tensor a function that brings it to the host, and its type."""
    require(
        set(variables) == {"params"},
        f"variables must be {{'params': ...}}; got {sorted(variables)}",
    )
    leaves = flatten_dict(variables["params"], sep="/")
    shapes = {p.path: p.shape for p in wanted}
    problems = [f"missing: {path}" for path in shapes if path not in leaves]
    problems += [f"unknown: {path}" for path in leaves if path not in shapes]
    problems += [
        f"{path} has shape {np.shape(leaves[path])}, expected {shape}"
        for path, shape in shapes.items()
        if path in leaves and np.shape(leaves[path]) != shape
    ]
    require(not problems, f"the variables are not the model's: {'; '.join(problems)}")
    parts: dict[str, list[Callable[[], np.ndarray]]] = collections.defaultdict(list)
    types: dict[str, set[str]] = collections.defaultdict(set)
    for p in wanted:
        leaf = leaves[p.path]
        choose(f"type of {p.path}", leaf.dtype.name, DTYPE_NAMES)
        require_in_one_process(p.path, leaf)
        for layer, name in enumerate(p.tensors):
            parts[name].append(_fetcher(leaf, p, layer))
            types[name].add(DTYPE_NAMES[leaf.dtype.name])
    common = {name: common_type(found) for name, found in types.items()}
    return {name: _joined(parts[name], common[name]) for name in parts}, common


def _joined(parts: list[Callable[[], np.ndarray]], dtype: str) -> Callable[[], np.ndarray]:
    """Brings a tensor of one part, or of several stacked by rows, to the host."""
    if len(parts) == 1:
        return parts[0]
    return lambda: np.concatenate([part().astype(DTYPES[dtype], copy=False) for part in parts])


def _fetcher(leaf: Any, parameter: StoredParameter, layer: int) -> Callable[[], np.ndarray]:
    options = {"stacked": parameter.stacked, "transposed": parameter.transposed}
    pick = _pick_on_device if isinstance(leaf, jax.Array) else _pick
    return lambda: parameter.ordered(np.asarray(pick(leaf, layer, **options)), back=True)


def _pick(leaf: Any, layer: Any, *, stacked: bool, transposed: bool) -> Any:
    """A tensor of a checkpoint, from the parameter that contains it."""
    x = leaf[layer] if stacked else leaf
    return x.T if transposed else x


_pick_on_device = jax.jit(_pick, static_argnames=("stacked", "transposed"))


def _cast(name: str, values: np.ndarray, dtype: str, *, exact: bool) -> np.ndarray:
    """The values in a type of safetensors; if ``exact``, ValueError where they do not fit."""
    with np.errstate(over="ignore"):
        result = values.astype(DTYPES[dtype], copy=False)
    if result.dtype != values.dtype:
        require(
            np.array_equal(np.isfinite(result), np.isfinite(values)),
            f"{name} has values that are too large for {DTYPES[dtype]}: give another dtype "
            f"({values.dtype.name} keeps them)",
        )
    if exact and result.dtype != values.dtype:
        require(
            np.array_equal(result.astype(values.dtype), values, equal_nan=True),
            f"{name} has values that are lost in {DTYPES[dtype]}, its type in `like`: give dtype= "
            f"({values.dtype.name} keeps them)",
        )
    return result


def _plan(wanted: list[StoredParameter], types: Mapping[str, str], limit: int) -> list[FilePlan]:
    """Files of at most ``limit`` bytes, or of one tensor, in the order of the model."""
    require(
        isinstance(limit, int) and limit > 0,
        f"max_shard_size must be a positive number of bytes; got {limit!r}",
    )
    tensors = {name: Tensor(types[name], p.tensor_shape) for p in wanted for name in p.tensors}
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in sorted(tensors.items(), key=lambda entry: _order(entry[0])):
        if shards[-1] and sum(x.nbytes for x in shards[-1].values()) + tensor.nbytes > limit:
            shards.append({})
        shards[-1][name] = tensor
    plans = []
    for i, shard in enumerate(shards):
        # Wider types first, so that every tensor is aligned.
        ordered = dict(sorted(shard.items(), key=lambda x: (-_width(x[1]), x[0])))
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else SINGLE
        plans.append(FilePlan(name, make_header(ordered, {"format": "pt"}), ordered))
    return plans


def _order(name: str) -> tuple[int, int, str]:
    """The key by which tensors are ordered: the embedding, layers by number, the rest."""
    part = name.split(".")
    if part[1] == "layers":
        return (1, int(part[2]), name)
    return (0 if name == EMBEDDING else 2, 0, name)


def _width(tensor: Tensor) -> int:
    return jnp.dtype(DTYPES[tensor.dtype]).itemsize


def _plan_like(source: Folder, target: str | None) -> list[FilePlan]:
    """The files of a checkpoint, with parameters in the type ``target`` unless that is None."""
    plans = []
    for file in source.files:
        tensors = {
            name: x if target is None or is_buffer(name) else dataclasses.replace(x, dtype=target)
            for name, x in file.tensors.items()
        }
        same = tensors == file.tensors
        header = file.header if same else make_header(tensors, file.metadata)
        plans.append(FilePlan(file.path.name, header, tensors))
    return plans


def _describe(
    model: Transformer, source: Folder | None, kind: str | None, types: Mapping[str, str]
) -> dict[str, Any]:
    """The content of ``config.json``: the source's own wherever the model agrees with it."""
    described = to_json(model, kind)
    counts = collections.Counter(DTYPES[dtype] for dtype in types.values() if dtype in DTYPES)
    common = counts.most_common(1)[0][0]
    if source is None:
        return {**described, "torch_dtype": common}
    result = dict(source.config)
    config = model_config(source.config, max_length=model.config.max_length)
    before = to_json(Transformer(config), kind)
    if described != before:
        own = family_of(source.config)[1].own | {*ROPE_FIELDS, "original_max_position_embeddings"}
        if length_of_scaling(main_rope(folded(model.config)).scaling) is not None:
            own |= {"max_position_embeddings"}
        result = {name: x for name, x in result.items() if name not in own} | {
            name: x
            for name, x in described.items()
            if name in own or name not in before or before[name] != x
        }
    if types != {name: file.tensors[name].dtype for name, file in source.where.items()}:
        result["dtype" if "dtype" in result else "torch_dtype"] = common
    return result


def _with_fields(described: dict[str, Any], fields: Mapping[str, Any] | None) -> dict[str, Any]:
    """``config.json`` with further fields, which must not change its meaning."""
    fields = dict(fields or {})
    result = {**described, **fields}
    types = ("dtype", "torch_dtype")
    require(
        model_config(result) == model_config(described)
        and all(described.get(name) == result.get(name) for name in types),
        f"config = {fields} contradicts the model; give fields that do not describe it",
    )
    return result


def _companions(source: Folder, described: Mapping[str, Any]) -> list[str]:
    names = {file.name for pattern in COMPANIONS for file in source.path.glob(pattern)}
    names = {name for name in names if (source.path / name).is_file()}
    return sorted(names | ({CONFIG} if described == source.config else set()))


def _index(plans: list[FilePlan], source: Folder | None) -> bytes | None:
    """The content of the index, or None if none is needed."""
    if source is None and len(plans) == 1:
        return None
    old: dict[str, Any] = {}
    if source is not None:
        if source.index is None:
            return None
        if all(p.header == f.header for p, f in zip(plans, source.files, strict=True)):
            return (source.path / INDEX).read_bytes()
        old = source.index.get("metadata") or {}
    tensors = [tensor for plan in plans for tensor in plan.tensors.values()]
    size = sum(tensor.nbytes for tensor in tensors)
    mapping = {name: plan.name for plan in plans for name in plan.tensors}
    count = sum(math.prod(tensor.shape) for tensor in tensors)
    metadata = {"total_parameters": count, **old, "total_size": size}
    return _to_text({"metadata": metadata, "weight_map": dict(sorted(mapping.items()))})


def _to_text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
