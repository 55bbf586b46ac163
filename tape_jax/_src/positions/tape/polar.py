"""TAPE on PoPE: content is length, position is angle, and layers update the angles."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from tape_jax._src.core.algebra import at_least_float32
from tape_jax._src.core.checks import require
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.fixed.features import Pope
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import State
from tape_jax._src.positions.tape.encoding import Tape

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TapePope(Pope, Tape):
    """TAPE whose states start in PoPE's polar form, with a frequency for each coordinate.

    The logit is ``sum_c softplus(q_c) softplus(k_c) Re(e_ic conj(e_jc) exp(-i phase_c))`` over
    ``sqrt(D)``. The first layer's states ``e [..., H, 2 D]`` are those of :class:`Pope`, and layers
    update them as in :class:`Tape`, so that an untrained model has PoPE's logits.

    Attributes:
      partial_rotary_factor: 1; all coordinates have angles.
      form: ``rotary``.

    Raises:
      ValueError: as :class:`Pope` and :class:`Tape` do; for other values of these two.
    """

    kind: ClassVar[str] = "tape_pope"

    def __post_init__(self):
        super().__post_init__()
        for name, value in (("partial_rotary_factor", 1.0), ("form", "rotary")):
            got = getattr(self, name)
            require(got == value, f"tape_pope: {name} must be {value!r}; got {got!r}")

    def layer_params(self, sizes: Sizes, *, updates: bool):
        of_tape = Tape.layer_params(self, sizes, updates=updates)
        return of_tape | super().layer_params(sizes, updates=updates)

    def carry(self, state: State, shape: tuple[int, ...], sizes: Sizes) -> State:
        return super().carry(state, shape, self._doubled(sizes))

    def rotation(self, state: State):
        # Queries and keys are lengths, which their states turn.
        return state, state

    def layer_terms(self, params, layer: Layer) -> Terms:
        assert layer.q is not None
        assert layer.k is not None
        phase = self.phases(params, jnp.promote_types(layer.dtype, jnp.float32))
        return Terms(features=(_lengths(layer.q, 0.0), _lengths(layer.k, phase)))


def _lengths(x: Array, angle: Array | float) -> Array:
    """``softplus(x)`` at angles ``[H, D]``, or one for all: ``[..., H, 2 D]``, sines last."""
    length = jax.nn.softplus(x.astype(at_least_float32(x.dtype)))
    planes = length * jnp.cos(angle), length * jnp.sin(angle)
    return jnp.concatenate(planes, axis=-1).astype(x.dtype)
