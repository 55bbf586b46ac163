"""One call of attention, checked and normalized, as every backend gets it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tape_jax._src.attention.visibility import Visibility
from tape_jax._src.core import algebra
from tape_jax._src.core.checks import refuse as refuse
from tape_jax._src.core.rows import AttentionRows as AttentionRows
from tape_jax._src.core.rows import RowFunction as RowFunction
from tape_jax._src.core.sharding import Sharding

Array = jax.Array
BiasFunction = Callable[[Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class Request:
    """One call of :func:`tape_jax.attention`, checked, with its batch axes flattened to one.

    An axis written ``B|1`` (and the like) is either full or 1, to be broadcast.

    Attributes:
      q: queries ``[B, Tq, Hq, D]``, not yet rotated.
      k: keys ``[B, S, Hk, D]``; rotated already if ``keys_rotated`` (then ``M * R`` wide in tensor
        form).
      v: values ``[B, S, Hk, Dv]``.
      state: state ``e`` of keys: rotary ``[B|1, S, Hk|1, D]`` or tensor
        ``[B|1, S, Hk|1, M, L, R]``, or None.
      query_state: state of the queries ``[B|1, Tq, He, ...]``, ``He`` a divisor of ``Hq``; None:
        nothing is rotated.
      bias: ``[B|1, Hq|1, Tq|1, S|1]``, or a function of query indices ``[Q]`` (offset included) and
        key indices ``[K]`` to ``[B|1, Hq|1, Q|1, K|1]``, or None.
      log_decay: of queries ``[B|1, Tq, Hq|1]`` and of keys ``[B|1, S, Hq|1]``, both float32 or
        float64; see :func:`decays`. Or None.
      visibility: which keys a query sees, and the offset of the queries.
      scale: factor on the logits.
      softcap: bound of the scaled logits, or None; see :func:`algebra.capped`.
      logits_fn, weights_fn: map logits ``[B, Hq, Q, K]`` and :class:`AttentionRows` to new
        logits and to weights, or None.
      keys_rotated, attend_state, interpret, sharding: as in :func:`tape_jax.attention`.
    """

    q: Array
    k: Array
    v: Array
    state: Array | None
    query_state: Array | None
    bias: Array | BiasFunction | None
    log_decay: tuple[Array, Array] | None
    visibility: Visibility
    scale: float
    keys_rotated: bool
    attend_state: bool
    interpret: bool
    sharding: Sharding | None = None
    softcap: float | None = None
    logits_fn: RowFunction | None = None
    weights_fn: RowFunction | None = None

    @property
    def query_length(self) -> int:
        """Number of queries, ``Tq``."""
        return self.q.shape[1]

    @property
    def key_length(self) -> int:
        """Number of keys, ``S``."""
        return self.k.shape[1]

    @property
    def symbolic(self) -> tuple[str, ...]:
        """The symbolic dimensions of queries and keys, under ``jax.export``."""
        sizes = (*self.q.shape, *self.k.shape)
        return tuple(dict.fromkeys(str(n) for n in sizes if not isinstance(n, int)))

    @property
    def rotated_width(self) -> int:
        """Width of rotated queries and keys: ``D``, or ``M * R`` in tensor form."""
        return algebra.rotated_width(self.q.shape[-1], self.query_state)

    @property
    def query_heads(self) -> int:
        """Number of query heads, ``Hq``."""
        return self.q.shape[2]

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, ``Hk``."""
        return self.k.shape[2]

    @property
    def groups(self) -> int:
        """Query heads per key/value head, ``G``."""
        return self.query_heads // self.kv_heads

    @property
    def needs_rows(self) -> bool:
        """True if a function rewrites whole rows of logits, or replaces the softmax."""
        return self.logits_fn is not None or self.weights_fn is not None

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Type of the operands of all products, which is the queries'."""
        return self.q.dtype

    @property
    def accumulator_dtype(self) -> jnp.dtype:
        """Type of logits, softmax and sums: at least float32."""
        return algebra.at_least_float32(self.q.dtype)

    def rotated(self) -> tuple[Array, Array]:
        """Queries ``[B, Tq, Hq, D']`` and keys ``[B, S, Hk, D']``, rotated, in the compute type.

        ``D'`` is :attr:`rotated_width`.
        """
        q, k = self.q, self.k.astype(self.compute_dtype)
        if self.query_state is not None:
            q = algebra.rotate(q, self.query_state)
        if self.state is not None and not self.keys_rotated:
            k = algebra.rotate(k, self.state)
        return q, k

    def attended_state(self) -> Array | None:
        """The state as values ``[B|1, S, Hk|1, De]`` in the compute type, or None.

        ``De`` is ``D``, or ``M * L * R`` in tensor form.
        """
        if self.state is None or not self.attend_state:
            return None
        return self.state.reshape(*self.state.shape[:3], -1).astype(self.compute_dtype)

    def values(self) -> Array:
        """``[v | e]`` in the compute type, ``[B, S, Hk, Dv + De]``; ``De = 0`` without a state."""
        values, state = self.v.astype(self.compute_dtype), self.attended_state()
        if state is None:
            return values
        state = jnp.broadcast_to(state, (*values.shape[:-1], state.shape[-1]))
        return jnp.concatenate([values, state], axis=-1)


