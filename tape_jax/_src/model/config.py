"""Frozen, validated, hashable descriptions of what is computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tape_jax._src.core.checks import choose, positive, require, set_field, type_name


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are adapted to sequences longer than those trained on.

    Attributes:
      kind: ``none``; ``linear`` (positions divided by ``factor``); ``ntk`` (base multiplied by
        ``factor ** (D / (D - 2))``); ``dynamic`` (NTK with a factor that follows the sequence
        length); ``yarn`` (frequencies blended by wavelength, states scaled by a magnitude);
        ``llama3``.
      factor: ratio of the wanted length to the trained one.
      original_length: the trained length, in tokens (dynamic, yarn, llama3).
      beta_fast, beta_slow: yarn; rotations over ``original_length`` above which a frequency is
        kept, and below which it is fully interpolated.
      low_freq_factor, high_freq_factor: llama3; the corresponding bounds.
      magnitude: yarn; factor on the states. None: ``0.1 ln(factor) + 1``.
      truncate: yarn; round the blending range outwards to whole dimensions, as published.
    """

    kind: str = "none"
    factor: float = 1.0
    original_length: int = 2048
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    magnitude: float | None = None
    truncate: bool = True

    def __post_init__(self):
        choose("rope scaling", self.kind, ("none", "linear", "ntk", "dynamic", "yarn", "llama3"))
        require(self.factor > 0, f"rope scaling: factor must be positive; got {self.factor}")
        require(
            self.original_length > 0,
            f"rope scaling: original_length must be positive; got {self.original_length}",
        )
        require(
            self.high_freq_factor > self.low_freq_factor,
            f"rope scaling: high_freq_factor {self.high_freq_factor} must exceed "
            f"low_freq_factor {self.low_freq_factor}",
        )

    @property
    def state_magnitude(self) -> float:
        """Factor on the start state: ``magnitude`` or ``0.1 ln(factor) + 1`` for yarn, else 1."""
        if self.kind != "yarn":
            return 1.0
        if self.magnitude is not None:
            return self.magnitude
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class RandomPositions:
    """Positions drawn in training, for every encoding that reads positions.

    So angles, distances and rows of tables are trained that sequences of the trained length do not
    have. Drawn is where the model has a random stream ``"positions"``, as in training, or its cache
    a key; without it, as in evaluation, positions are what they are. One draw serves every layer,
    head and row of a call.

    Attributes:
      kind: ``spaced``: the i-th position is the i-th of a random subset of ``0 .. range - 1``, in
        order (Ruoss et al. 2023); ``stretched``: all positions times one number from 1 to ``range /
        length``, whose logarithm is uniform, not for ``learned`` and ``t5``, which look whole
        positions up; ``shifted``: one number from ``0 .. range - length`` added to all, random
        starts, which only encodings of absolute positions notice.
      range: drawn positions lie below it.
    """

    kind: str = "spaced"
    range: int = 2048

    def __post_init__(self):
        choose("random positions", self.kind, ("spaced", "stretched", "shifted"))
        set_field(self, "range", positive("random_positions: range", self.range))
        require(
            self.range < 2**31,
            f"random_positions: range must be less than 2^31; got {self.range}",
        )


