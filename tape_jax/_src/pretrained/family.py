"""Families of Hugging Face decoders, and functions that the files of all families need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tape_jax._src import positions
from tape_jax._src.core.checks import positive, require
from tape_jax._src.model.config import ModelConfig
from tape_jax._src.positions.fixed.frequencies import RopeScaling

Fields = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
# Encodings that a checkpoint can describe.
ROPES = (positions.Rope, positions.Yarn, positions.LongRope)
ATTENTION, MLP = ("q", "k", "v", "out"), ("gate", "up", "down")
BIASES = {(a, m): (*ATTENTION * a, *MLP * m) for a in (False, True) for m in (False, True)}
# The period of layers of another kind, in files of transformers 4.
PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")

# Fields that do not affect what a decoder computes: names, token ids, training, caches, types,
# and generation options in older files.
HARMLESS = frozenset(
    (
        *("_attn_implementation", "_attn_implementation_autoset", "_name_or_path"),
        *("architectures", "transformers.js_config", "unsloth_fixed", "unsloth_version"),
        *("attn_implementation", "attention_dropout", "auto_map"),
        *("bos_token_id", "cache_implementation", "chunk_size_feed_forward"),
        *("decoder_start_token_id", "dtype", "max_sequence_length", "tf_legacy_loss"),
        *("remove_invalid_values", "use_bfloat16"),
        *("embd_pdrop", "eos_token_id", "finetuning_task", "id2label", "initializer_range"),
        *("is_decoder", "is_encoder_decoder", "label2id", "max_position_embeddings"),
        *("model_type", "num_labels", "output_attentions", "output_hidden_states"),
        *("pad_token_id", "pretraining_tp", "problem_type", "resid_pdrop", "return_dict"),
        *("sep_token_id", "task_specific_params", "tie_encoder_decoder"),
        *("tokenizer_class", "torch_dtype", "torchscript", "transformers_version"),
        *("unk_token_id", "use_cache", "use_return_dict"),
        *("diversity_penalty", "do_sample", "early_stopping", "length_penalty", "max_length"),
        *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "bad_words_ids"),
        *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "prefix"),
        *("max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams"),
        *("suppress_tokens",),
        *("num_return_sequences", "output_scores", "repetition_penalty"),
        *("return_dict_in_generate", "temperature", "top_k", "top_p", "typical_p"),
    )
)
# Fields that every family has, and that are always read.
COMMON = frozenset(
    (
        *("head_dim", "hidden_size", "intermediate_size"),
        *("num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
        *("original_max_position_embeddings", "quantization_config"),
        *("rope_parameters", "rope_scaling", "rope_theta"),
        *("tie_word_embeddings", "vocab_size"),
    )
)


# Values with which a field unknown to a family changes nothing.
OFF = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "add_cross_attention": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1,
    "lm_head_bias": False,
    "pruned_heads": {},
    # In published files; transformers does not read them.
    "use_mrope": False,
    "is_llama_config": True,
    "activation": "swiglu",
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "use_bidirectional_attention": False,
}
# Options of a model that Llama lacks.
OPTIONS = (
    *("embedding_scale", "residual_scale", "logits_scaling", "query_scale", "qk_norm", "norms"),
    *("norm", "zero_centered_norms", "parallel_block", "logit_softcap", "final_logit_softcap"),
)


class LayerKind(NamedTuple):
    """The rotation and the window of one layer.

    Attributes:
      rope: its rotation, or None.
      window: how many tokens before its own a token sees; None: all.
    """

    rope: positions.Rope | None
    window: int | None


# Maps a config.json, and its rotations by FULL or SLIDING, to all layers' kinds.
ReadLayers = Callable[[Mapping[str, Any], Callable[[str], positions.Rope]], list[LayerKind]]


# Fields in which null means none; in others, null counts as absent.
SAYS_NONE = frozenset(
    (
        *("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
        *("head_dim", "num_key_value_heads"),
    )
)


@dataclasses.dataclass(frozen=True)
class Family:
    """A ``model_type`` of ``config.json``.

    Attributes:
      architecture: its name in ``architectures``.
      own: the fields of its ``config.json`` that the others lack.
      read: maps ``config.json`` to fields of :class:`tape_jax.ModelConfig`.
      write: the inverse; returns None if the family cannot describe the model.
      defaults: transformers' values for absent fields, if they are not Llama's.
      names: of tensors, by the paths of our parameters, if they are not Llama's. Parameters of one
        name are rows of one tensor, in the order of Llama's names.
      layers: maps ``config.json`` to the kinds of its layers if they differ; None: they are alike.
      head_order: maps our model to the numbers of a checkpoint's head in our order, if rotation
        pairs others; None: the same.
      eps, activation: the fields of the norms' epsilon and of the MLP's activation.
      fixed: values that fields of its own must have, if present.
      rope_kinds: names of rotary scalings that have another meaning here.
    """

    architecture: str
    own: frozenset[str]
    read: Callable[[Mapping[str, Any]], Fields]
    write: Callable[[ModelConfig], Fields | None]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layers: ReadLayers | None = None
    head_order: Callable[[ModelConfig], tuple[int, ...]] | None = None
    eps: str = "rms_norm_eps"
    activation: str = "hidden_act"
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rope_kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)


def flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name) or False
    require(isinstance(value, bool), f"config.json: {name} must be true or false; got {value!r}")
    return value


def number(given: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A number of ``config.json``; ValueError for anything else."""
    value = given.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"config.json: {name} must be a number; got {value!r}")
    return float(value)


