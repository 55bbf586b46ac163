"""Runs of small models, for tests of commands that read one."""

from pathlib import Path

from train.main import main


def train(folder: Path, config: str) -> Path:
    """The run of a config file with this content, trained."""
    (folder / "small.py").write_text(config)
    assert main(["train", f"--config={folder / 'small.py'}", f"--run={folder / 'run'}"]) == 0
    return folder / "run"