MLP_PROJECTIONS = ("gate", "up", "down")
PROJECTIONS = ("q", "k", "v", "out", *MLP_PROJECTIONS)


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adaptation (Hu et al. 2021): ``x W`` becomes ``x W + (alpha / rank) (x A) B``.

    Attributes:
      rank: columns of ``A`` and rows of ``B``.
      alpha: scale of the low-rank term, divided by ``rank``.
      targets: the projections of a block that have the term: ``q``, ``k``, ``v`` and ``out`` of
        the attention, ``gate``, ``up`` and ``down`` of the MLP.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q", "k", "v", "out")

    def __post_init__(self):
        set_field(self, "rank", positive("lora: rank", self.rank))
        if isinstance(self.targets, list):
            set_field(self, "targets", tuple(self.targets))
        require(
            isinstance(self.targets, tuple) and bool(self.targets),
            f"lora: targets must be a tuple of names of projections; got {self.targets!r}",
        )
        for name in self.targets:
            choose("lora target", name, PROJECTIONS)

    @property
    def scale(self) -> float:
        """Factor on the low-rank term."""
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of each block's MLP; see ``experts``.

    Attributes:
      count: experts of a layer, each as wide as the MLP would be.
      per_token: how many a token takes.
      balance: weight of each layer's balance loss in training (Fedus et al. 2021, equation 4).
      z: weight of each layer's router z-loss in training (Zoph et al. 2022, equation 5).
      normalize: whether the weights of a token's experts sum to one, as in Mixtral; if not they are
        the router's probabilities.
    """

    count: int
    per_token: int = 2
    balance: float = 0.01
    z: float = 0.0
    normalize: bool = True

    def __post_init__(self):
        for name in ("count", "per_token"):
            set_field(self, name, positive(f"experts: {name}", getattr(self, name)))
        require(
            self.per_token <= self.count,
            f"experts: per_token = {self.per_token} exceeds count = {self.count}",
        )
        require(
            self.per_token > 1 or not self.normalize,
            "experts: with per_token = 1 a normalised weight is always 1, from which the router "
            "learns nothing; give normalize=False",
        )
        for name in ("balance", "z"):
            value = getattr(self, name)
            require(value >= 0, f"experts: {name} must not be negative; got {value!r}")


def kinds_by_pairs(encoding: Any) -> list[str]:
    """Those of an encoding whose causal attention is more than states and decays."""
    members = getattr(encoding, "encodings", (encoding,))
    own = {"logits", "weights"}
    return [x.kind for x in members if own & {*x.acts_on} or tuple(x.acts_on) == ("bias",)]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama-style decoder.

    Fields are kept in one form, so that equal descriptions are equal: integers of numpy as ``int``,
    types by their names, encodings as values, sequences as tuples.

    Attributes:
      vocab_size: number of token ids.
      hidden_size: width of the residual stream.
      num_layers: number of blocks.
      num_heads: query heads.
      num_kv_heads: key/value heads, a divisor of ``num_heads``; None: ``num_heads``.
      head_dim: numbers per head, even; None: ``hidden_size // num_heads``.
      intermediate_size: width of the gated MLP; None: ``4 * hidden_size``.
      position: the position encoding: a name in ``tape_jax.positions.registry``, an encoding such
        as ``tape_jax.positions.Tape(norm="rms")``, or a mapping with the name, ``kind``, and
        options.
      random_positions: positions drawn in training in place of the given ones, or None.
      norm_eps: epsilon of every RMSNorm.
      tie_embeddings: the output projection is the transposed embedding.
      max_length: longest sequence that the model accepts, in tokens; None: no limit of its own.
      dtype: compute type; parameters are kept in ``param_dtype``, position states in
        ``state_dtype`` (None: at least float32). float64 needs ``jax_enable_x64`` where the model
        is used.
      attention_implementation: as ``implementation`` of :func:`tape_jax.attention`: a name, names
        in order of preference, or None for the fastest that can.
      update_implementation: as ``implementation`` of :func:`tape_jax.update_state`, for position
        encodings that have several.
      local_window_size: width of a sliding window in tokens, or None.
      remat: what the backward pass recomputes: ``none``; ``dots``: all but matrix products;
        ``full``: all but what enters each layer; ``groups``: all but what enters every few layers,
        which runs layers forward a third time, and needs ``scan_layers`` and no ``experts``.
      scan_layers: compile each run of like layers once, as a scan.
      init_scale: standard deviation of the initial projections (residual output projections are
        divided by ``sqrt(2 * num_layers)``); None: ``fan_in ** -0.5``.
      lora: low-rank terms of projections, or None.
      experts: a mixture of experts in place of the MLP, or None.
      shifted_groups: for training on long sequences, attention inside this many groups of the
        sequence, shifted by half a group in half of the heads (see
        ``layers.shifted_group_attention``); None: full attention.
    """

    vocab_size: int
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    position: Any = "tape"
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    max_length: int | None = None
    dtype: str = "float32"
    param_dtype: str = "float32"
    state_dtype: str | None = None
    attention_implementation: str | tuple[str, ...] | None = None
    update_implementation: str | tuple[str, ...] | None = None
    local_window_size: int | None = None
    remat: str = "none"
    scan_layers: bool = True
    init_scale: float | None = None
    lora: Lora | None = None
    shifted_groups: int | None = None
    experts: Experts | None = None
    random_positions: RandomPositions | None = None

    def __post_init__(self):
        # Encodings and implementations say of themselves what they are called, and build on this
        # file: it cannot import them before they have imported it.
        from tape_jax._src.attention import BACKENDS
        from tape_jax._src.positions import create

        set_field(self, "position", create(self.position))
        known = {
            "attention_implementation": BACKENDS,
            "update_implementation": self.position.update_implementations,
        }
        for field, implementations in known.items():
            names = getattr(self, field)
            if names is not None and not isinstance(names, str):
                require(
                    isinstance(names, Sequence) and len(names) > 0,
                    f"model: {field} must be a name, names or None; got {names!r}",
                )
                set_field(self, field, tuple(names))
            require(
                names is None or len(implementations) > 0,
                f"model: {field} = {names!r}, but position encoding {self.position.kind!r} has no "
                "implementations to choose from",
            )
            for name in (names,) if isinstance(names, str) else names or ():
                choose(field.replace("_", " "), name, implementations)
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads"):
            set_field(self, name, positive(f"model: {name}", getattr(self, name)))
        optional = (
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_length",
            "local_window_size",
        )
        for name in (*optional, "shifted_groups"):
            set_field(self, name, positive(f"model: {name}", getattr(self, name), optional=True))
        require(
            self.num_heads % self.kv_heads == 0,
            f"model: num_heads = {self.num_heads} is not a multiple of num_kv_heads = "
            f"{self.kv_heads}",
        )
        require(
            self.head_dim is not None or self.hidden_size % self.num_heads == 0,
            f"model: hidden_size = {self.hidden_size} is not a multiple of num_heads = "
            f"{self.num_heads}; give head_dim",
        )
        require(self.dim % 2 == 0, f"model: the head dimension must be even; got {self.dim}")
        require(
            self.shifted_groups is None or self.kv_heads % 2 == 0,
            f"model: shifted_groups halves the heads, so their number must be even; got "
            f"{self.kv_heads} key/value heads",
        )
        by_pairs = kinds_by_pairs(self.position)
        require(
            self.shifted_groups is None or not by_pairs,
            f"model: shifted_groups = {self.shifted_groups} cuts sequences up, which "
            f"{' and '.join(map(repr, by_pairs))} cannot take: pairs of tokens are looked at",
        )
        require(
            self.lora is None or isinstance(self.lora, Lora),
            f"model: lora must be a Lora or None; got {self.lora!r}",
        )
        require(
            self.experts is None or isinstance(self.experts, Experts),
            f"model: experts must be an Experts or None; got {self.experts!r}",
        )
        draw, limit = self.random_positions, self.position.max_length()
        require(
            draw is None or isinstance(draw, RandomPositions),
            f"model: random_positions must be a RandomPositions or None; got {draw!r}",
        )
        require(
            draw is None or self.position.reads_positions,
            f"model: random_positions are for an encoding that reads positions, which "
            f"{self.position.kind!r} does not; got {draw!r}",
        )
        require(
            draw is None or self.position.coordinate_axes == 1,
            f"model: random_positions are for one position a token; {self.position.kind!r} has "
            f"axes = {self.position.coordinate_axes}",
        )
        require(
            draw is None or limit is None or draw.range <= limit,
            f"model: random_positions.range = {draw and draw.range} exceeds what the encoding "
            f"{self.position.kind!r} takes, {limit} positions",
        )
        targets = set(self.lora.targets if self.lora and self.experts else ())
        require(
            targets.isdisjoint(MLP_PROJECTIONS),
            "model: low-rank terms are for projections that all tokens share, not for those of "
            f"experts; got lora.targets = {self.lora and self.lora.targets}",
        )
        computed = ("float32", "bfloat16", "float16", "float64")
        allowed = {
            "dtype": computed,
            "param_dtype": computed,
            "state_dtype": (None, "float32", "bfloat16", "float64"),
        }
        for field, types in allowed.items():
            set_field(self, field, type_name(f"model {field}", getattr(self, field), types))
        choose("remat policy", self.remat, ("none", "dots", "full", "groups"))
        require(
            self.remat != "groups" or (self.scan_layers and self.experts is None),
            "remat='groups' needs scan_layers=True and experts=None; got "
            f"scan_layers={self.scan_layers}, experts={self.experts}",
        )
        self.position.check(self)

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def dim(self) -> int:
        """Head dimension."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def mlp_size(self) -> int:
        """Width of the gated MLP."""
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def embedding_std(self) -> float:
        """Standard deviation of initial embeddings."""
        return self.hidden_size**-0.5 if self.init_scale is None else self.init_scale
