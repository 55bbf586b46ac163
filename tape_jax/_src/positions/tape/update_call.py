"""What every implementation of the update is given: one checked call."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from tape_jax._src.core.sharding import Sharding
from tape_jax._src.positions.tape.norms import normalize

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class UpdateCall:
    """One call of :func:`tape_jax.update_state`, checked.

    Attributes:
      params: as there.
      e: the state, ``[..., T, H_kv | 1, D]`` or ``[..., T, H_kv | 1, M, L, R]``, batch axes full, 1
        or absent.
      a: the attended state, with query heads; None if it is not mixed in.
      x: the MLP's output.
      alpha: step size.
      heads: ``H_kv``.
      tensor: whether the state has tensor form.
      norm, magnitude, activation, sharding, interpret: as in :func:`tape_jax.update_state`.
    """

    params: dict[str, Array]
    e: Array
    a: Array | None
    x: Array
    alpha: float | Array
    heads: int
    tensor: bool
    norm: str
    magnitude: float
    activation: str
    sharding: Sharding | None
    interpret: bool

    @property
    def block(self) -> tuple[int, ...]:
        """What the update does not act on: ``[D]`` or ``[M, L, R]``."""
        return self.e.shape[-3:] if self.tensor else self.e.shape[-1:]

    @property
    def splits_heads(self) -> bool:
        """Whether heads are split over devices."""
        split = () if self.sharding is None else ("heads", "kv_heads")
        return any(self.sharding.shards(axis) > 1 for axis in split)  # type: ignore[union-attr]

    def flat_state(self) -> Array:
        """``e`` as ``[..., T, H_kv | 1, N]``."""
        return self._flat(self.e)

    def flat_attended(self) -> Array:
        """``a`` as ``[..., T, H_q, N]``, in the type of the state."""
        assert self.a is not None
        return self._flat(self.a.astype(self.e.dtype))

    def full_state(self) -> Array:
        """``e`` as ``[..., T, H_kv, N]`` with all batch axes."""
        shape = (*self.x.shape[:-1], self.heads, math.prod(self.block))
        return jnp.broadcast_to(self.flat_state(), shape)

    def normalized(self, flat: Array) -> Array:
        """The new state, of what the norm is to act on, ``[..., T, H_kv | 1, N]``."""
        lead = jnp.broadcast_shapes(flat.shape[:-2], self.x.shape[:-1])
        flat = jnp.broadcast_to(flat, (*lead, self.heads, flat.shape[-1]))
        state = flat.reshape(*flat.shape[:-1], *self.block)
        state = normalize(state, self.norm, self.magnitude, tensor=self.tensor)
        return state.astype(self.e.dtype)

    def _flat(self, x: Array) -> Array:
        return x.reshape(*x.shape[: x.ndim - len(self.block)], math.prod(self.block))
