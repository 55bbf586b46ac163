"""Loads and saves checkpoints in the Hugging Face layout, without transformers.

A checkpoint is a folder with ``config.json`` and safetensors, in one file or in shards with an
index. Nothing is downloaded, and pickles are never opened.

>>> model, variables = from_pretrained("checkpoints/llama-2-7b")
>>> save_pretrained("checkpoints/mine", model, variables, like="checkpoints/llama-2-7b")
"""

from tape_jax._src.pretrained.loading import from_pretrained, pretrained_config
from tape_jax._src.pretrained.saving import save_pretrained

__all__ = ["from_pretrained", "pretrained_config", "save_pretrained"]
