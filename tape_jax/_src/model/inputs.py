"""What a model may be called with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from tape_jax._src.core.checks import concrete, require, require_whole
from tape_jax._src.core.segments import PADDING
from tape_jax._src.core.sharding import Sharding
from tape_jax._src.model.cache import Cache, check_length
from tape_jax._src.model.config import ModelConfig
from tape_jax._src.model.layers import splits_sequence
from tape_jax._src.positions.protocol import Encoding, State

if TYPE_CHECKING:
    from tape_jax._src.model.decoder import Transformer

Array = jax.Array


def check_inputs(
    model: Transformer,
    tokens: Array,
    positions: Array | None,
    segment_ids: Array | None,
    cache: Cache | None,
) -> None:
    """Raises ValueError unless these fit each other and the model; the message gives both sides."""
    encoding = model.encoding
    for name, x in (("tokens", tokens), ("positions", positions), ("segment_ids", segment_ids)):
        require(
            x is None or hasattr(x, "dtype"),
            f"{name} must be an array; got {type(x).__name__}",
        )
        if x is not None:
            require_whole(name, x)
    if not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.ndim < 1:
        raise ValueError(
            f"tokens must be integers [..., T]; got {tokens.dtype} of shape {tokens.shape}"
        )
    time = tokens.shape[-1]
    if not tokens.size:
        raise ValueError(f"tokens must hold at least one token; got shape {tokens.shape}")
    check_length(model, time if cache is None else cache.capacity)
    if positions is None and encoding.coordinate_axes > 1:
        raise ValueError(
            f"the encoding {encoding.kind!r} has axes={encoding.coordinate_axes}: give "
            f"positions= of shape {(*tokens.shape, encoding.coordinate_axes)}"
        )
    tail = () if encoding.coordinate_axes == 1 else (encoding.coordinate_axes,)
    _fits("positions", positions, tokens, tail)
    _fits("segment_ids", segment_ids, tokens, ())
    if segment_ids is None:
        return
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"segment_ids must be integers; got {segment_ids.dtype}")
    ids = concrete(segment_ids)
    if cache is None and ids is not None and (ids == PADDING).all():
        raise ValueError(
            f"all segment_ids are {PADDING}, which is padding: real tokens have other ids"
        )


def check_initial_state(encoding: Encoding, initial_state: State) -> None:
    """Raises ValueError if a state is given that the encoding does not read."""
    require(
        initial_state is None or encoding.reads_start,
        f"the encoding {encoding.kind!r} reads no state that enters the first layer: expected "
        f"initial_state=None; got {jax.tree.map(jnp.shape, initial_state)}, by shapes",
    )


def check_sharded(
    sharding: Sharding, config: ModelConfig, tokens: Array, initial_state: State, cache: Any
) -> None:
    """Raises ValueError unless the mesh can take a call."""
    require(tokens.ndim == 2, f"on a mesh, tokens must have shape [B, T]; got shape {tokens.shape}")
    require(
        not splits_sequence(sharding) or (cache is None and initial_state is None),
        "a mesh that splits sequences takes neither a cache nor an initial_state",
    )
    sharding.check_activations(config, *tokens.shape)


def _fits(name: str, x: Array | None, tokens: Array, tail: tuple[int, ...]) -> None:
    """Raises ValueError unless ``x`` is None or ``[..., T, *tail]`` for ``tokens [..., T]``."""
    if x is None:
        return
    lead = x.shape[: x.ndim - len(tail)]
    batch = zip(lead[-2::-1], tokens.shape[-2::-1], strict=False)
    if (
        x.shape[x.ndim - len(tail) :] != tail
        or not 1 <= len(lead) <= tokens.ndim
        or lead[-1] != tokens.shape[-1]
        or any(a not in (1, b) for a, b in batch)
    ):
        raise ValueError(
            f"{name} of shape {x.shape} does not fit tokens of shape {tokens.shape}: expected "
            f"{(*tokens.shape, *tail)}, leading axes may be missing"
        )
