"""PaTH: logits through Householder-like maps of the tokens between a key and a query."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from tape_jax._src.core.checks import not_negative, positive, require, set_field
from tape_jax._src.core.padding import pad_to, pad_to_multiple
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.contextual import householder
from tape_jax._src.positions.contextual.rows import all_axes
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Encoding, Param

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class PathAttention(Encoding):
    """PaTH (Yang et al. 2025, section 3): logits ``q_i^T H_i H_{i-1} ... H_{j+1} k_j / sqrt(D)``.

    ``H_t = I - beta_t w_t w_t^T`` with, for each key/value head, ``w = z / sqrt(z^2 + eps)`` and
    ``beta = beta_max * sigmoid(x W + b)``, where ``z = silu(conv(x W_down W_up))`` and ``x`` is the
    layer's input. Queries and keys are not rotated. Attention must be causal.

    In cached decoding each new token rewrites the earlier keys, so one token at a time attends as
    usual, by any implementation. Together with ``fox``, PaTH has a forget gate.

    Attributes:
      rank: of the projection to ``z``; None: a full matrix.
      taps: of the causal convolution of each channel of ``z``, followed by silu; 0: neither.
      beta_max: upper bound of ``beta``: 1 shrinks, 2 reflects.
      eps: guards the norm of ``w``.
      chunk: tokens in a chunk of the operator. It changes speed and memory only.

    Raises:
      ValueError: for options out of range; for a call that is not causal.
    """

    kind: ClassVar[str] = "path"
    # It makes logits from queries and keys as they are, with its own scale.
    acts_on: ClassVar[tuple[str, ...]] = ("state", "scale", "logits")
    reads_positions: ClassVar[bool] = False
    rewrites_keys: ClassVar[bool] = True

    rank: int | None = 32
    taps: int = 3
    beta_max: float = 2.0
    eps: float = 1e-6
    chunk: int = 64

    def __post_init__(self):
        set_field(self, "rank", positive("path: rank", self.rank, optional=True))
        set_field(self, "chunk", positive("path: chunk", self.chunk))
        set_field(self, "taps", not_negative("path: taps", self.taps))
        require(
            0 < self.beta_max <= 2,
            f"path: expected 0 < beta_max <= 2, beyond which keys grow without bound; got "
            f"{self.beta_max}",
        )
        require(self.eps > 0, f"path: eps must be positive; got {self.eps}")

    def layer_params(self, sizes: Sizes, *, updates: bool):
        normal = jax.nn.initializers.normal(0.02)
        heads, width = sizes.num_kv_heads, sizes.num_kv_heads * sizes.head_dim
        params = {
            "beta_kernel": Param((sizes.hidden_size, heads), normal, ("embed", "kv_heads")),
            "beta_bias": Param((heads,), jax.nn.initializers.zeros, ("kv_heads",)),
        }
        if self.rank is None:
            params["w_kernel"] = Param((sizes.hidden_size, width), normal, ("embed", "kv_heads"))
        else:
            params["w_down"] = Param((sizes.hidden_size, self.rank), normal, ("embed", None))
            params["w_up"] = Param((self.rank, width), normal, (None, "kv_heads"))
        if self.taps:
            params["w_taps"] = Param((width, self.taps), normal, ("kv_heads", None))
        return params

    def projections(self, params, layer: Layer) -> Array:
        """``x W_down W_up [..., T, H_kv, D]``, which the convolution reads."""
        heads, dim = layer.sizes.num_kv_heads, layer.sizes.head_dim
        if self.rank is None:
            z = layer.product(params["w_kernel"])
        else:
            low = layer.product(params["w_down"]).astype(layer.x.dtype)
            z = layer.product(params["w_up"], low)
        return z.astype(layer.x.dtype).reshape(*z.shape[:-1], heads, dim)

    def vectors(self, params, layer: Layer, z: Array) -> Array:
        """``w [..., T, H_kv, D]`` of :meth:`projections`, of norm 1 at most, at least float32."""
        if self.taps:
            taps = params["w_taps"].astype(layer.dtype).reshape(*z.shape[-2:], self.taps)
            z = jax.nn.silu(layer.convolution("w", z, taps))
        z = z.astype(layer.dtype)
        return z * lax.rsqrt(jnp.square(z).sum(-1, keepdims=True) + self.eps)

    def strengths(self, params, layer: Layer) -> Array:
        """``beta [..., T, H_kv]``, in at least float32."""
        logits = layer.product(params["beta_kernel"])
        return self.beta_max * jax.nn.sigmoid(logits + params["beta_bias"].astype(logits.dtype))

    def layer_terms(self, params, layer: Layer) -> Terms:
        layer.require_causal(self.kind, "a token's maps act on what comes before it")
        assert layer.k is not None
        z = self.projections(params, layer)
        kept = {"w": z} if self.taps else None
        w, beta = self.vectors(params, layer, z), self.strengths(params, layer)
        ids, key_ids = layer.ids()
        k, w, beta = all_axes(layer.k), all_axes(w), all_axes(beta, 2)
        chunks = householder.chunked(k, w, beta, ids, self.chunk, layer.dtype)
        if layer.kept is None:
            return Terms(logits_fn=_logits_fn(chunks, layer, ids), kept=kept)

        def rewritten(keys: Array) -> Array:
            assert key_ids is not None
            out = householder.transported(chunks, keys, key_ids, layer.index, layer.time)
            # As it is until the next token comes.
            return out.astype(keys.dtype)

        several = layer.time > 1
        return Terms(
            logits_fn=_logits_fn(chunks, layer, ids) if several else None,
            rewritten_keys=rewritten,
            kept=kept,
        )


def _logits_fn(
    chunks: householder.Chunks, layer: Layer, ids: Array | None
) -> Callable[[Array, Any], Array]:
    """Logits of rows: the operator over new tokens, and the transformed queries over older keys."""
    assert layer.q is not None
    all_q, time = all_axes(layer.q), layer.time
    heads, dim = chunks.entries.shape[2], all_q.shape[-1]
    groups = all_q.shape[2] // heads

    def logits_of(logits: Array, rows: Any) -> Array:
        q = jnp.take(
            all_q, rows.queries, axis=1, mode="clip", unique_indices=True, indices_are_sorted=True
        )
        batch, count = q.shape[:2]
        q = q.astype(layer.dtype).reshape(batch, count, heads, groups, dim) * dim**-0.5
        q = q.transpose(0, 2, 3, 1, 4).reshape(batch, heads, groups * count, dim)
        queries = jnp.tile(rows.queries, groups)
        row_ids = None if ids is None else jnp.tile(jnp.take(ids, rows.queries, axis=1), groups)
        visible = rows.visible.any((0, 1, 2))
        keys = time if layer.cached_keys is None else layer.cached_keys.shape[-2]
        visible = pad_to(visible, keys, 0)
        new = (
            visible if layer.kept is None else lax.dynamic_slice_in_dim(visible, layer.index, time)
        )
        new = pad_to_multiple(new, chunks.size, 0).reshape(-1, chunks.size).any(-1)
        # Chunks after all queries, or before all that they see, need no work.
        needed = lax.cummax(new.astype(jnp.int8)).astype(bool)
        if layer.kept is not None:
            slots = jnp.arange(visible.size, dtype=jnp.int32)
            needed = needed | (visible & (slots < layer.index)).any()
        needed = needed & (chunks.begins() <= rows.queries.max())
        found, q = householder.products(chunks, q, queries, row_ids, needed)
        found = found[..., :time]
        if layer.cached_keys is not None:
            old = householder.precise_einsum(
                "bhrd,bhsd->bhrs", q, layer.cached_keys.astype(q.dtype)
            )
            found = lax.dynamic_update_slice_in_dim(old, found, layer.index, axis=3)
        return found[..., : logits.shape[-1]].reshape(logits.shape)

    return logits_of
