"""A Flax Linen module for one update of the position states."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax

from tape_jax._src.core.algebra import float_type
from tape_jax._src.core.checks import require_x64
from tape_jax._src.core.sharding import Sharding
from tape_jax._src.positions import update_state
from tape_jax._src.positions.tape.encoding import update_params

Array = jax.Array


class UpdateState(nn.Module):
    """One layer's update of the position states, as a Flax Linen module.

    It creates the parameters of :func:`tape_jax.init_update`, under the same names, and calls
    :func:`tape_jax.update_state`. The end of a block of your own is then::

        o, a = tape.attention(q, k, v, state=e, is_causal=True)
        ...
        return h + x, tape.UpdateState(num_heads=8)(e, a, x)

    Attributes:
      num_heads: query heads ``H_q``.
      num_kv_heads: state heads ``H_kv``; None: ``num_heads``.
      width: ``P``; None: ``4 * H_kv``.
      attention_mix: ``heads``, ``head_scale`` or ``none``, as in :func:`tape_jax.init_update`.
      mlp_mix: whether the MLP's output mixes the states.
      degree: 1, or 3 for products of three states, as in :func:`tape_jax.init_update`.
      alpha: step size.
      norm: ``none``, ``rms`` or ``unit``, as in :func:`tape_jax.update_state`.
      magnitude: scale of the start state (YaRN's), which the norms restore.
      activation: one of ``silu``, ``gelu``, ``relu``, ``tanh``, ``identity``.
      param_dtype: type of the parameters; None: jax's default float.
      sharding: a mesh and rules; where they split heads, sums over heads are one reduce-scatter.
    """

    num_heads: int
    num_kv_heads: int | None = None
    width: int | None = None
    attention_mix: str = "heads"
    mlp_mix: bool = True
    degree: int = 1
    alpha: float = 1.0
    norm: str = "none"
    magnitude: float = 1.0
    activation: str = "silu"
    param_dtype: Any = None
    sharding: Sharding | None = None

    @nn.compact
    def __call__(self, state: Array, attended: Array | None, x: Array) -> Array:
        """The state leaving the layer.

        Args:
          state: ``e``, the state entering the layer: ``[T, D]`` or ``[batch..., T, H_kv | 1, D]``,
            in tensor form ``[T, 1, M, L, R]`` or ``[batch..., T, H_kv | 1, M, L, R]``.
          attended: ``a``, with query heads ``H_q`` and the rest as ``state``; may be None if
            ``attention_mix`` is ``none`` and ``degree`` 1.
          x: the MLP's output before its residual addition ``[..., T, hidden]``.

        Returns:
          The new state, ``[..., T, H_kv, D]`` or ``[..., T, H_kv, M, L, R]``, in the type of
          ``state``.

        Raises:
          ValueError: if shapes disagree or an option is unknown.
        """
        specs = update_params(
            x.shape[-1],
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            width=self.width,
            attention_mix=self.attention_mix,
            mlp_mix=self.mlp_mix,
            degree=self.degree,
        )
        dtype = float_type(self.param_dtype)
        require_x64(param_dtype=dtype)
        params = {
            name: self.param(name, spec.init, spec.shape, dtype) for name, spec in specs.items()
        }
        return update_state(
            params,
            state,
            attended,
            x,
            self.alpha,
            norm=self.norm,
            magnitude=self.magnitude,
            activation=self.activation,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            sharding=self.sharding,
        )
