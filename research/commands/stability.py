r"""Measures how position states and gradients grow with depth, and where training diverges.

  python -m research.main stability --config=research/configs/ablations.py --out=runs/stability \
      --variants=tape_head_scale,norm_rms,no_equivariance --depths=4,8,16,32,48 --steps=100

Written as it goes: stability.jsonl, a record for each variant and depth; at the end stability.txt,
depth.png and layers.png. Called again, what is there already is not measured again.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--config", type=Path, required=True, help="a config file with VARIANTS")
    parser.add_argument("--out", type=Path, required=True, help="the folder for what is written")
    parser.add_argument("--variants", metavar="NAME,...", help="of the config (all)")
    parser.add_argument("--depths", default="4,8,16,32,48", help="numbers of layers (4,...,48)")
    parser.add_argument("--steps", type=int, default=100, help="of training (100)")
    parser.add_argument("--noise", type=float, default=0.1, help="for disturbed updates (0.1)")
    parser.set_defaults(overrides=())


def run(args: argparse.Namespace) -> None:
    """Measures."""
    from research.records import Store
    from research.stability import Growth, depth_figure, layer_figure, table
    from research.study import Place
    from train import experiment
    from train.checks import require
    from train.compare import plots, sweep
    from train.files import write_atomically

    require(
        all(depth.isdigit() and int(depth) for depth in args.depths.split(",")),
        f"stability: --depths must be numbers such as 4,8,16; got {args.depths}",
    )
    require(args.noise >= 0, f"stability: --noise must not be negative; got {args.noise}")
    older = args.out / "stability.json"
    require(
        not older.exists(),
        f"{older} was written by version 0.2, which measures in another format: choose another "
        "folder",
    )
    base = experiment.from_file(args.config, args.overrides, lambda _: None)
    names = args.variants.split(",") if args.variants else None
    variants = [setting.name for setting in sweep.variants(args.config, names)]
    for name in ("depth.png", "layers.png"):
        plots.require_ours(args.out / name)
    design = Growth(
        name="stability",
        config=args.config,
        variants=variants,
        depths=[int(depth) for depth in args.depths.split(",")],
        steps=args.steps,
        noise=args.noise,
        seeds=(base.seed,),
        overrides=tuple(args.overrides),
    )
    study = design.at(Place(Store(args.out), args.out))
    other = list(study.remarks())
    require(not other, f"stability: {'; '.join(other)}: choose another folder")
    study.run(lambda item: None)
    traces = sorted(study.traces(), key=lambda trace: variants.index(trace.variant))
    print(table(traces))
    write_atomically(args.out / "stability.txt", table(traces) + "\n")
    plots.save(depth_figure(traces), args.out / "depth.png")
    plots.save(layer_figure(traces), args.out / "layers.png")
    written = ("stability.jsonl", "stability.txt", "depth.png", "layers.png")
    print(f"\nwritten: {', '.join(str(args.out / name) for name in written)}")
