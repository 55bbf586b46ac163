import hashlib
import os
import threading

import chex
import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.training import checkpoint
from train.training.checkpoint import Checkpoints, saved_steps
from train.training.metrics import Sums


def a_state(value: float = 1.0) -> dict:
    """Arrays of the kinds that training saves."""
    return {
        "params": {
            "w": jnp.full((3, 5), value),
            "b": jnp.arange(4, dtype=jnp.bfloat16) * value,
        },
        "step": jnp.int32(value),
        "key": jax.random.key_data(jax.random.key(int(value))),
    }


def a_dataset():
    return iter(
        grain.MapDataset.range(1000)
        .shuffle(seed=1)
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
    )


@pytest.fixture
def notes():
    return []


@pytest.fixture
def saved(tmp_path, notes):
    """Checkpoints of the steps 1, 2 and 3."""
    with Checkpoints(tmp_path, report=notes.append) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, a_state(step))
        checkpoints.wait()
        yield checkpoints


def test_round_trip_with_the_position_of_the_data(tmp_path):
    data = a_dataset()
    for _ in range(5):
        next(data)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, a_state(7), data)
        upcoming = [next(data) for _ in range(6)]
    other = a_dataset()
    with Checkpoints(tmp_path) as checkpoints:
        step, state = checkpoints.restore(a_state(0), other)
    assert step == 7
    chex.assert_trees_all_equal(state, a_state(7), strict=True)
    assert [next(other) for _ in range(6)] == upcoming


class Changed:
    """Data that do not go on from where they were."""

    def get_state(self):
        return {}

    def set_state(self, state):
        raise ValueError("the text has changed")


def test_data_that_have_changed_say_so_themselves(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, a_state(7), Changed())
        checkpoints.wait()
        message = r"cannot go on from .*00000007: the text has changed$"
        with pytest.raises(ValueError, match=message):
            checkpoints.restore(a_state(0), Changed())


def test_restores_from_shapes_alone_and_in_part(saved):
    """Also where older checkpoints have no sums of metrics."""
    template = jax.eval_shape(lambda: {"params": a_state()["params"]})
    sums = Sums()
    step, state = saved.restore(template, sums=sums, partial=True)
    assert sums == Sums()
    assert step == 3
    chex.assert_trees_all_equal(state, {"params": a_state(3)["params"]})


def test_saving_is_asynchronous_and_survives_donation(tmp_path, monkeypatch):
    go_on = threading.Event()
    commit = Checkpoints._commit

    def slow_commit(self, step, response):
        response.result()
        assert go_on.wait(300)
        commit(self, step, response)

    monkeypatch.setattr(Checkpoints, "_commit", slow_commit)
    advance = jax.jit(lambda x: jax.tree.map(lambda a: a + 1, x), donate_argnums=0)
    state = {"w": jnp.zeros((512, 512))}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        for _ in range(5):
            state = advance(state)
        assert checkpoints.steps() == []
        go_on.set()
        checkpoints.wait()
        assert checkpoints.steps() == [1]
        _, restored = checkpoints.restore(state)
    chex.assert_trees_all_equal(restored, {"w": np.zeros((512, 512))})


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda array, manifest: manifest.unlink(), None),
        (lambda array, manifest: flip(array), "has changed"),
        (lambda array, manifest: array.unlink(), "is missing"),
        (lambda array, manifest: array.with_name("more").touch(), "not in the manifest"),
        (lambda array, manifest: manifest.write_bytes(b"\xff" + manifest.read_bytes()), "00000003"),
        (lambda array, manifest: manifest.write_text(""), "not in the manifest"),
    ],
)
def test_what_is_damaged_is_noticed_and_not_used(saved, notes, damage, said):
    """A checkpoint without manifest was never finished, and does not count."""
    folder = saved.folder / "00000003"
    arrays = [path for path in folder.rglob("d/*") if path.is_file()]
    damage(max(arrays, key=lambda path: path.stat().st_size), folder.with_suffix(".sha256"))
    step, state = saved.restore(a_state())
    assert step == 2
    chex.assert_trees_all_equal(state, a_state(2))
    assert len(notes) == (said is not None)
    assert all(str(folder) in note and said in note for note in notes)


