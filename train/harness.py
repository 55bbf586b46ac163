"""Runs the lm-evaluation-harness on runs and Hugging Face Llama folders.

    pip install lm_eval
    python -m train.harness --model tape_jax --model_args run=runs/x --tasks lambada_openai
    python -m train.harness --model tape_jax --model_args model=llama,adapter=tape.safetensors \\
        --tasks arc_easy --batch_size 16 --use_cache runs/answers

All other options are the harness's own: ``--help`` lists them. In a program of your own, call
:func:`register` first.
"""

from __future__ import annotations

import sys

from train.process import keep_freed_memory, keep_programs

NAME = "tape_jax"
TARGET = "train.harness_model:TapeJax"


def register() -> None:
    """Makes the model known to the harness, under the name ``tape_jax``.

    Raises:
      ModuleNotFoundError: if ``lm_eval`` is not installed.
    """
    import lm_eval.models  # noqa: F401 - else the harness would take ours for all there are.
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)


def main() -> int:
    """Runs the harness's own command line."""
    try:
        register()
    except ModuleNotFoundError as error:
        print(f"error: {error}: `pip install 'lm_eval>=0.4.13'` installs it", file=sys.stderr)
        return 2
    from lm_eval.__main__ import cli_evaluate

    keep_freed_memory()
    keep_programs()
    try:
        cli_evaluate()
    except (ValueError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
