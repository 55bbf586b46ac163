"""Training that starts from the parameters of another run."""

import shutil

import chex
import pytest

from tests.train import small
from tests.train.training.tiny import final_state
from train import experiment
from train.training import loop, runs
from train.training import step as training_step


def an_experiment(initial=None, *, task=None, position="rope", **model):
    return experiment.from_mapping(
        {
            "name": "test",
            "task": task or {"name": "addition", "max_digits": 2},
            "model": {
                **{"hidden_size": 8, "num_heads": 2, "num_layers": 1, "position": position},
                **model,
            },
            "train": {"steps": 2, "batch_size": 4, "learning_rate": 0.01, "initial": initial},
        }
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run with RoPE, not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "rope"
    return small.save_run(folder, an_experiment(), 2)


@pytest.mark.slow
def test_starts_from_the_last_parameters_with_a_new_optimiser(first, tmp_path, monkeypatch):
    source = shutil.copytree(first, tmp_path / "rope")
    # The name of the encoding completes the folder's.
    wanted = an_experiment(f"{tmp_path}/{{encoding}}")

    def crash(*_):
        raise InterruptedError

    crash.lower = crash
    with monkeypatch.context() as patch:
        patch.setattr(loop, "make_step", lambda *_: crash)
        with pytest.raises(InterruptedError):
            loop.train(wanted, tmp_path / "second")
    step, state = final_state(tmp_path / "second", wanted)
    assert step == state.step == 0
    last = runs.restore_model(first).variables["params"]
    chex.assert_trees_all_equal(state.params, last)
    fresh = training_step.make_optimizer(wanted.train).init(last)
    chex.assert_trees_all_equal(state.opt_state, fresh)

    # To resume, the other run is not needed.
    shutil.rmtree(source)
    loop.train(wanted, tmp_path / "second", resume=True)
    assert final_state(tmp_path / "second", wanted)[0] == 2


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_there_again(first, tmp_path, monkeypatch):
    wanted = an_experiment(str(first))

    def killed(*_):
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(loop.Resumable, "first", killed)
        with pytest.raises(InterruptedError):
            loop.train(wanted, tmp_path / "second")
    loop.train(wanted, tmp_path / "second", resume=True)
    loop.train(wanted, tmp_path / "whole")
    again, whole = (final_state(tmp_path / name, wanted)[1] for name in ("second", "whole"))
    chex.assert_trees_all_equal(again.params, whole.params)


def test_all_that_does_not_fit_is_listed(first, tmp_path):
    learned = {"kind": "learned", "size": 16}
    wanted = an_experiment(str(first), tie_embeddings=True, vocab_size=30, position=learned)
    with pytest.raises(ValueError) as error:
        loop.train(wanted, tmp_path / "new")
    heading, *lines = str(error.value).splitlines()
    assert heading == f"the parameters of {first} do not fit this model:"
    assert [line.strip() for line in lines] == [
        "embedding: (19, 8) there, (30, 8) here",
        "head/kernel: (8, 19) there, absent here",
        "position_table: absent there, (16, 8) here",
    ]
    with pytest.raises(ValueError, match="there is no run folder"):
        loop.train(an_experiment(str(tmp_path / "none")), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_another_tokenizer(tmp_path):
    def task(fingerprint):
        return {
            **{"name": "scrolls", "tokenizer": "gone.model", "vocab_size": 300},
            "tokenizer_fingerprint": fingerprint,
        }

    runs.create(tmp_path / "first", an_experiment(task=task("1" * 64)))
    with pytest.raises(ValueError, match="do not fit this model:\n  the tokenizer: another one"):
        runs.initial_params(an_experiment(str(tmp_path / "first"), task=task("2" * 64)))
