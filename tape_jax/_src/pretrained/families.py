"""Families of Hugging Face decoders: translates their configuration fields to ours and back.

A new family is a file with a :class:`Family`, and a line in :data:`FAMILIES`. ``llama`` reads the
fields that all of them share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tape_jax._src.core.checks import require
from tape_jax._src.model.config import ModelConfig
from tape_jax._src.pretrained.cohere2 import COHERE2
from tape_jax._src.pretrained.family import (
    ATTENTION,
    COMMON,
    FULL,
    HARMLESS,
    OFF,
    SAYS_NONE,
    Family,
    Fields,
    LayerKind,
    before_own,
    flag,
    is_plain,
    layer_types,
    layers_of,
    one_rope,
    read_biases,
    slides,
    sliding_window,
    write_biases,
)
from tape_jax._src.pretrained.gemma import GEMMA2, GEMMA3
from tape_jax._src.pretrained.olmo3 import OLMO3, OLMO_NORMS
from tape_jax._src.pretrained.phi3 import PHI3
from tape_jax._src.pretrained.smollm3 import SMOLLM3


def _write_llama(c: ModelConfig) -> Fields | None:
    return write_biases(c) if is_plain(c) else None


def _write_mistral(c: ModelConfig) -> Fields | None:
    if c.biases or not is_plain(c, "window"):
        return None
    return {"sliding_window": sliding_window(layers_of(c))}


def _qwen_layers(config: Mapping[str, Any], rope: Any) -> list[LayerKind]:
    """The window of Qwen 2 and 3: of the layers marked sliding, or from a certain one on."""
    window = config["sliding_window"] if flag(config, "use_sliding_window") else None
    if window is None:
        return [LayerKind(rope(FULL), None)] * config["num_hidden_layers"]
    first = config["max_window_layers"]
    require(
        config.get("layer_types") is not None
        or (isinstance(first, int) and not isinstance(first, bool)),
        f"config.json: max_window_layers must be an integer; got {first!r}",
    )
    before = before_own(window)
    sliding = slides(config, lambda layer: layer >= first)
    return [LayerKind(one_rope(rope), before if one else None) for one in sliding]


def _write_qwen_window(c: ModelConfig) -> Fields | None:
    layers = layers_of(c)
    if layers is None or len({layer.rope for layer in layers}) > 1:
        return None
    window = sliding_window(layers)
    kinds = [layer.window is not None for layer in layers]
    first = kinds.index(True) if window is not None else c.num_layers
    late = all(kinds[first:])
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": first if late else c.num_layers,
        **({} if late else {"layer_types": layer_types(layers)}),
    }


def _read_qwen2(config: Mapping[str, Any]) -> Fields:
    return {"biases": ("q", "k", "v")}


def _write_qwen2(c: ModelConfig) -> Fields | None:
    if c.biases != ("q", "k", "v") or not is_plain(c, "layers"):
        return None
    return _write_qwen_window(c)


def _read_qwen3(config: Mapping[str, Any]) -> Fields:
    biases = ATTENTION if flag(config, "attention_bias") else ()
    return {"biases": biases, "qk_norm": "head"}


def _write_qwen3(c: ModelConfig) -> Fields | None:
    if not is_plain(c, "layers", qk_norm="head") or c.biases not in ((), ATTENTION):
        return None
    windows = _write_qwen_window(c)
    return None if windows is None else {"attention_bias": bool(c.biases), **windows}


GRANITE = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "query_scale",
    "logits_scaling": "logits_scaling",
}


def _read_granite(config: Mapping[str, Any]) -> Fields:
    return read_biases(config) | {ours: config[theirs] for theirs, ours in GRANITE.items()}


def _write_granite(c: ModelConfig) -> Fields | None:
    if not is_plain(c, *GRANITE.values()) or c.query_scale is None:
        return None
    off: Any = {**dict.fromkeys(GRANITE.values(), 1), "query_scale": None}
    plain = dataclasses.replace(c, **off)
    biases = _write_llama(plain)
    if biases is None:
        return None
    return biases | {theirs: getattr(c, ours) for theirs, ours in GRANITE.items()}


def _write_olmo2(c: ModelConfig) -> Fields | None:
    wanted = is_plain(c, qk_norm="full", norms="after")
    return {"attention_bias": bool(c.biases)} if wanted and c.biases in ((), ATTENTION) else None


_WINDOWS = frozenset(("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"))
_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}

# In the order in which they are tried when a model is saved.
FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", frozenset(("attention_bias", "mlp_bias")), read_biases, _write_llama
    ),
    "mistral": Family(
        "MistralForCausalLM",
        frozenset(("sliding_window",)),
        PHI3.read,
        _write_mistral,
        {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", _WINDOWS, _read_qwen2, _write_qwen2, _QWEN, layers=_qwen_layers
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _WINDOWS | {"attention_bias"},
        _read_qwen3,
        _write_qwen3,
        {**_QWEN, "head_dim": 128},
        layers=_qwen_layers,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        frozenset(("attention_bias", "mlp_bias", *GRANITE)),
        _read_granite,
        _write_granite,
        dict.fromkeys(GRANITE, 1.0),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        frozenset(("attention_bias",)),
        OLMO3.read,
        _write_olmo2,
        {"rms_norm_eps": 1e-5},
        OLMO_NORMS,
    ),
    "olmo3": OLMO3,
    "smollm3": SMOLLM3,
    "phi3": PHI3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "cohere2": COHERE2,
}


def family_of(config: Mapping[str, Any]) -> tuple[str, Family]:
    """The family that a ``config.json`` names, and its ``model_type``.

    Raises:
      ValueError: if the family is unknown, or does not know a field.
    """
    architectures, kind = config.get("architectures") or [], config.get("model_type")
    if kind is None:
        named = [name for name, one in FAMILIES.items() if architectures == [one.architecture]]
        kind = named[0] if named else None
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    known = ", ".join(f"{one.architecture} ({name})" for name, one in FAMILIES.items())
    if family is None or architectures not in ([], [family.architecture]):
        raise ValueError(
            f"config.json describes architectures {architectures!r} of model_type {kind!r}; known "
            f"are {known}"
        )
    fields = COMMON | HARMLESS | family.own | {family.eps, family.activation}
    fixed = {name: x for name, x in {**OFF, **family.fixed}.items() if name not in fields}
    # A null field counts as absent.
    unknown = [name for name, x in config.items() if x is not None and name not in fields]
    unknown = [name for name in unknown if name not in fixed or config[name] != fixed[name]]
    require(
        not unknown,
        f"config.json has fields that are not known of model_type {kind!r}: "
        f"{', '.join(f'{name} = {config[name]!r}' for name in unknown)}. If they change nothing "
        "that the model computes, remove them; else give the model_type that they belong to",
    )
    return str(kind), family


def with_defaults(config: Mapping[str, Any], family: Family) -> Fields:
    """Fills the fields that a ``config.json`` lacks with transformers' defaults."""
    given = {name: x for name, x in config.items() if x is not None or name in SAYS_NONE}
    return {**family.defaults, **given}


def writer_of(config: ModelConfig, kind: str | None = None) -> tuple[str, Family, Fields] | None:
    """The family ``kind``, or the first that can describe a model, and its own fields, or None."""
    for name in FAMILIES if kind is None else (kind,):
        fields = FAMILIES[name].write(config)
        if fields is not None:
            return name, FAMILIES[name], fields
    return None
