"""Inkling: each token mixes a learned table of distances into its row of logits."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tape_jax._src.core.checks import positive, require, set_field
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.contextual import rows as by_rows
from tape_jax._src.positions.fixed.bias import distances
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Encoding, Param, check_indices

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class RelativeTable(Encoding):
    """Logits ``tau_i (q_i . k_j / D + b_ij)``, ``b_ij = r_i . table[:, i - j]``; 0 where it ends.

    ``r = x W`` is a projection of the layer's input, for each query head; the heads of a layer
    share the table. Logits are divided by ``D``, for queries and keys that are normed by head
    (``qk_norm="head"``).
    """

    acts_on: ClassVar[tuple[str, ...]] = ("scale", "logits")
    takes_drawn: ClassVar[tuple[str, ...]] = ("spaced", "shifted")
    # Whether a query sees no key beyond the table.
    is_local: ClassVar[bool] = False

    width: int = 16
    reach: int = 1024

    def __post_init__(self):
        for name in ("width", "reach"):
            set_field(self, name, positive(f"{self.kind}: {name}", getattr(self, name)))

    def logits_scale(self, sizes: Sizes) -> float:
        return 1 / sizes.head_dim

    def layer_params(self, sizes: Sizes, *, updates: bool):
        normal = jax.nn.initializers.normal(0.02)
        shape = (sizes.hidden_size, sizes.num_heads * self.width)
        return {
            "relative_kernel": Param(shape, normal, ("embed", "heads")),
            "table": Param((self.width, self.reach), normal, (None, None)),
        }

    def relative(self, params, layer: Layer) -> Array:
        """``r [..., T, H, width]``, in at least float32."""
        flat = layer.product(params["relative_kernel"])
        return flat.reshape(*flat.shape[:-1], layer.sizes.num_heads, self.width)

    def relative_bias(self, table: Array, relative: Array, index: Array) -> Array:
        """``b [B, H, Q, K]`` of ``r [B, Q, H, width]`` and ``index [B|1, Q, K]``; reach: 0."""
        entries = jnp.einsum("bqhc,cn->bhqn", relative, table.astype(relative.dtype))
        entries = jnp.pad(entries, [(0, 0)] * 3 + [(0, 1)])
        return jnp.take_along_axis(entries, index[:, None], axis=-1)

    def factors(self, layer: Layer) -> Array | None:
        """The factors ``tau [..., T]``; None: 1."""
        return None

    def layer_terms(self, params, layer: Layer) -> Terms:
        layer.require_causal(self.kind, "its table has distances to earlier tokens")
        check_indices(f"{self.kind}: positions", layer.positions)
        relative = self.relative(params, layer)
        tau, batch = self.factors(layer), layer.x.shape[:-2]
        queries, keys = (
            by_rows.with_batch(x, batch) for x in (layer.query_positions, layer.positions)
        )

        def logits_fn(logits: Array, rows: Any) -> Array:
            own = jnp.take(queries, rows.queries, axis=1)
            seen = keys[:, : logits.shape[-1]]
            apart = distances(own, seen)
            outside = (apart >= self.reach) | (seen[:, None] > own[..., None])
            index = jnp.where(outside, self.reach, apart.astype(jnp.int32))
            of_rows = by_rows.of_queries(relative, rows)
            found = logits + self.relative_bias(params["table"], of_rows, index)
            if tau is not None:
                found = found * jnp.take(tau, rows.queries, axis=1)[:, None, :, None]
            return jnp.where(outside[:, None], -jnp.inf, found) if self.is_local else found

        return Terms(logits_fn=logits_fn)


@dataclasses.dataclass(frozen=True)
class Inkling(RelativeTable):
    """Inkling's global layers: ``tau_i (q_i . k_j / D + b_ij)``, ``b_ij = r_i . table[:, i - j]``.

    From the release of transformers 5.24. ``r = x W`` is a projection of the layer's input, for
    each query head; the heads of a layer share the table, and ``b`` is 0 beyond it. ``tau = 1 +
    alpha log(max(n / floor, 1))`` for the ``n``-th position of a segment. Logits are divided by
    ``D`` and not its root: its models norm queries and keys by head (``qk_norm="head"``). No bias
    of a whole text is kept: memory is linear in its length.

    Attributes:
      width: numbers of ``r`` in each head.
      reach: distances in the table, from 0 on.
      alpha, floor: of ``tau``; without a floor it is 1.

    Raises:
      ValueError: for options out of range; for positions that are not integers; if tokens see later
        ones, which the table lacks.
    """

    kind: ClassVar[str] = "inkling"

    alpha: float = 0.1
    floor: float | None = None

    def __post_init__(self):
        super().__post_init__()
        require(self.alpha >= 0, f"inkling: alpha must not be negative; got {self.alpha}")
        require(
            self.floor is None or self.floor > 0,
            f"inkling: floor must be positive or None; got {self.floor}",
        )

    def factors(self, layer: Layer) -> Array | None:
        if self.floor is None:
            return None
        first = layer.first_positions()
        first = layer.of_new_tokens(first) if first.shape[-1] > 1 else first
        count = (layer.query_positions - first + 1).astype(layer.dtype)
        tau = 1 + self.alpha * jnp.log(jnp.maximum(count / self.floor, 1))
        return by_rows.with_batch(tau, layer.x.shape[:-2])


@dataclasses.dataclass(frozen=True)
class InklingLocal(RelativeTable):
    """Inkling's sliding layers: :class:`Inkling` without ``tau``, and no key beyond the table.

    Attributes:
      width: numbers of ``r`` in each head.
      reach: distances in the table, from 0 on: how many positions a query sees.

    Raises:
      ValueError: as :class:`Inkling` does.
    """

    kind: ClassVar[str] = "inkling_local"
    is_local: ClassVar[bool] = True

    reach: int = 512
