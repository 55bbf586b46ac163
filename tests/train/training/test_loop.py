import os
import re
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.selection import mostly_slow
from tests.train.training.tiny import an_experiment, final_state, numbers
from train import experiment
from train.training import loop, metrics, runs
from train.training import step as training_step
from train.training.signals import NON_FINITE_EXIT_CODE, Stopped


class Watched:
    """Replaces the compiled step: notes the batches, and does something after one step."""

    def __init__(self, monkeypatch, after: int = 0, action=None):
        self.batches, self.compilations = [], 0
        make_step = loop.make_step

        def make(*args):
            step = make_step(*args)
            before = step._cache_size()

            def watched(state, batch, frozen):
                self.batches.append(batch)
                number = int(state.step) + 1
                state, values = step(state, batch, frozen)
                self.compilations = step._cache_size() - before
                return action(state, values) if number == after else (state, values)

            watched.lower = step.lower
            return watched

        monkeypatch.setattr(loop, "make_step", make)


class Crash(Exception):
    pass


def crash(state, values):
    raise Crash


def sigterm(state, values):
    os.kill(os.getpid(), signal.SIGTERM)
    return state, values


@pytest.mark.parametrize(
    ("action", "error", "resumed_from"),
    mostly_slow([(sigterm, Stopped, 6), (crash, Crash, 3)], (sigterm, Stopped, 6)),
)
def test_resuming_is_exact(tiny, tmp_path, monkeypatch, action, error, resumed_from):
    """Also between two lines of metrics."""
    wanted = an_experiment(save_every=3, log_every=4)
    with monkeypatch.context() as patch:
        whole = Watched(patch)
        loop.train(wanted, tmp_path / "whole")
    with monkeypatch.context() as patch:
        first = Watched(patch, after=6, action=action)
        with pytest.raises(error) as stopped:
            loop.train(wanted, tmp_path / "parts")
    notes = []
    with monkeypatch.context() as patch:
        rest = Watched(patch)
        loop.train(wanted, tmp_path / "parts", resume=True, report=notes.append)

    assert f"from step {resumed_from} of 12" in notes[0]
    if error is Stopped:
        assert stopped.value.exit_code == 143
        assert "SIGTERM after step 6" in str(stopped.value)
        assert f"--run={tmp_path / 'parts'} --resume" in str(stopped.value)
    beginning = next(iter(wanted.task.dataset(wanted.seed, 8)))
    chex.assert_trees_all_equal(beginning, whole.batches[0])
    chex.assert_trees_all_equal([*first.batches[:resumed_from], *rest.batches], whole.batches)
    step, state = final_state(tmp_path / "whole")
    assert step == state.step == 12
    chex.assert_trees_all_equal(final_state(tmp_path / "parts"), (step, state))
    assert [line["step"] for line in numbers(tmp_path / "whole")] == [4, 8, 12]
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    assert max(watched.compilations for watched in (whole, first, rest)) <= 1


def interrupt_twice(state, values):
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)
    return state, values


