"""Contextual position encoding: positions are counts of keys that a query lets in."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tape_jax._src.core.checks import positive, require, set_field
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.contextual import rows as by_rows
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Encoding, Param

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Cope(Encoding):
    """CoPE (Golovneva et al. 2024, section 4): a learned vector for each count of gates.

    Query ``i`` lets key ``l`` in by ``g_il = sigmoid(q_i . k_l / sqrt(D))``. The place of key ``j``
    is the sum of the gates of the keys ``j .. i`` that the query sees, at most ``positions - 1``;
    between whole places vectors are interpolated. ``q_i . e(place) / sqrt(D)`` is added to the
    logit, with vectors that all heads of a layer share. The rotation by another encoding enters the
    gates with the logits, but not ``q_i . e``.

    Attributes:
      positions: number of vectors; None: one more than the model's ``max_length``, as in the
        published code, so that no place is cut.
      separate_key: gates use their own keys, a further projection of the layer's input.
      divide: whether ``q_i . e`` is divided by ``sqrt(D)``.

    Raises:
      ValueError: for options out of range; without ``positions`` in a model without ``max_length``;
        if tokens see later ones, which have no place.
    """

    kind: ClassVar[str] = "cope"
    acts_on: ClassVar[tuple[str, ...]] = ("logits",)
    reads_positions: ClassVar[bool] = False

    positions: int | None = 64
    separate_key: bool = False
    divide: bool = True

    def __post_init__(self):
        set_field(self, "positions", positive("cope: positions", self.positions, optional=True))

    def check(self, sizes: Sizes) -> None:
        require(
            self.positions is not None or sizes.max_length is not None,
            "cope: positions=None is for a model with a max_length; this one has none",
        )

    def _size(self, sizes: Sizes) -> int:
        return self.positions or (sizes.max_length or 0) + 1

    def layer_params(self, sizes: Sizes, *, updates: bool):
        zeros = jax.nn.initializers.zeros
        params = {"vectors": Param((sizes.head_dim, self._size(sizes)), zeros, (None, None))}
        if self.separate_key:
            shape = (sizes.hidden_size, sizes.num_kv_heads * sizes.head_dim)
            normal = jax.nn.initializers.normal(0.02)
            params["gate_key_kernel"] = Param(shape, normal, ("embed", "kv_heads"))
        return params

    def layer_terms(self, params, layer: Layer) -> Terms:
        layer.require_causal(self.kind, "it counts from a key up to the query")
        sizes, q = layer.sizes, layer.q
        assert q is not None
        scale = sizes.head_dim**-0.5
        vectors = params["vectors"]
        gate_keys, kept = None, None
        if self.separate_key:
            own = layer.product(params["gate_key_kernel"]).astype(q.dtype)
            own = own.reshape(*own.shape[:-1], sizes.num_kv_heads, sizes.head_dim)
            kept = {"gate_key": own}
            gate_keys = layer.of_all_keys("gate_key", own).astype(q.dtype)

        def logits_fn(logits: Array, rows: Any) -> Array:
            queries = by_rows.of_queries(q, rows)
            gates = logits
            if gate_keys is not None:
                keys = by_rows.of_keys(gate_keys, rows)
                gates = by_rows.products(queries, keys, logits.dtype) * scale
            gates = jnp.where(rows.visible, jax.nn.sigmoid(gates), 0)
            place = jnp.minimum(by_rows.sums_from(gates), vectors.shape[-1] - 1)
            found = jnp.moveaxis(layer.product(vectors, queries), 1, 2)
            below = jnp.floor(place)

            def at(place: Array) -> Array:
                return jnp.take_along_axis(found, place.astype(jnp.int32), axis=-1)

            low, high = at(below), at(jnp.ceil(place))
            added = low + (place - below) * (high - low)
            return logits + (scale * added if self.divide else added)

        return Terms(logits_fn=logits_fn, kept=kept)
