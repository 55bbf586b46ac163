"""Olmo 3: Olmo 2 with a window in three of four layers, which keep the rotation unscaled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tape_jax._src.model.config import ModelConfig
from tape_jax._src.positions.fixed.frequencies import RopeScaling
from tape_jax._src.pretrained.family import (
    ATTENTION,
    FULL,
    SLIDING,
    Family,
    Fields,
    LayerKind,
    before_own,
    flag,
    is_plain,
    layer_types,
    layers_of,
    main_rope,
    scaling_to_json,
    slides,
    sliding_window,
)

OLMO_NORMS = {
    "layers/attention_norm/scale": "model.layers.{}.post_attention_layernorm.weight",
    "layers/mlp_norm/scale": "model.layers.{}.post_feedforward_layernorm.weight",
}
# The base that transformers 5 takes for sliding layers if a file does not say each kind's, like
# files of transformers 4.
USUAL_BASE = 500_000.0


def _read(config: Mapping[str, Any]) -> Fields:
    biases = ATTENTION if flag(config, "attention_bias") else ()
    return {"biases": biases, "qk_norm": "full", "norms": "after"}


def _layers(config: Mapping[str, Any], rope: Any) -> list[LayerKind]:
    plain = dataclasses.replace(rope(SLIDING), scaling=RopeScaling())
    local = LayerKind(plain, before_own(config["sliding_window"]))
    sliding = slides(config, lambda layer: (layer + 1) % 4 != 0)
    return [local if one else LayerKind(rope(FULL), None) for one in sliding]


def _write(c: ModelConfig) -> Fields | None:
    wanted = is_plain(c, "layers", qk_norm="full", norms="after")
    layers = layers_of(c)
    if not wanted or layers is None or c.biases not in ((), ATTENTION):
        return None
    rope, local = main_rope(layers), [x for x in layers if x.window is not None]
    plain = dataclasses.replace(rope, scaling=RopeScaling())
    full = [x for x in layers if x.window is None]
    if not local or any(x.rope != plain for x in local) or any(x.rope != rope for x in full):
        return None
    by_kind = {
        SLIDING: {"rope_type": "default", "rope_theta": rope.base},
        FULL: {"rope_type": "default", **(scaling_to_json(rope.scaling) or {})}
        | {"rope_theta": rope.base},
    }
    return {
        "attention_bias": bool(c.biases),
        "layer_types": layer_types(layers),
        "sliding_window": sliding_window(layers),
        **({} if rope.base == USUAL_BASE else {"rope_parameters": by_kind}),
    }


OLMO3 = Family(
    "Olmo3ForCausalLM",
    frozenset(("attention_bias", "layer_types", "sliding_window")),
    _read,
    _write,
    {"rms_norm_eps": 1e-5, "sliding_window": 4096},
    OLMO_NORMS,
    _layers,
)
