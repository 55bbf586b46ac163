"""Loads models of runs and Llama folders with their tokenizers, and continues prompts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tape_jax as tape
from tape_jax import Cache, Transformer, decode, init_cache, pad_prompts, prefill
from tape_jax.pretrained import pretrained_config
from tape_jax.sharding import ShardingConfig
from train.checks import require
from train.data.tokenizers import Tokenized, Tokenizer
from train.evaluation import fits
from train.evaluation.continuations import before
from train.files import json_object
from train.training import runs

TOKENS_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class Speaker:
    """A model with its tokenizer.

    Attributes:
      model: the Flax module.
      variables: its variables.
      encode: prompt to token ids.
      decode: token ids to text.
      ends: ids of the tokens that end a text.
      codec: the tokenizer, or None for a task without one.
      steps: of training, taken and wanted; None for a Llama folder.
    """

    model: Transformer
    variables: Any
    encode: Callable[[str], Sequence[int] | np.ndarray]
    decode: Callable[[Sequence[int]], str]
    ends: tuple[int, ...]
    codec: Tokenizer | None = None
    steps: tuple[int, int] | None = None

    def continuation(self, prompt: np.ndarray, new: Sequence[int]) -> str:
        """Decodes new tokens after a prompt.

        Some tokenizers write the space between two words only if they see both.
        """
        before = self.decode(prompt.tolist())
        whole = self.decode([*prompt.tolist(), *new])
        return whole[len(before) :] if whole.startswith(before) else self.decode(new)


def load(
    folder: Path,
    adapter: Path | None = None,
    tokenizer: str | None = None,
    mesh: ShardingConfig | None = None,
) -> Speaker:
    """Loads the model of a run or Llama folder.

    Args:
      folder: of either.
      adapter, tokenizer: of a Llama folder.
      mesh: of the devices of this process; None: the first one.

    Raises:
      ValueError: if ``folder`` is neither or lacks a tokenizer, or the devices do not fit the mesh.
    """
    if (folder / "experiment.json").exists() or not (folder / "config.json").exists():
        require(
            adapter is None and tokenizer is None,
            "generate: --adapter and --tokenizer go with a Llama folder, and "
            f"{folder} has no config.json",
        )
        given = None if mesh is None else runs.evaluation_sharding(runs.load(folder), mesh)
        trained = runs.restore_model(folder, sharding=given)
        task: Any = trained.experiment.task
        codec = getattr(task, "codec", None)
        ends = getattr(codec, "ends", ())
        steps = trained.step, trained.experiment.steps
        return Speaker(
            trained.model, trained.variables, task.encode, task.decode, ends, codec, steps
        )
    model, variables = _llama(folder, adapter, mesh)
    task = Tokenized(tokenizer=tokenizer or str(folder))
    require(
        task.vocab_size <= model.config.vocab_size,
        f"generate: the tokenizer {task.tokenizer!r} has {task.vocab_size} tokens, the model "
        f"{model.config.vocab_size}",
    )
    codec = task.codec
    ends = _ends(folder, codec, model.config.vocab_size)
    # As the tokenizer itself; runs see documents with their start token.
    encode = task.encode if codec.adds_bos else codec.encode
    return Speaker(model, variables, encode, task.decode, ends, codec)


def _ends(folder: Path, codec: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids that end a text: the tokenizer's, and those of ``generation_config.json``."""
    path = folder / "generation_config.json"
    content = json_object(path.read_bytes()) if path.is_file() else {}
    require(content is not None, f"{path} is no JSON object")
    named = (content or {}).get("eos_token_id")
    named = named if isinstance(named, list) else [] if named is None else [named]
    require(
        all(type(x) is int for x in named),
        f"{path}: eos_token_id must be one or several integers; got {named!r}",
    )
    # Ids that the model lacks never come.
    return tuple(dict.fromkeys(x for x in (*codec.ends, *named) if 0 <= x < vocab_size))


def _llama(
    folder: Path, adapter: Path | None, mesh: ShardingConfig | None
) -> tuple[Transformer, Any]:
    """Loads a Llama folder's model and variables, on a mesh if there is one."""
    sharding = places = None
    if mesh is not None:
        sharding = dataclasses.replace(mesh.build(jax.local_devices()), strict=False)
        base = Transformer(pretrained_config(folder))
        shapes = jax.eval_shape(base.init, jax.random.key(0), runs.ONE_TOKEN)
        places = sharding.of(base, shapes)
    model, variables = tape.from_pretrained(folder, sharding=places)
    if adapter is not None:
        model, variables = tape.adapt.load_adapter(adapter, model, variables)
    if sharding is not None:
        model = Transformer(model.config, sharding=sharding)
        variables = jax.device_put(variables, sharding.of(model, variables))
    return model, variables


def stream(
    speaker: Speaker, prompts: Sequence[np.ndarray], new: int, **sampling: Any
) -> Iterator[tuple[list[list[int]], Cache]]:
    """Yields the continuations so far, after every few tokens, up to the end token.

    Args:
      speaker: the model.
      prompts: token ids of each.
      new: tokens to generate at most.
      **sampling: ``key``, ``temperature``, ``top_k`` and ``top_p`` as in :func:`tape_jax.generate`.

    Yields:
      For each prompt the ids of its continuation, and the cache.

    Raises:
      ValueError: if a prompt is empty, or the longest with its continuation is too long for the
        model.
    """
    model, variables = speaker.model, speaker.variables
    tokens, lengths = pad_prompts(prompts, vocab_size=model.config.vocab_size)
    longest = tokens.shape[1]
    total = longest + new
    limit = runs.max_length(model.config)
    require(
        fits(total, limit),
        f"a prompt of {longest} tokens and {new} new ones make {total}, but the model accepts at "
        f"most {limit}",
    )
    stop = jnp.array(speaker.ends) if speaker.ends else None
    # Padding repeats the stop token, which shows that a row has ended.
    step = jax.jit(
        functools.partial(decode, model, stop=stop, pad_id=[*speaker.ends, 0][0], **sampling),
        static_argnums=3,
        donate_argnums=1,
    )
    if longest > 1:
        # Logits of a whole prompt, if they were returned, could take more memory than the model.
        fill = jax.jit(lambda *given: prefill(model, *given, capacity=total)[1])
        cache = fill(variables, tokens[:, :-1], lengths - 1)
    else:
        cache = init_cache(model, len(prompts), total)
    last, rows = tokens[:, -1], np.zeros((len(prompts), 0), np.int32)
    while rows.shape[1] < new:
        count = min(TOKENS_AT_ONCE, new - rows.shape[1])
        written, cache = step(variables, cache, last, count)
        last, rows = written[:, -1], np.concatenate([rows, written], axis=1)
        yield [before(speaker.ends, row).tolist() for row in rows], cache
        if np.isin(rows, speaker.ends).any(axis=1).all():
            return


def describe_cache(cache: Cache) -> str:
    """Describes type, capacity and size of a cache in a few words."""
    arrays = jax.tree.leaves(cache.layers)
    size = sum(x.size * x.dtype.itemsize for x in arrays)
    types = ", ".join(sorted({str(x.dtype) for x in arrays}))
    kept = (
        "keys, values and position states"
        if any(layer.e is not None for layer in cache.layers)
        else "keys and values"
    )
    return f"cache: {kept} of {cache.capacity} tokens in {types}, {size / 2**20:.1f} MiB"
