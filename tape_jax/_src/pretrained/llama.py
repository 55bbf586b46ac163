"""Translates descriptions of Hugging Face decoders to those of this library, and back."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tape_jax._src import positions
from tape_jax._src.core.checks import choose, positive, require, require_field
from tape_jax._src.model.config import ModelConfig
from tape_jax._src.model.decoder import Transformer
from tape_jax._src.model.layout import OUTSIDE, block_name, by_path, replaced
from tape_jax._src.positions.fixed.frequencies import RopeScaling, frequencies
from tape_jax._src.pretrained.families import FAMILIES, family_of, with_defaults, writer_of
from tape_jax._src.pretrained.family import (
    FULL,
    OPTIONS,
    SLIDING,
    Family,
    Fields,
    LayerKind,
    flag,
    layers_of,
    main_rope,
    number,
    one_rope,
    position_of,
    scaling_to_json,
)

# This library's parameters, and the tensors of a checkpoint that hold them. Kernels are stored
# transposed, ``[out, in]``.
NAMES = {
    "embedding": "model.embed_tokens.weight",
    "layers/attention_norm/scale": "model.layers.{}.input_layernorm.weight",
    "layers/attention/q/kernel": "model.layers.{}.self_attn.q_proj.weight",
    "layers/attention/k/kernel": "model.layers.{}.self_attn.k_proj.weight",
    "layers/attention/v/kernel": "model.layers.{}.self_attn.v_proj.weight",
    "layers/attention/out/kernel": "model.layers.{}.self_attn.o_proj.weight",
    "layers/attention/q/bias": "model.layers.{}.self_attn.q_proj.bias",
    "layers/attention/k/bias": "model.layers.{}.self_attn.k_proj.bias",
    "layers/attention/v/bias": "model.layers.{}.self_attn.v_proj.bias",
    "layers/attention/out/bias": "model.layers.{}.self_attn.o_proj.bias",
    "layers/attention/q_norm/scale": "model.layers.{}.self_attn.q_norm.weight",
    "layers/attention/k_norm/scale": "model.layers.{}.self_attn.k_norm.weight",
    "layers/mlp_norm/scale": "model.layers.{}.post_attention_layernorm.weight",
    "layers/mlp/gate/kernel": "model.layers.{}.mlp.gate_proj.weight",
    "layers/mlp/up/kernel": "model.layers.{}.mlp.up_proj.weight",
    "layers/mlp/down/kernel": "model.layers.{}.mlp.down_proj.weight",
    "layers/mlp/gate/bias": "model.layers.{}.mlp.gate_proj.bias",
    "layers/mlp/up/bias": "model.layers.{}.mlp.up_proj.bias",
    "layers/mlp/down/bias": "model.layers.{}.mlp.down_proj.bias",
    "final_norm/scale": "model.norm.weight",
    "head/kernel": "lm_head.weight",
}
EMBEDDING, HEAD = NAMES["embedding"], NAMES["head/kernel"]
# Parameters whose last axis has the numbers of heads that rotate.
ROTATED = re.compile(r"layers/attention/[qk](_norm)?/(kernel|bias|scale)")

# Fields of config.json that a model needs, and this library's names for them.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}

# Options of a model in which families differ.
DIFFER = (
    *("biases", "local_window_size", "activation"),
    *OPTIONS,
)

# Activations in ``config.json``, the usual name of each first.
ACTIVATIONS = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
    "gelu_new": "gelu",
    "swish": "silu",
}

ROPE_KINDS = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "longrope",
}
ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")
# What may stand inside: of all kinds, since transformers reads only those of the given one.
INSIDE_ROPE = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "finetuned"),
    *("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor"),
)

# The defaults of transformers for absent fields of config.json.
DEFAULT_LENGTH = 2048
DEFAULT_BASE = 10_000.0
DEFAULT_EPS = 1e-6


def is_buffer(name: str) -> bool:
    """Returns whether a tensor holds rotary frequencies, which old files have and nobody reads."""
    return re.fullmatch(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", name) is not None


@dataclasses.dataclass(frozen=True)
class StoredParameter:
    """A parameter of the model, and the checkpoint tensors that make it.

    Attributes:
      path: in the parameters, such as ``layers_0/mlp/up/kernel``.
      shape: of the parameter.
      tensors: names of its tensors, one for each layer.
      stacked: whether the parameter has a leading axis of layers.
      transposed: whether the tensors are ``[out, in]``, and the parameter ``[..., in, out]``.
      rows: if it has only some rows of each tensor, the first of them, and their number.
      order: numbers of each head of the tensors in the parameter's order; None: the same.
    """

    path: str
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    stacked: bool
    transposed: bool
    rows: tuple[int, int] | None = None
    order: tuple[int, ...] | None = None

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of its part of each tensor."""
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transposed else shape

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each of the tensors."""
        return self.part_shape if self.rows is None else (self.rows[1], *self.part_shape[1:])

    def ordered(self, part: np.ndarray, *, back: bool = False) -> np.ndarray:
        """Puts rows of a tensor into the parameter's order or, with ``back``, the reverse."""
        if self.order is None:
            return part
        order = np.argsort(self.order) if back else np.array(self.order)
        heads = part.reshape(-1, len(order), *part.shape[1:])
        return heads[:, order].reshape(part.shape)


