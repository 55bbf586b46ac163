"""What a family of Hugging Face decoders is, and what the files of all families need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tape_jax._src.core.checks import require
from tape_jax._src.model.config import ModelConfig

Fields = dict[str, Any]
ATTENTION, MLP = ("q", "k", "v", "out"), ("gate", "up", "down")

# Fields that say nothing of what a decoder computes: names, token ids, training, caches, types.
HARMLESS = frozenset(
    (
        *("_attn_implementation_autoset", "_name_or_path", "architectures"),
        *("attn_implementation", "attention_dropout", "auto_map"),
        *("bos_token_id", "cache_implementation", "chunk_size_feed_forward", "dtype"),
        *("embd_pdrop", "eos_token_id", "finetuning_task", "id2label", "initializer_range"),
        *("is_decoder", "is_encoder_decoder", "label2id", "max_position_embeddings"),
        *("model_type", "num_labels", "output_attentions", "output_hidden_states"),
        *("pad_token_id", "pretraining_tp", "problem_type", "resid_pdrop", "return_dict"),
        *("sep_token_id", "task_specific_params", "tie_encoder_decoder"),
        *("tokenizer_class", "torch_dtype", "torchscript", "transformers_version"),
        *("unk_token_id", "use_cache", "use_return_dict"),
    )
)
# Fields that every family has, and that are read for all of them.
COMMON = frozenset(
    (
        *("head_dim", "hidden_act", "hidden_size", "intermediate_size"),
        *("num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
        *("original_max_position_embeddings", "quantization_config"),
        *("rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta"),
        *("tie_word_embeddings", "vocab_size"),
    )
)


# Values with which a field that a family does not know changes nothing.
OFF = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "add_cross_attention": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1,
    "lm_head_bias": False,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """A ``model_type`` of ``config.json``.

    Attributes:
      architecture: its name in ``architectures``.
      own: the fields of its ``config.json`` that the others lack.
      read: from ``config.json`` to fields of :class:`tape_jax.ModelConfig`.
      write: the other way; None if the family cannot be such a model.
      defaults: what transformers takes for fields that are absent, where it is not Llama's.
      names: of tensors, by the paths of our parameters, where they are not Llama's. Parameters of
        one name are rows of one tensor, in the order of Llama's names.
      head_order: of our model, which numbers of a checkpoint's head ours are, where rotation pairs
        others; None: the same.
    """

    architecture: str
    own: frozenset[str]
    read: Callable[[Mapping[str, Any]], Fields]
    write: Callable[[ModelConfig], Fields | None]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    head_order: Callable[[ModelConfig], tuple[int, ...]] | None = None


def flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name) or False
    require(isinstance(value, bool), f"config.json: {name} must be true or false; got {value!r}")
    return value


def before_own(window: Any) -> int | None:
    """Keys before a token's own that ``sliding_window`` lets it see, which counts the own too."""
    if window is None:
        return None
    require(
        isinstance(window, int) and not isinstance(window, bool) and window >= 1,
        f"config.json: sliding_window must be a positive integer or null; got {window!r}",
    )
    return window - 1


def sliding_window(before: int | tuple[int, int] | None) -> int | None:
    """Inverse of :func:`before_own`, of a causal model's window."""
    before = before[0] if isinstance(before, tuple) else before
    return None if before is None else before + 1


def is_plain(c: ModelConfig, *own: str, **wanted: Any) -> bool:
    """Whether what Llama has not is not there, but for fields of the family's own."""
    off: Fields = {"embedding_scale": 1, "residual_scale": 1, "logits_scaling": 1}
    off |= {"query_scale": None, "qk_norm": None, "norms": "before"} | wanted
    part = getattr(c.position, "partial_rotary_factor", 1)
    return (part == 1 or "partial_rotary_factor" in own) and all(
        getattr(c, name) == value for name, value in off.items() if name not in own
    )
