"""Cohere 2: attention and MLP side by side, LayerNorm, rotation in layers with a window only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tape_jax._src.model.config import ModelConfig
from tape_jax._src.pretrained.family import (
    ATTENTION,
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
    period_of,
    positive_number,
    slides,
    sliding_window,
)

BLOCK = {"norm": "layer", "parallel_block": True}


def _read(config: Mapping[str, Any]) -> Fields:
    return {
        **BLOCK,
        "biases": ATTENTION if flag(config, "attention_bias") else (),
        "logits_scaling": 1 / positive_number(config, "logit_scale"),
    }


def _layers(config: Mapping[str, Any], rope: Any) -> list[LayerKind]:
    # Every n-th layer sees all tokens.
    period = period_of(config, 4)
    sliding = slides(config, lambda layer: (layer + 1) % period != 0)
    window = before_own(config["sliding_window"])
    # Only layers that have the window rotate.
    local = LayerKind(None if window is None else rope(SLIDING), window)
    return [local if one else LayerKind(None, None) for one in sliding]


def _write(c: ModelConfig) -> Fields | None:
    layers = layers_of(c)
    plain = is_plain(c, "layers", "logits_scaling", **BLOCK) and c.biases in ((), ATTENTION)
    if not plain or layers is None:
        return None
    local = {layer.rope for layer in layers if layer.window is not None}
    full = {layer.rope for layer in layers if layer.window is None}
    if len(local) != 1 or None in local or full - {None}:
        return None
    return {
        "attention_bias": bool(c.biases),
        "logit_scale": 1 / c.logits_scaling,
        "layer_types": layer_types(layers),
        "sliding_window": sliding_window(layers),
    }


def _head_order(c: ModelConfig) -> tuple[int, ...]:
    """The checkpoint's numbers of a head in our order: its pairs are neighbours."""
    return (*range(0, c.dim, 2), *range(1, c.dim, 2))


COHERE2 = Family(
    "Cohere2ForCausalLM",
    frozenset(("attention_bias", "layer_types", "logit_scale", "sliding_window", *PATTERN)),
    _read,
    _write,
    {
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    layers=_layers,
    head_order=_head_order,
    eps="layer_norm_eps",
    # Of published files: transformers has these alone, and does not read them.
    fixed={
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
        "use_qk_norm": False,
    },
)