def parameters(model: Transformer, family: Family) -> list[StoredParameter]:
    """The parameters of a model with only a family's parameters, in the order of ``NAMES``."""
    names, order = {**NAMES, **family.names}, None
    if family.head_order is not None:
        order = family.head_order(model.config)
    # Types do not affect shapes, and 64-bit ones may be disabled.
    plain = replaced(model, dtype="float32", param_dtype="float32", state_dtype=None)
    shapes = by_path({path: one.shape for path, one in plain.parameters().items()})
    ranges, found = {blocks.layers[0]: blocks.layers for blocks in model.blocks}, []
    paths = [path for path in names if path in shapes]
    shared = collections.Counter(names[path] for path in paths)
    widths = {path: next(iter(shapes[path].values())).shape[-1] for path in paths}
    for path in paths:
        rows = None
        if shared[names[path]] > 1:
            beside = [x for x in paths if names[x] == names[path]]
            before = beside[: beside.index(path)]
            rows = (sum(widths[x] for x in before), sum(widths[x] for x in beside))
        for first, leaf in shapes[path].items():
            layers = (first,) if first == OUTSIDE else ranges[first]
            found.append(
                StoredParameter(
                    path=block_name(first, path),
                    shape=leaf.shape,
                    tensors=tuple(names[path].format(layer) for layer in layers),
                    stacked=first != OUTSIDE and model.config.scan_layers,
                    transposed=path.endswith("/kernel"),
                    rows=rows,
                    order=order if ROTATED.fullmatch(path) else None,
                )
            )
    return found


def model_config(config: Mapping[str, Any], **fields: Any) -> ModelConfig:
    """The model that a ``config.json`` describes.

    Args:
      config: its content; rotary parameters in the form of transformers 5 (``rope_parameters``) or
        of earlier versions (``rope_theta`` and ``rope_scaling``).
      **fields: those of :class:`tape_jax.ModelConfig` that config.json does not have.

    Raises:
      ValueError: if it describes an unknown family, has a field unknown to its family, lacks a
        size, or has an unknown rotary scaling.
    """
    _, family = family_of(config)
    config = with_defaults(config, family)
    given = config.get(family.activation) or "silu"
    choose(f"{family.activation} in config.json", given, ACTIVATIONS)
    require(
        not config.get("quantization_config"),
        "config.json: the checkpoint is quantised (quantization_config); give one in floating "
        "point",
    )
    missing = [name for name in SIZES if config.get(name) is None]
    require(not missing, f"config.json lacks {', '.join(missing)}")
    for name in SIZES:
        positive(f"config.json: {name}", config[name])
    part, kinds = "partial_rotary_factor" in family.own, {**ROPE_KINDS, **family.rope_kinds}
    rope = functools.partial(_rope, config, part=part, kinds=kinds)
    if family.layers is None:
        layers: Fields = {"position": one_rope(rope)}
    else:
        layers = position_of(family.layers(config, rope))
    return ModelConfig(
        **{ours: config[theirs] for theirs, ours in SIZES.items()},
        num_kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        norm_eps=number(config, family.eps, DEFAULT_EPS),
        activation=ACTIVATIONS[given],
        tie_embeddings=flag(config, "tie_word_embeddings"),
        **layers,
        **family.read(config),
        **fields,
    )


def _rope(
    config: Mapping[str, Any], kind: str = FULL, *, part: bool, kinds: Mapping[str, str]
) -> positions.Rope:
    """The rotation; fields take precedence as in transformers 5.

    Args:
      config: the content of ``config.json``.
      kind: of layers, if they differ in it.
      part: whether a part of each head may rotate.
      kinds: of scalings, by the family's names.
    """
    nested = config.get("rope_parameters")
    by_kind = isinstance(nested, dict) and {FULL, SLIDING} & nested.keys()
    require(
        not (by_kind and config.get("rope_scaling")),
        "config.json: rope_scaling beside rope_parameters of several kinds of layers is ambiguous; "
        "give rope_parameters alone",
    )
    given = config.get("rope_scaling") or nested or {}
    given = given.get(kind, given) if isinstance(given, dict) else given
    require(
        isinstance(given, dict) and not {FULL, SLIDING} & given.keys(),
        "config.json: rotary parameters must be an object, or one for each kind of layers; got "
        f"{given!r}",
    )
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        require_field(name, INSIDE_ROPE, "the rotary parameters in config.json")
    typed = {"rope_type", "type"} & given.keys()
    require(
        bool(typed) or "factor" not in given,
        f"config.json: rotary parameters with a factor must name their rope_type; got {given}",
    )
    both = config if config.get("partial_rotary_factor") is not None else given
    share = number(both, "partial_rotary_factor", 1.0)
    require(
        0 < share <= 1 and (part or share == 1),
        f"config.json: partial_rotary_factor must be {'above 0 and at most ' if part else ''}1"
        f"{'' if part else ', heads rotate as a whole'}; got {share!r}",
    )
    kind = given.get("rope_type", given.get("type", "default"))
    choose("rope_type in config.json", kind, kinds)
    fallback = number(config, "rope_theta", DEFAULT_BASE)
    base = number(given, "rope_theta", fallback)
    scaling = _scaling(kinds[kind], given, config)
    return positions.Rope(base=base, scaling=scaling, partial_rotary_factor=share)


