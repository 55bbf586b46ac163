"""Frozen, validated, hashable configurations of models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tape_jax._src.attention import BACKENDS
from tape_jax._src.core.algebra import at_least_float32
from tape_jax._src.core.checks import (
    FLOATS,
    check_fields,
    choose,
    from_mapping,
    number,
    positive,
    real,
    require,
    set_field,
    truth,
    type_name,
    window,
)
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.drawing import RandomPositions
from tape_jax._src.positions.fixed.window import narrower
from tape_jax._src.positions.protocol import Encoding, OfLayer
from tape_jax._src.positions.schedule import create

MLP_PROJECTIONS = ("gate", "up", "down")
PROJECTIONS = ("q", "k", "v", "out", *MLP_PROJECTIONS)
# Of the MLP's gate; ``gelu`` is jax.nn's, by tanh.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}
# Names of the norms before and behind attention and MLP, after ``attention_`` and ``mlp_``.
NORMS = {"before": ("norm", None), "after": (None, "norm"), "both": ("norm", "out_norm")}


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
        set_field(self, "alpha", real("lora: alpha", self.alpha))
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

    JAX cannot take its products through :func:`jax.vmap`: give the model a batch, or use
    :func:`jax.lax.map`.

    Attributes:
      count: number of experts per layer, each as wide as the MLP would be.
      per_token: number of experts per token.
      balance: weight of each layer's balance loss in training (Fedus et al. 2021, equation 4).
      z: weight of each layer's router z-loss in training (Zoph et al. 2022, equation 5).
      normalize: whether the weights of a token's experts sum to one, as in Mixtral; otherwise they
        are the router's probabilities.
    """

    count: int
    per_token: int = 2
    balance: float = 0.01
    z: float = 0.0
    normalize: bool = True

    def __post_init__(self):
        check_fields(self, "experts: ")
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


def kinds_by_pairs(encoding: Encoding) -> list[str]:
    """Returns the kinds of members whose causal attention is more than states and decays."""
    members, own = encoding.members, {"logits", "weights"}
    return [x.kind for x in members if own & {*x.acts_on} or tuple(x.acts_on) == ("bias",)]


class LayerStack(NamedTuple):
    """Like layers with stacked parameters, or one layer.

    Attributes:
      layers: their numbers.
      like: each layer's part of the model's encoding.
    """

    layers: range
    like: OfLayer

    @property
    def name(self) -> str:
        """The name of their parameters: ``layers_<first>``."""
        return f"layers_{self.layers[0]}"