@pytest.mark.slow
def test_a_second_signal_abandons_what_is_not_saved(tiny, tmp_path, monkeypatch, capsys):
    """What was saved stays, and training goes on from there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    Watched(monkeypatch, after=6, action=interrupt_twice)
    try:
        with pytest.raises(Stopped, match="the steps since 4 are abandoned") as stopped:
            loop.train(an_experiment(), tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped.value.exit_code == 130
    assert final_state(tmp_path / "run")[0] == 4
    # What is being written when the signal comes may not count yet.
    assert re.search("saving; again to abandon the steps since [04]", capsys.readouterr().err)


@pytest.mark.slow
def test_it_says_what_begins_and_how_it_ended(tiny, tmp_path):
    """Also of a training that some steps are traced of."""
    said = []
    loop.train(an_experiment(), tmp_path / "run", profile=range(3, 5), report=said.append)
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    parameters = sum(x.size for x in jax.tree.leaves(final_state(tmp_path / "run")[1].params))
    assert f"{parameters:,} parameters; 12 steps of 8 x 10 tokens on 1 x cpu" in said[0]
    loss = metrics.read(tmp_path / "run" / "metrics.jsonl")[-1]["loss"]
    assert f"12 steps done, loss {loss:.4f}, in" in said[-1]
    assert not [line for line in said if line.startswith("no trace")]
    loop.train(
        an_experiment(), tmp_path / "run", resume=True, profile=range(3, 5), report=said.append
    )
    assert "no trace: none of the steps 3 to 4 will be taken" in said


@pytest.mark.slow
def test_what_will_be_read_is_made_sure_of_first(tiny, tmp_path, monkeypatch):
    """Nothing is made if it is missing; a run that was begun before goes on, and says so."""
    task = type(an_experiment().task)

    def missing(self, options, limit):
        raise ValueError(f"no text for {options.longest}")

    said = []
    monkeypatch.setattr(task, "prepare", lambda self, options, limit: "all here")
    loop.train(an_experiment(steps=1), tmp_path / "run", report=said.append)
    assert said[0].splitlines()[1:] == ["all here"]
    monkeypatch.setattr(task, "prepare", missing)
    with pytest.raises(ValueError, match="no text for None"):
        loop.train(an_experiment(), tmp_path / "other")
    assert not (tmp_path / "other").exists()
    (tmp_path / "run" / "checkpoints" / "00000001.sha256").unlink()
    loop.train(an_experiment(steps=1), tmp_path / "run", resume=True, report=said.append)
    assert any("it cannot be evaluated: no text for" in line for line in said)


def test_what_the_model_does_not_take_is_known_first(tiny, tmp_path):
    """By its own limit or its encoding's."""
    for fields in ({"max_length": 9}, {"position": {"kind": "learned", "size": 9}}):
        short = experiment.to_json(an_experiment())
        short["model"] |= fields
        with pytest.raises(ValueError, match=r"sequences have 10 tokens, .* accepts at most 9"):
            loop.train(experiment.from_mapping(short), tmp_path / "run")
    short["model"]["position"]["size"] = 12
    short["evaluation"]["longest"] = 4
    with pytest.raises(ValueError, match="of 4 digits have up to 16 tokens"):
        loop.train(experiment.from_mapping(short), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_different_seeds_differ(tiny, tmp_path):
    first = an_experiment(steps=2)
    configs = [first, experiment.from_mapping(experiment.to_json(first) | {"seed": 1})]
    states = []
    for config in configs:
        folder = tmp_path / str(config.seed)
        loop.train(config, folder)
        states.append(final_state(folder)[1])
    same = jax.tree.map(
        lambda a, b: bool(jnp.array_equal(a, b)), states[0].params, states[1].params
    )
    assert not same["Dense_0"]["kernel"]


def lose(state, values):
    return state, values | {"loss": jnp.float32(np.nan)}


def break_moments(state, values):
    broken = jax.tree.map(
        lambda x: x * np.nan if jnp.issubdtype(x.dtype, jnp.floating) else x, state.opt_state
    )
    return state._replace(opt_state=broken), values


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("action", "what"),
    [
        (lose, "the loss is not finite at step 8"),
        (break_moments, "a parameter or its moments is not finite at step 8"),
    ],
)
def test_non_finite_numbers_stop_and_are_never_saved(tiny, tmp_path, monkeypatch, action, what):
    Watched(monkeypatch, after=8, action=action)
    with pytest.raises(Stopped) as stopped:
        loop.train(an_experiment(), tmp_path / "run")
    assert stopped.value.exit_code == NON_FINITE_EXIT_CODE
    assert what in str(stopped.value)
    assert "step 4." in str(stopped.value)
    assert final_state(tmp_path / "run")[0] == 4


class Poisoned:
    """Makes the loss of the batches ``when``, counted from 1, not finite."""

    def __init__(self, when):
        self._when, self._number = when, 0

    def __call__(self, batch):
        self._number += 1
        factor = np.nan if self._number in self._when else 1
        return {**batch, "weights": batch["weights"] * factor}


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("when", "skip", "lost"), [((3, 7, 8), 2, 3), ((5, 6, 7), 2, None)])
def test_bad_steps_are_skipped_and_counted(tiny, tmp_path, monkeypatch, when, skip, lost):
    """Parameters and moments stay as they were; too many in a row stop the training."""
    task = type(an_experiment().task)
    dataset = task.dataset
    monkeypatch.setattr(task, "dataset", lambda *args: dataset(*args).map(Poisoned(when)))
    wanted = an_experiment(skip=skip, log_every=1)
    if lost is None:
        with pytest.raises(Stopped, match="for the 3th step in a row, is not finite"):
            loop.train(wanted, tmp_path / "run")
        return
    loop.train(wanted, tmp_path / "run")
    _, state = final_state(tmp_path / "run")
    assert training_step.all_finite(state)
    lines = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert sum(line["skipped"] for line in lines) == lost
    assert [line["step"] for line in lines if "loss" not in line] == list(when)
    # The optimiser has seen the good steps only.
    counts = [x for x in jax.tree.leaves(state.opt_state) if x.shape == () and x.dtype == "int32"]
    assert int(counts[0]) == wanted.train.steps - lost


def test_a_finished_run_is_left_as_it_is(tiny, tmp_path):
    loop.train(an_experiment(), tmp_path / "run")
    before = final_state(tmp_path / "run")
    loop.train(an_experiment(), tmp_path / "run", resume=True)
    chex.assert_trees_all_equal(final_state(tmp_path / "run"), before)
    with (
        runs.guarded(tmp_path / "run"),
        pytest.raises(ValueError, match="another process is training the run"),
    ):
        loop.train(an_experiment(), tmp_path / "run", resume=True)


def test_a_mesh_must_divide_the_batch_that_is_trained_on():
    """Of 16 sequences of 12 tokens, in place of 4 of 48."""

    def build(**mesh):
        task = {"name": "text", "sequence_length": 48, "train_length": 12}
        wanted = an_experiment(task, mesh, batch_size=4, accumulate=1)
        return loop.build_sharding(wanted, print)

    assert build(data=8).shards("batch") == 8
    assert build(data=4, sequence=2).shards("sequence") == 2
    with pytest.raises(ValueError, match="sequence = 12 is not a multiple of 16"):
        build(sequence=8)
