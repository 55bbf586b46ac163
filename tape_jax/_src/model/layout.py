"""The layout of a model's parameters, and conversion from one layout to another."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from tape_jax._src.core.checks import require, typed
from tape_jax._src.core.explicit import tuple_of
from tape_jax._src.model.decoder import Transformer
from tape_jax._src.model.parameters import full_name
from tape_jax._src.positions.protocol import Encoding

# In place of a block's number, for parameters outside of the layers.
OUTSIDE = -1


def replaced(model: Transformer, **changes: Any) -> Transformer:
    """Returns the model with fields of its configuration changed."""
    return Transformer(dataclasses.replace(model.config, **changes), sharding=model.sharding)


def unrolled(model: Transformer) -> Transformer:
    """Returns the model with the parameters of every layer by themselves."""
    return replaced(model, scan_layers=False, remat="none")


def with_position(model: Transformer, encoding: Encoding, **changes: Any) -> Transformer:
    """Returns the model with another encoding, and without options for which that has no use."""
    if not encoding.update_implementations:
        changes["update_implementation"] = None
    if not encoding.reads_positions:
        changes["random_positions"] = None
    return replaced(model, position=encoding, **changes)


def layer_params(model: Transformer, params: Any) -> dict[Encoding, list[dict[str, Any]]]:
    """Returns, by encoding, the parameters of ``Encoding.layer_params`` of each of its blocks."""
    found: dict[Encoding, list[dict[str, Any]]] = {}
    for blocks in model.blocks:
        encoding, _, updates = blocks.like
        names = encoding.layer_params(model.config.sizes, updates=updates)
        own = {name: params[blocks.name][full_name("position", name)] for name in names}
        found.setdefault(encoding, []).append(own)
    return found


@typed
def restack(
    params: Any, old: Transformer, new: Transformer, *, donate: bool = False
) -> dict[str, Any]:
    """Converts parameters from the layout of ``old`` to that of ``new``.

    A model keeps the parameters of each run of like layers stacked, ``layers_<first>/...`` with a
    leading axis; without ``scan_layers`` every layer has its own. If a run is the same in both
    layouts, its arrays are returned as is; only others are sliced or concatenated.

    Args:
      params: nested dict of jax arrays, numpy arrays (sliced as views) or ShapeDtypeStructs. It may
        hold only some of the parameters.
      old: the model with the layout of ``params``.
      new: the model with the wanted layout, with as many layers.
      donate: delete each jax array once its parts are made, so that never more than one
        parameter's stack exists twice. ``params`` cannot be used afterwards.

    Returns:
      The same parameters, of the same types. Arrays with a NamedSharding keep it; the axis of
      layers is no longer sharded if its new length does not divide.

    Raises:
      ValueError: if the numbers of layers differ, ``params`` does not have the layout of ``old``,
        or only some layers of a run of ``new`` have a parameter.
    """
    layers = old.config.num_layers
    require(
        new.config.num_layers == layers,
        f"restack needs equal numbers of layers; got {layers} and {new.config.num_layers}",
    )
    sources, result = {blocks.layers[0]: blocks.layers for blocks in old.blocks}, {}
    for path, leaves in by_path(params).items():
        if OUTSIDE in leaves:
            result[path] = leaves[OUTSIDE]
            continue
        for first, leaf in leaves.items():
            require(
                first in sources,
                f"parameters have layers_{first}, the model has "
                f"{', '.join(f'layers_{a}' for a in sources)}",
            )
            count = len(sources[first])
            require(
                not old.config.scan_layers or leaf.shape[:1] == (count,),
                f"{block_name(first, path)} must hold {count} layers on its first axis, as the "
                f"model has; got the shape {leaf.shape}",
            )
        made: dict[str, Any] = {}
        rows = {layer: (first, row) for first in leaves for row, layer in enumerate(sources[first])}
        for blocks in new.blocks:
            found = [rows[layer] for layer in blocks.layers if layer in rows]
            if not found:
                continue
            require(
                len(found) == len(blocks.layers),
                f"{path}: {len(found)} of the layers {', '.join(map(str, blocks.layers))} have "
                "this parameter; like layers need it in all or none",
            )
            stacked = (old.config.scan_layers, new.config.scan_layers)
            made[block_name(blocks.layers[0], path)] = _assemble(_spans(leaves, found), *stacked)
        result |= made
        for x in leaves.values():
            if donate and isinstance(x, jax.Array) and not any(x is y for y in made.values()):
                x.delete()
    return unflatten_dict(result, sep="/")


def by_path(params: Any) -> dict[str, dict[int, Any]]:
    """Returns leaves by their path without the number of a block, then by that number.

    ``layers_3/mlp/up/kernel`` is entry 3 of ``layers/mlp/up/kernel``; leaves outside of the layers
    are entry OUTSIDE of their own path.
    """
    result: dict[str, dict[int, Any]] = {}
    for name, x in flatten_dict(params, sep="/").items():
        block, _, rest = name.partition("/")
        number = block.removeprefix("layers_")
        inside = number != block and number.isdigit()
        path, entry = (f"layers/{rest}", int(number)) if inside else (name, OUTSIDE)
        result.setdefault(path, {})[entry] = x
    return result


def block_name(first: int, path: str) -> str:
    """Inverse of :func:`by_path` for one leaf."""
    return path if first == OUTSIDE else f"layers_{first}/{path.removeprefix('layers/')}"


def _spans(leaves: Mapping[int, Any], rows: list[tuple[int, int]]) -> list[tuple[Any, int, int]]:
    """Joins neighbouring rows ``(leaf, row)`` to ``(array, first, one past the last)``."""
    spans: list[tuple[int, int, int]] = []
    for leaf, row in rows:
        lower = row
        if spans and spans[-1][0] == leaf and spans[-1][2] == row:
            lower = spans.pop()[1]
        spans.append((leaf, lower, row + 1))
    return [(leaves[leaf], lower, upper) for leaf, lower, upper in spans]


def _assemble(parts: list[tuple[Any, int, int]], stacked: bool, stack: bool) -> Any:
    """The rows ``lower .. upper`` of each part, one after the other.

    ``stacked`` and ``stack`` say whether the parts, and the result, have an axis of layers.
    """
    x, lower, upper = parts[0]
    if len(parts) == 1 and stacked == stack and (not stacked or upper - lower == x.shape[0]):
        return x

    def build(xp: Any, *leaves: Any) -> Any:
        spans = [(lower, upper) for _, lower, upper in parts]
        if not stack:
            return leaves[0][spans[0][0]]
        if not stacked:
            return xp.stack(leaves)
        rows = [leaf[a:b] for leaf, (a, b) in zip(leaves, spans, strict=True)]
        return rows[0] if len(rows) == 1 else xp.concatenate(rows)

    leaves = [leaf for leaf, _, _ in parts]
    if isinstance(x, np.ndarray):
        return np.asarray(build(np, *leaves))
    if isinstance(x, jax.ShapeDtypeStruct):
        shape = jax.eval_shape(lambda *leaves: build(jnp, *leaves), *leaves)
        sharding = _restacked_sharding(x, shape.shape, stacked, stack)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
    result = build(jnp, *leaves)
    sharding = _restacked_sharding(x, result.shape, stacked, stack)
    return result if sharding is None else jax.device_put(result, sharding)


def _restacked_sharding(
    x: Any, shape: tuple[int, ...], stacked: bool, stack: bool
) -> NamedSharding | None:
    """The NamedSharding of ``x`` for its restacked form of ``shape``; None if it has none."""
    sharding = None if isinstance(x, jax.core.Tracer) else x.sharding
    if not isinstance(sharding, NamedSharding):
        return None
    spec = [*sharding.spec, *[None] * (len(x.shape) - len(sharding.spec))]
    lead = spec.pop(0) if stacked else None
    if stack:
        divides = shape[0] % math.prod(sharding.mesh.shape[n] for n in tuple_of(lead)) == 0
        spec.insert(0, lead if divides else None)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)
