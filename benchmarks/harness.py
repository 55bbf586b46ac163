"""The lm-evaluation-harness on a small random Llama: this package beside transformers, in one run.

Needs lm_eval, torch, transformers and accelerate. Both get the same requests in batches of the same
size; the first turn compiles, and is shown separately. Each has one core, whose processor time is
measured, so that other work on the machine does not count.

    python -m benchmarks.harness
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

import tape_jax as tape
from benchmarks.table import markdown
from tape_jax import testing
from tests.train import tokenizer_files


def folder(path: Path, width: int, layers: int) -> Path:
    """Makes a random Llama folder with a tokenizer of 300 tokens."""
    sizes = {"hidden_size": width, "num_layers": layers, "num_heads": 4, "num_kv_heads": 2}
    config = tape.ModelConfig(
        vocab_size=300, intermediate_size=3 * width, position="rope", max_length=1024, **sizes
    )
    model = tape.Transformer(config)
    variables = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 1), np.int32))
    tape.save_pretrained(path, model, testing.random_params(None, variables))
    tokenizer_files.hugging_face(path / "tokenizer.json")
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(roles | kind))
    return path


def requests(count: int) -> dict[str, list[Any]]:
    """Contexts of 50 to 400 letters, with four continuations each or with what ends an answer."""
    rng = np.random.default_rng(0)

    def text(low: int, high: int) -> str:
        letters = rng.integers(97, 123, rng.integers(low, high)).astype(np.uint8)
        return letters.tobytes().decode()

    contexts = [text(50, 400) for _ in range(count)]
    choices = [(context, f" {text(4, 30)}") for context in contexts for _ in range(4)]
    until = {"until": ["\n\n"], "max_gen_toks": 32, "do_sample": False}
    asked = {"loglikelihood": choices, "generate_until": [(c, until) for c in contexts]}
    return {kind: [SimpleNamespace(args=args) for args in all_] for kind, all_ in asked.items()}


def times(name: str, llama: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the processor time of each turn with one model in seconds, by kind of request."""
    if name == "transformers":
        from lm_eval.models.huggingface import HFLM

        batch = options.batch
        model: Any = HFLM(pretrained=llama, dtype="float32", device="cpu", batch_size=batch)
    else:
        from train.harness_model import TapeJax

        model = TapeJax(model=llama, batch_size=options.batch)
    found: dict[str, list[float]] = {}
    for kind, asked in requests(options.count).items():
        for _ in range(options.turns + 1):
            start = time.process_time()
            getattr(model, kind)(asked, disable_tqdm=True)
            found.setdefault(kind, []).append(time.process_time() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {"width": 256, "layers": 4, "count": 64, "batch": 16, "turns": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", nargs=2, metavar=("MODEL", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        # Before the libraries look for cores.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        print(json.dumps(times(*options.only, options)))
        return
    found = {}
    with tempfile.TemporaryDirectory() as path:
        llama = folder(Path(path) / "llama", options.width, options.layers)
        # Each in its own process: threads of the two libraries would keep one another waiting.
        for name in ("transformers", "tape_jax"):
            call = [sys.executable, "-m", "benchmarks.harness", *sys.argv[1:]]
            call += ["--only", name, str(llama)]
            out = subprocess.run(call, check=True, capture_output=True, text=True).stdout
            found[name] = json.loads(out.splitlines()[-1])
    rows = []
    for kind in found["transformers"]:
        base = statistics.median(found["transformers"][kind][1:])
        for name, by_kind in found.items():
            first, *others = by_kind[kind]
            middle = statistics.median(others)
            row = [kind, name, f"{first:.2f}", f"{middle:.2f}"]
            rows.append([*row, f"{min(others):.2f} to {max(others):.2f}", f"{base / middle:.2f}"])
    header = ["requests", "model", "first turn, s", "a turn, s", "from to", "times as fast"]
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
