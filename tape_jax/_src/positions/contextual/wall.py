"""Wall attention: a forget gate for each channel of the queries and keys."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from tape_jax._src.core.algebra import precise_einsum
from tape_jax._src.core.checks import positive, set_field
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.contextual import rows as by_rows
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Encoding, Param

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Wall(Encoding):
    """Wall attention: logits ``q_i^T F_i F_{i-1} ... F_{j+1} k_j / sqrt(D)``, ``F`` diagonal.

    From flash-linear-attention. ``F_t = diag(sigmoid(x_t W + b))`` is made from the layer's input,
    one gate for each channel of each query head. Queries and keys are not rotated. Together with
    ``fox``, as ``wall_scalar``, a head has a gate for all of its channels too.

    Every factor is a product of gates, so nothing overflows, however strong they are. Decoding
    keeps the gates of each token, as many numbers as a query has.

    Attributes:
      bias: initial ``b``; the larger, the less is forgotten.
      chunk: maximum tokens in a chunk of the operator, fewer in short calls. It changes speed and
        memory only.

    Raises:
      ValueError: for options out of range; if tokens see later ones, which are not forgotten.
    """

    kind: ClassVar[str] = "wall"
    # It makes logits from queries and keys as they are, with its own scale.
    acts_on: ClassVar[tuple[str, ...]] = ("state", "scale", "logits")
    reads_positions: ClassVar[bool] = False

    bias: float = 8.0
    chunk: int = 32

    def __post_init__(self):
        set_field(self, "chunk", positive("wall: chunk", self.chunk))

    def layer_params(self, sizes: Sizes, *, updates: bool):
        width = sizes.num_heads * sizes.head_dim
        normal, constant = jax.nn.initializers.normal(0.02), jax.nn.initializers.constant(self.bias)
        return {
            "forget_kernel": Param((sizes.hidden_size, width), normal, ("embed", "heads")),
            "forget_bias": Param((width,), constant, ("heads",)),
        }

    def channel_log_gates(self, params, layer: Layer) -> Array:
        """``log f [..., T, H, D]``, in at least float32."""
        logits = layer.product(params["forget_kernel"])
        gates = jax.nn.log_sigmoid(logits + params["forget_bias"].astype(logits.dtype))
        return gates.reshape(*gates.shape[:-1], layer.sizes.num_heads, layer.sizes.head_dim)

    def layer_terms(self, params, layer: Layer) -> Terms:
        layer.require_causal(self.kind, "what comes after a token would be favoured, not forgotten")
        assert layer.q is not None
        own = self.channel_log_gates(params, layer)
        gates, keys = layer.of_all_keys("log_gate", own), layer.all_keys()
        ids, key_ids = layer.ids()
        scale, all_q = layer.sizes.head_dim**-0.5, layer.q

        def logits_fn(logits: Array, rows: Any) -> Array:
            count = logits.shape[-1]
            q, k, log_gates = (
                jnp.swapaxes(x, 1, 2).astype(logits.dtype)
                for x in (
                    by_rows.of_queries(all_q, rows),
                    by_rows.of_keys(keys, rows),
                    by_rows.of_keys(gates, rows),
                )
            )
            k = jnp.repeat(k, q.shape[1] // k.shape[1], axis=1)
            places = layer.index + rows.queries
            acts = (jnp.arange(count, dtype=jnp.int32) <= places[:, None])[None]
            same = None
            if ids is not None and key_ids is not None:
                same = key_ids[:, :count]
                acts = acts & (jnp.take(ids, rows.queries, axis=1)[..., None] == same[:, None])
            return products(q * scale, k, log_gates, acts, places, same, self.chunk)

        return Terms(logits_fn=logits_fn, kept={"log_gate": own})


def products(
    q: Array, k: Array, log_gates: Array, acts: Array, places: Array, ids: Array | None, size: int
) -> Array:
    """``q_i^T F_i ... F_{j+1} k_j`` of diagonal maps: such maps commute, so no chunk waits for one.

    Between a query and a key of an earlier chunk are the gates after the key in its chunk and those
    of later chunks: a factor of the key, and one of the query and the chunk. Within its own chunk a
    query has a factor for each key.

    Args:
      q: ``[B, H, R, D]``.
      k, log_gates: ``[B, H, K, D]``.
      acts: which tokens act on a query: its own and those before it of its segment,
        ``[B|1, R, K]``.
      places: of the queries among the keys ``[R]``.
      ids: of the segments of the keys ``[B, K]``, or None.
      size: maximum tokens in a chunk.

    Returns:
      ``[B, H, R, K]``, valid where a key acts on the query.
    """
    keys = k.shape[2]
    # A query has a factor for each chunk, and for each key of its own: both should be few.
    size = min(size, 1 << ((keys - 1).bit_length() + 1) // 2)
    k, log_gates = (by_rows.split(x, size, 2) for x in (k, log_gates))
    acts = by_rows.split(acts, size, 2)
    strictly = jnp.tri(size, k=-1, dtype=bool)[None, None]
    if ids is not None:
        ids = by_rows.split(ids, size, 1)
        strictly = strictly & (ids[..., None] == ids[..., None, :])
    # Of each key, what the tokens behind it in its chunk leave.
    behind = precise_einsum("bntj,bhntd->bhnjd", strictly.astype(k.dtype), log_gates)
    # Of each query and chunk, what the chunks between them leave.
    of_chunks = precise_einsum("brnt,bhntd->bhrnd", acts.astype(k.dtype), log_gates)
    passed = q[..., None, :] * jnp.exp(_sums_behind(of_chunks))
    found = precise_einsum("bhrnd,bhnjd->bhrnj", passed, k * jnp.exp(behind))

    own = places // size
    near_k, near_gates = (jnp.take(x, own, axis=2, mode="clip") for x in (k, log_gates))
    near_acts = jnp.take_along_axis(acts, own[None, :, None, None], axis=2)[:, :, 0]
    # Not a difference of what is behind a key and a query, which would hold gates of later tokens.
    left = _sums_behind(jnp.where(near_acts[:, None, ..., None], near_gates, 0))
    near = precise_einsum("bhrd,bhrjd->bhrj", q, near_k * jnp.exp(left))
    is_own = own[:, None] == jnp.arange(k.shape[2], dtype=jnp.int32)
    found = jnp.where(is_own[..., None], near[..., None, :], found)
    return found.reshape(*found.shape[:3], -1)[..., :keys]


def _sums_behind(x: Array) -> Array:
    """Sums ``x [..., n, D]`` over all entries of the axis ``n`` behind each."""
    total = lax.cumsum(x, axis=x.ndim - 2, reverse=True)
    return jnp.concatenate([total[..., 1:, :], jnp.zeros_like(x[..., :1, :])], axis=-2)