def positive_number(given: Mapping[str, Any], name: str) -> float:
    """A number of ``config.json`` above 0; ValueError for anything else."""
    value = number(given, name)
    require(value > 0, f"config.json: {name} must be positive; got {value}")
    return value


def number_or_none(given: Mapping[str, Any], name: str) -> float | None:
    """A number of ``config.json`` as :func:`number` reads it, or None if null or absent."""
    return None if given.get(name) is None else number(given, name)


def before_own(window: Any) -> int | None:
    """Keys before its own that a token sees with ``sliding_window``, which counts its own too."""
    if window is None:
        return None
    require(
        isinstance(window, int) and not isinstance(window, bool) and window >= 1,
        f"config.json: sliding_window must be a positive integer or null; got {window!r}",
    )
    return window - 1


def slides(config: Mapping[str, Any], default: Callable[[int], bool]) -> list[bool]:
    """Returns which layers have the window, by ``layer_types`` or else by a rule."""
    layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    if kinds is None:
        return [default(layer) for layer in range(layers)]
    require(
        isinstance(kinds, list)
        and len(kinds) == layers
        and all(x in (FULL, SLIDING) for x in kinds),
        f"config.json: layer_types must be {layers} of {FULL}, {SLIDING}; got {kinds!r}",
    )
    return [kind == SLIDING for kind in kinds]


def one_rope(rope: Callable[[str], positions.Rope]) -> positions.Rope:
    """The rotation of a family whose layers all have one.

    Raises:
      ValueError: if there are two.
    """
    full, local = rope(FULL), rope(SLIDING)
    require(
        full == local,
        f"config.json: rotary parameters of {FULL} and {SLIDING} must be equal here; got {full} "
        f"and {local}",
    )
    return full


def read_biases(config: Mapping[str, Any]) -> Fields:
    """Returns which projections have biases, by two flags."""
    return {"biases": BIASES[flag(config, "attention_bias"), flag(config, "mlp_bias")]}


def write_biases(c: ModelConfig) -> Fields | None:
    """Inverse of :func:`read_biases`; None if the flags cannot say which have biases."""
    flags = {biases: flags for flags, biases in BIASES.items()}.get(c.biases)
    return None if flags is None else {"attention_bias": flags[0], "mlp_bias": flags[1]}


def period_of(config: Mapping[str, Any], default: int) -> int:
    """Returns the period of layers of another kind; ValueError unless a positive integer."""
    name = next((name for name in PATTERN if config.get(name) is not None), None)
    return default if name is None else positive(f"config.json: {name}", config[name])


