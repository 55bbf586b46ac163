"""FoPE: rotary states in which each plane turns by a sum of frequencies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.core import algebra
from tape_jax._src.core.checks import not_negative, positive, require, set_field
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.fixed.frequencies import frequencies
from tape_jax._src.positions.fixed.rotary import angles
from tape_jax._src.positions.protocol import Encoding, Param, State

Array = jax.Array

# The sums of sines and of cosines.
SUMS = ("sin_coef", "cos_coef")


@dataclasses.dataclass(frozen=True)
class Fope(Encoding):
    """Fourier position embedding (Hua et al. 2024, arXiv:2412.17739): sums of sines and cosines.

    Frequencies ``w = base^(-2c/D)`` with a period beyond the trained length are dropped. The first
    ``N`` planes of each key/value head have the state ``C + iS`` at position ``t``, ``C_n = sum_c
    cos(t w_c) cos_coef[c, n]`` and likewise ``S_n``; ``N`` is at most ``D/4``. All others have ``1
    + i``. So states are not rotations, and logits depend on more than distances.

    The formulas, ``1 + i`` included, are those of the published configuration, in which every layer
    draws coefficients of its own; here one draw serves all layers.

    Attributes:
      base: the rotary base.
      original_length: the trained length, in tokens.
      learn: learn coefficients, starting from a draw of the initialiser; False: draw them with
        ``seed``, as published.
      gain: of that draw, normal with the deviation ``gain sqrt(2 / (F N + H N))`` for ``F``
        frequencies and ``H`` heads; 1 is added to frequency ``n ceil(F / N)`` of plane ``n``, where
        there is one.
      seed: of coefficients that are not learned.

    Raises:
      ValueError: for options out of range; if no frequency is left, or a head has fewer than 4
        dimensions.
    """

    kind: ClassVar[str] = "fope"
    acts_on: ClassVar[tuple[str, ...]] = ("state",)
    starts_by_head: ClassVar[bool] = True

    base: float = 10_000.0
    original_length: int = 2048
    learn: bool = False
    gain: float = 0.3
    seed: int = 0

    def __post_init__(self):
        require(self.base > 1, f"fope: the rotary base must exceed 1; got {self.base}")
        require(self.gain >= 0, f"fope: gain must not be negative; got {self.gain}")
        length = positive("fope: original_length", self.original_length)
        require(
            length >= 2 * math.pi,
            f"fope: original_length must hold a turn of the fastest frequency, 2 pi tokens; got "
            f"{length}",
        )
        set_field(self, "original_length", length)
        set_field(self, "seed", not_negative("fope: seed", self.seed))

    def check(self, sizes: Sizes) -> None:
        require(
            sizes.head_dim >= 4,
            f"fope: a quarter of a head's dimensions are sums; got a head dimension of "
            f"{sizes.head_dim}",
        )

    def shape(self, sizes: Sizes) -> tuple[int, int, int]:
        """Returns the shape of coefficients: heads, kept frequencies, planes that are sums."""
        omega = frequencies(sizes.head_dim, self.base)
        kept = int((omega >= 2 * math.pi / self.original_length).sum())
        return sizes.num_kv_heads, kept, min(kept, sizes.head_dim // 4)

    def input_params(self, sizes: Sizes):
        if not self.learn:
            return {}

        def init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
            return jnp.asarray(self._from_normal(jax.random.normal(key, shape, dtype)), dtype)

        shape = self.shape(sizes)
        return {name: Param(shape, init, ("kv_heads", None, None)) for name in SUMS}

    def _from_normal(self, x: Any) -> Any:
        """Coefficients ``[H, F, N]`` from standard normal numbers."""
        heads, kept, planes = x.shape
        own = np.arange(planes) * -(-kept // planes) == np.arange(kept)[:, None]
        return x * (self.gain * math.sqrt(2 / (kept * planes + heads * planes))) + own

    def start(self, positions, sizes, *, key=None, length=None, dtype=jnp.float32, params=None):
        heads, kept, planes = self.shape(sizes)
        if self.learn and params is not None:
            coefficients = [params[name] for name in SUMS]
        else:
            drawn = np.random.default_rng(self.seed).normal(size=(2, heads, kept, planes))
            coefficients = [self._from_normal(x) for x in drawn]
        turns = angles(positions, sizes.head_dim, self.base, dtype=dtype)[..., :kept]

        def summed(wave: Callable[[Array], Array], weights: Any) -> Array:
            weights = jnp.asarray(weights, turns.dtype)
            sums = algebra.precise_einsum("...tc,hcn->...thn", wave(turns), weights)
            still = [(0, 0)] * (sums.ndim - 1) + [(0, sizes.head_dim // 2 - planes)]
            return jnp.pad(sums, still, constant_values=1)

        sines, cosines = summed(jnp.sin, coefficients[0]), summed(jnp.cos, coefficients[1])
        return jnp.concatenate([cosines, sines], axis=-1).astype(dtype)

    def rotation(self, state: State):
        return state, state
