"""Measures how position states and gradients grow with depth, and where training diverges.

  python -m research.main stability --config=research/configs/ablations.py --out=runs/stability \\
      --variants=tape,norm_rms,norm_unit,no_equivariance --depths=4,8,16,32,48 --steps=100

Written as it goes: stability.json; at the end stability.txt, depth.png and layers.png. Called
again, what is there already is not measured again.
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
    from research.inside import stability
    from tape_jax._src.core.checks import require
    from train.compare import plots, sweep
    from train.training.metrics import Progress

    require(
        all(depth.isdigit() and int(depth) for depth in args.depths.split(",")),
        f"stability: --depths must be numbers such as 4,8,16; got {args.depths}",
    )
    names = args.variants.split(",") if args.variants else None
    settings = sweep.variants(args.config, names)
    for name in ("depth.png", "layers.png"):
        plots.require_ours(args.out / name)
    with Progress.of("measuring") as progress:
        traces = stability.measure(
            args.config,
            settings,
            [int(depth) for depth in args.depths.split(",")],
            args.out,
            overrides=(*args.overrides, f"--config.train.steps={args.steps}"),
            noise=args.noise,
            progress=progress,
        )
    print(stability.table(traces))
    written = stability.write_figures(traces, args.out)
    print(f"\nwritten: {', '.join(map(str, [args.out / 'stability.json', *written]))}")
