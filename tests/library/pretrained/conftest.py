"""A checkpoint for every test that spoils one."""

from pathlib import Path

import pytest

from tests.library.pretrained.folders import MHA, change_json, checkpoint_files


@pytest.fixture
def copy(tmp_path):
    """A checkpoint that a test may spoil."""

    def make(source: Path = MHA, **changes) -> Path:
        target = tmp_path / "checkpoint"
        target.mkdir()
        for name, content in checkpoint_files(source).items():
            (target / name).write_bytes(content)
        change_json(target / "config.json", **changes)
        return target

    return make
