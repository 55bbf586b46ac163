"""Encodings added to the token embeddings: sinusoidal, learned, Abacus."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax import algebra
from tape_jax.config import ModelConfig, require
from tape_jax.positions.protocol import Encoding, Param, check_indices

Array = jax.Array


def sinusoids(positions: Array, width: int, base: float = 10_000.0, dtype=jnp.float32) -> Array:
    """Sinusoids ``[..., T, width]``, sines in even, cosines in odd columns (Vaswani et al.)."""
    omega = jnp.asarray(base ** (-np.arange(0, width, 2) / width), dtype)
    angle = positions.astype(dtype)[..., None] * omega
    pairs = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1)
    return pairs.reshape(*positions.shape, -1)[..., :width]


@dataclasses.dataclass(frozen=True)
class Sinusoidal(Encoding):
    """Fixed sinusoids (Vaswani et al. 2017, section 3.5).

    Attributes:
      base: ratio of the longest to the shortest wavelength.
    """

    kind: ClassVar[str] = "sinusoidal"

    base: float = 10_000.0

    def embed(self, params, coordinates, config: ModelConfig, key):
        compute = algebra.at_least_float32(config.dtype)
        return sinusoids(coordinates, config.hidden_size, self.base, compute)


@dataclasses.dataclass(frozen=True)
class Learned(Encoding):
    """A learned vector per absolute position.

    Attributes:
      size: number of positions in the table; longer sequences are refused.
    """

    kind: ClassVar[str] = "learned"

    size: int = 2048

    def __post_init__(self):
        require(self.size > 0, f"{self.kind}: size must be positive; got {self.size}")

    def max_length(self) -> int | None:
        return self.size

    def input_params(self, config: ModelConfig):
        init = jax.nn.initializers.normal(config.embedding_std)
        return {"table": Param((self.size, config.hidden_size), init, (None, "embed"))}

    def embed(self, params, coordinates, config: ModelConfig, key):
        check_indices(self.kind, coordinates)
        return params["table"][coordinates]


@dataclasses.dataclass(frozen=True)
class Abacus(Learned):
    """Abacus embeddings (McLeish et al. 2024): a learned vector per place within a number.

    Each digit of a run of digits gets the index 1, 2, ... in reading order, every other token 0. A
    run ends where its segment does.
    While the model has a random stream ``"positions"``, one offset in ``0 .. max_offset`` is added
    to all digits, so that indices past the trained lengths are trained too.

    Attributes:
      size: size of the table; places beyond it share its last vector.
      digits: token ids of the digits.
      max_offset: largest random offset.
    """

    kind: ClassVar[str] = "abacus"

    size: int = 256
    digits: tuple[int, ...] = ()
    max_offset: int = 100

    def check(self, config: ModelConfig) -> None:
        require(bool(self.digits), "abacus: digits, the token ids of the digits, must be given")
        require(
            self.size > self.max_offset,
            f"abacus: size = {self.size} must exceed max_offset = {self.max_offset}",
        )

    def max_length(self) -> int | None:
        return None

    def coordinates(self, tokens: Array, positions: Array, segment_ids: Array | None = None):
        is_digit = jnp.isin(tokens, jnp.asarray(self.digits))
        index = jnp.arange(tokens.shape[-1])
        begins = is_digit & ~_previous(is_digit, False)
        if segment_ids is not None:
            begins |= segment_ids != _previous(segment_ids, 0)
        first = jax.lax.cummax(jnp.where(begins, index, 0), axis=tokens.ndim - 1)
        return jnp.where(is_digit, index - first + 1, 0)

    def embed(self, params, coordinates, config: ModelConfig, key):
        if key is not None:
            offset = jax.random.randint(key, (), 0, self.max_offset + 1)
            coordinates = jnp.where(coordinates > 0, coordinates + offset, 0)
        return params["table"][jnp.minimum(coordinates, self.size - 1)]


def _previous(x: Array, first: Any) -> Array:
    """Each element's predecessor along the last axis of ``[..., T]``; ``first`` has none."""
    return jnp.concatenate([jnp.full_like(x[..., :1], first), x[..., :-1]], axis=-1)
