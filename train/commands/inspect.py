"""Draws the inside of a trained model, and lists the tokens whose states move most.

  python -m train.main inspect --run=runs/x [--prompt "407+85"]

Pictures, in the folder inside/ of the run unless --out says otherwise:
  patterns.png   dot products of position states by head and layer, beside the start (RoPE)
  attention.png  attention maps by head and layer
  drift.png      norms and phases of the states by layer
  moves.png      how far each layer moves each token's state
  pointing.png   for addressing: what questions attend to, and what their states are most like
"""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.add_argument("--out", type=Path, help="where the pictures go (RUN/inside)")
    parser.add_argument("--prompt", help="look at this instead of examples of the task")
    parser.add_argument("--length", type=int, help="tokens to look at (the trained length)")
    parser.add_argument("--examples", type=int, default=8, help="for the averages (8)")


def run(args: argparse.Namespace) -> None:
    """Writes the pictures and prints the tokens whose states move most."""
    import numpy as np

    from train.analysis import inspection
    from train.checks import require
    from train.compare import plots
    from train.compare import tasks as of_tasks
    from train.evaluation.inside import look
    from train.training import runs

    require(args.examples >= 1, f"inspect: --examples must be at least 1; got {args.examples}")
    trained = runs.restore_model(args.run)
    if args.prompt is None:
        tokens = np.asarray(inspection.examples(trained.experiment, args.examples)["inputs"])
    else:
        tokens = inspection.prompted(trained.experiment, args.prompt)
    if args.length is not None:
        require(
            2 <= args.length <= tokens.shape[1],
            f"inspect: --length must be from 2 to {tokens.shape[1]}; got {args.length}",
        )
        tokens = tokens[:, : args.length]
    task = trained.experiment.task
    labels = [[inspection.printable(task.decode([token])) for token in row] for row in tokens]
    inside = look(trained.model, trained.variables, tokens, labels)
    folder = args.out or args.run / "inside"
    pictures = inspection.figures(inside) | of_tasks.inside(task, trained)
    for name in pictures:
        plots.require_ours(folder / name)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in pictures.items():
        plots.save(figure, folder / name)
    if inside.states is None:
        kind = trained.experiment.model.position.kind
        print(f"the encoding {kind!r} keeps no position state: attention maps only")
    else:
        print(inspection.movers(inside))
        moved = ", ".join(f"{100 * x:.1f}" for x in inside.moved)
        layers = "each layer"
        if len(inside.layers) < len(inside.maps):
            layers = f"layers {', '.join(map(str, inside.layers))}"
        print(f"\nmoved from their start, entering {layers}, % of their norm: {moved}")
    print(f"\nwritten: {', '.join(str(folder / name) for name in pictures)}")
