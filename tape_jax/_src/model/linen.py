"""Flax Linen modules: one update of the position states, and attention of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax

from tape_jax._src.core.algebra import float_type
from tape_jax._src.core.checks import check_fields, require_x64
from tape_jax._src.core.sharding import Sharding
from tape_jax._src.model import one_attention
from tape_jax._src.model.cache import LayerCache, empty_layer
from tape_jax._src.model.config import ModelConfig
from tape_jax._src.positions import update_state
from tape_jax._src.positions.protocol import State
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
      sharding: a mesh and rules; if they split heads, sums over heads are one reduce-scatter.
      implementation: as in :func:`tape_jax.update_state`.
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
    implementation: str | Sequence[str] | None = None

    def __post_init__(self):
        check_fields(self)
        super().__post_init__()

    @nn.compact
    def __call__(self, state: Array, attended: Array | None, x: Array) -> Array:
        """Returns the state leaving the layer.

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
            implementation=self.implementation,
        )


class Attention(nn.Module):
    """Attention of one layer with any position encoding, as a Flax Linen module.

    It creates the projections, the norms and the encoding's parameters for a layer;
    :class:`UpdateState` updates TAPE's state. A block of your own is then::

        o, a, cache = tape.linen.Attention(num_heads=8)(norm(h), e, cache=cache, index=index)
        h = h + o
        x = mlp(norm(h))
        return h + x, tape.linen.UpdateState(num_heads=8)(e, a, x), cache

    Parameters are ``q``, ``k``, ``v`` and ``out``, kernels ``[in, out]`` without bias, ``q_norm``
    and ``k_norm`` of width ``head_dim``, and those of the encoding as ``position_<name>``.

    Attributes:
      num_heads: query heads ``H_q``.
      num_kv_heads: key/value heads ``H_kv``; None: ``num_heads``.
      head_dim: numbers per head, even; None: the width of ``x`` divided by ``num_heads``.
      position: the encoding, as in :class:`tape_jax.ModelConfig`. Of its update, only whether it
        attends states is read here: the rest is given to :class:`UpdateState`.
      updates: whether an update follows, which needs the attended state; False in the last layer.
      qk_norm: whether an RMSNorm over each head follows the projections of queries and keys.
      norm_eps: epsilon of these norms.
      local_window_size: as in :class:`tape_jax.ModelConfig`.
      implementation: as in :func:`tape_jax.attention`.
      dtype, param_dtype: types of products and of parameters.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    position: Any = "tape"
    updates: bool = True
    qk_norm: bool = False
    norm_eps: float = 1e-6
    local_window_size: int | tuple[int, int] | None = None
    implementation: str | tuple[str, ...] | None = None
    dtype: Any = "float32"
    param_dtype: Any = "float32"

    def __post_init__(self):
        check_fields(self)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: Array,
        state: State = None,
        *,
        positions: Array | None = None,
        segment_ids: Any = None,
        mask: Array | None = None,
        is_causal: bool = True,
        cache: LayerCache | None = None,
        index: Array | int = 0,
    ) -> tuple[Array, Array | None, LayerCache | None]:
        """Computes attention.

        Args:
          x: what enters the layer after its norm, ``[..., T, hidden]``; ``[B, T, hidden]`` with a
            cache.
          state: the position state ``e`` that enters. The first layer takes
            :func:`tape_jax.rotary_state` if an update follows. None: the encoding's start state.
          positions: of each key, ``[..., S]``: of the ``T`` tokens, or of all slots of a cache.
            None, usual while decoding: ``0 .. S - 1``.
          segment_ids: integers ``[..., T]``; with a cache a pair ``([B, T], [B, S])``.
          mask: as in :func:`tape_jax.attention`.
          is_causal: whether tokens see earlier ones only.
          cache: of :meth:`init_cache`, or what the last call returned.
          index: number of slots written before. If ``index + T`` exceeds the capacity, it is an
            error or, if not known, results are NaN.

        Returns:
          ``[..., T, hidden]``, the attended state or None, and the new cache or None.

        Raises:
          ValueError: if shapes or options are incompatible.
          NotImplementedError: for an encoding that also acts at the embeddings; with ``updates``,
            for what :class:`UpdateState` does not have.
        """
        config = self._config(x.shape[-1])
        dtype = config.param_dtype
        require_x64(dtype=config.dtype, param_dtype=dtype)
        specs = one_attention.attention_params(config, qk_norm=self.qk_norm)
        params = {name: self.param(name, p.init, p.shape, dtype) for name, p in specs.items()}
        return one_attention.attend(
            config,
            params,
            x,
            state,
            updates=self.updates,
            positions=positions,
            segment_ids=segment_ids,
            mask=mask,
            is_causal=is_causal,
            cache=cache,
            index=index,
        )

    @nn.nowrap
    def init_cache(self, hidden_size: int, batch_size: int, capacity: int) -> LayerCache:
        """Return an empty cache for ``batch_size`` sequences of up to ``capacity`` tokens."""
        config = self._config(hidden_size)
        return empty_layer(config, batch_size, capacity, updates=self.updates)

    @nn.nowrap
    def _config(self, hidden_size: int) -> ModelConfig:
        return one_attention.layer_config(
            hidden_size,
            self.num_heads,
            updates=self.updates,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            position=self.position,
            norm_eps=self.norm_eps,
            local_window_size=self.local_window_size,
            attention_implementation=self.implementation,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
        )
