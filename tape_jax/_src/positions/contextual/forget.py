"""Forget gates: one per token (FoX, CABLE), or per pair of a query and a token."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.core.checks import choose, positive, require, set_field
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.contextual import rows as by_rows
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Encoding, Param
from tape_jax._src.positions.some_heads import SomeHeads

GATES = ("full", "bias_only", "fixed")
# Why they need the causal rule.
FAVOURED = "what comes after a token would be favoured, not forgotten"


@dataclasses.dataclass(frozen=True)
class Fox(SomeHeads):
    """Forgetting Transformer (Lin et al. 2025, section 3): ``F_i - F_j`` is added to the logits.

    ``F_t`` is the sum of ``log f_s`` over ``s <= t``, with forget gates ``f = sigmoid(x W + b)`` of
    the layer's input, one for each query head.

    Attributes:
      gate: ``full``; ``bias_only``: gates that do not depend on the content, ``sigmoid(b)``;
        ``fixed``: gates that are not learned, decays by ``1 / e`` in ``shortest`` to ``longest``
        tokens, spaced logarithmically over the heads.
      bias: initial ``b``; the larger, the less is forgotten.
      shortest, longest: of ``fixed``, in tokens.
      scaled: the decay is divided by ``sqrt(head_dim)``, as in the published code of PaTH with a
        forget gate.
      on_heads: number of query heads, the first ones, that forget; None: all.

    Raises:
      ValueError: for options out of range; if tokens see later ones, which are not forgotten.
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
        log_gates = self.log_gates(params, layer)
        if self.scaled:
            log_gates = log_gates * layer.sizes.head_dim**-0.5
        return _forgetting(self.kind, layer, log_gates)


@dataclasses.dataclass(frozen=True)
class Cable(Encoding):
    """CABLE (Veisi et al. 2025): ``q_i . k_j - sum_{j < l <= i} softplus(x_l W + b)``.

    FoX's decay, one for each query head, but on logits that are not divided by ``sqrt(D)``, as in
    the published code.

    Attributes:
      bias: initial ``b``; the larger, the more is forgotten.

    Raises:
      ValueError: if tokens see later ones, which are not forgotten.
    """

    kind: ClassVar[str] = "cable"
    acts_on: ClassVar[tuple[str, ...]] = ("scale", "decay")
    reads_positions: ClassVar[bool] = False

    bias: float = 0.0

    def logits_scale(self, sizes: Sizes) -> float:
        return 1.0

    def layer_params(self, sizes: Sizes, *, updates: bool):
        heads = sizes.num_heads
        normal, constant = jax.nn.initializers.normal(0.02), jax.nn.initializers.constant(self.bias)
        return {
            "decay_kernel": Param((sizes.hidden_size, heads), normal, ("embed", "heads")),
            "decay_bias": Param((heads,), constant, ("heads",)),
        }

    def decays(self, params, layer: Layer) -> jax.Array:
        """``softplus(x W + b) [..., T, H]``, in at least float32."""
        logits = layer.product(params["decay_kernel"])
        return jax.nn.softplus(logits + params["decay_bias"].astype(logits.dtype))

    def layer_terms(self, params, layer: Layer) -> Terms:
        return _forgetting(self.kind, layer, -self.decays(params, layer))


def _forgetting(kind: str, layer: Layer, log_gates: jax.Array) -> Terms:
    """Returns the decay for logarithms of gates ``[..., T, H]``."""
    layer.require_causal(kind, FAVOURED)
    total = layer.running_sum("log_decay", log_gates)
    decay = total, layer.of_all_keys("log_decay", total)
    return Terms(log_decay=decay, kept={"log_decay": total})


@dataclasses.dataclass(frozen=True)
class DdaPerRow(Encoding):
    """Data-dependent ALiBi of each row: every query has gates of its own for the keys before it.

    From x-transformers (``PerRowDataDependentAlibi``): ``sum_{j <= l < i} post_log_scale * log
    sigmoid(a_i . c_l / sqrt(width))`` is added to the logit of query ``i`` and key ``j``, over the
    keys ``l`` that the query sees. ``a`` and ``c`` are projections of the layer's input, for each
    query head. The key's own gate counts and the query's does not; FoX does the opposite.

    Attributes:
      width: numbers of ``a`` and ``c`` in each head.
      post_log_scale: factor on the logarithms.

    Raises:
      ValueError: for options out of range; if tokens see later ones, which are not forgotten.
    """

    kind: ClassVar[str] = "dda_per_row"
    acts_on: ClassVar[tuple[str, ...]] = ("logits",)
    reads_positions: ClassVar[bool] = False

    width: int = 8
    post_log_scale: float = 1.0

    def __post_init__(self):
        set_field(self, "width", positive("dda_per_row: width", self.width))
        require(
            self.post_log_scale > 0,
            f"dda_per_row: post_log_scale must be positive; got {self.post_log_scale}",
        )

    def layer_params(self, sizes: Sizes, *, updates: bool):
        # Uniform in +- 1 / sqrt(fan_in), as in torch.
        uniform = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        kernel = Param(
            (sizes.hidden_size, sizes.num_heads * self.width), uniform, ("embed", "heads")
        )
        return {"query_gate_kernel": kernel, "key_gate_kernel": kernel}

    def layer_terms(self, params, layer: Layer) -> Terms:
        layer.require_causal(self.kind, FAVOURED)

        def projected(name: str) -> jax.Array:
            flat = layer.product(params[name])
            return flat.reshape(*flat.shape[:-1], layer.sizes.num_heads, self.width)

        own, gates = projected("query_gate_kernel"), projected("key_gate_kernel")
        keys = layer.of_all_keys("gate", gates).astype(own.dtype)

        def logits_fn(logits: jax.Array, rows: Any) -> jax.Array:
            sides = by_rows.of_queries(own, rows), by_rows.of_keys(keys, rows)
            along = by_rows.products(*sides, own.dtype) * self.width**-0.5
            steps = self.post_log_scale * jax.nn.log_sigmoid(along)
            steps = jnp.where(by_rows.before(rows), steps, 0)
            return logits + by_rows.sums_from(steps).astype(logits.dtype)

        return Terms(logits_fn=logits_fn, kept={"gate": gates})
