"""Encodings added to the token embeddings: sinusoidal, learned, Abacus."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.core import algebra
from tape_jax._src.core.checks import not_negative, require, set_field
from tape_jax._src.core.segments import side_by_side, steps_since
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.fixed.rotary import turned
from tape_jax._src.positions.protocol import Encoding, Param, check_indices, table_rows

Array = jax.Array


def sinusoids(positions: Array, width: int, base: float = 10_000.0, dtype=jnp.float32) -> Array:
    """Sinusoids ``[..., T, width]``, sines in even, cosines in odd columns (Vaswani et al.)."""
    angle = turned(positions, base ** (-np.arange(0, width, 2) / width), dtype)
    pairs = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1)
    return pairs.reshape(*positions.shape, -1)[..., :width]


@dataclasses.dataclass(frozen=True)
class Sinusoidal(Encoding):
    """Fixed sinusoids (Vaswani et al. 2017, section 3.5).

    Attributes:
      base: ratio of the longest to the shortest wavelength.
    """

    kind: ClassVar[str] = "sinusoidal"
    acts_on: ClassVar[tuple[str, ...]] = ("embedding",)

    base: float = 10_000.0

    def __post_init__(self):
        require(self.base > 1, f"sinusoidal: base must exceed 1; got {self.base}")

    def embed(self, params, coordinates, sizes: Sizes, key):
        compute = algebra.at_least_float32(sizes.dtype)
        return sinusoids(coordinates, sizes.hidden_size, self.base, compute)


@dataclasses.dataclass(frozen=True)
class Learned(Encoding):
    """A learned vector per absolute position.

    Attributes:
      size: number of positions in the table; longer sequences and positions beyond it are refused
        or, if traced (not known yet), give NaN.

    Raises:
      ValueError: for a size that is not positive; for positions outside the table, if they are
        known.
    """

    kind: ClassVar[str] = "learned"
    takes_drawn: ClassVar[tuple[str, ...]] = ("spaced", "shifted")
    acts_on: ClassVar[tuple[str, ...]] = ("embedding",)

    size: int = 2048

    def __post_init__(self):
        require(self.size > 0, f"{self.kind}: size must be positive; got {self.size}")

    def max_length(self) -> int | None:
        return self.size

    def input_params(self, sizes: Sizes):
        init = jax.nn.initializers.normal(sizes.embedding_std)
        return {"table": Param((self.size, sizes.hidden_size), init, (None, "embed"))}

    def embed(self, params, coordinates, sizes: Sizes, key):
        return table_rows(f"{self.kind}: positions", params["table"], coordinates)


@dataclasses.dataclass(frozen=True)
class Abacus(Learned):
    """Abacus embeddings (McLeish et al. 2024, arXiv:2405.17399): a learned vector for each place.

    Each digit of a number, a run of digits, gets the index 1, 2, ... in reading order, every other
    token 0. A run ends where its segment does; tokens of other segments, and padding, do not
    interrupt it. While the model has a random stream ``"positions"``, one offset in ``0 ..
    max_offset`` is added to all digits, so that indices past the trained lengths are trained too.

    Numbers of ``size`` digits or more (``size - max_offset`` with the random stream) are refused
    or, if tokens are traced (not known yet), give NaN.

    Attributes:
      size: size of the table.
      digits: token ids of the digits.
      max_offset: largest random offset.

    Raises:
      ValueError: for options out of range; if digits are not given, or are not token ids of the
        model; for numbers that are too long, if tokens are known.
    """

    kind: ClassVar[str] = "abacus"
    reads_positions: ClassVar[bool] = False

    size: int = 256
    digits: tuple[int, ...] = ()
    max_offset: int = 100

    def __post_init__(self):
        super().__post_init__()
        try:
            set_field(self, "digits", tuple(operator.index(digit) for digit in self.digits))
        except TypeError:
            raise ValueError(f"abacus: digits must be token ids; got {self.digits!r}") from None
        not_negative("abacus: max_offset", self.max_offset)

    def check(self, sizes: Sizes) -> None:
        require(bool(self.digits), "abacus: digits, the token ids of the digits, must be given")
        require(
            min(self.digits) >= 0 and max(self.digits) < sizes.vocab_size,
            f"abacus: digits must be token ids in 0 .. {sizes.vocab_size - 1}; got {self.digits}",
        )
        require(
            self.size > self.max_offset,
            f"abacus: size = {self.size} must exceed max_offset = {self.max_offset}",
        )

    def max_length(self) -> int | None:
        return None

    def coordinates(self, tokens: Array, positions: Array, segment_ids: Array | None = None):
        is_digit = jnp.isin(tokens, jnp.asarray(self.digits))
        if segment_ids is None:
            return places_in_runs(is_digit, previous(is_digit, False))

        def within(ids: Array, is_digit: Array) -> Array:
            goes_on = previous(is_digit, False) & (ids == previous(ids, 0))
            return places_in_runs(is_digit, goes_on)

        return side_by_side(within, jnp.broadcast_to(segment_ids, tokens.shape), is_digit)

    def embed(self, params, coordinates, sizes: Sizes, key):
        what = f"{self.kind}: places within a number"
        return moved_rows(what, params["table"], coordinates, self.max_offset, key)


def moved_rows(what: str, table: Array, index: Array, max_offset: int, key: Array | None) -> Array:
    """Rows of a table as in :func:`table_rows`, for indices that a draw moves.

    Args:
      what: name of the indices, for the message.
      table: ``[size, N]``.
      index: ``[...]``, with a key below ``size - max_offset``; those above 0 are moved.
      max_offset: the largest move.
      key: of the draw, one for all; None: nothing is moved.
    """
    if key is not None:
        # Whether an index is too large must not depend on the draw.
        size = table.shape[0] - max_offset
        check_indices(what, index, size)
        offset = jax.random.randint(key, (), 0, max_offset + 1)
        moved = jnp.where(index > 0, index + offset, index)
        index = jnp.where(index < size, moved, table.shape[0])
    return table_rows(what, table, index)


def places_in_runs(is_digit: Array, goes_on: Array) -> Array:
    """Counts 1, 2, ... from each digit that starts a number; 0 for all other tokens."""
    return jnp.where(is_digit, steps_since(is_digit & ~goes_on) + 1, 0)


def previous(x: Array, first: Any) -> Array:
    """Each element's predecessor along the last axis of ``[..., T]``, starting with ``first``."""
    return jnp.concatenate([jnp.full_like(x[..., :1], first), x[..., :-1]], axis=-1)
