"""Which code made a result."""

import re
import subprocess

from research import source


def test_no_git(tmp_path, monkeypatch):
    # A folder of its own, that no git knows.
    monkeypatch.setattr(source, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert source.describe_source() == {"commit": None, "dirty": None}


def test_a_commit(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True, capture_output=True)

    (tmp_path / "tape_jax" / "deep").mkdir(parents=True)
    (tmp_path / "tape_jax" / "deep" / "a.py").write_text("1")
    git("init")
    git("add", ".")
    git("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-m", "x")
    monkeypatch.setattr(source, "ROOT", tmp_path)
    found = source.describe_source()
    assert re.fullmatch("[0-9a-f]{40}", found["commit"])
    assert found["dirty"] is False
    (tmp_path / "tape_jax" / "page.md").write_text("written by the run itself")
    assert source.describe_source()["dirty"] is False
    (tmp_path / "tape_jax" / "deep" / "a.py").write_text("2")
    assert source.describe_source()["dirty"] is True
