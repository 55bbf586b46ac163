"""Forgetting attention: a gate of each token lets everything before it fade."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.core.checks import choose, require
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Param
from tape_jax._src.positions.some_heads import SomeHeads

GATES = ("full", "bias_only", "fixed")


@dataclasses.dataclass(frozen=True)
class Fox(SomeHeads):
    """Forgetting Transformer (Lin et al. 2025, section 3): ``F_i - F_j`` is added to the logits.

    ``F_t`` is the sum of ``log f_s`` over ``s <= t``, with forget gates ``f = sigmoid(x W + b)`` of
    what enters the layer, one for each query head.

    Attributes:
      gate: ``full``; ``bias_only``: gates that do not depend on the content, ``sigmoid(b)``;
        ``fixed``: such that nothing is learned, decays by ``1 / e`` in ``shortest`` to ``longest``
        tokens, spaced logarithmically over the heads.
      bias: what ``b`` starts at; the larger, the less is forgotten.
      shortest, longest: of ``fixed``, in tokens.
      scaled: the decay is divided by ``sqrt(head_dim)``, as the published code of PaTH with a
        forget gate has it.
      on_heads: how many query heads, the first ones, forget; None: all.

    Raises:
      ValueError: for options out of range; where tokens see later ones, which are not forgotten.
    """

    kind: ClassVar[str] = "fox"
    acts_on: ClassVar[tuple[str, ...]] = ("decay",)
    reads_positions: ClassVar[bool] = False

    gate: str = "full"
    bias: float = 0.0
    shortest: float = 2.0
    longest: float = 4096.0
    scaled: bool = False

    def __post_init__(self):
        choose("fox gate", self.gate, GATES)
        require(
            0 < self.shortest <= self.longest,
            f"fox: expected 0 < shortest <= longest; got {self.shortest} and {self.longest}",
        )

    def head_params(self, sizes: Sizes):
        if self.gate == "fixed":
            return {}
        heads = sizes.num_heads
        constant = jax.nn.initializers.constant(self.bias)
        params = {"forget_bias": Param((heads,), constant, ("heads",))}
        if self.gate == "full":
            normal = jax.nn.initializers.normal(0.02)
            shape = (sizes.hidden_size, heads)
            params["forget_kernel"] = Param(shape, normal, ("embed", "heads"))
        return params

    def log_gates(self, params, layer: Layer) -> jax.Array:
        """``log f [..., T, H]``, in at least float32."""
        shape = (*layer.x.shape[:-1], layer.sizes.num_heads)
        if self.gate == "fixed":
            tokens = np.geomspace(self.shortest, self.longest, shape[-1])
            return jnp.broadcast_to(jnp.asarray(-1 / tokens, layer.dtype), shape)
        logits = params["forget_bias"].astype(layer.dtype)
        if self.gate == "full":
            logits = logits + layer.product(params["forget_kernel"])
        return jnp.broadcast_to(jax.nn.log_sigmoid(logits), shape)

    def head_terms(self, params, layer: Layer) -> Terms:
        layer.require_causal(self.kind, "what comes after a token would be favoured, not forgotten")
        log_gates = self.log_gates(params, layer)
        if self.scaled:
            log_gates = log_gates * layer.sizes.head_dim**-0.5
        total = layer.running_sum("log_decay", log_gates)
        decay = total, layer.of_all_keys("log_decay", total)
        return Terms(log_decay=decay, kept={"log_decay": total})
