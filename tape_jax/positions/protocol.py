"""What a position encoding is to the model: one small frozen value with a handful of methods.

The model never asks which encoding it has. An encoding may act in any of four places, each of
which is absent by default: it adds to the embeddings (:meth:`Encoding.embed`), rotates queries and
keys by a state (:meth:`Encoding.start`, :meth:`Encoding.rotation`), biases the logits
(:meth:`Encoding.pair_bias`), and updates its state layer by layer (:meth:`Encoding.update`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from tape_jax.config import ModelConfig, require
from tape_jax.sharding import Sharding

Array = jax.Array
State = Any


class Param(NamedTuple):
    """A parameter that an encoding asks the model to create.

    Attributes:
      shape: its shape.
      init: initialiser ``(key, shape, dtype) -> array``.
      axes: one logical axis name (or None) per dimension, for sharding.
    """

    shape: tuple[int, ...]
    init: Callable[..., Array]
    axes: tuple[str | None, ...]


def check_indices(kind: str, positions: Array) -> None:
    """Raises ValueError unless ``positions``, which index a table of ``kind``, are integers."""
    require(
        jnp.issubdtype(positions.dtype, jnp.integer),
        f"{kind}: positions must be integers, since they index a table; got {positions.dtype}",
    )


@dataclasses.dataclass(frozen=True)
class Encoding:
    """No position encoding at all; the base of every other one.

    Shapes: ``positions`` are ``[..., T]`` (``[..., T, n]`` for n-dimensional coordinates), token
    ids ``[..., T]``. A state is any pytree of arrays.
    """

    kind: ClassVar[str] = "none"

    @property
    def coordinate_axes(self) -> int:
        """Coordinates per token."""
        return 1

    @property
    def attends_state(self) -> bool:
        """Whether :meth:`update` wants the attended state ``a = A e``."""
        return False

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError if the encoding does not fit the model."""

    def max_length(self) -> int | None:
        """Longest sequence that the encoding can address, in tokens; None: any."""
        return None

    def input_params(self, config: ModelConfig) -> dict[str, Param]:
        """Parameters used once, at the embeddings or for the start state."""
        return {}

    def layer_params(self, config: ModelConfig, *, updates: bool) -> dict[str, Param]:
        """Parameters of one layer; ``updates`` says whether it updates the state."""
        return {}

    def coordinates(
        self, tokens: Array, positions: Array, segment_ids: Array | None = None
    ) -> Array:
        """Index ``[..., T]`` of each token that :meth:`embed` reads; the positions by default.

        Called with every token from the start of the sequence, in cached decoding too, and with
        their segment ids ``[..., T]``, if there are any.
        """
        return positions

    def embed(
        self, params: dict[str, Array], coordinates: Array, config: ModelConfig, key: Array | None
    ) -> Array | None:
        """Vectors ``[..., T, hidden]`` added to the token embeddings, or None."""
        return None

    def start(
        self,
        positions: Array,
        config: ModelConfig,
        *,
        key: Array | None = None,
        length: int | None = None,
        dtype: Any = jnp.float32,
        params: dict[str, Array] | None = None,
    ) -> State:
        """State entering the first layer, or None.

        Args:
          positions: ``[..., T]`` or ``[..., T, n]``.
          config: the model's.
          key: random key for encodings that draw; None: their fixed draw.
          length: the sequence length, in tokens, for which a draw or a dynamic scaling is made
            (the cache's capacity in cached decoding); None: that of ``positions``.
          dtype: type of the state.
          params: of :meth:`input_params`; None: those of an untrained model.
        """
        return None

    def locate(self, state: State, coordinates: Array) -> State:
        """The state entering the first layer with what :meth:`coordinates` says of its tokens."""
        return state

    def carry(self, state: State, shape: tuple[int, ...], config: ModelConfig) -> State:
        """The start state with all axes that an updating layer gives it, tokens being ``shape``."""
        return state

    def rotation(self, state: State) -> tuple[Array | None, Array | None]:
        """The states ``e`` by which queries and keys are rotated; ``(None, None)``: not at all."""
        return None, None

    def pair_bias(
        self, params: dict[str, Array], query: Array, key: Array, config: ModelConfig
    ) -> Array:
        """Bias ``[..., H, Q, K]`` of the logits at positions ``[..., Q]`` and ``[..., K]``."""
        raise NotImplementedError(f"the encoding {self.kind!r} does not bias the logits")

    @property
    def biases(self) -> bool:
        """Whether :meth:`pair_bias` is to be added to the logits."""
        return type(self).pair_bias is not Encoding.pair_bias

    def updates(self, layer: int, num_layers: int) -> bool:
        """Whether layer ``layer`` (from 0) of ``num_layers`` updates the state."""
        return False

    def update(
        self,
        params: dict[str, Array],
        state: State,
        attended: Array | None,
        x: Array,
        *,
        sharding: Sharding | None = None,
    ) -> State:
        """State leaving a layer, from the one entering it.

        Args:
          params: this layer's, as :meth:`layer_params` describes them.
          state: the state entering the layer.
          attended: ``a = A e`` of this layer, or None unless ``attends_state``.
          x: the MLP's output before its residual addition, ``[..., T, hidden]``.
          sharding: given on a mesh: how arrays are split over it, for an encoding that wants to say
            where its sums are made. The result's arrays ``[B, T, H_kv, ...]`` are split by heads.
        """
        return state

    def loss(self, params: Any, progress: Array | float) -> Array | None:
        """What a training step adds to its loss, or None.

        Args:
          params: all parameters of the model.
          progress: share of the training that is done, in [0, 1].
        """
        return None