def test_nothing_to_restore(tmp_path, saved):
    with pytest.raises(ValueError, match="00000003 does not fit this model"):
        saved.restore(a_state() | {"more": jnp.zeros(3)})
    for path in saved.folder.glob("*.sha256"):
        path.write_text("")
    with pytest.raises(ValueError, match=r"all 3 checkpoints in .* are damaged"):
        saved.restore(a_state())
    with pytest.raises(ValueError, match=r"no checkpoint in .*elsewhere"):
        Checkpoints(tmp_path / "elsewhere").restore(a_state())
    assert not (tmp_path / "elsewhere").exists()


def test_keeps_the_newest_and_never_fewer(tmp_path, monkeypatch):
    whole = []
    write = checkpoint.write_atomically

    def spy(path, text):
        with Checkpoints(tmp_path) as reader:
            whole.append([s for s in reader.steps() if not reader.problems(s)])
        write(path, text)

    monkeypatch.setattr(checkpoint, "write_atomically", spy)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, {"w": jnp.ones(step)})
    # What was intact at the moment when the manifest of step 1, 2, ... was written.
    assert whole == [[], [1], [1, 2], [2, 3], [3, 4]]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["00000004", "00000004.sha256", "00000005", "00000005.sha256"]
    with pytest.raises(ValueError, match="keep must be at least 1; got 0"):
        Checkpoints(tmp_path, keep=0)


def test_all_files_are_on_the_disk_before_their_manifest(tmp_path, monkeypatch):
    done = []
    write = checkpoint.write_atomically

    def written(path, text):
        done.append(path)
        write(path, text)

    monkeypatch.setattr(checkpoint, "sync", done.append)
    monkeypatch.setattr(checkpoint, "write_atomically", written)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, a_state(), a_dataset(), Sums())
    folder = tmp_path / "00000001"
    assert done.index(folder.with_suffix(".sha256")) == len(done) - 1
    assert done[-2] == tmp_path
    assert set(done[:-2]) == {folder, *folder.rglob("*")}
    assert folder / "data" / "position.json" in done


def test_an_old_checkpoint_that_stays_stops_nothing(tmp_path, monkeypatch):
    """As where another process has a file of it open, on a network's file system."""
    said = []

    remove = checkpoint.shutil.rmtree

    def rmtree(path):
        if os.path.exists(path):
            raise OSError(39, "Directory not empty", str(path))
        remove(path)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.shutil, "rmtree", rmtree)
        with Checkpoints(tmp_path, keep=1, report=said.append) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, {"w": jnp.ones(step)})
    assert len(said) == 1
    assert "an old checkpoint could not be removed" in said[0]
    assert saved_steps(tmp_path) == [2]
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, {"w": jnp.ones(3)})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["00000003", "00000003.sha256"]


def test_what_a_crash_left_behind_is_removed_later(tmp_path):
    leftovers = ["00000001", "00000001.orbax-checkpoint-tmp-7"]
    for name in leftovers:
        (tmp_path / name).mkdir()
    (tmp_path / "notes").mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == []
        checkpoints.save(2, a_state())
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["00000002", "00000002.sha256", "notes"]
    # The manifest is what `sha256sum --check` reads.
    for line in (tmp_path / "00000002.sha256").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest


def test_a_failed_save_is_raised_and_costs_nothing(saved, monkeypatch):
    def fail(path, text):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_atomically", fail)
        saved.save(4, a_state(4))
        with pytest.raises(OSError, match="no space left"):
            saved.wait()
    assert saved.steps() == [1, 2, 3]
    saved.save(4, a_state(4))
    saved.wait()
    assert saved.restore(a_state())[0] == 4


def test_after_going_back_later_steps_are_written_anew(saved):
    saved.forget_after(1)
    assert saved.steps() == [1]
    assert (saved.folder / "00000003").exists()
    saved.save(2, a_state(20))
    saved.wait()
    assert saved.steps() == [1, 2]
    chex.assert_trees_all_equal(saved.restore(a_state())[1], a_state(20))
