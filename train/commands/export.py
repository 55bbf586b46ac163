"""Writes the newest checkpoint of a run as a Hugging Face Llama folder.

python -m train.main export --run=runs/lora --out=llama-2-7b-longer/

Low-rank terms are added to their kernels. Parts that Llama does not have, such as TAPE, are an
error: use adapter.safetensors in the run instead, or the run itself if its base is a run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

# Encodings that a Llama folder can have, beside windows and layers without rotation.
ROTATIONS = ("rope", "yarn", "longrope")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.add_argument("--out", type=Path, required=True, help="the folder, new or empty")
    parser.add_argument(
        "--dtype",
        help="type of all parameters, such as bfloat16; the base's or the run's by default",
    )


def run(args: argparse.Namespace) -> None:
    """Writes the run's model as a Llama folder."""
    from tape_jax.adapt import merge_lora
    from tape_jax.pretrained import save_pretrained
    from train.checks import require
    from train.training import messages, runs

    wanted, adapter = runs.load(args.run), args.run / runs.ADAPTER
    position = wanted.model.position
    kinds = {one.kind for one in position.members}
    use = f"it stays a run, {messages.generate(args.run, wanted.task, 'Once upon a time')}"
    base = wanted.adapt.base if wanted.adapt else None
    like = base if base and (Path(base) / "config.json").is_file() else None
    if like and adapter.exists():
        call = f"generate --model={like} --adapter={adapter}"
        use = f"what was trained is in {adapter}, as {call} takes it"
    require(
        not kinds.isdisjoint(ROTATIONS) and kinds <= {*ROTATIONS, "window", "none"},
        f"a Llama folder has no place for the position encoding {position.kind!r}: {use}",
    )
    trained = runs.restore_model(args.run)
    model, variables = trained.model, trained.variables
    if model.config.lora:
        model, variables = merge_lora(model, variables)
    save_pretrained(args.out, model, variables, like=like, dtype=args.dtype)
    print(f"written: {args.out}")
