"""Measures TAPE's training step against RoPE's in one run, the same model otherwise.

    python -m benchmarks.train_step [--model tiny|small|c4] [--lengths T ...] [--rows NAME ...]

A row is an encoding, or ``encoding:backend`` to name its attention backend, such as ``rope:cudnn``;
``tape:cudnn:fused`` names how the update is computed too, and ``tape:cudnn:state_dtype=bfloat16``
sets a field of the model. ``--unrolled`` writes layers out instead of looping over them. The step
is that of ``train.training.loop``: loss, gradients, clipping and an update by AdamW, on random
tokens. Rows take turns; ratios are to the first row that can run here, which their columns name,
run by run, and that row's second entry shows the noise. Memory is what the compiler plans:
``temporary`` for the step alone, ``in all`` with parameters, moments and batch. Model FLOP
utilisation is that of :func:`train.training.flops.model_flops`, where the chip's peak is known.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.table import markdown, mebibytes, ratio
from research.overhead import StepMeasurement, measure_steps
from tape_jax import ModelConfig
from tape_jax._src.core.checks import nearest, require
from tape_jax._src.core.timing import describe_device
from tape_jax._src.model import block
from train.training.flops import model_flops, peak


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model to measure, with its default lengths and tokens.

    Attributes:
      model: all except the encoding and the attention backend.
      lengths: of the sequences.
      tokens: in a batch, at every length.
    """

    model: ModelConfig
    lengths: tuple[int, ...]
    tokens: int


PRESETS = {
    "tiny": Preset(
        ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=2), (32, 64), 128
    ),
    "small": Preset(
        ModelConfig(vocab_size=256, hidden_size=256, num_layers=6, num_heads=4), (256, 1024), 2048
    ),
    # The published pre-training on C4; 162 M parameters with RoPE.
    "c4": Preset(
        ModelConfig(
            vocab_size=32_000, hidden_size=768, num_layers=12, num_heads=12, dtype="bfloat16"
        ),
        (1024, 8192),
        16_384,
    ),
    # A billion parameters.
    "1b": Preset(
        ModelConfig(
            vocab_size=32_000, hidden_size=2048, num_layers=16, num_heads=16, dtype="bfloat16"
        ),
        (1024, 8192),
        16_384,
    ),
}


def row_config(model: ModelConfig, row: str) -> ModelConfig:
    """Returns the model of a row: ``encoding[:backend[:update]][:field=value]...``.

    Raises:
      ValueError: if the row names more than these, a field that a model does not have, or one
        twice; and for what a model refuses.
    """
    fields = ("position", "attention_implementation", "update_implementation")
    parts = [part.partition("=") for part in row.split(":")]
    named = [name for name, is_setting, _ in parts if not is_setting]
    require(
        len(named) <= len(fields),
        f"row {row!r}: expected at most an encoding, a backend and how the update is computed; "
        f"got {', '.join(named)}",
    )
    given: dict[str, Any] = {field: x for field, x in zip(fields, named, strict=False) if x}
    known = [field.name for field in dataclasses.fields(model)]
    for field, is_setting, value in parts:
        if is_setting:
            require(
                field in known,
                f"row {row!r}: a model has no field {field!r}{nearest(field, known)}",
            )
            require(field not in given, f"row {row!r} gives {field} twice")
            given[field] = {"true": True, "false": False}.get(value, value)
    return dataclasses.replace(model, **given)


def models(options: argparse.Namespace) -> tuple[ModelConfig, dict[str, ModelConfig]]:
    """Returns the model that rows have in common, and that of each row."""
    names = ("dtype", "state_dtype", "remat")
    given = {name: getattr(options, name) for name in names if getattr(options, name)}
    model = dataclasses.replace(PRESETS[options.model].model, **given)
    return model, {row: row_config(model, row) for row in options.rows}


def report(
    configs: dict[str, ModelConfig], found: dict[str, StepMeasurement], batch: int, length: int
) -> str:
    """Returns the table of one length."""
    device, rows = jax.devices()[0].device_kind, []
    first, base = next(iter(found.items()))
    base_memory = base.memory.total if base.memory else None
    for name, got in found.items():
        config = configs[name.removesuffix(", again")]
        rate = model_flops(config, batch, length) / got.timing.median
        best, memory = peak(device, config.dtype), got.memory
        total = memory.total if memory else None
        rows.append(
            (
                name,
                f"{1e3 * got.timing.median:.2f}",
                f"{100 * got.timing.spread:.1f} %",
                f"{got.timing.ratio(base.timing):.3f}",
                mebibytes(memory.temporary if memory else None),
                mebibytes(total),
                ratio(total, base_memory),
                f"{batch * length / got.timing.median:,.0f}",
                f"{rate / 1e12:.3f}",
                "-" if best is None else f"{100 * rate / best:.1f} %",
            )
        )
    header = ("step", "ms", "+-", f"time / {first}", "temporary MiB", "in all MiB")
    header += (f"memory / {first}", "tokens/s", "TFLOP/s", "of peak")
    return markdown(header, rows)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the command-line options, with the preset's values where none are given.

    ``common`` and ``configs`` are what :func:`models` returns.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", choices=PRESETS, help="default: tiny on a CPU, c4 elsewhere")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="T")
    parser.add_argument("--tokens", type=int, help="tokens per batch, at every length")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps of each (10)")
    parser.add_argument(
        "--rows", nargs="+", default=["rope", "tape"], metavar="ENCODING[:BACKEND[:UPDATE]]"
    )
    parser.add_argument("--unrolled", action="store_true", help="layers one by one, in one program")
    parser.add_argument("--dtype", help="compute type")
    parser.add_argument("--state-dtype", help="type of the position states")
    parser.add_argument("--remat", help="what the backward pass recomputes: none, dots or full")
    options = parser.parse_args(argv)
    options.model = options.model or ("tiny" if jax.default_backend() == "cpu" else "c4")
    preset = PRESETS[options.model]
    options.lengths = options.lengths or preset.lengths
    options.tokens = options.tokens or preset.tokens
    try:
        options.common, options.configs = models(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    options = parse(argv)
    model, configs = options.common, options.configs
    if options.unrolled:
        block.MOST_UNROLLED[jax.default_backend()] = model.num_layers
    print(describe_device())
    print(
        f"model {options.model}, {model.dtype}, states in {model.state_dtype or 'float32'}; median "
        f"of {options.repeats} steps, +- half the quartiles' distance; "
        f"layers {'written out' if options.unrolled else 'as the model has them'}"
    )
    for length in options.lengths:
        batch = max(1, options.tokens // length)
        found, skipped = measure_steps(configs, batch, length, repeats=options.repeats)
        print(f"\nT = {length}, batch {batch}")
        if found:
            print(f"\n{report(configs, found, batch, length)}")
        for name, reason in skipped.items():
            print(f"\n{name}: skipped, {reason}")


if __name__ == "__main__":
    main()
