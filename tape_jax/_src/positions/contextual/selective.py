"""Selective RoPE: rotations by angles made from the content."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tape_jax._src.core.checks import choose, positive, require, set_field
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.fixed.frequencies import frequencies
from tape_jax._src.positions.fixed.rotary import content_state
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Encoding, Param

Array = jax.Array

SPACINGS = ("rope", "rfa")
GATES = ("none", "standard")
EPS = 1e-6
# Columns of kernels are divided by their norm, or by this if it is larger.
LEAST = 1e-12

normal = jax.nn.initializers.normal(0.02)
zeros = jax.nn.initializers.zeros


@dataclasses.dataclass(frozen=True)
class SelectiveRope(Encoding):
    """Selective RoPE (Movahedi et al. 2025, arXiv:2511.17388): angles are sums over tokens so far.

    ``angle_t = temperature * sum_{s <= t} phi_s``, where ``phi`` is a projection of the layer's
    input, each head's share of it at unit length, after a short causal convolution. Every layer and
    every key/value head has angles of its own. Positions are not read: with ``phi = 0`` there are
    none. The formulas are those of ``SelectiveRoPE`` in the published code.

    Attributes:
      rank: of the projection; None: full rank, each head from only its own share, with columns of
        unit length times a learned scalar per head.
      taps: of the convolution, the token's own included.
      spacing: of the temperatures over a head's frequencies: ``rope``, ``theta^(-2c/D)``; ``rfa``,
        ``tan(a / 2)``, evenly spaced ``a`` in ``0 .. theta pi``, the largest one being 1.
      theta: as above; None: 500,000, for ``rfa`` 0.9.
      temperature: the largest one.
      learn_temperature: learn temperatures, starting from these.
      gate: ``none``; ``standard``: ``phi`` is multiplied by a gate for each head, a sigmoid of a
        projection.
      bias: ``exp(b)`` is added to ``phi``, with a learned ``b`` for each head and frequency.

    Raises:
      ValueError: for options out of range; for a hidden size that the key/value heads do not
        divide; for ``rfa`` with a head dimension of 2.
    """

    kind: ClassVar[str] = "selective_rope"
    acts_on: ClassVar[tuple[str, ...]] = ("state",)
    reads_positions: ClassVar[bool] = False

    rank: int | None = 16
    taps: int = 4
    spacing: str = "rope"
    theta: float | None = None
    temperature: float = 1.0
    learn_temperature: bool = False
    gate: str = "none"
    bias: bool = False

    def __post_init__(self):
        set_field(self, "rank", positive(f"{self.kind}: rank", self.rank, optional=True))
        set_field(self, "taps", positive(f"{self.kind}: taps", self.taps))
        choose(f"{self.kind} spacing", self.spacing, SPACINGS)
        choose(f"{self.kind} gate", self.gate, GATES)
        rope, theta = self.spacing == "rope", self._theta
        require(
            theta > 1 if rope else 0 < theta < 1,
            f"{self.kind}: with spacing={self.spacing!r} theta must "
            f"{'exceed 1' if rope else 'lie between 0 and 1'}; got {theta}",
        )
        require(
            self.temperature > 0,
            f"{self.kind}: temperature must be positive; got {self.temperature}",
        )

    def check(self, sizes: Sizes) -> None:
        require(
            sizes.hidden_size % sizes.num_kv_heads == 0,
            f"{self.kind}: each of the {sizes.num_kv_heads} key/value heads has its share of the "
            f"hidden size; got {sizes.hidden_size}, which they do not divide",
        )
        require(
            self.spacing == "rope" or sizes.head_dim > 2,
            f"{self.kind}: with spacing='rfa' the slowest of two or more frequencies stands still; "
            f"got a head dimension of {sizes.head_dim}",
        )

    @property
    def _theta(self) -> float:
        if self.theta is None:
            return 500_000.0 if self.spacing == "rope" else 0.9
        return self.theta

    def temperatures(self, head_dim: int) -> np.ndarray:
        """The initial temperatures, float64 ``[D/2]``."""
        if self.spacing == "rope":
            return self.temperature * frequencies(head_dim, self._theta)
        rising = np.tan(np.linspace(0, self._theta * np.pi, head_dim // 2) / 2)
        return self.temperature * rising / rising.max()

    def layer_params(self, sizes: Sizes, *, updates: bool):
        heads, width, hidden = sizes.num_kv_heads, sizes.head_dim // 2, sizes.hidden_size
        by_head = (heads, width)
        params = {"conv_kernel": Param((*by_head, self.taps), normal, ("kv_heads", None, None))}
        if self.rank is None:
            # As the authors do; the length of a column is divided out.
            init = jax.nn.initializers.variance_scaling(2.0, "fan_out", "uniform", batch_axis=0)
            shape = (heads, hidden // heads, width)
            params["phase_kernel"] = Param(shape, init, ("kv_heads", None, None))
            params["phase_scale"] = Param((heads,), jax.nn.initializers.ones, ("kv_heads",))
        else:
            params["phase_down"] = Param((hidden, self.rank), normal, ("embed", None))
            params["phase_up"] = Param((self.rank, heads * width), normal, (None, "kv_heads"))
        if self.bias:
            params["phase_bias"] = Param(by_head, zeros, ("kv_heads", None))
        if self.gate != "none":
            params["gate_kernel"] = Param((hidden, heads), normal, ("embed", "kv_heads"))
            params["gate_bias"] = Param((heads,), zeros, ("kv_heads",))
        if self.learn_temperature:

            def start(key, shape, dtype):
                return jnp.asarray(self.temperatures(sizes.head_dim), dtype)

            params["temperature"] = Param((width,), start, (None,))
        return params

    def layer_terms(self, params, layer: Layer) -> Terms:
        heads, width = layer.sizes.num_kv_heads, layer.sizes.head_dim // 2
        shares = functools.partial(_shares, heads=heads, dtype=layer.dtype)

        # The backward pass recomputes the shares: keeping them would keep several copies of x.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def project(params: Mapping[str, Array], x: Array) -> Array:
            if self.rank is None:
                return _by_head(params, shares(x), layer.dtype)
            low = layer.product(params["phase_down"], shares(x).reshape(x.shape))
            return layer.product(params["phase_up"], low)

        phi = project(params, layer.flat).reshape(*layer.x.shape[:-1], heads, width)
        taps = params["conv_kernel"].astype(layer.dtype)
        kept = {"phase": phi}
        phi = layer.convolution("phase", phi, taps)
        if self.bias:
            phi = phi + jnp.exp(params["phase_bias"].astype(layer.dtype))
        if self.gate != "none":
            logits = layer.product(params["gate_kernel"], shares(layer.x).reshape(layer.x.shape))
            gate = jax.nn.sigmoid(logits + params["gate_bias"].astype(layer.dtype))
            phi = phi * gate[..., None]
        temperature = params.get("temperature", self.temperatures(layer.sizes.head_dim))
        kept["angle"] = layer.running_sum("angle", phi)
        angles = kept["angle"] * jnp.asarray(temperature, layer.dtype)
        return Terms(state=content_state(angles), kept=kept)


def _shares(x: Array, *, heads: int, dtype: Any) -> Array:
    """Each head's share of ``x``, at unit length, ``[..., H, E/H]``."""
    wide = x.reshape(*x.shape[:-1], heads, -1).astype(dtype)
    length = lax.rsqrt(jnp.square(wide).sum(-1, keepdims=True) + EPS)
    return (wide * length).astype(x.dtype)


def _by_head(params: Mapping[str, Array], shares: Array, dtype: Any) -> Array:
    """Applies the full-rank projection: ``[..., T, H, E/H]`` to ``[..., T, H, D/2]``."""
    kernel = params["phase_kernel"].astype(dtype)
    length = jnp.sqrt(jnp.maximum(jnp.square(kernel).sum(-2, keepdims=True), LEAST**2))
    scale = params["phase_scale"].astype(dtype)[:, None, None]
    kernel = scale * kernel / length
    # Not every backend has products of many small matrices in narrow types.
    return jnp.einsum("...he,hew->...hw", shares.astype(dtype), kernel)
