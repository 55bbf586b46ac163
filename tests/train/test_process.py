"""Where compiled programs are kept, who says otherwise, and who compiles first."""

import os
import platform
import resource
import sys
import threading
import time

import jax
import numpy as np
import pytest

from train import process

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
    process.keep_programs()
    assert before_jax[FOLDER] == str(tmp_path / "cache" / "compiled")
    assert int(before_jax[SIZE]) == process.MOST_BYTES
    assert (tmp_path / "cache" / "compiled").is_dir()


def test_where_nothing_is_kept(before_jax, tmp_path, monkeypatch):
    """What the environment says stays; where there is no folder, or jax is loaded, it is no use."""
    with monkeypatch.context() as patch:
        patch.setitem(before_jax, FOLDER, "elsewhere")
        process.keep_programs()
        assert before_jax[FOLDER] == "elsewhere"
        assert SIZE not in before_jax
        assert not (tmp_path / "cache").exists()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jax", object())
        process.keep_programs()
        assert FOLDER not in before_jax
    (tmp_path / "cache").write_text("in the way")
    for folder in (tmp_path / "cache", "~nobody_of_this_name/x"):
        before_jax["TAPE_JAX_CACHE"] = str(folder)
        process.keep_programs()
        assert FOLDER not in before_jax


class Program:
    """A lowered program, whose compilation notes when it begins and ends."""

    def __init__(self, text, notes, wait=lambda: time.sleep(0.05)):
        self.as_text, self._notes, self._wait = lambda: text, notes, wait

    def compile(self):
        self._notes.append("begins")
        self._wait()
        self._notes.append("ends")


def side_by_side(*programs):
    threads = [threading.Thread(target=process.compile_in_turn, args=[x]) for x in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def kept(tmp_path):
    """Jax keeps what it compiles."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "compiled"))
    yield tmp_path / "compiled"
    jax.config.update("jax_compilation_cache_dir", before)


def test_one_program_is_compiled_in_turns(kept):
    notes = []
    side_by_side(*(Program("same", notes) for _ in range(3)))
    assert notes == ["begins", "ends"] * 3


@pytest.mark.parametrize("texts", [("one", "other"), ("same", "same")])
def test_others_do_not_wait(texts, kept, monkeypatch):
    """Nor does anybody where nothing is kept: each goes on when all have begun."""

    def no_room(*_, **__):
        raise OSError("no room")

    if texts[0] == texts[1]:
        monkeypatch.setattr(process.Path, "mkdir", no_room)
    together = threading.Barrier(2, timeout=60)
    notes = []
    side_by_side(*(Program(text, notes, together.wait) for text in texts))
    assert notes == ["begins", "begins", "ends", "ends"]


def page_faults_of_an_array() -> int:
    """Pages fetched from the kernel to fill 80 MB that are freed again."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(10_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_used_again():
    process.keep_freed_memory()
    page_faults_of_an_array()
    assert page_faults_of_an_array() < 1000