def scaled_beforehand(q: Array, scale: float) -> tuple[Array, float]:
    """Return scaled queries and scale 1; 16-bit queries and their scale are returned unchanged.

    XLA may contract ``logits * scale - top`` into one instruction, which rounds once. At logits of
    1e9 the largest one then differs from the maximum by hundreds, and the softmax overflows.
    """
    return (q, scale) if q.dtype.itemsize < 4 else (q * scale, 1.0)


def refuse_rows(request: Request) -> None:
    """Raises NotImplementedError if a call needs whole rows of logits."""
    for name in ("logits_fn", "weights_fn"):
        refuse(
            getattr(request, name) is not None,
            f"{name}= is given rows of logits, which 'query_blocks', 'rows' and 'reference' have",
        )


def to_rows(x: Array, kv_heads: int, block: int) -> Array:
    """Stacks the ``G`` query heads that share a key/value head as rows.

    Args:
      x: ``[B, T, Hq, D]``, ``T`` a multiple of ``block``.
      kv_heads: ``Hk``.
      block: number of time steps that stay together: a block has its first head's steps,
        then the second head's, ...

    Returns:
      ``[B, Hk, T * G, D]``: one product then pairs a head's keys with all its queries.
    """
    b, t, heads, d = x.shape
    x = x.reshape(b, t // block, block, kv_heads, heads // kv_heads, d)
    return x.transpose(0, 3, 1, 4, 2, 5).reshape(b, kv_heads, -1, d)


def from_rows(x: Array, query_heads: int, block: int) -> Array:
    """Inverse of :func:`to_rows`: ``[B, Hk, T * G, D]`` to ``[B, T, Hq, D]``."""
    b, kv_heads, _, d = x.shape
    x = x.reshape(b, kv_heads, -1, query_heads // kv_heads, block, d)
    return x.transpose(0, 2, 4, 1, 3, 5).reshape(b, -1, query_heads, d)


def pairs_to_rows(x: Array, kv_heads: int, groups: int, block: int) -> Array:
    """Return biases or masks of a query block, ``[B|1, Hq|1, block|1, K|1]``, as rows.

    Returns:
      ``[B|1, Hk|1, G * block|1, K|1]``.
    """
    b, heads, queries, keys = x.shape
    if groups == 1 or (heads == 1 and queries == 1):
        return x
    x = x.reshape(b, *((1, 1) if heads == 1 else (kv_heads, groups)), queries, keys)
    x = jnp.broadcast_to(x, (b, x.shape[1], groups, block, keys))
    return x.reshape(b, x.shape[1], groups * block, keys)


def decays(queries: Array, keys: Array) -> Array:
    """Return ``F_i - F_j``, which is added to logits.

    Args:
      queries: log decay ``F [B|1, Q, Hq|1]``.
      keys: likewise, ``[B|1, K, Hq|1]``.

    Returns:
      ``[B|1, Hq|1, Q, K]``, subtracted in the given type: adding anything first would round.
    """
    return queries.swapaxes(1, 2)[..., None] - keys.swapaxes(1, 2)[..., None, :]


def hide(logits: Array, visible: Array | None) -> Array:
    """Put -inf where keys are not visible; None: all are."""
    return logits if visible is None else jnp.where(visible, logits, -jnp.inf)
