"""Compares how TAPE's and RoPE's training steps grow in memory and traffic, by compiler plans.

    python -m benchmarks.scaling [--remat full|dots|none] [--attention chunked]

Nothing is timed or run: steps are compiled for simulated devices of the CPU. One size at a time is
doubled. ``in between`` is the memory that a step needs besides its arguments, on one device, mostly
activations; ``sent`` is what a device sends. The devices are in a mesh of ``fsdp``, with one
sequence each (weak scaling), or of ``sequence``, which splits one sequence.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

from benchmarks.table import markdown, mebibytes, ratio
from tape_jax import ModelConfig, Transformer
from tape_jax.sharding import ShardingConfig
from train.analysis.collectives import collectives
from train.experiment import TrainConfig
from train.training import runs
from train.training.step import TrainState, make_optimizer, make_step


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step.

    Attributes:
      length, layers, width, batch: of the model and the batch.
      mesh: on which devices.
    """

    length: int = 1024
    layers: int = 4
    width: int = 256
    batch: int = 1
    mesh: ShardingConfig = dataclasses.field(default_factory=ShardingConfig)

    def planned(self, encoding: str, remat: str, attention: str) -> tuple[int, float]:
        """Returns one device's bytes in between, and the bytes that it sends."""
        config = ModelConfig(
            vocab_size=256,
            hidden_size=self.width,
            num_layers=self.layers,
            num_heads=8,
            max_length=self.length,
            position=encoding,
            scan_layers=True,
            remat=remat,
            # A split sequence has one implementation, the ring.
            attention_implementation=attention if self.mesh.sequence == 1 else None,
        )
        count = self.mesh.data * self.mesh.fsdp * self.mesh.sequence * self.mesh.tensor
        sharding = self.mesh.build(jax.devices()[:count])
        model = Transformer(config, sharding=sharding)
        sharding.check(model, batch_size=self.batch, length=self.length)
        training = TrainConfig(steps=100, batch_size=self.batch, learning_rate=1e-3)
        optimizer = make_optimizer(training)
        shape = self.batch, self.length
        place = sharding.named(("batch", "sequence"), shape)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)
        weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)

        def initial() -> TrainState:
            params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
            key = jax.random.key_data(jax.random.key(1))
            return TrainState(params, optimizer.init(params), jnp.int32(0), key)

        state = jax.eval_shape(initial)
        places = sharding.of(model, state)
        batch = {"inputs": tokens, "targets": tokens, "weights": weights}
        step = make_step(model, optimizer, training, places)
        compiled = step.lower(runs.placed(state, places), batch).compile()
        found = collectives(compiled.as_text(), sharding.mesh)
        sent = sum((c.times or 1) * c.traffic for c in found)
        return compiled.memory_analysis().temp_size_in_bytes, sent


CASES = {
    "length": {str(n): Case(length=n) for n in (512, 1024, 2048, 4096)},
    "layers": {str(n): Case(layers=n) for n in (4, 8, 16)},
    "width": {str(n): Case(width=n) for n in (128, 256, 512)},
    "devices, one sequence each (fsdp)": {
        str(n): Case(batch=n, mesh=ShardingConfig(fsdp=n)) for n in (1, 2, 4, 8)
    },
    "devices, one sequence of 4,096 (sequence)": {
        str(n): Case(length=4096, mesh=ShardingConfig(sequence=n)) for n in (1, 2, 4, 8)
    },
}


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--remat", choices=("full", "dots", "none"), default="full")
    parser.add_argument("--attention", default="chunked")
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    usual = Case()
    print(
        f"{usual.layers} layers, width {usual.width}, 8 heads, {usual.length} tokens, float32, "
        f"remat {options.remat}, attention {options.attention}, jax {jax.__version__}\n"
    )
    for what, cases in CASES.items():
        rows = []
        for size, case in cases.items():
            tape, rope = (
                case.planned(encoding, options.remat, options.attention)
                for encoding in ("tape", "rope")
            )
            rows.append(
                (
                    size,
                    mebibytes(tape[0]),
                    mebibytes(rope[0]),
                    ratio(tape[0], rope[0]),
                    mebibytes(tape[1]),
                    mebibytes(rope[1]),
                )
            )
        header = (
            what, "TAPE, in between MiB", "RoPE", "ratio", "TAPE, sent MiB", "RoPE",
        )  # fmt: skip
        print(markdown(header, rows), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