def _scaling(kind: str, given: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    if kind == "none":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind, factor=number(given, "factor"))
    length = int(number(config, "max_position_embeddings", DEFAULT_LENGTH))
    if kind == "dynamic":
        return RopeScaling(kind, factor=number(given, "factor"), original_length=length)
    inner = number(given, "original_max_position_embeddings", length)
    original = int(number(config, "original_max_position_embeddings", inner))
    if kind == "llama3":
        return RopeScaling(
            kind,
            factor=number(given, "factor"),
            original_length=original,
            low_freq_factor=number(given, "low_freq_factor"),
            high_freq_factor=number(given, "high_freq_factor"),
        )
    factor = number(given, "factor", length / original)
    if kind == "longrope":
        return RopeScaling(
            kind,
            factor=factor,
            original_length=original,
            magnitude=given.get("attention_factor"),
            short_factor=_list(given, "short_factor"),
            long_factor=_list(given, "long_factor"),
        )
    return RopeScaling(
        kind,
        factor=factor,
        original_length=original,
        beta_fast=number(given, "beta_fast", 0.0) or 32.0,
        beta_slow=number(given, "beta_slow", 0.0) or 1.0,
        magnitude=_yarn_magnitude(factor, given),
        truncate=bool(given.get("truncate", True)),
    )


def _yarn_magnitude(factor: float, given: Mapping[str, Any]) -> float | None:
    """Factor on the states if it is not YaRN's own, else None."""
    if "attention_factor" in given:
        return number(given, "attention_factor")
    above, below = given.get("mscale"), given.get("mscale_all_dim")
    if not (above and below):
        return None
    growth = 0.1 * math.log(max(factor, 1.0))
    return (above * growth + 1) / (below * growth + 1)


