"""Positions drawn at random, from a longer range than a sequence has."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from tape_jax._src.core.algebra import float_type
from tape_jax._src.core.checks import choose, concrete, positive, require, set_field
from tape_jax._src.positions.protocol import as_positions, check_indices

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class RandomPositions:
    """Positions drawn in training, for every encoding that reads positions.

    This trains angles, distances and rows of tables that sequences of the trained length do not
    have. Positions are drawn if the model has a random stream ``"positions"``, as in training, or
    its cache has a key. Otherwise, as in evaluation, they stay as they are. One draw serves every
    layer, head and row of a call.

    Attributes:
      kind: ``spaced``: the i-th position is the i-th of a random subset of ``0 .. range - 1``, in
        order (Ruoss et al. 2023); ``stretched``: all positions times one log-uniform number from 1
        to ``range / length``, not for ``learned``, ``t5`` and ``inkling``, which look up whole
        positions; ``shifted``: all positions plus one number from ``0 .. range - length``, a random
        start that only encodings of absolute positions notice.
      range: drawn positions lie below it.
    """

    kind: str = "spaced"
    range: int = 2048

    def __post_init__(self):
        choose("random positions", self.kind, ("spaced", "stretched", "shifted"))
        set_field(self, "range", positive("random_positions: range", self.range))
        require(
            self.range < 2**31,
            f"random_positions: range must be less than 2^31; got {self.range}",
        )


def drawn_positions(
    draw: RandomPositions,
    positions: Array,
    length: int | Array,
    key: Array,
    what: str = "random_positions",
) -> Array:
    """Draws positions below ``draw.range`` to replace those below ``length``.

    One draw serves all rows, as far as their lengths agree.

    Args:
      draw: kind and range of the draw.
      positions: integers ``[..., T]``, each below its row's length.
      length: in tokens, an integer or integers that broadcast to ``[...]``.
      key: of the draw.
      what: name for messages.

    Returns:
      ``[..., T]``: integers, or floats if stretched; -1 where a position or length that is not
      known yet is out of range.

    Raises:
      ValueError: if positions are not integers; if one, or a length, is known to be out of range.
    """
    positions = as_positions(positions)
    longest = concrete(length)
    if longest is not None and longest.size and longest.max() > draw.range:
        raise ValueError(f"{what}: {longest.max()} positions do not fit into range = {draw.range}")
    length = jnp.expand_dims(length, -1)
    check_indices(f"{what}: positions", positions, length)
    inside = (positions >= 0) & (positions < length) & (length <= draw.range)
    at = jnp.where(inside, positions, 0)
    if draw.kind == "spaced":
        # The first of a random order are a random subset, of whatever size.
        order = jax.random.permutation(key, draw.range)
        first = jnp.arange(draw.range) < length
        drawn = _entries(jnp.sort(jnp.where(first, order, draw.range)), at)
    else:
        share = jax.random.uniform(key, dtype=float_type(None))
        if draw.kind == "stretched":
            drawn = at * (draw.range / length) ** share
        else:
            drawn = at + jnp.floor(share * (draw.range - length + 1)).astype(at.dtype)
    return jnp.where(inside, drawn, -1)


@functools.partial(jnp.vectorize, signature="(n),(t)->(t)")
def _entries(table: Array, index: Array) -> Array:
    """The entries of each row's own table."""
    return table[index]
