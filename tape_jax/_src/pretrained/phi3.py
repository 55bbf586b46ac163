"""Phi 3 and its like: projections fused in one tensor, rotation of a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tape_jax._src.core.checks import require
from tape_jax._src.model.config import ModelConfig
from tape_jax._src.pretrained.family import (
    Family,
    Fields,
    before_own,
    is_plain,
    layers_of,
    main_rope,
    sliding_window,
)


def _read(config: Mapping[str, Any]) -> Fields:
    return {"local_window_size": before_own(config["sliding_window"])}


def _write(c: ModelConfig) -> Fields | None:
    if c.biases or not is_plain(c, "partial_rotary_factor", "window"):
        return None
    layers = layers_of(c) or []
    rope = main_rope(layers)
    fields: Fields = {
        "sliding_window": sliding_window(layers),
        "partial_rotary_factor": rope.partial_rotary_factor,
    }
    scaling = rope.scaling
    if scaling.kind == "longrope" and scaling.magnitude is None and scaling.long_factor:
        # transformers 4 takes these three fields and no others.
        factors = {name: [*getattr(scaling, name)] for name in ("short_factor", "long_factor")}
        fields["rope_scaling"] = {"type": "longrope", **factors}
        fields["original_max_position_embeddings"] = scaling.original_length
    return fields


def _head_order(c: ModelConfig) -> tuple[int, ...]:
    """The checkpoint's numbers of a head in our order: its first ones rotate by halves."""
    share = main_rope(layers_of(c) or []).partial_rotary_factor
    turning = int(c.dim * share)
    require(
        turning % 2 == 0,
        f"config.json: partial_rotary_factor must rotate an even number of a head's {c.dim} "
        f"numbers; got {share}, which rotates {turning}",
    )
    half, middle = turning // 2, (c.dim + turning) // 2
    first = (*range(half), *range(turning, middle))
    return (*first, *range(half, turning), *range(middle, c.dim))


_LAYER = "model.layers.{}."
PHI3 = Family(
    "Phi3ForCausalLM",
    frozenset(("partial_rotary_factor", "sliding_window")),
    _read,
    _write,
    {"rms_norm_eps": 1e-5, "sliding_window": None, "original_max_position_embeddings": 4096},
    {
        **{f"layers/attention/{x}/kernel": f"{_LAYER}self_attn.qkv_proj.weight" for x in "qkv"},
        **{f"layers/mlp/{x}/kernel": f"{_LAYER}mlp.gate_up_proj.weight" for x in ("gate", "up")},
    },
    head_order=_head_order,
    # As in transformers, for files of its first versions.
    rope_kinds={"su": "longrope", "yarn": "longrope"},
)
