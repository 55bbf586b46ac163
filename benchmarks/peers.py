"""Times a training step against what you would use instead of this package.

    pip install '.[peers]'  # a build for the CPU will do
    python -m benchmarks.peers [--lengths 256 1024] [--tokens 2048] [--repeats 10]

The ``small`` model of :mod:`benchmarks.train_step`, by the same optimiser on random tokens: with
RoPE and with TAPE here; with RoPE and, instead of this package's attention, plain
``jax.nn.dot_product_attention`` and that of ``flax.linen``; and as Hugging Face's PyTorch Llama,
which is left out, with the reason, if the extra is not installed. Rows take turns in one
process, in float32 on the CPU; ratios are to the first row, run by run.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.table import markdown
from benchmarks.train_step import PRESETS
from research.overhead import Runner, TrainingStep
from tape_jax import ModelConfig
from tape_jax._src.attention.choice import BACKENDS
from tape_jax._src.attention.request import Request, refuse
from tape_jax._src.attention.visibility import Band
from tape_jax._src.core.timing import describe_device, take_turns

MODULE = "benchmarks.peers"


class Library:
    """A library's ``dot_product_attention`` as a backend: causal, no state attended."""

    def __init__(self, attend: Callable[..., jax.Array]):
        self._attend = attend

    def check(self, request: Request) -> None:
        """Refuses what the step here does not ask for."""
        visibility = request.visibility
        plain = visibility.band == Band(is_causal=True) and visibility.query_offset == 0
        plain = plain and visibility.segments is None and visibility.mask is None
        plain = plain and request.bias is None and request.attended_state() is None
        refuse(not plain, "only causal attention of whole sequences, without a state to attend")

    def attend(self, request: Request) -> tuple[jax.Array, None]:
        """Rotates, and calls the library."""
        return self._attend(*request.rotated(), request.v), None


def _flax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    mask = nn.make_causal_mask(jnp.ones(q.shape[:2], bool), dtype=bool)
    return nn.dot_product_attention(q, k, v, mask=mask)


def _jax_nn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


jax_nn, flax_linen = Library(_jax_nn), Library(_flax)
LIBRARIES = {"jax.nn": f"{MODULE}:jax_nn", "flax": f"{MODULE}:flax_linen"}


def torch_step(config: ModelConfig, batch: int, length: int) -> Callable[[], Any]:
    """Returns a training step of Hugging Face's Llama of the same shape.

    Raises:
      NotImplementedError: if PyTorch or transformers is not installed.
    """
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise NotImplementedError(f"needs pip install '.[peers]': {error}") from error
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.mlp_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            max_position_embeddings=length,
            use_cache=False,
            attn_implementation="sdpa",
        )
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))
    tokens = torch.randint(0, config.vocab_size, (batch, length))

    def step() -> Any:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return jnp.float32(loss.item())

    return step


def rows(
    model: ModelConfig, batch: int, length: int
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Returns the steps by name, and the reasons why others cannot be measured here."""
    rope = dataclasses.replace(model, position="rope", dtype="float32")
    configs = {"rope": rope, "tape": dataclasses.replace(rope, position="tape")}
    for name in LIBRARIES:
        configs[f"rope, {name} attention"] = dataclasses.replace(
            rope, attention_implementation=name
        )
    found: dict[str, Callable[[], Any]] = {}
    skipped = {}
    try:
        found["Hugging Face Llama, PyTorch"] = torch_step(rope, batch, length)
    except NotImplementedError as reason:
        skipped["Hugging Face Llama, PyTorch"] = str(reason)
    for name, config in configs.items():
        found[name] = Runner(TrainingStep(config, batch, length))
    first = next(iter(found))
    found[f"{first}, again"] = found[first]
    return found, skipped


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", choices=PRESETS, default="small")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="T")
    parser.add_argument("--tokens", type=int, help="tokens per batch")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps of each (10)")
    options = parser.parse_args(argv)
    preset = PRESETS[options.model]
    BACKENDS.update(LIBRARIES)
    print(describe_device())
    for length in options.lengths or preset.lengths:
        batch = max(1, (options.tokens or preset.tokens) // length)
        found, skipped = rows(preset.model, batch, length)
        timings = take_turns(found, repeats=options.repeats)
        base = next(iter(timings.values()))
        table = [
            (
                name,
                f"{1e3 * got.median:.0f}",
                f"{100 * got.spread:.0f} %",
                f"{got.ratio(base):.3f}",
            )
            for name, got in timings.items()
        ]
        print(f"\nmodel {options.model}, T = {length}, batch {batch}\n")
        print(markdown(("step", "ms", "+-", "ratio"), table), flush=True)
        for name, reason in skipped.items():
            print(f"\n{name}: left out, {reason}")


if __name__ == "__main__":
    main()
