"""The arithmetic of a call or a training step, and the peak rates of chips."""

from __future__ import annotations

import dataclasses
import math

from flax.traverse_util import flatten_dict

from tape_jax import ModelConfig, Transformer
from tape_jax.positions import Encoding
from train.experiment import Experiment
from train.training import runs

GB = 10**9


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator.

    Attributes:
      name: for people.
      kind: start of jax's ``device_kind``.
      operations: dense bfloat16 operations per second; a multiplication and an addition are two.
      memory: size, in bytes.
      bandwidth: of the memory, in bytes per second.
      link: bytes per second that it can send over all its links to chips nearby, one way.
      network: its share of what its host can send to other hosts, in bytes per second, one way.
      host: chips of a host.
    """

    name: str
    kind: str
    operations: float
    memory: int
    bandwidth: float
    link: float
    network: float
    host: int


# Links join the TPUs of a slice across hosts, so `network` is between slices.
CHIPS = {
    "v4": Chip("TPU v4", "TPU v4", 275e12, 32 * GB, 1228e9, 300e9, 6.25e9, 4),
    "v5e": Chip("TPU v5e", "TPU v5 lite", 197e12, 16 * GB, 819e9, 200e9, 3.125e9, 8),
    "v5p": Chip("TPU v5p", "TPU v5", 459e12, 95 * GB, 2765e9, 600e9, 6.25e9, 4),
    "v6e": Chip("TPU v6e", "TPU v6 lite", 918e12, 32 * GB, 1600e9, 400e9, 12.5e9, 8),
    "a100": Chip(
        "NVIDIA A100 80GB", "NVIDIA A100", 312e12, 80 * GB, 2039e9, 300e9, 25e9, 8
    ),
    "h100": Chip(
        "NVIDIA H100 80GB", "NVIDIA H100 80GB HBM3", 989.4e12, 80 * GB, 3352e9, 450e9, 50e9, 8
    ),
    "h200": Chip("NVIDIA H200", "NVIDIA H200", 989.4e12, 141 * GB, 4800e9, 450e9, 50e9, 8),
}  # fmt: skip


def find_chip(device_kind: str) -> Chip | None:
    """Finds the chip that jax calls ``device_kind``; None if it is unknown.

    >>> find_chip("TPU v5 lite").name
    'TPU v5e'
    """
    found = [chip for chip in CHIPS.values() if device_kind.startswith(chip.kind)]
    return max(found, key=lambda chip: len(chip.kind), default=None)


# Of an MLP, or of an expert.
MLP_PROJECTIONS = ("gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class Products:
    """Products of attention, in units of queries x keys x head dimension.

    Attributes:
      forward: of the forward pass.
      backward: of a backward pass in one kernel, which computes the logits once more.
    """

    forward: int
    backward: int

    @property
    def both(self) -> int:
        """The products of the forward and the backward pass."""
        return self.forward + self.backward


PLAIN = Products(2, 5)  # values alone: RoPE
STATE = Products(3, 7)  # values and states by one set of probabilities, the form of this library
TWO_CALLS = Products(4, 10)  # values and states by two attentions
THREE_CALLS = Products(6, 15)  # values, cosines and sines in full width: the published code


def peak(device_kind: str, dtype: str) -> float | None:
    """Returns the peak operations per second of a chip; None if it is unknown."""
    chip = find_chip(device_kind)
    return chip.operations if chip and dtype == "bfloat16" else None


Window = int | tuple[int, int] | None


def visible_pairs(
    length: int, *, is_causal: bool = True, local_window_size: Window = None
) -> float:
    """Counts pairs of a query and a visible key; the causal rule leaves half.

    Pairs on the edge count half, so that a window as long as the sequence changes nothing.
    """
    window = local_window_size
    left, right = window if isinstance(window, tuple) else (window, window)

    def half(side: int | None) -> float:
        """Pairs before, or behind, a query's own place."""
        outside = 0 if side is None else max(0, length - side - 1)
        return (length**2 - outside**2) / 2

    return half(left) + (0 if is_causal else half(right))


def attention_flops(
    products: int, length: int, *, batch: int, heads: int, head_dim: int, is_causal: bool = True,
    local_window_size: Window = None,
) -> float:  # fmt: skip
    """Operations (a multiplication and an addition are two) of a number of products.

    >>> attention_flops(PLAIN.forward, 2, batch=1, heads=1, head_dim=4)
    32.0
    """
    pairs = visible_pairs(length, is_causal=is_causal, local_window_size=local_window_size)
    return 2 * products * pairs * head_dim * heads * batch


def model_flops(config: ModelConfig, batch: int, length: int) -> float:
    """Operations of a training step: three times those of the forward pass's matrix products.

    The count leaves out recomputation in the backward pass, norms, activations, rotations and the
    look-up of embeddings (the convention of PaLM, appendix B, with causal pairs halved). It also
    leaves out experts that a token does not take.
    """
    c, kinds = config, Transformer(config).encoding.of_layers(config.num_layers)
    per_token = c.hidden_size * c.vocab_size
    attention = 0.0
    for encoding, _, updates in kinds:
        projected = c.num_heads + 2 * c.kv_heads + c.attention_heads
        per_token += c.hidden_size * c.dim * projected
        per_token += _mlp_products(config)
        if updates:
            per_token += _update_products(config, encoding)
        attends = updates and encoding.attends_state
        attention += attention_flops(
            (STATE if attends else PLAIN).forward,
            length,
            batch=batch,
            heads=c.attention_heads,
            head_dim=c.dim,
            local_window_size=c.window_of(encoding),
        )
    return 3 * (2 * per_token * batch * length + attention)


def _mlp_products(config: ModelConfig) -> int:
    """Multiplications of one token's MLP, or of its experts and the router."""
    mlp, experts = 3 * config.hidden_size * config.mlp_size, config.experts
    if experts is None:
        return mlp
    return experts.per_token * mlp + config.hidden_size * experts.count


def _update_products(config: ModelConfig, encoding: Encoding) -> int:
    """Multiplications of one token's position update in the rotary form, without scales."""
    params = encoding.layer_params(config.sizes, updates=True)
    over_heads = (params[name].shape for name in ("mix", "origin", "target") if name in params)
    mixing = sum(math.prod(shape) * config.dim for shape in over_heads if len(shape) == 2)
    if "wx" not in params:
        return mixing
    hidden, width = params["wx"].shape
    heads = config.kv_heads
    return mixing + hidden * width + width * heads**2 + heads**2 * config.dim


def step_flops(experiment: Experiment) -> float:
    """Operations of a step, without gradients of frozen kernels.

    They are those of :func:`model_flops`. The low-rank terms of adapters are not counted.
    """
    rows, length = experiment.batch_shape
    count = model_flops(experiment.model, rows, length)
    frozen = flatten_dict(runs.abstract_params(experiment)[1] or {})
    kernels = {p: x for p, x in frozen.items() if x is not None and p[-1] == "kernel"}
    tokens, experts = rows * length, experiment.model.experts

    def share(path: tuple[str, ...]) -> float:
        """Returns the share of a kernel's entries that a token meets."""
        return experts.per_token / experts.count if experts and path[-2] in MLP_PROJECTIONS else 1.0

    return count - sum(2.0 * tokens * share(p) * math.prod(x.shape) for p, x in kernels.items())
