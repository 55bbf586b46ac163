"""Folders of runs: which are free, and that one process at a time writes to one."""

import json

import chex
import pytest

from tests.train.training.tiny import an_experiment, final_state
from train.training import loop, runs


def a_start(folder):
    """What a run leaves whose first step fails."""
    runs.create(folder, an_experiment())
    for name in ("checkpoints/00000000/state", "tensorboard"):
        (folder / name).mkdir(parents=True)
    for name in ("checkpoints/00000000.sha256", "metrics.jsonl", "tensorboard/events", ".lock"):
        (folder / name).touch()


def test_a_run_without_a_step_may_be_made_anew(tmp_path):
    """Of what was there before nothing is left."""
    a_start(tmp_path / "run")
    runs.create(tmp_path / "run", an_experiment(batch_size=4))
    assert runs.load(tmp_path / "run").train.batch_size == 4
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "experiment.json"}


def test_checkpoints_on_another_disk(tmp_path):
    a_start(tmp_path / "run")
    (tmp_path / "run/checkpoints").rename(tmp_path / "disk")
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "disk")
    runs.create(tmp_path / "run", an_experiment())
    assert (tmp_path / "run/checkpoints").is_symlink()
    assert not [*(tmp_path / "disk").iterdir()]


def test_another_process_has_trained_meanwhile(tmp_path):
    a_start(tmp_path)
    runs.require_begun(tmp_path, True)
    with pytest.raises(ValueError, match=r"another process has trained .* again with --resume"):
        runs.require_begun(tmp_path, False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("thesis.txt", "continue it with --resume, or choose another --run"),
        ("evaluation.json", "continue it with --resume, or"),
        ("metrics.jsonl", "continue it with --resume, or"),
        ("checkpoints/00000003.sha256.damaged", "continue it with --resume, or"),
        ("experiment.json", "run exists already: choose another --run"),
    ],
)
def test_a_folder_with_anything_else_is_not_free(tmp_path, name, message):
    a_start(tmp_path / "run")
    (tmp_path / "run" / name).write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=message):
        runs.create(tmp_path / "run", an_experiment())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_run_is_guarded_before_it_is_made_and_after_its_record_is_replaced(tmp_path):
    folder = tmp_path / "new" / "run"

    def another():
        with pytest.raises(ValueError, match=r"another process is training the run .*new/run"):
            runs.guarded(folder).__enter__()

    with runs.guarded(folder):
        another()
        runs.create(folder, an_experiment())
        another()
        runs.rewrite(folder, an_experiment(steps=13), {"step": 0})
        another()
    with runs.guarded(folder):
        another()
    assert json.loads((folder / "experiment.json").read_text())["changes"] == [{"step": 0}]


@pytest.mark.slow
def test_a_command_whose_first_step_failed_can_be_corrected(tiny, tmp_path, monkeypatch):
    def fails(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_compile", fails)
        with pytest.raises(MemoryError):
            loop.train(an_experiment(batch_size=64), tmp_path / "run")
    loop.train(an_experiment(), tmp_path / "run")
    loop.train(an_experiment(), tmp_path / "undisturbed")
    chex.assert_trees_all_equal(
        final_state(tmp_path / "run"), final_state(tmp_path / "undisturbed")
    )