def _list(given: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    value = given.get(name)
    require(isinstance(value, list), f"config.json: {name} must be a list; got {value!r}")
    return tuple(value or ())


def written(model: Transformer, kind: str | None = None) -> tuple[str, Family, Fields]:
    """The family ``kind``, or the first that can describe the model, its name and own fields.

    Raises:
      ValueError: if a checkpoint cannot describe all of the model.
    """
    advice = "save what was trained with tape_jax.adapt.save_adapter instead"
    c, encoding = model.config, model.encoding
    layers = layers_of(c)
    require(
        layers is not None and any(layer.rope for layer in layers),
        f"a Llama checkpoint has no place for the position encoding {encoding!r}: {advice}",
    )
    require(
        c.lora is None,
        "a Llama checkpoint has no place for low-rank terms: merge them into the kernels "
        f"(tape_jax.adapt.merge_lora), or {advice}",
    )
    require(
        c.experts is None,
        f"a Llama checkpoint has no place for a mixture of experts, {c.experts}: keep the run, or "
        "the variables as they are",
    )
    require(
        c.shifted_groups is None,
        "a checkpoint has full attention, the model has shifted_groups = "
        f"{c.shifted_groups!r}: save the model with shifted_groups=None, or {advice}",
    )
    known = {*ROPE_KINDS.values(), "ntk"}
    scalings = {layer.rope.scaling.kind for layer in layers or () if layer.rope}
    require(
        scalings <= known,
        f"a checkpoint has no place for the rope scaling {', '.join(sorted(scalings - known))}; "
        f"known are {', '.join(sorted(known))}: {advice}",
    )
    found = writer_of(dataclasses.replace(c, **position_of(folded(c))), kind)
    if found is None and kind is not None and layers is not None:
        rope = main_rope(layers)
        alike = position_of([layer._replace(rope=layer.rope and rope) for layer in layers])
        require(
            writer_of(dataclasses.replace(c, **alike), kind) is None,
            f"a checkpoint of the family {kind!r} has one rotation for all layers; the model has "
            f"others in {encoding.kind!r}: {_rotations(layers)}; {advice}",
        )
    require(
        found is not None,
        f"{'no family of checkpoints has' if kind is None else f'the family {kind!r} has not'} "
        f"{_described(c) or 'the plain layers of Llama'}; known are {', '.join(FAMILIES)}",
    )
    assert found is not None
    return found


def _rotations(layers: Sequence[LayerKind]) -> str:
    """Describes the rotations of layers by the fields in which they differ."""
    ropes = list(dict.fromkeys(layer.rope for layer in layers if layer.rope))
    names = [f.name for f in dataclasses.fields(positions.Rope)]
    differ = [n for n in names if len({getattr(rope, n) for rope in ropes}) > 1]
    return " and ".join(
        ", ".join(f"{name} = {getattr(rope, name)!r}" for name in differ) for rope in ropes
    )


def folded(c: ModelConfig) -> list[LayerKind]:
    """Layers of a model, with a larger base in place of NTK's scaling, which has no name there."""
    found = []
    for rope, window in layers_of(c) or ():
        if rope is not None and rope.scaling.kind == "ntk":
            turning = frequencies(c.dim, rope.base, None, None, rope.partial_rotary_factor)
            width = 2 * int((turning > 0).sum())
            grown = rope.scaling.factor ** (width / (width - 2)) if width > 2 else 1.0
            rope = dataclasses.replace(rope, base=rope.base * grown, scaling=RopeScaling())
        found.append(LayerKind(rope, window))
    return found


def _described(c: ModelConfig) -> str:
    """Options of a model in which families differ."""
    given = {name: getattr(c, name) for name in DIFFER}
    layers = layers_of(c) or []
    given["partial_rotary_factor"] = main_rope(layers).partial_rotary_factor
    given["layers"] = len({*layers}) > 1 and c.position.kind
    plain = ModelConfig(1, position="rope")
    given = {k: x for k, x in given.items() if x and x != getattr(plain, k, 1)}
    return ", ".join(f"{name} = {value!r}" for name, value in given.items())


def to_json(model: Transformer, kind: str | None = None) -> dict[str, Any]:
    """The ``config.json`` of a model, in the form that every version of transformers reads.

    It names the family ``kind``, or the first that can describe the model.

    The length that a model was trained for is known if its scaling or ``max_length`` says it;
    otherwise it is transformers' default.
    """
    kind, family, own = written(model, kind)
    c = model.config
    layers = folded(c)
    base, scaling = main_rope(layers).base, main_rope(layers).scaling
    config = {
        "architectures": [family.architecture],
        "model_type": kind,
        **{theirs: getattr(c, ours) for theirs, ours in SIZES.items()},
        "intermediate_size": c.mlp_size,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.dim,
        family.activation: next(x for x, ours in ACTIVATIONS.items() if ours == c.activation),
        family.eps: c.norm_eps,
        "tie_word_embeddings": c.tie_embeddings,
        "max_position_embeddings": _length(c, scaling),
        "rope_theta": base,
        **({} if "rope_parameters" in own else {"rope_scaling": scaling_to_json(scaling)}),
        # The ids that some families have exceed smaller vocabularies.
        "pad_token_id": None,
        **own,
    }
    # A name of a scaling may mean another one in this family.
    again = [] if scaling.kind in family.rope_kinds else layers_of(model_config(config)) or []
    require(
        [_turns(x, c.dim) for x in again] == [_turns(x, c.dim) for x in layers],
        f"a config.json of the family {kind!r} cannot say how the layers of {c.position.kind!r} "
        "rotate and what they see: save what was trained with tape_jax.adapt.save_adapter instead",
    )
    return config


def _turns(layer: LayerKind, dim: int) -> Any:
    """Describes a layer's rotation at a short and at a long length, and its window, to compare."""
    if layer.rope is None:
        return None, layer.window
    base, scaling, share = layer.rope.base, layer.rope.scaling, layer.rope.partial_rotary_factor
    found = [frequencies(dim, base, scaling, n, share) for n in (1, 2**20)]
    numbers = [*np.concatenate(found), scaling.state_magnitude]
    return [f"{x:.6e}" for x in numbers], layer.window


def length_of_scaling(scaling: RopeScaling) -> int | None:
    """Returns the ``max_position_embeddings`` that transformers needs for a scaling, or None."""
    if scaling.kind == "dynamic":
        return scaling.original_length
    if scaling.kind in ("yarn", "longrope"):
        return round(scaling.original_length * scaling.factor)
    return None


def _length(config: ModelConfig, scaling: RopeScaling) -> int:
    """Returns ``max_position_embeddings``."""
    if (length := length_of_scaling(scaling)) is not None:
        return length
    if config.max_length is not None:
        return config.max_length
    if scaling.kind == "llama3":
        return round(scaling.original_length * scaling.factor)
    return DEFAULT_LENGTH
