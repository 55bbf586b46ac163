"""Which code made a result."""

import re
import shutil

import pytest

from research import source


@pytest.fixture
def copy(tmp_path):
    for module in source.MODULES:
        here, there = source.ROOT / module, tmp_path / module
        if here.is_dir():
            shutil.copytree(here, there, dirs_exist_ok=True)
        else:
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(here, there)
    return tmp_path


def test_the_hash_follows_the_modules(copy):
    first = source.hash_of_modules(copy)
    assert first == source.hash_of_modules(source.ROOT)
    (copy / "train" / "evidence" / "page.py").write_text("other words")
    (copy / "train" / "tasks" / "notes.txt").write_text("none of the code")
    assert source.hash_of_modules(copy) == first
    for path in ("tape_jax/losses.py", "research/overhead.py"):
        before = (copy / path).read_text()
        (copy / path).write_text(before + "\n")
        assert source.hash_of_modules(copy) != first
        (copy / path).write_text(before)


def test_a_name_belongs_to_it(copy):
    first = source.hash_of_modules(copy)
    (copy / "tape_jax" / "losses.py").rename(copy / "tape_jax" / "lossy.py")
    assert source.hash_of_modules(copy) != first


def test_a_folder_that_has_moved(copy):
    shutil.rmtree(copy / "train" / "tasks")
    with pytest.raises(ValueError, match="tasks has no Python files"):
        source.hash_of_modules(copy)


def test_description(tmp_path, monkeypatch):
    found = source.describe_source()
    assert re.fullmatch("[0-9a-f]{16}", found["modules"])
    # A folder of its own, that no git knows.
    monkeypatch.setattr(source, "ROOT", tmp_path)
    monkeypatch.setattr(source, "hash_of_modules", lambda root: "0")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert source.describe_source() == {"commit": None, "dirty": None, "modules": "0"}


def test_a_commit(tmp_path, monkeypatch):
    import subprocess

    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True, capture_output=True)

    (tmp_path / "tape_jax").mkdir()
    (tmp_path / "tape_jax" / "a.py").write_text("1")
    git("init")
    git("add", ".")
    git("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-m", "x")
    monkeypatch.setattr(source, "ROOT", tmp_path)
    monkeypatch.setattr(source, "hash_of_modules", lambda root: "0")
    found = source.describe_source()
    assert re.fullmatch("[0-9a-f]{40}", found["commit"])
    assert found["dirty"] is False
    (tmp_path / "page.md").write_text("written by the run itself")
    assert source.describe_source()["dirty"] is False
    (tmp_path / "tape_jax" / "b.py").write_text("2")
    assert source.describe_source()["dirty"] is True
