"""RePo: RoPE at positions that each token chooses."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from tape_jax._src.core.checks import choose, not_negative, positive, require, set_field
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.fixed.frequencies import frequencies
from tape_jax._src.positions.fixed.rope import Rope
from tape_jax._src.positions.fixed.rotary import content_state
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Encoding, Param, State

FORMS = ("swiglu", "linear")


@dataclasses.dataclass(frozen=True)
class Repo(Encoding):
    """RePo (Li et al. 2025, arXiv:2512.14391): RoPE at real positions made from the content.

    Context re-positioning: for each key/value head, the position of a token is ``(silu(x W_gate) *
    (x W_content)) W`` of the layer's input; it involves neither sums over tokens nor their order.

    Attributes:
      form: ``swiglu``, as above; ``linear``: ``x W``; in the published code
        ``swigluex_multihead`` and ``multihead_continuous``.
      width: of the gated layer; None: an eighth of the hidden size.
      base: the rotary base.
      first_layer: first layer to choose positions; earlier ones have ordinary RoPE of the same
        base. The published model leaves the first 5 of its 16 layers to RoPE.

    Raises:
      ValueError: for options out of range; if no layer would choose positions; without a width for
        a hidden size below 8.
    """

    kind: ClassVar[str] = "repo"
    acts_on: ClassVar[tuple[str, ...]] = ("state",)

    form: str = "swiglu"
    width: int | None = None
    base: float = 500_000.0
    first_layer: int = 0

    def __post_init__(self):
        choose("repo form", self.form, FORMS)
        set_field(self, "width", positive("repo: width", self.width, optional=True))
        require(self.base > 1, f"repo: the rotary base must exceed 1; got {self.base}")
        set_field(self, "first_layer", not_negative("repo: first_layer", self.first_layer))

    @property
    def reads_positions(self) -> bool:
        return self.first_layer > 0

    @property
    def reads_start(self) -> bool:
        return self.first_layer > 0

    def check(self, sizes: Sizes) -> None:
        require(
            self.first_layer < sizes.num_layers,
            f"repo: no layer would choose positions: first_layer = {self.first_layer} of "
            f"{sizes.num_layers} layers",
        )
        require(
            self.form == "linear" or self.width is not None or sizes.hidden_size >= 8,
            f"repo: an eighth of the hidden size {sizes.hidden_size} is nothing: give width",
        )

    def layer_params(self, sizes: Sizes, *, updates: bool):
        if self.first_layer > 0 and not updates:
            return {}
        init = jax.nn.initializers.truncated_normal(0.02, lower=-3.0, upper=3.0)
        hidden, heads = sizes.hidden_size, sizes.num_kv_heads
        if self.form == "linear":
            return {"place_kernel": Param((hidden, heads), init, ("embed", "kv_heads"))}
        width = self.width or hidden // 8
        return {
            "place_gate": Param((hidden, width), init, ("embed", None)),
            "place_content": Param((hidden, width), init, ("embed", None)),
            "place_kernel": Param((width, heads), init, (None, "kv_heads")),
        }

    def start(self, positions, sizes, *, key=None, length=None, dtype=jnp.float32, params=None):
        if self.first_layer == 0:
            return None
        rope = Rope(base=self.base)
        return rope.start(positions, sizes, key=key, length=length, dtype=dtype)

    def carry(self, state: State, shape: tuple[int, ...], sizes: Sizes) -> State:
        # Layers that choose positions do not read it.
        return None

    def rotation(self, state: State):
        return state, state

    def updates(self, layer: int, num_layers: int) -> bool:
        return 0 < self.first_layer <= layer

    def places(self, params, layer: Layer) -> jax.Array:
        """The positions that the new tokens choose, ``[..., T, H_kv]``."""
        if self.form == "linear":
            return layer.product(params["place_kernel"])
        gate = jax.nn.silu(layer.product(params["place_gate"]))
        content = layer.product(params["place_content"])
        return layer.product(params["place_kernel"], gate * content)

    def layer_terms(self, params, layer: Layer) -> Terms:
        if not params:
            return Terms()
        places = self.places(params, layer)
        turns = jnp.asarray(frequencies(layer.sizes.head_dim, self.base), layer.dtype)
        return Terms(state=content_state(places[..., None] * turns))
