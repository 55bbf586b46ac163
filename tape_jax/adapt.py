"""Adapts a trained RoPE model: TAPE, its baselines, and files of trained parameters.

A method of :data:`METHODS` turns a model and its variables into an adapted model, whose outputs
are the same at first, and rules that say which parameters train:

>>> adapted = adapt(model, variables, "tape", key=key)
>>> mask = trainable_mask(adapted.model, adapted.rules)
>>> trainable, frozen = partition(adapted.variables["params"], mask)

Then make gradients and an optimiser's state for ``trainable`` only; :func:`merge` puts the two
together for the model. :func:`save_adapter` writes the trained parameters, with a fingerprint of
the model that they belong to.
"""

from tape_jax._src.adapt.files import describe_adapter, load_adapter, save_adapter
from tape_jax._src.adapt.identity import Fingerprint, fingerprint
from tape_jax._src.adapt.methods import (
    METHODS,
    Adapted,
    Method,
    adapt,
    add_lora,
    add_tape,
    drop_positions,
    full_attention,
    in_place_of,
    merge_lora,
    scale_theta,
    with_encoding,
    with_scaling,
)
from tape_jax._src.adapt.rules import (
    RULES,
    Embeddings,
    Everything,
    LoraFactors,
    Norms,
    Path,
    Position,
    Rule,
    describe_trainable,
    merge,
    parse_rule,
    partition,
    trainable_mask,
)
from tape_jax._src.model.layout import restack

__all__ = [
    "METHODS",
    "RULES",
    "Adapted",
    "Embeddings",
    "Everything",
    "Fingerprint",
    "LoraFactors",
    "Method",
    "Norms",
    "Path",
    "Position",
    "Rule",
    "adapt",
    "add_lora",
    "add_tape",
    "describe_adapter",
    "describe_trainable",
    "drop_positions",
    "fingerprint",
    "full_attention",
    "in_place_of",
    "load_adapter",
    "merge",
    "merge_lora",
    "parse_rule",
    "partition",
    "restack",
    "save_adapter",
    "scale_theta",
    "trainable_mask",
    "with_encoding",
    "with_scaling",
]
