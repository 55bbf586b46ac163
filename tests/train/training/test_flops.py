"""Counts of operations against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from tape_jax import Experts, ModelConfig, positions
from train.training import flops
from train.training.flops import attention_flops, visible_pairs


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 8),
        ({"is_causal": False}, 16),
        ({"local_window_size": 3}, 8),
        ({"local_window_size": 0}, 3.5),
        ({"is_causal": False, "local_window_size": 2}, 15),
    ],
)
def test_visible_pairs(options, pairs):
    assert visible_pairs(4, **options) == pairs


def test_attention():
    """T = 2, D = 4: four pairs, four numbers each, a multiplication and an addition."""
    call = {"batch": 1, "heads": 1, "head_dim": 4}
    assert attention_flops(1, 2, is_causal=False, **call) == 32
    assert attention_flops(1, 2, **call) == 16
    assert attention_flops(3, 2, batch=5, heads=7, head_dim=4) == 3 * 5 * 7 * 16


# Projections of q, k, v and the output 4 * 2 * 2, the MLP 3 * 2 * 8; logits 2 * 3.
TINY = ModelConfig(vocab_size=3, hidden_size=2, num_layers=2, num_heads=1)


def test_model():
    """One sequence of two tokens: two layers, then the logits; forward and twice that backward."""
    config = dataclasses.replace(TINY, position="rope")
    products = 2 * 2 * (2 * (16 + 48) + 6)
    attention = 2 * (2 * 2 * 2 * 2)
    assert flops.model_flops(config, 1, 2) == 3 * (products + attention)
    windows = [
        flops.model_flops(dataclasses.replace(TINY, position=position, local_window_size=7), 1, 64)
        for position in ("rope", "rope+window")
    ]
    assert windows[0] == windows[1]


def test_model_with_tape():
    """The first of two layers attends the state and updates it: P = 4 by default."""
    rope = flops.model_flops(dataclasses.replace(TINY, position="rope"), 1, 2)
    tape = flops.model_flops(dataclasses.replace(TINY, position="tape"), 1, 2)
    gate, matrix, mixing = 2 * 4, 4 * 1, 1 * 2
    attended = 1 * 2
    assert tape - rope == 3 * (2 * 2 * (gate + matrix + mixing + attended) + 2 * 2 * 2)
    scale = positions.Tape(attention_mix="head_scale")
    found = flops.model_flops(dataclasses.replace(TINY, position=scale), 1, 2)
    assert tape - found == 3 * 2 * 2 * attended
    alone = positions.Tape(mlp_mix=False)
    found = flops.model_flops(dataclasses.replace(TINY, position=alone), 1, 2)
    assert found - rope == 3 * (2 * 2 * attended + 2 * 2 * 2)
    bare = positions.Tape(attention_mix="none", mlp_mix=False)
    assert flops.model_flops(dataclasses.replace(TINY, position=bare), 1, 2) == rope


def test_experts():
    """Of eight experts a token takes three, and its router has eight outputs."""
    dense = dataclasses.replace(TINY, position="rope")
    experts = dataclasses.replace(dense, experts=Experts(8, per_token=3))
    more = 2 * (2 * 48 + 2 * 8)
    found = flops.model_flops(experts, 1, 2) - flops.model_flops(dense, 1, 2)
    assert found == 3 * 2 * 2 * more


@pytest.mark.parametrize(
    ("chip", "dtype", "wanted"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "float32", None),
        ("TPU v5 lite", "bfloat16", 197e12),
        ("TPU v5", "bfloat16", 459e12),
        ("cpu", "bfloat16", None),
    ],
)
def test_peak(chip, dtype, wanted):
    assert flops.peak(chip, dtype) == wanted
