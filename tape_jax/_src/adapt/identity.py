"""The fingerprint of a model, which keeps an adapter from being put on another base."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tape_jax._src import positions
from tape_jax._src.core.checks import require, typed
from tape_jax._src.core.explicit import automatic_inside
from tape_jax._src.model.config import ModelConfig
from tape_jax._src.model.decoder import Transformer
from tape_jax._src.model.inputs import check_variables
from tape_jax._src.model.layout import OUTSIDE, by_path
from tape_jax._src.positions import creation
from tape_jax._src.positions.protocol import Encoding
from tape_jax._src.positions.schedule import options_of

# Least number of entries per axis of a parameter's matrix in the fingerprint.
SAMPLES = 16
# Fields that older fingerprints lack; they stand there where they are used.
LATER = (
    *("biases", "qk_norm", "norms", "norm", "zero_centered_norms", "activation", "parallel_block"),
    *("embedding_scale", "residual_scale", "query_scale", "logits_scaling", "logit_softcap"),
    "final_logit_softcap",
)


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The identity of a model in any layout: its architecture and samples of its parameters.

    Attributes:
      architecture: fields of the configuration, position encoding included, as JSON values.
      tensors: of each parameter, by its path without the number of a layer: ``shape`` (layers
        first), ``dtype`` and ``sha256`` of a strided sample of its bytes.
    """

    architecture: dict[str, Any]
    tensors: dict[str, dict[str, Any]]

    def differences(self, other: Fingerprint) -> list[str]:
        """Returns the entries that differ, each with both values, ``self``'s first."""
        flat = is_flat(self.architecture["position"]) or is_flat(other.architecture["position"])
        mine, others = dict(self._entries(flat)), dict(other._entries(flat))
        return [
            f"{name}: {mine.get(name, 'absent')} and {others.get(name, 'absent')}"
            for name in dict.fromkeys([*mine, *others])
            if mine.get(name) != others.get(name)
        ]

    def _entries(self, flat: bool):
        options = creation.options_of if flat else options_of
        for name, value in self.architecture.items():
            # Fields that an encoding gained since then have their defaults.
            position = name == "position"
            yield name, _json_copy(options(positions.create(value))) if position else value
        for name, tensor in self.tensors.items():
            shape = "x".join(map(str, tensor["shape"]))
            yield name, f"{tensor['dtype']}[{shape}] with values {tensor['sha256'][:12]}"


@typed
def fingerprint(model: Transformer, variables: Any) -> Fingerprint:
    """Returns the fingerprint of a model with its parameters.

    It reads some 16 x 16 evenly strided entries of every matrix of every layer, so that a model of
    billions of parameters takes hardly longer than a small one. If parameters are split over
    processes, all of these must call it.

    Raises:
      ValueError: if the variables have no values.
    """
    check_variables(variables)
    c = model.config
    require(
        not has_no_values(variables),
        "a fingerprint needs the values of parameters; got ShapeDtypeStructs",
    )
    architecture = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_layers": c.num_layers,
        "num_heads": c.num_heads,
        "num_kv_heads": c.kv_heads,
        "head_dim": c.dim,
        "intermediate_size": c.mlp_size,
        "norm_eps": c.norm_eps,
        "tie_embeddings": c.tie_embeddings,
        "position": encoding_to_json(model.encoding),
        **({"experts": dataclasses.asdict(c.experts)} if c.experts else {}),
        **{name: x for name in LATER if (x := getattr(c, name)) != getattr(ModelConfig, name)},
    }
    layers = {blocks.layers[0]: blocks.layers for blocks in model.blocks}
    tensors = {}
    for path, leaves in sorted(by_path(variables["params"]).items()):
        stacked = c.scan_layers and OUTSIDE not in leaves
        by_layer = {
            layer: row
            for first, x in leaves.items()
            for layer, row in zip(layers.get(first, (first,)), _sample(x, stacked), strict=True)
        }
        rows = np.stack([by_layer[layer] for layer in sorted(by_layer)])
        first = next(iter(leaves.values()))
        shape = first.shape[1:] if stacked else first.shape
        tensors[path] = {
            "shape": list(shape) if OUTSIDE in leaves else [len(rows), *shape],
            "dtype": str(first.dtype),
            "sha256": digest(rows),
        }
    return Fingerprint(_json_copy(architecture), tensors)


def _sample(x: Any, stacked: bool) -> np.ndarray:
    """Returns evenly strided entries of each layer of ``x``, ``[layers or 1, ...]``."""
    if not isinstance(x, jax.Array):
        return _strided(x, stacked)  # Of a type that jax might narrow.
    return gathered(_whole_strided(x, stacked))


def _strided(x: Any, stacked: bool) -> Any:
    """Returns what :func:`_sample` does, where ``x`` is."""
    shape = x.shape[1:] if stacked else x.shape
    strides = tuple(slice(None, None, max(n // SAMPLES, 1)) for n in shape)
    return x[(slice(None), *strides)] if stacked else x[strides][None]


# Strides over an axis that is split are refused where the mesh has explicit axes.
_whole_strided = automatic_inside(lambda given, shape: ())(_strided)


def gathered(x: Any) -> np.ndarray:
    """Returns all of an array; if it is split over processes, all of these must call it."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def digest(x: np.ndarray) -> str:
    """SHA-256 of the bytes of an array, in hexadecimal digits."""
    return hashlib.sha256(x.tobytes()).hexdigest()


def is_flat(position: Mapping[str, Any]) -> bool:
    """Whether a record has one set of options for all layers of a schedule, as old ones had."""
    return "/" in position["kind"] and "encodings" not in position


def encoding_to_json(encoding: Encoding) -> dict[str, Any]:
    """An encoding as JSON values from which ``positions.create`` makes it again."""
    return _json_copy(options_of(encoding))


def _json_copy(values: dict[str, Any]) -> dict[str, Any]:
    """Returns ``values`` as JSON has them, so that they compare equal to those read from a file."""

    def plain(value: Any) -> Any:
        require(isinstance(value, np.generic), f"an option must be a JSON value; got {value!r}")
        return value.item()

    return json.loads(json.dumps(values, default=plain))


def has_no_values(variables: Any) -> bool:
    """Whether these are ShapeDtypeStructs in place of arrays."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(variables))
