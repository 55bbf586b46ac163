"""Predicts the cost of a training step on a machine you do not have, and the best mesh.

  python -m train.main plan --config=configs/c4_pretrain.py --topology=v5e:8x8
  python -m train.main plan --config=configs/c4_pretrain.py --topology=h100:4x8 \\
      --mesh fsdp=8,data=4 --mesh fsdp=32
  python -m train.main plan --pretrained=checkpoints/llama-2-7b --mesh fsdp=8

The real step is compiled for that machine, which needs libtpu or the CUDA plugin (see
train/analysis/ahead_of_time.py). Memory and collectives come from the compiler; times are the best
that the chips' data sheets allow. Nothing is run. Topologies: v4, v5e, v5p, v6e with the shape of a
slice; a100, h100, h200 with GPUs of one host, or hosts x GPUs.

For a Hugging Face folder it lists where each parameter goes, and the bytes on each device of a
mesh. This reads no tensor and needs no compiler.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tape_jax.sharding import ShardingConfig


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, help="the config file")
    source.add_argument("--pretrained", type=Path, help="a Hugging Face folder, of which to plan")
    parser.add_argument("--topology", help="such as v5e:8x8 or h100:4x8; needed with --config")
    parser.add_argument(
        "--mesh",
        action="append",
        default=[],
        help="such as fsdp=8,tensor=4; may be repeated; without it several are tried",
    )
    parser.set_defaults(overrides=())


def run(args: argparse.Namespace) -> None:
    """Prints each mesh's plan and the best in detail, or where a folder's parameters go."""
    import jax

    from train import experiment
    from train.analysis import ahead_of_time, plan
    from train.checks import require

    jax.config.update("jax_platforms", "cpu")
    if args.pretrained is not None:
        plan_folder(args)
        return
    require(args.topology is not None, "--config needs --topology, such as v5e:8x8 or h100:4x8")
    wanted = experiment.from_file(args.config, args.overrides)
    machine = ahead_of_time.machine(args.topology)
    given = [parse_mesh(text) for text in args.mesh]
    chosen = given or ([wanted.sharding] if wanted.sharding else [])
    found = []
    for one in plan.plans(wanted, machine, chosen):
        found.append(one)
        print(f"{one.name}: {one.error or f'compiled in {one.seconds:.0f} s'}", flush=True)
    print(f"\n{wanted.name} on {args.topology}\n\n{plan.summary(found)}\n")
    best = plan.best(found)
    require(best is not None, f"no mesh of these fits {args.topology}")
    assert best is not None
    print(f"best: {plan.details(best)}")


def plan_folder(args: argparse.Namespace) -> None:
    """Prints where a folder's parameters go, for each mesh."""
    from tape_jax import Transformer
    from tape_jax.pretrained import pretrained_config
    from tape_jax.sharding import MESH_AXES
    from train.checks import require

    require(
        args.topology is None and not args.overrides,
        "--pretrained takes --mesh, and no --topology or fields of a config: bytes of parameters "
        "depend on neither",
    )
    model = Transformer(pretrained_config(args.pretrained))
    for text in args.mesh or ["data=1"]:
        mesh = parse_mesh(text)
        sizes = [getattr(mesh, axis) for axis in MESH_AXES]
        require(-1 not in sizes, f"--mesh with --pretrained needs sizes above 0; got {text!r}")
        print(f"{mesh.build(math.prod(sizes)).table(model)}\n")


def parse_mesh(text: str) -> ShardingConfig:
    """Parses a mesh such as ``fsdp=8,tensor=4``."""
    from tape_jax.sharding import MESH_AXES, ShardingConfig
    from train.checks import choose, require

    sizes: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        require(
            bool(equals) and size.removeprefix("-").isdecimal(),
            f"--mesh: expected such as fsdp=8,tensor=4; got {text!r}",
        )
        choose("mesh axis", name, MESH_AXES)
        sizes[name] = int(size)
    return ShardingConfig(**sizes)
