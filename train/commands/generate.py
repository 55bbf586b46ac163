"""Continues prompts with a trained run, or with a Hugging Face Llama folder.

  python -m train.main generate --run=runs/x --prompt "def main(" --new=200
  python -m train.main generate --model=llama/ --adapter=tape.safetensors --prompt "Once" \\
      --temperature=0.8 --top-p=0.95 --seed=1

A single prompt is streamed to you; several are continued as one batch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", type=Path, help="the run folder")
    which.add_argument("--model", type=Path, help="a Hugging Face Llama folder")
    parser.add_argument("--adapter", type=Path, help="an adapter for the Llama folder")
    parser.add_argument("--tokenizer", help="of the Llama folder, if it is not in there")
    parser.add_argument("--prompt", action="append", required=True, help="may be repeated")
    parser.add_argument(
        "--new", "--max-new-tokens", type=int, default=128, help="tokens at most (128)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token (0)")
    parser.add_argument("--top-k", type=int, help="draw from so many tokens only")
    parser.add_argument("--top-p", type=float, help="draw from tokens of this probability only")
    parser.add_argument("--stop", action="append", default=[], help="a text that ends the answer")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")


def run(args: argparse.Namespace) -> None:
    """Prints the continuation of each prompt."""
    begun = time.monotonic()

    import sys

    import numpy as np

    from train.checks import require
    from train.training.generation import describe_cache, load, stream
    from train.training.metrics import Clock

    clock = Clock(begun)
    require(args.new >= 1, f"generate: --new must be at least 1; got {args.new}")
    require(
        0 <= args.seed < 2**32, f"generate: --seed must be from 0 to 2**32 - 1; got {args.seed}"
    )
    require(all(args.prompt), "generate: a --prompt is empty")
    require(all(args.stop), "generate: a --stop is empty")
    for prompt in args.prompt:
        is_text = prompt.encode(errors="ignore").decode() == prompt
        require(is_text, f"generate: the --prompt {prompt!r} is not UTF-8")
    speaker = load(args.run or args.model, args.adapter, args.tokenizer)
    prompts = [np.asarray(speaker.encode(prompt)) for prompt in args.prompt]
    sampling = _sampling(args)
    clock.lap("to start")
    texts, cache, head, shown = [""] * len(prompts), None, args.prompt[0], 0
    for rows, cache in stream(speaker, prompts, args.new, **sampling):  # noqa: B007
        decoded = [speaker.continuation(*both) for both in zip(prompts, rows, strict=True)]
        texts = [_until(text, args.stop) for text in decoded]
        if all(any(stop in text for stop in args.stop) for text in decoded):
            break
        if len(prompts) == 1:
            settled = _settled(texts[0], args.stop)
            print(head + settled[shown:], end="", flush=True)
            head, shown = "", len(settled)
    if len(prompts) == 1:
        print(head + texts[0].rstrip("\ufffd")[shown:])
    else:
        for prompt, text in zip(args.prompt, texts, strict=True):
            print(f"--- {prompt}\n{text}")
    assert cache is not None
    clock.lap("to generate")
    step, steps = speaker.steps or (0, 0)
    trained = f"step {step:,} of {steps:,}; " if speaker.steps else ""
    print(f"[{trained}{describe_cache(cache)}; {clock}]")
    if step < steps:
        print(f"warning: {args.run} is not trained to its end", file=sys.stderr)


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of a draw, or none for the likeliest tokens."""
    import jax

    from train.checks import require

    if args.temperature > 0:
        drawn = {"key": jax.random.key(args.seed), "temperature": args.temperature}
        return drawn | {"top_k": args.top_k, "top_p": args.top_p}
    require(
        args.temperature == 0,
        f"generate: --temperature must not be negative; got {args.temperature:g}",
    )
    require(
        args.top_k is None and args.top_p is None,
        "generate: --top-k and --top-p need a positive --temperature; got 0",
    )
    return {}


def _until(text: str, stops: Sequence[str]) -> str:
    """Cuts text before the first of ``stops``."""
    ends = [text.index(stop) for stop in stops if stop in text]
    return text[: min(ends, default=len(text))]


def _settled(text: str, stops: Sequence[str]) -> str:
    """Cuts from the end of text what is part of a character, or may be part of one of ``stops``."""
    text = text.rstrip("\ufffd")
    parts = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return text[: len(text) - max(parts, default=0)]
