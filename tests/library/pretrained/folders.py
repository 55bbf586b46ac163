"""Folders that transformers wrote, copies of them that a test may spoil, and how to spoil them."""

import json
from pathlib import Path

import numpy as np
import safetensors.numpy

from tests.paths import GOLDEN, ROOT

HF = GOLDEN / "hf"
# Folders beside the repository, too large to ship.
BESIDE = ROOT.parent / "shared" / "golden" / "hf"
MHA, TIED = HF / "llama2_mha", HF / "tied_sharded_headdim"
NAMES = ["llama2_mha", "llama3_gqa", "tied_sharded_headdim"]
SCALINGS = np.load(MHA / "rope_scalings.npz")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DOWN = "model.layers.0.mlp.down_proj.weight"


def checkpoint_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix != ".npz"}


def config_of(name, **changes):
    """The ``config.json`` of a folder, changed; ``...`` takes a field away."""
    config = json.loads((HF / name / "config.json").read_text()) | changes
    return {key: value for key, value in config.items() if value is not ...}


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(path: Path, change, name: str = SINGLE) -> None:
    """Rewrites a file with what ``change`` makes of its tensors."""
    tensors = safetensors.numpy.load_file(path / name)
    change(tensors)
    safetensors.numpy.save_file(tensors, path / name, metadata={"format": "pt"})


def as_type(dtype):
    def change(tensors):
        tensors.update({name: x.astype(dtype) for name, x in tensors.items()})

    return change


def as_dict(tensors):
    return {name: np.asarray(x, np.float64) for name, x in tensors.items()}
