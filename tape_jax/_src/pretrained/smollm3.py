"""SmolLM3: no rotation in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tape_jax._src.core.checks import require
from tape_jax._src.model.config import ModelConfig
from tape_jax._src.pretrained.family import (
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


def _rotates(config: Mapping[str, Any]) -> list[bool]:
    layers, given = config["num_hidden_layers"], config.get("no_rope_layers")
    if given is None:
        every = config["no_rope_layer_interval"]
        require(
            isinstance(every, int) and every > 0,
            f"config.json: no_rope_layer_interval must be a positive integer; got {every!r}",
        )
        return [(layer + 1) % every != 0 for layer in range(layers)]
    require(
        isinstance(given, list) and len(given) == layers and all(x in (0, 1) for x in given),
        f"config.json: no_rope_layers must be {layers} of 0 (no rotation) and 1; got {given!r}",
    )
    return [x == 1 for x in given]


def _layers(config: Mapping[str, Any], rope: Any) -> list[LayerKind]:
    rotates = _rotates(config)
    windowed = flag(config, "use_sliding_window") and config.get("sliding_window") is not None
    before = before_own(config["sliding_window"]) if windowed else None
    sliding = slides(config, lambda layer: not rotates[layer])
    return [
        LayerKind(one_rope(rope) if turns else None, before if one else None)
        for turns, one in zip(rotates, sliding, strict=True)
    ]


def _write(c: ModelConfig) -> Fields | None:
    biases = write_biases(c)
    layers = layers_of(c)
    if biases is None or layers is None or not is_plain(c, "layers"):
        return None
    if len({layer.rope for layer in layers if layer.rope}) > 1:
        return None
    window = sliding_window(layers)
    return {
        **biases,
        "no_rope_layers": [int(layer.rope is not None) for layer in layers],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": layer_types(layers),
    }


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    frozenset(
        (
            *("attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"),
            *("use_sliding_window", "sliding_window", "layer_types", "max_window_layers"),
        )
    ),
    read_biases,
    _write,
    {
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 4,
    },
    layers=_layers,
)
