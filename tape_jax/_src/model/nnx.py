"""Flax NNX modules: one update of the position states, and attention of one layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from tape_jax._src.core.algebra import float_type
from tape_jax._src.core.checks import require_x64, typed
from tape_jax._src.core.sharding import Sharding
from tape_jax._src.model import one_attention
from tape_jax._src.model.cache import LayerCache, empty_layer
from tape_jax._src.positions import update_state
from tape_jax._src.positions.protocol import Param, State
from tape_jax._src.positions.tape.encoding import update_params

Array = jax.Array


def _create(module: nnx.Module, specs: Mapping[str, Param], dtype: Any, rngs: nnx.Rngs) -> None:
    for name, spec in specs.items():
        setattr(module, name, nnx.Param(spec.init(rngs.params(), spec.shape, dtype)))


def _values(module: nnx.Module, names: Iterable[str]) -> dict[str, Array]:
    return {name: getattr(module, name)[...] for name in names}


class UpdateState(nnx.Module):
    """One layer's update of the position states, as a Flax NNX module.

    It holds the parameters of :func:`tape_jax.init_update`, under the same names, and calls
    :func:`tape_jax.update_state`.

    Args:
      hidden_size: width of ``x``.
      num_heads: query heads ``H_q``.
      num_kv_heads, width, attention_mix, mlp_mix, degree: as in :func:`tape_jax.init_update`.
      alpha, norm, magnitude, activation: as in :func:`tape_jax.update_state`.
      param_dtype: type of the parameters; None: jax's default float.
      sharding: a mesh and rules; if they split heads, sums over heads are one reduce-scatter.
      implementation: as in :func:`tape_jax.update_state`.
      rngs: its stream ``params`` draws the parameters.

    Raises:
      ValueError: if an option is unknown or out of range.
    """

    @typed
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        width: int | None = None,
        attention_mix: str = "heads",
        mlp_mix: bool = True,
        degree: int = 1,
        alpha: float = 1.0,
        norm: str = "none",
        magnitude: float = 1.0,
        activation: str = "silu",
        param_dtype: Any = None,
        sharding: Sharding | None = None,
        implementation: str | Sequence[str] | None = None,
        rngs: nnx.Rngs,
    ):
        dtype = float_type(param_dtype)
        require_x64(param_dtype=dtype)
        specs = update_params(
            hidden_size,
            num_heads,
            num_kv_heads=num_kv_heads,
            width=width,
            attention_mix=attention_mix,
            mlp_mix=mlp_mix,
            degree=degree,
        )
        _create(self, specs, dtype, rngs)
        self._names = tuple(specs)
        options: dict[str, Any] = {
            "alpha": float(alpha),
            "norm": norm,
            "magnitude": float(magnitude),
            "activation": activation,
            "num_kv_heads": num_kv_heads or num_heads,
            "sharding": sharding,
            "implementation": implementation
            if implementation is None or isinstance(implementation, str)
            else tuple(implementation),
        }
        self._options = nnx.static(tuple(options.items()))

    def __call__(self, state: Array, attended: Array | None, x: Array) -> Array:
        """Return the state leaving the layer.

        Args:
          state: ``e``, the state entering the layer, ``[T, D]`` or ``[batch..., T, H_kv | 1, D]``,
            or in tensor form; the first layer takes :func:`tape_jax.rotary_state`.
          attended: ``a``, with query heads ``H_q`` and the rest as ``state``; may be None if
            ``attention_mix`` is ``none`` and ``degree`` 1.
          x: the MLP's output before its residual addition ``[..., T, hidden]``.

        Returns:
          The new state, ``[..., T, H_kv, D]`` in the type of ``state``.

        Raises:
          ValueError: if shapes disagree.
        """
        params = _values(self, self._names)
        return update_state(params, state, attended, x, **dict(self._options))


class Attention(nnx.Module):
    """Attention of one layer with any position encoding, as a Flax NNX module.

    It holds the projections, the norms and the encoding's parameters for a layer, under the names
    of :class:`tape_jax.linen.Attention`; :class:`UpdateState` updates TAPE's state.

    Args:
      hidden_size: width of ``x``.
      num_heads: query heads ``H_q``.
      num_kv_heads: key/value heads ``H_kv``; None: ``num_heads``.
      head_dim: numbers per head, even; None: ``hidden_size // num_heads``.
      position: the encoding, as in :class:`tape_jax.ModelConfig`. Of its update, only whether it
        attends states is read here: the rest is given to :class:`UpdateState`.
      updates: whether an update follows, which needs the attended state; False in the last layer.
      qk_norm: whether an RMSNorm over each head follows the projections of queries and keys.
      norm_eps: epsilon of these norms.
      local_window_size: as in :class:`tape_jax.ModelConfig`.
      implementation: as in :func:`tape_jax.attention`.
      dtype, param_dtype: types of products and of parameters.
      rngs: its stream ``params`` draws the parameters.

    Raises:
      ValueError: if options are incompatible.
      NotImplementedError: for an encoding that also acts at the embeddings; with ``updates``, for
        what :class:`UpdateState` does not have.
    """

    @typed
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        position: Any = "tape",
        updates: bool = True,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        local_window_size: int | Sequence[int] | None = None,
        implementation: str | Sequence[str] | None = None,
        dtype: Any = "float32",
        param_dtype: Any = "float32",
        rngs: nnx.Rngs,
    ):
        self.config = one_attention.layer_config(
            hidden_size,
            num_heads,
            updates=updates,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            position=position,
            norm_eps=norm_eps,
            local_window_size=local_window_size,
            attention_implementation=implementation,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        require_x64(dtype=self.config.dtype, param_dtype=self.config.param_dtype)
        self.updates, self.qk_norm = updates, qk_norm
        _create(self, self._specs(), self.config.param_dtype, rngs)

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
          index: number of slots written before. ``index + T`` must not exceed the capacity.

        Returns:
          ``[..., T, hidden]``, the attended state or None, and the new cache or None.

        Raises:
          ValueError: if shapes or options are incompatible.
        """
        return one_attention.attend(
            self.config,
            _values(self, self._specs()),
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

    def init_cache(self, batch_size: int, capacity: int) -> LayerCache:
        """Return an empty cache for ``batch_size`` sequences of up to ``capacity`` tokens."""
        return empty_layer(self.config, batch_size, capacity, updates=self.updates)

    def _specs(self) -> dict[str, Param]:
        return one_attention.attention_params(self.config, qk_norm=self.qk_norm)
