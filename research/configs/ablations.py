"""Parts of TAPE left out, replaced or broken, one at a time, on sorting with six layers.

Claim: none beforehand; the report says which parts matter to words longer than those trained on.
Sorting tells encodings apart there; sums do not at this size, where all are wrong.
Nine variants are judged by research/protocol.md (research/evidence.md): six by sorting with half
the steps, and three by growth in 48 layers. All, from before, are in research/records_before.jsonl.
Contradicted: equivariance keeps states stable. In 48 layers they grow to three times as much
without it, but to 42 % less if the update mixes along a head's dimensions, which breaks it too
(60 steps, five seeds). Confirmed, by words of 11 to 20 symbols sorted right: permutation
equivariance matters (TAPE 19 %, weights by place 14), and updates of later layers matter more (if
only two of six layers update, two late ones 25 %, two early ones 17; if all do, cutting off the
first one's costs most). TAPE without its update has 18 % and is not told apart.
Cost: two to three minutes of one core for a run, with evaluation; all variants with three seeds
took 3.5 hours of processor time.
Command: one variant of VARIANTS, or all of them with three seeds each:
    python -m research.main compare --config=research/configs/ablations.py --run=runs/ablations \
        --variants=tape_head_scale,attention_only,mlp_only
    python -m research.main compare --config=research/configs/ablations.py --run=runs/ablations \
        --variants=all --seeds=3
"""

from typing import Any

from ml_collections import ConfigDict

from research.configs import length_suite

SCALES = length_suite.SCALES
# By name, the fields in which a variant differs from the base, "tape_head_scale", which mixes heads
# as the published code does.
VARIANTS: dict[str, dict[str, Any]] = {
    "tape_head_scale": {},
    # No contextual update: another encoding, and TAPE with both parts left out.
    "rope": {"model.position.kind": "rope"},
    "no_update": {"model.position.attention_mix": "none", "model.position.mlp_mix": False},
    # One part of the update.
    "attention_only": {"model.position.mlp_mix": False},
    "mlp_only": {"model.position.attention_mix": "none"},
    # What the published code does against what the paper writes.
    "tape": {"model.position.attention_mix": "heads"},
    # One symmetry broken.
    "separate_cos_sin": {"model.position.kind": "tape_separate_cos_sin"},
    "mix_head_dim": {"model.position.kind": "tape_mix_head_dim"},
    "no_equivariance": {"model.position.kind": "tape_no_equivariance"},
    "place_weights": {"model.position.kind": "tape_place_weights"},
    # The phase symmetry given up gradually, from the start, and held to the end.
    "relaxed_gradually": {"model.position.kind": "tape_relaxed_equivariance"},
    "relaxed_freely": {
        "model.position.kind": "tape_relaxed_equivariance",
        "model.position.penalty": (0.0, 0.0),
    },
    "relaxed_barely": {
        "model.position.kind": "tape_relaxed_equivariance",
        "model.position.penalty": (1.0, 1.0),
    },
    # Bounds on the state.
    "norm_rms": {"model.position.norm": "rms"},
    "norm_unit": {"model.position.norm": "unit"},
    # The step size.
    "alpha_0.1": {"model.position.alpha": 0.1},
    "alpha_0.3": {"model.position.alpha": 0.3},
    "alpha_learned": {"model.position.learn_alpha": True},
    "alpha_per_head": {
        "model.position.learn_alpha": True,
        "model.position.alpha_per_head": True,
    },
    # The base of the start state.
    "learned_base": {"model.position.learn_base": True},
    # The layers that update; the sixth never does.
    "early": {"model.position.layers": (0, 2)},
    "middle": {"model.position.layers": (2, 4)},
    "late": {"model.position.layers": (3, 5)},
    # The width P of the update, 16 by default.
    "width_4": {"model.position.width": 4},
    "width_64": {"model.position.width": 64},
    # The form of the state: with blocks as in rotary form, and with more columns.
    "tensor": {"model.position.form": "tensor"},
    "tensor_wide": {"model.position.form": "tensor", "model.position.r": 4},
    # Half of the dimensions of a head do not rotate.
    "partial": {"model.position.partial_rotary_factor": 0.5},
    "partial_rope": {"model.position.kind": "rope", "model.position.partial_rotary_factor": 0.5},
    # Attention to the last eight tokens only.
    "window": {"model.local_window_size": 7},
    "window_rope": {"model.local_window_size": 7, "model.position.kind": "rope"},
}


def get_config() -> ConfigDict:
    """Fields that differ from the defaults of :mod:`train.experiment`."""
    config = length_suite.get_config()
    config.name = "ablations"
    config.task.problem = "sort"
    config.model.num_layers = 6
    config.model.position.attention_mix = "head_scale"
    return config
