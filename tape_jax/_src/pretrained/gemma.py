"""Gemma 2, and the text model of Gemma 3: norms on both sides of attention and of the MLP."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from tape_jax._src.core.checks import require
from tape_jax._src.model.config import ModelConfig
from tape_jax._src.positions.fixed.frequencies import RopeScaling
from tape_jax._src.pretrained.family import (
    ATTENTION,
    FULL,
    PATTERN,
    SLIDING,
    Family,
    Fields,
    LayerKind,
    before_own,
    flag,
    is_plain,
    layer_types,
    layers_of,
    number,
    number_or_none,
    one_rope,
    period_of,
    positive_number,
    slides,
    sliding_window,
)

NORMS = {"norms": "both", "zero_centered_norms": True}
NAMES = {
    "layers/attention_out_norm/scale": "model.layers.{}.post_attention_layernorm.weight",
    "layers/mlp_norm/scale": "model.layers.{}.pre_feedforward_layernorm.weight",
    "layers/mlp_out_norm/scale": "model.layers.{}.post_feedforward_layernorm.weight",
}
LOCAL_BASE = 10_000.0


def _read(config: Mapping[str, Any]) -> Fields:
    return {
        **NORMS,
        "biases": ATTENTION if flag(config, "attention_bias") else (),
        "embedding_scale": math.sqrt(number(config, "hidden_size")),
        "query_scale": positive_number(config, "query_pre_attn_scalar") ** -0.5,
        "final_logit_softcap": number_or_none(config, "final_logit_softcapping"),
    }


def _read2(config: Mapping[str, Any]) -> Fields:
    return {**_read(config), "logit_softcap": number_or_none(config, "attn_logit_softcapping")}


def _read3(config: Mapping[str, Any]) -> Fields:
    # There, transformers has the bound of attention's logits, but does not apply it.
    return {**_read(config), "qk_norm": "head"}


def _layers2(config: Mapping[str, Any], rope: Any) -> list[LayerKind]:
    window, again = config["sliding_window"], config.get("sliding_window_size")
    require(
        again in (None, window),
        f"config.json: sliding_window_size = {again!r} contradicts sliding_window = {window!r}",
    )
    window = before_own(window)
    sliding = slides(config, lambda layer: layer % 2 == 0)
    return [LayerKind(one_rope(rope), window if one else None) for one in sliding]


def _layers3(config: Mapping[str, Any], rope: Any) -> list[LayerKind]:
    given = config.get("rope_parameters")
    base = number(config, "rope_local_base_freq", LOCAL_BASE)
    if isinstance(given, dict) and SLIDING in given:
        local, own = rope(SLIDING), given[SLIDING].get("rope_theta")
        local = dataclasses.replace(local, base=base) if own is None else local
    else:
        local = dataclasses.replace(rope(FULL), base=base, scaling=RopeScaling())
    # Every n-th layer sees all tokens.
    period = period_of(config, 6)
    sliding = slides(config, lambda layer: (layer + 1) % period != 0)
    window = before_own(config["sliding_window"])
    return [LayerKind(local, window) if one else LayerKind(rope(FULL), None) for one in sliding]


def _write(c: ModelConfig, *own: str, **wanted: Any) -> Fields | None:
    own = (*own, "layers", "query_scale", "final_logit_softcap")
    wanted |= {**NORMS, "embedding_scale": math.sqrt(c.hidden_size)}
    layers = layers_of(c)
    if not is_plain(c, *own, **wanted) or layers is None or c.biases not in ((), ATTENTION):
        return None
    return {
        "attention_bias": bool(c.biases),
        "query_pre_attn_scalar": c.dim if c.query_scale is None else _square(c.query_scale),
        "final_logit_softcapping": c.final_logit_softcap,
        "layer_types": layer_types(layers),
        "sliding_window": sliding_window(layers),
    }


def _square(scale: float) -> float:
    """``scale ** -2``, as an integer if it is one."""
    whole = round(scale**-2)
    return whole if whole > 0 and whole**-0.5 == scale else scale**-2


def _write2(c: ModelConfig) -> Fields | None:
    fields, layers = _write(c, "logit_softcap"), layers_of(c)
    if fields is None or len({layer.rope for layer in layers or ()}) > 1:
        return None
    return {**fields, "attn_logit_softcapping": c.logit_softcap}


def _write3(c: ModelConfig) -> Fields | None:
    fields, layers = _write(c, qk_norm="head"), layers_of(c)
    if fields is None or layers is None:
        return None
    full = {layer.rope for layer in layers if layer.window is None}
    local = {layer.rope for layer in layers if layer.window is not None}
    bases = {None if rope is None else rope.base for rope in local}
    scaled = any(rope and rope.scaling != RopeScaling() for rope in local)
    if None in full | local or len(full) > 1 or len(local) > 1 or scaled:
        return None
    return {**fields, "rope_local_base_freq": next(iter(bases), LOCAL_BASE)}


_OWN = frozenset(
    (
        *("attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "hidden_act"),
        *("layer_types", "query_pre_attn_scalar", "sliding_window"),
    )
)
_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_family = functools.partial(Family, names=NAMES, activation="hidden_activation")
GEMMA2 = _family(
    "Gemma2ForCausalLM",
    _OWN | {"sliding_window_size"},
    _read2,
    _write2,
    {**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    layers=_layers2,
)
GEMMA3 = _family(
    "Gemma3ForCausalLM",
    _OWN | {"rope_local_base_freq", *PATTERN},
    _read3,
    _write3,
    {**_DEFAULTS, "rope_theta": 1_000_000.0},
    layers=_layers3,
)
