"""Where compiled programs are kept, and who says otherwise."""

import os
import sys

import pytest

from train.training import compiled

FOLDER, SIZE = "JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE"


@pytest.fixture
def before_jax(monkeypatch, tmp_path):
    """As in a process that has not loaded jax yet; what it sets is taken back."""
    for name in list(os.environ):
        if name.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")):
            monkeypatch.delenv(name)
    changed = dict(os.environ)
    monkeypatch.setattr(os, "environ", changed)
    changed["TAPE_JAX_CACHE"] = str(tmp_path / "cache")
    monkeypatch.delitem(sys.modules, "jax")
    return changed


def test_programs_are_kept_in_the_users_folder(before_jax, tmp_path):
    compiled.keep()
    assert before_jax[FOLDER] == str(tmp_path / "cache" / "compiled")
    assert int(before_jax[SIZE]) == compiled.MOST_BYTES
    assert (tmp_path / "cache" / "compiled").is_dir()


def test_without_a_folder_nothing_is_kept(before_jax):
    before_jax["TAPE_JAX_CACHE"] = "~nobody_of_this_name/x"
    compiled.keep()
    assert FOLDER not in before_jax


def test_what_the_environment_says_stays(before_jax, tmp_path):
    before_jax[FOLDER] = "elsewhere"
    compiled.keep()
    assert before_jax[FOLDER] == "elsewhere"
    assert SIZE not in before_jax
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_made_is_done_without(before_jax, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    compiled.keep()
    assert FOLDER not in before_jax


def test_a_jax_that_is_loaded_is_left_alone(before_jax, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", object())
    compiled.keep()
    assert FOLDER not in before_jax
