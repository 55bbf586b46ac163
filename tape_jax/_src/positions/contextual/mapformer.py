"""MapFormer: rotations that add up how each token moves a position in some space."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.core.algebra import align_state, rotate
from tape_jax._src.core.checks import positive, require, set_field
from tape_jax._src.core.rows import AttentionRows
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.fixed.rotary import content_state
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Encoding, Param, State

Array = jax.Array

# PyTorch's for a linear layer: uniform in +- 1 / sqrt(fan_in).
uniform = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


@dataclasses.dataclass(frozen=True)
class MapFormerWM(Encoding):
    """MapFormer with working memory (Rambaud et al. 2025, arXiv:2511.19279): RoPE along a path.

    Each token moves by ``delta = x W_in W_out``, made from its embedding, and the angle of each
    key/value head and frequency is ``omega * sum_{s <= t} delta_s``, the same in all layers.
    Positions are not read. The formulas are those of public code, not the authors'.

    Attributes:
      rank: of the projection.
      grid: number of distinct places along one axis: the initial ``omega`` fall geometrically from
        ``2 pi`` to ``2 pi / grid``.

    Raises:
      ValueError: for options out of range.
    """

    kind: ClassVar[str] = "mapformer_wm"
    acts_on: ClassVar[tuple[str, ...]] = ("state",)
    reads_positions: ClassVar[bool] = False

    rank: int = 2
    grid: float = 64.0

    def __post_init__(self):
        set_field(self, "rank", positive(f"{self.kind}: rank", self.rank))
        require(self.grid > 0, f"{self.kind}: grid must be positive; got {self.grid}")

    def frequencies(self, head_dim: int) -> np.ndarray:
        """The initial ``omega`` of a head, float64 ``[D/2]``."""
        planes = head_dim // 2
        return 2 * np.pi * self.grid ** -(np.arange(planes) / max(planes - 1, 1))

    def input_params(self, sizes: Sizes):
        heads, planes = sizes.num_kv_heads, sizes.head_dim // 2

        def omega(key, shape, dtype):
            return jnp.broadcast_to(jnp.asarray(self.frequencies(sizes.head_dim), dtype), shape)

        return {
            "delta_in": Param((sizes.hidden_size, self.rank), uniform, ("embed", None)),
            "delta_out": Param((self.rank, heads * planes), uniform, (None, "kv_heads")),
            "omega": Param((heads, planes), omega, ("kv_heads", None)),
        }

    def path(self, params, layer: Layer) -> Array:
        """Returns the places ``[..., T, H, D/2]`` of the new tokens, which are kept as ``path``."""
        return layer.running_sum("path", self.moves(params, layer))

    def moves(self, params, layer: Layer) -> Array:
        """``delta [..., T, H, D/2]``: by how much each token moves."""
        delta = layer.product(params["delta_out"], layer.product(params["delta_in"]))
        return delta.reshape(*delta.shape[:-1], *params["omega"].shape)

    def state_of(self, params, path: Array, layer: Layer) -> Array:
        """The state ``[..., T, H, D]`` of tokens at the places ``path``."""
        state = content_state(params["omega"].astype(path.dtype) * path)
        return state.astype(layer.sizes.state_dtype or layer.dtype)

    def start_from_embeddings(self, params, layer: Layer) -> tuple[State, dict[str, Array]]:
        path = self.path(params, layer)
        return self.state_of(params, path, layer), {"path": path}

    def rotation(self, state: State):
        return state, state


@dataclasses.dataclass(frozen=True)
class MapFormerEM(MapFormerWM):
    """MapFormer with episodic memory (Rambaud et al. 2025, arXiv:2511.19279): content times place.

    Content and place are compared separately, and multiplied: ``logit_ij = (q_i . k_j / sqrt(D))
    (r_i(q0) . r_j(k0) / sqrt(D))``, with the rotations ``r`` of :class:`MapFormerWM`, and with
    learned vectors ``q0`` of each head and ``k0`` of each key/value head of a layer.

    Attributes:
      rank, grid: as there.

    Raises:
      ValueError: as :class:`MapFormerWM` does; with a cache, for an initial state that is not a
        pair.
    """

    kind: ClassVar[str] = "mapformer_em"
    acts_on: ClassVar[tuple[str, ...]] = ("state", "logits")

    def layer_params(self, sizes: Sizes, *, updates: bool):
        init = jax.nn.initializers.normal(0.02)
        return {
            "q0": Param((sizes.num_heads, sizes.head_dim), init, ("heads", None)),
            "k0": Param((sizes.num_kv_heads, sizes.head_dim), init, ("kv_heads", None)),
        }

    def start_from_embeddings(self, params, layer: Layer) -> tuple[State, dict[str, Array]]:
        """Returns the states of the new tokens and, second, of all keys."""
        state, kept = super().start_from_embeddings(params, layer)
        keys = state
        if layer.kept is not None:
            keys = self.state_of(params, layer.of_all_keys("path", kept["path"]), layer)
        return (state, keys), kept

    def rotation(self, state: State):
        # Only q0 and k0 are rotated.
        return None, None

    def layer_terms(self, params, layer: Layer) -> Terms:
        q, k, sizes = layer.q, layer.k, layer.sizes
        assert q is not None
        assert k is not None
        require(
            isinstance(layer.state, tuple) or layer.kept is None,
            f"{self.kind}: with a cache, an initial state is a pair, of the new tokens and of all "
            "keys",
        )
        state, keys = layer.state if isinstance(layer.state, tuple) else (layer.state,) * 2

        def rotated(vectors: Array, state: Array, like: Array) -> Array:
            time = align_state(state).shape[-3]
            shape = (*like.shape[:-3], time, *like.shape[-2:])
            found = rotate(jnp.broadcast_to(vectors.astype(q.dtype), shape), state)
            found = jnp.repeat(found, sizes.num_heads // found.shape[-2], axis=-2)
            return found.reshape(-1, time, *q.shape[-2:]).swapaxes(1, 2)

        q0 = rotated(params["q0"], state, q)
        k0 = rotated(params["k0"], keys, k)

        def logits_fn(logits: Array, rows: AttentionRows) -> Array:
            places = jnp.einsum(
                "bhqd,bhkd->bhqk",
                q0[:, :, rows.queries],
                k0[:, :, : logits.shape[-1]],
                preferred_element_type=logits.dtype,
            )
            return logits * (places * sizes.head_dim**-0.5)

        return Terms(logits_fn=logits_fn)