def loops(kinds: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Splits ``kinds`` into runs of equal neighbours, or of a pattern that repeats: one scan each.

    Returns:
      The first index of each run, the length of its pattern, and how often that repeats.
    """
    found, first = [], 0
    while first < len(kinds):
        period, times = 1, 1
        for length in range(1, (len(kinds) - first) // 2 + 1):
            pattern, count = kinds[first : first + length], 1
            while kinds[first + length * count :][:length] == pattern:
                count += 1
            if count > 1 and length * count > period * times:
                period, times = length, count
        found.append((first, period, times))
        first += period * times
    return found


def _names(what: str, names: Any) -> str | tuple[str, ...] | None:
    """A name, names as a tuple, or None; ValueError if it is none of these."""
    if names is None or isinstance(names, str):
        return names
    require(
        isinstance(names, Sequence) and len(names) > 0,
        f"{what} must be a name, names or None; got {names!r}",
    )
    return tuple(names)


def _projections(what: str, names: Any) -> tuple[str, ...]:
    """Names of projections, each once, in the order of ``PROJECTIONS``."""
    require(
        isinstance(names, tuple | list),
        f"{what} must be a tuple of names of projections; got {names!r}",
    )
    for name in names:
        choose("projection with a bias", name, PROJECTIONS)
    return tuple(name for name in PROJECTIONS if name in names)


def _one_of_names(what: str, *allowed: Any) -> Callable[[str, Any], Any]:
    """A check that a value is one of these."""
    return lambda _, value: choose(what, value, allowed)


def _one_of(what: str, *allowed: Any) -> Callable[[str, Any], Any]:
    """A check that a value is one of these; types are given in any way that numpy knows."""
    return lambda _, value: type_name(what, value, allowed)


def _optional(cls: type) -> Callable[[str, Any], Any]:
    """A check that a value is an instance of a class, a mapping of its fields, or None."""

    def check(what: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return from_mapping(cls, dict(value), what=what)
        article = "an" if cls.__name__[0] in "AEIO" else "a"
        require(
            value is None or isinstance(value, cls),
            f"{what} must be {article} {cls.__name__} or None; got {value!r}",
        )
        return value

    return check


def _positive_number(what: str, value: Any, optional: bool = False) -> Any:
    value = number(what, value, optional=optional)
    require(value is None or value > 0, f"{what} must be positive; got {value!r}")
    return value


_or_none = functools.partial(positive, optional=True)
# Checks of the fields of ModelConfig, which also normalise them.
FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "position": lambda _, value: create(value),
    **dict.fromkeys(("vocab_size", "hidden_size", "num_layers", "num_heads"), positive),
    **dict.fromkeys(("num_kv_heads", "head_dim", "intermediate_size", "max_length"), _or_none),
    "local_window_size": window,
    "shifted_groups": _or_none,
    **dict.fromkeys(("attention_implementation", "update_implementation"), _names),
    **dict.fromkeys(
        ("tie_embeddings", "scan_layers", "zero_centered_norms", "parallel_block"), truth
    ),
    "norm_eps": number,
    "init_scale": functools.partial(number, optional=True),
    "dtype": _one_of("model dtype", *FLOATS),
    "param_dtype": _one_of("model param_dtype", *FLOATS),
    "state_dtype": _one_of("model state_dtype", None, "float32", "bfloat16", "float64"),
    "remat": _one_of_names("remat policy", "none", "dots", "full", "groups"),
    "lora": _optional(Lora),
    "experts": _optional(Experts),
    "random_positions": _optional(RandomPositions),
    "biases": _projections,
    "qk_norm": _one_of_names("qk_norm", None, "head", "full"),
    "norms": _one_of_names("norms", *NORMS),
    "norm": _one_of_names("norm", "rms", "layer"),
    "activation": _one_of_names("activation", *ACTIVATIONS),
    **dict.fromkeys(("embedding_scale", "residual_scale", "logits_scaling"), _positive_number),
    **dict.fromkeys(
        ("query_scale", "logit_softcap", "final_logit_softcap"),
        functools.partial(_positive_number, optional=True),
    ),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama-style decoder.

    Fields are kept in one form, so that equivalent configurations compare equal: numpy integers as
    ``int``, types by their names, encodings as values, sequences as tuples.

    Attributes:
      vocab_size: number of token ids.
      hidden_size: width of the residual stream.
      num_layers: number of blocks.
      num_heads: query heads.
      num_kv_heads: key/value heads, a divisor of ``num_heads``; None: ``num_heads``.
      head_dim: numbers per head, even; None: ``hidden_size // num_heads``.
      intermediate_size: width of the gated MLP; None: ``4 * hidden_size``.
      position: the position encoding: a name in ``tape_jax.positions.registry``, an encoding such
        as ``tape_jax.positions.Tape(norm="rms")``, or a mapping with ``kind``, the name, and
        options.
      random_positions: random positions that replace the given ones in training, or None.
      norm_eps: epsilon of every norm.
      tie_embeddings: the output projection is the transposed embedding.
      max_length: longest sequence that the model accepts, in tokens; None: no limit of its own.
      dtype: compute type; parameters are kept in ``param_dtype``, position states in
        ``state_dtype`` (None: at least float32). float64 needs ``jax_enable_x64`` where the model
        is used.
      attention_implementation: as ``implementation`` of :func:`tape_jax.attention`: a name, names
        in order of preference, or None for the fastest that supports the call.
      update_implementation: as ``implementation`` of :func:`tape_jax.update_state`, for position
        encodings that have several.
      local_window_size: as in ``jax.nn``: how many tokens a token sees before and behind its own,
        an integer or a pair ``(left, right)``; None: all. Beside a window of the encoding the
        narrower one holds. Only tokens of its own segment count, not
        padding; inside ``shifted_groups``, and on a mesh that splits sequences, all places do.
      remat: what the backward pass recomputes: ``none``; ``dots``: all except matrix products;
        ``full``: all except each layer's inputs; ``groups``: all except the inputs of every few
        layers, which runs layers forward a third time, and needs ``scan_layers`` and no
        ``experts``.
      scan_layers: compile each run of like layers once, as a scan.
      init_scale: standard deviation of the initial projections (residual output projections are
        divided by ``sqrt(2 * num_layers)``); None: ``fan_in ** -0.5``.
      lora: low-rank terms of projections, or None.
      experts: a mixture of experts in place of the MLP, or None.
      biases: projections with a bias, from the names that ``Lora.targets`` takes.
      qk_norm: ``head``: queries and keys are normalised head by head, before they are rotated, as
        in Qwen3; ``full``: over all heads at once, as in Olmo 2; None: not at all.
      norms: ``before``: the inputs of attention and MLP are normalised; ``after``: their outputs,
        as in Olmo 2; ``both``, as in Gemma 2.
      norm: ``rms``, or ``layer`` for a LayerNorm without bias, as in Cohere 2.
      zero_centered_norms: norms multiply by ``1 + scale``, as in Gemma.
      activation: of the MLP's gate, ``silu``, ``gelu`` (by tanh, as in ``jax.nn``), ``gelu_exact``
        or ``relu``.
      parallel_block: attention and MLP read the same normalised input and are added at once, as in
        Cohere 2; the MLP then has no norm.
      embedding_scale, residual_scale: factors on embeddings, and on what attention and MLP add to
        the residual stream, as in Granite.
      query_scale: factor on the logits of attention, for encodings without one of their own;
        None: ``head_dim ** -0.5``.
      logits_scaling: divisor of the model's logits.
      logit_softcap: bound of the logits of attention, as in :func:`tape_jax.attention`.
      final_logit_softcap: bound ``c`` of the model's logits, which become ``c tanh(logits / c)``,
        as in Gemma 2; None: none.
      shifted_groups: for training on long sequences, limits attention to this many groups of the
        sequence, shifted by half a group in half of the heads (LongLoRA); None: full attention.
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
    local_window_size: int | tuple[int, int] | None = None
    remat: str = "none"
    scan_layers: bool = True
    init_scale: float | None = None
    lora: Lora | None = None
    shifted_groups: int | None = None
    experts: Experts | None = None
    random_positions: RandomPositions | None = None
    biases: tuple[str, ...] = ()
    qk_norm: str | None = None
    norms: str = "before"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    query_scale: float | None = None
    logits_scaling: float = 1.0
    norm: str = "rms"
    zero_centered_norms: bool = False
    activation: str = "silu"
    parallel_block: bool = False
    logit_softcap: float | None = None
    final_logit_softcap: float | None = None

    def __post_init__(self):
        for name, check in FIELDS.items():
            set_field(self, name, check(f"model: {name}", getattr(self, name)))
        self._check_heads()
        self._check_scale()
        self._check_implementations()
        self._check_random_positions()
        self._check_mlp()
        self.position.check(self.sizes)

    def _check_heads(self) -> None:
        """Raises ValueError for numbers of heads that do not go together."""
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

    def _check_scale(self) -> None:
        """Raises ValueError for a scale or bound of logits that the encoding makes itself."""
        own = [x.kind for x in self.position.members if "scale" in x.acts_on]
        require(
            self.query_scale is None or not own,
            f"model: query_scale = {self.query_scale} is for encodings without a scale of their "
            f"own, which {' and '.join(map(repr, own))} has",
        )
        made = [
            x.kind for x in self.position.members if {"state", "scale", "logits"} <= {*x.acts_on}
        ]
        require(
            self.logit_softcap is None or not made,
            f"model: logit_softcap = {self.logit_softcap} bounds the products of queries and keys, "
            f"but {' and '.join(map(repr, made))} makes its logits by itself",
        )

    def _check_implementations(self) -> None:
        """Raises ValueError for a name that neither attention nor the encoding knows."""
        known = {
            "attention_implementation": tuple(BACKENDS),
            "update_implementation": self.position.update_implementations,
        }
        for field, implementations in known.items():
            names = getattr(self, field)
            require(
                names is None or len(implementations) > 0,
                f"model: {field} = {names!r}, but position encoding {self.position.kind!r} has no "
                "implementations to choose from",
            )
            for name in (names,) if isinstance(names, str) else names or ():
                choose(field.replace("_", " "), name, implementations)

    def _check_random_positions(self) -> None:
        """Raises ValueError for random positions that the encoding does not take."""
        draw, encoding = self.random_positions, self.position
        if draw is None:
            return
        kind, limit = encoding.kind, encoding.max_length()
        require(
            encoding.reads_positions,
            f"model: random_positions are for an encoding that reads positions, which {kind!r} "
            f"does not; got {draw!r}",
        )
        require(
            encoding.coordinate_axes == 1,
            f"model: random_positions are for one position a token; {kind!r} has axes = "
            f"{encoding.coordinate_axes}",
        )
        require(
            draw.kind in encoding.takes_drawn,
            f"model: {kind!r} takes random_positions of the kinds {encoding.takes_drawn}; got "
            f"{draw}",
        )
        require(
            limit is None or draw.range <= limit,
            f"model: random_positions.range = {draw.range} exceeds what the encoding {kind!r} "
            f"takes, {limit} positions",
        )

    def _check_mlp(self) -> None:
        """Raises ValueError if options of the MLP or the experts do not go together."""
        require(
            not self.parallel_block or self.norms == "before",
            f"model: parallel_block = True needs norms = 'before'; got norms = {self.norms!r}",
        )
        targets = set(self.lora.targets if self.lora and self.experts else ())
        require(
            targets.isdisjoint(MLP_PROJECTIONS),
            "model: low-rank terms are for projections that all tokens share, not for those of "
            f"experts; got lora.targets = {self.lora and self.lora.targets}",
        )
        require(
            self.experts is None or not {*self.biases} & {*MLP_PROJECTIONS},
            f"model: experts have no biases; got biases = {self.biases}",
        )
        require(
            self.remat != "groups" or (self.scan_layers and self.experts is None),
            "remat='groups' needs scan_layers=True and experts=None; got "
            f"scan_layers={self.scan_layers}, experts={self.experts}",
        )

    @property
    def loops(self) -> list[tuple[LayerStack, ...]]:
        """Layers as they are compiled: one loop for like layers or a repeating pattern."""
        kinds = self.position.of_layers(self.num_layers)
        found = [(i, 1, 1) for i in range(self.num_layers)]
        return [
            tuple(
                LayerStack(range(first + n, first + period * times, period), kinds[first + n])
                for n in range(period)
            )
            for first, period, times in (loops(kinds) if self.scan_layers else found)
        ]

    @property
    def blocks(self) -> list[LayerStack]:
        """The stacks of like layers; one for each layer if layers are not scanned."""
        return [blocks for loop in self.loops for blocks in loop]

    @property
    def has_window(self) -> bool:
        """True if some layer sees only nearby tokens."""
        return self.local_window_size is not None or "window" in self.position.acts_on

    @property
    def carried_dtype(self) -> jnp.dtype:
        """Type of the position states."""
        return jnp.dtype(self.state_dtype or at_least_float32(self.dtype))

    def window_of(self, encoding: Encoding) -> int | tuple[int, int] | None:
        """Returns the narrower of the model's and an encoding's window; None if neither has one."""
        return narrower(self.local_window_size, encoding.local_window_size)

    @property
    def sizes(self) -> Sizes:
        """The sizes of the model that the position encoding receives."""
        return Sizes(
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            dtype=self.dtype,
            state_dtype=self.state_dtype,
            embedding_std=self.embedding_std,
        )

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def attention_heads(self) -> int:
        """Number of heads that attend: query heads, or more if the encoding makes them."""
        return self.num_heads * self.position.heads_per_query

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
