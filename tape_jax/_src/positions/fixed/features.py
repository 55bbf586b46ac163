"""Encodings that make further queries and keys, which attend without any state."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from tape_jax._src.core.algebra import (
    align_state,
    at_least_float32,
    complex_multiply,
    repeat_heads,
    rotate,
)
from tape_jax._src.core.checks import require
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.fixed.rope import Rope
from tape_jax._src.positions.fixed.rotary import state_at
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Param, State

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class RopePP(Rope):
    """RoPE++ (Liu et al. 2025, arXiv:2512.07525): the imaginary part attends with its own heads.

    RoPE's logit is the real part of ``q conj(k)``, with its rotations. Two heads attend for each
    query head, and read the same key/value head: ``2h`` is rotated as in RoPE, ``2h + 1`` by a
    quarter turn less, so that its logit is the imaginary part. The output projection has twice as
    many inputs. (In the paper this is ``EC``; ``EH`` is the same with half of all heads.)

    Raises:
      ValueError: as :class:`Rope` does.
    """

    kind: ClassVar[str] = "rope_pp"
    heads_per_query: ClassVar[int] = 2

    def rotation(self, state: State):
        # Queries and keys are rotated here already.
        return None, None

    def layer_terms(self, params, layer: Layer) -> Terms:
        assert layer.q is not None
        assert layer.k is not None
        real, imaginary = jnp.split(layer.state, 2, axis=-1)
        behind = jnp.concatenate([imaginary, -real], axis=-1)
        both = jnp.stack([rotate(layer.q, e) for e in (layer.state, behind)], axis=-2)
        q = both.reshape(*both.shape[:-3], -1, both.shape[-1])
        return Terms(features=(q, rotate(layer.k, layer.state)))


@dataclasses.dataclass(frozen=True)
class Pope(Rope):
    """PoPE (Gopalakrishnan et al. 2025, arXiv:2509.10534): content is length, position is angle.

    Each coordinate ``c`` of a query and of a key becomes a vector in a plane of its own, of length
    ``softplus(x_c)`` and angle ``t omega_c``, ``omega_c = base^(-c/n)``; keys are turned further by
    a learned phase for each key/value head. So the logit has
    ``softplus(q_c) softplus(k_c) cos((j - i) omega_c + phase_c)``, over ``sqrt(D)``.

    In the published code phases are clipped to ``[-2 pi, 0]`` and have no gradient beyond. A step
    from their start, 0, may leave them there for good. With ``clip=False`` they stay as they are:
    angles are periodic.

    Attributes:
      partial_rotary_factor: share ``n / D`` of the coordinates, the first ones; the others multiply
        as they are.
      clip: clip phases.
      uniform_phase: phases start uniformly in ``[-2 pi, 0]``, not at 0.

    Raises:
      ValueError: as :class:`Rope` does; for a share without coordinates.
    """

    kind: ClassVar[str] = "pope"

    clip: bool = True
    uniform_phase: bool = False

    def check(self, sizes: Sizes) -> None:
        require(
            self._turning(sizes) > 0,
            f"pope: partial_rotary_factor = {self.partial_rotary_factor} leaves no coordinate of "
            f"{sizes.head_dim}",
        )
        super().check(self._doubled(sizes))

    def _turning(self, sizes: Sizes) -> int:
        """Returns the number of coordinates of a head that have angles."""
        return round(sizes.head_dim * self.partial_rotary_factor)

    def _doubled(self, sizes: Sizes) -> Sizes:
        """Sizes whose heads have two numbers for each angle."""
        return dataclasses.replace(sizes, head_dim=2 * self._turning(sizes))

    def layer_params(self, sizes: Sizes, *, updates: bool):
        def init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
            if self.uniform_phase:
                return jax.random.uniform(key, shape, dtype, -2 * math.pi, 0)
            return jnp.zeros(shape, dtype)

        shape = (sizes.num_kv_heads, self._turning(sizes))
        return {"phase": Param(shape, init, ("kv_heads", None))}

    def start_options(self, params: dict[str, Array] | None) -> dict[str, Any]:
        return super().start_options(params) | {"partial_rotary_factor": 1.0}

    def start_at(self, positions, sizes, **options):
        return super().start_at(positions, self._doubled(sizes), **options)

    def rotation(self, state: State):
        # Queries and keys are turned here already.
        return None, None

    def phases(self, params: dict[str, Array], dtype: Any) -> Array:
        """The angles by which keys are turned further, ``[H_kv, n]``."""
        phase = params["phase"].astype(dtype)
        if not self.clip:
            return phase
        # At the bounds there is a gradient, unlike in jnp.clip.
        inside = (phase >= -2 * math.pi) & (phase <= 0)
        return jnp.where(inside, phase, lax.stop_gradient(jnp.clip(phase, -2 * math.pi, 0)))

    def layer_terms(self, params, layer: Layer) -> Terms:
        assert layer.q is not None
        assert layer.k is not None
        state = align_state(layer.state)
        compute = jnp.promote_types(layer.dtype, state.dtype)
        phase = self.phases(params, compute)
        turned = complex_multiply(state.astype(compute), state_at(phase))
        return Terms(features=(_polar(layer.q, state), _polar(layer.k, turned)))


def _polar(x: Array, state: Array) -> Array:
    """``[..., H, n + D]``: the first ``n`` numbers as vectors turned by a state ``[..., 2n]``."""
    cos, sin = jnp.split(repeat_heads(state, x.shape[-2]), 2, axis=-1)
    first, rest = jnp.split(x, [cos.shape[-1]], axis=-1)
    length = jax.nn.softplus(first.astype(jnp.promote_types(at_least_float32(x.dtype), cos.dtype)))
    planes = jnp.stack([length * cos, length * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([planes.reshape(*planes.shape[:-2], -1), rest], axis=-1)
