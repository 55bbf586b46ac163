"""Trains the models of the page and writes them into docs/play/models.

    make play-models

For TAPE and for RoPE three seeds of configs/addressing_demo.py are trained, in minutes. Of each
encoding the seed in the middle is shipped, by exact match on lists longer than those trained on.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from train import main
from train.compare import evaluations
from train.training import runs, shipped

CONFIG = Path("configs/addressing_demo.py")
MODELS = Path(__file__).parent / "models"
ENCODINGS = {"tape": "tape+alibi", "rope": "rope+alibi"}
SEEDS = 3
TRAINED, BEYOND = "exact_match_inside", "exact_match_outside"


def commit() -> str:
    """Returns the commit that is checked out; ``-dirty`` follows if files differ from it."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()


def ship(name: str, folders: list[Path], commit: str) -> None:
    """Writes the model in the middle of the runs ``folders`` as ``models/<name>.js``."""
    scores = {}
    for folder in folders:
        saved = evaluations.saved(folder)
        if saved is None:
            raise ValueError(f"{folder} has not been evaluated")
        task = runs.load(folder).task
        scores[folder] = task.read_result(saved["result"]).summary()
    middle = sorted(folders, key=lambda folder: scores[folder][BEYOND])[len(folders) // 2]
    trained = runs.restore_model(middle)
    seeds = [runs.load(folder).seed for folder in folders]
    facts = {
        "name": name.upper().replace("ROPE", "RoPE"),
        "commit": commit,
        "config": CONFIG.as_posix(),
        "seed": trained.experiment.seed,
        "scores": [
            {"seed": seed, "trained": scores[f][TRAINED], "beyond": scores[f][BEYOND]}
            for seed, f in zip(seeds, folders, strict=True)
        ],
    }
    shipped.write(MODELS / f"{name}.js", trained, facts)
    print(f"{name}: seed {trained.experiment.seed} of {facts['scores']}")


def run() -> int:
    """Trains and writes; returns the exit code."""
    made_from = commit()
    MODELS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        code = main.main(
            [
                "compare",
                f"--config={CONFIG}",
                f"--run={folder}/runs",
                f"--encodings={','.join(ENCODINGS.values())}",
                f"--seeds={SEEDS}",
                "--config.seed=0",
            ]
        )
        if code:
            return code
        for name, encoding in ENCODINGS.items():
            found = Path(folder, "runs").glob(f"{encoding}*/experiment.json")
            ship(name, sorted(path.parent for path in found), made_from)
    return 0


if __name__ == "__main__":
    raise SystemExit(run())