def layer_types(layers: Sequence[LayerKind]) -> list[str]:
    """Inverse of :func:`slides`."""
    return [FULL if layer.window is None else SLIDING for layer in layers]


def position_of(layers: Sequence[LayerKind]) -> Fields:
    """Fields of :class:`tape_jax.ModelConfig` that describe its layers."""
    windows = {layer.window for layer in layers}
    shared = windows.pop() if len(windows) == 1 else None
    entries = [
        [
            *([] if layer.rope is None else [layer.rope]),
            *([] if layer.window in (None, shared) else [positions.Window(layer.window)]),
        ]
        for layer in layers
    ]
    lengths = range(1, len(entries) + 1)
    period = next(n for n in lengths if all(x == entries[i % n] for i, x in enumerate(entries)))
    pattern = [positions.create(entry or "none") for entry in entries[:period]]
    position = pattern[0] if period == 1 else positions.Layers(pattern)
    return {"position": position, "local_window_size": shared}


def layers_of(c: ModelConfig) -> list[LayerKind] | None:
    """Inverse of :func:`position_of`; None for encodings that checkpoints cannot describe."""
    found = []
    for encoding, _, _ in c.position.of_layers(c.num_layers):
        ropes = [x for x in encoding.members if type(x) in ROPES]
        others = [x for x in encoding.members if x not in ropes]
        known = all(type(x) in (positions.Window, positions.Encoding) for x in others)
        if len(ropes) > 1 or not known or any(x.axes > 1 or x.learn_base for x in ropes):
            return None
        window = c.window_of(encoding)
        before = window[0] if isinstance(window, tuple) else window
        found.append(LayerKind(ropes[0] if ropes else None, before))
    return None if any(x.rope and x.rope.still_heads for x in found) else found


def main_rope(layers: Sequence[LayerKind]) -> positions.Rope:
    """The rotation of layers that see all tokens or, if none rotates, of the first that does."""
    rotated = [layer for layer in layers if layer.rope is not None]
    found = next((x.rope for x in rotated if x.window is None), rotated[0].rope)
    assert found is not None
    return found


def sliding_window(layers: Sequence[LayerKind] | None) -> int | None:
    """The ``sliding_window`` that some layers have, which counts a token's own place too.

    Raises:
      ValueError: if they have several.
    """
    windows = {x.window + 1 for x in layers or () if x.window is not None}
    require(len(windows) < 2, f"a checkpoint has one sliding window; got {sorted(windows)}")
    return next(iter(windows), None)


def scaling_to_json(scaling: RopeScaling) -> Fields | None:
    """``rope_scaling`` of a config.json."""
    if scaling.kind == "none":
        return None
    names: tuple[str, ...] = {
        "longrope": ("short_factor", "long_factor"),
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "truncate"),
    }.get(scaling.kind, ())
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    values = {name: getattr(scaling, name) for name in names}
    fields |= {name: list(x) if isinstance(x, tuple) else x for name, x in values.items()}
    if scaling.kind in ("yarn", "llama3", "longrope"):
        fields["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind in ("yarn", "longrope") and scaling.magnitude is not None:
        fields["attention_factor"] = scaling.magnitude
    return fields


def is_plain(c: ModelConfig, *own: str, **wanted: Any) -> bool:
    """Returns whether a model has nothing that Llama lacks, except the family's own fields.

    With ``"window"`` among them layers may have one, with ``"layers"`` differ in it and rotation.
    """
    off: Fields = {name: getattr(ModelConfig, name) for name in OPTIONS} | wanted
    layers = layers_of(c)
    if layers is None or not any(layer.rope for layer in layers):
        return False
    if "layers" not in own and len(set(layers)) > 1:
        return False
    if not {"layers", "window"} & {*own} and layers[0].window is not None:
        return False
    parts = {layer.rope.partial_rotary_factor for layer in layers if layer.rope}
    return (parts == {1} or "partial_rotary_factor" in own) and all(
        getattr(c, name) == value for name, value in off.items() if name not in own
    )
