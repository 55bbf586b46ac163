import os
import re
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tape_jax._src.model.config import Experts, ModelConfig
from tape_jax.losses import added_by_routers
from tests.models import random_variables, small_model
from tests.selection import mostly_slow
from tests.train.training.tiny import Tiny, an_experiment, final_state, numbers
from train import experiment
from train.experiment import TrainConfig
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
    try:
        with monkeypatch.context() as patch:
            Watched(patch, after=6, action=interrupt_twice)
            with pytest.raises(Stopped) as stopped:
                loop.train(an_experiment(), tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped.value.exit_code == 130
    assert "the steps since 4 are abandoned" in str(stopped.value)
    assert f"--run={tmp_path / 'run'} --resume" in str(stopped.value)
    # What is being written when the signal comes may not count yet.
    assert re.search("saving; again to abandon the steps since [04]", capsys.readouterr().err)
    loop.train(an_experiment(), tmp_path / "run", resume=True)
    loop.train(an_experiment(), tmp_path / "whole")
    chex.assert_trees_all_equal(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))


@pytest.mark.slow
def test_it_says_what_begins_and_how_it_ended(tiny, tmp_path):
    """Also of a training that some steps are traced of."""
    said = []
    loop.train(an_experiment(), tmp_path / "run", profile=range(3, 5), report=said.append)
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    parameters = sum(x.size for x in jax.tree.leaves(final_state(tmp_path / "run")[1].params))
    assert said[0] == (
        f"tape: {parameters:,} parameters; 12 steps of 8 x 10 tokens on 1 x cpu, in "
        f"{tmp_path / 'run'}\nasked for 1 to 4 digits in the end"
    )
    loss = metrics.read(tmp_path / "run" / "metrics.jsonl")[-1]["loss"]
    assert re.fullmatch(
        rf"{tmp_path / 'run'}: 12 steps done, loss {loss:.4f}, in .* s: .*", said[-1]
    )


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


def test_the_loss_falls(tiny, tmp_path):
    loop.train(an_experiment(steps=60, save_every=60), tmp_path / "run")
    losses = [line["loss"] for line in metrics.read(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] < 0.9 * losses[0] < losses[0]


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
    message = str(stopped.value)
    assert stopped.value.exit_code == NON_FINITE_EXIT_CODE
    assert what in message
    assert "last good checkpoint" in message
    assert "step 4." in message
    assert "learning_rate" in message
    assert final_state(tmp_path / "run")[0] == 4


def poison(when):
    """An action that makes the loss of the steps ``when`` not finite."""
    return lambda step, batch: {
        **batch, "weights": batch["weights"] * (np.nan if step in when else 1)
    }  # fmt: skip


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("when", "skip", "lost"), [((3, 7, 8), 2, 3), ((5, 6, 7), 2, None)])
def test_bad_steps_are_skipped_and_counted(tiny, tmp_path, monkeypatch, when, skip, lost):
    """Parameters and moments stay as they were; too many in a row stop the training."""
    dataset = type(an_experiment().task).dataset
    change = poison(when)

    def poisoned(self, *args):
        return dataset(self, *args).map(Numbered(change))

    monkeypatch.setattr(type(an_experiment().task), "dataset", poisoned)
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


class Numbered:
    """Calls a function with the number of the batch, from 1, and the batch."""

    def __init__(self, function):
        self._function, self._number = function, 0

    def __call__(self, batch):
        self._number += 1
        return self._function(self._number, batch)


def test_a_spike_is_many_times_the_usual_norm():
    mean = jnp.float32(0), jnp.float32(0)
    for _ in range(10):
        mean = training_step.add_to_mean(mean, jnp.float32(2))

    def bad(loss, norm, mean):
        return bool(training_step.is_bad(jnp.float32(loss), jnp.float32(norm), mean, spike=5.0))

    assert not bad(1, 100, mean)  # Ten steps tell too little.
    for _ in range(20):
        mean = training_step.add_to_mean(mean, jnp.float32(2))
    assert not bad(1, 9.9, mean)
    assert bad(1, 10.1, mean)
    assert bad(np.nan, 1, mean)
    assert bad(1, np.inf, None)
    assert not bad(1, 1e9, None)
    with pytest.raises(ValueError, match=r"spike must exceed 1 and needs skip; got spike = 3"):
        an_experiment(spike=3.0)


def test_a_finished_run_is_left_as_it_is(tiny, tmp_path):
    loop.train(an_experiment(steps=2), tmp_path / "run")
    before = final_state(tmp_path / "run")
    loop.train(an_experiment(steps=2), tmp_path / "run", resume=True)
    chex.assert_trees_all_equal(final_state(tmp_path / "run"), before)
    with (
        runs.guarded(tmp_path / "run"),
        pytest.raises(ValueError, match="another process is training the run"),
    ):
        loop.train(an_experiment(steps=2), tmp_path / "run", resume=True)


@pytest.mark.slow
def test_the_first_moment_has_a_type_of_its_own(tiny, tmp_path):
    """It is stored so, resumed so, and leaves what is learned nearly as it was."""
    steps = []
    for name, options in (("float32", {}), ("bfloat16", {"moment_dtype": "bfloat16"})):
        loop.train(an_experiment(**options), tmp_path / name)
        _, state = final_state(tmp_path / name)
        moments = {
            field: {x.dtype.name for x in jax.tree.leaves(optax.tree.get(state.opt_state, field))}
            for field in ("mu", "nu")
        }
        assert moments == {"mu": {name}, "nu": {"float32"}}
        start = runs.init_variables(runs.load(tmp_path / name))["params"]
        steps.append(jax.tree.map(jnp.subtract, state.params, start))
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, *steps))
    assert 0 < difference < 0.05 * optax.tree.norm(steps[0])


def test_accumulation_gives_the_gradient_of_the_whole_batch():
    model = Tiny(ModelConfig(vocab_size=19, hidden_size=8, num_heads=2))
    task = an_experiment().task
    batch = next(iter(task.dataset(0, 12)))
    batch["weights"][:4] = 0  # Parts of unequal weight: their means must not simply be averaged.
    params = jax.jit(model.init)(jax.random.key(0), batch["inputs"])["params"]
    plain = optax.sgd(1.0)
    results = []
    for accumulate in (1, 3):
        config = TrainConfig(steps=5, batch_size=12, learning_rate=1.0, accumulate=accumulate)
        quiet = Quiet(model.config)
        state = training_step.TrainState(
            params, plain.init(params), jnp.int32(0), jax.random.key_data(jax.random.key(0))
        )
        step = loop.make_step(quiet, plain, config)
        results.append(step(jax.tree.map(jnp.copy, state), batch, None))
    chex.assert_trees_all_close(results[0][0].params, results[1][0].params, atol=1e-6)
    chex.assert_trees_all_close(results[0][1], results[1][1], rtol=1e-6)

    def mean_loss(params):
        logits = quiet.apply({"params": params}, batch["inputs"])
        return (
            training_step.weighted_loss(logits, batch["targets"], batch["weights"])
            / batch["weights"].sum()
        )

    loss, grads = jax.jit(jax.value_and_grad(mean_loss))(params)
    expected = jax.tree.map(lambda p, g: p - g, params, grads)
    chex.assert_trees_all_close(results[1][0].params, expected, atol=1e-6)
    np.testing.assert_allclose(results[1][1]["loss"], loss, rtol=1e-6)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.slow
def test_routers_add_their_losses_to_what_is_minimised(monkeypatch, chunked):
    """To the gradient, not to the reported loss; every part of a batch is balanced by itself."""
    experts = Experts(3, balance=0.5, z=0.25)
    model = small_model("rope", num_layers=1, vocab_size=19, experts=experts)
    batch = next(iter(an_experiment().task.dataset(0, 4)))
    params = random_variables(model)["params"]
    plain = optax.sgd(1.0)
    config = TrainConfig(steps=5, batch_size=4, learning_rate=1.0, accumulate=2)

    def wanted(params):
        total, numbers = 0.0, []
        for rows in (slice(0, None, 2), slice(1, None, 2)):
            part = {name: x[rows] for name, x in batch.items()}
            logits, sown = model.apply({"params": params}, part["inputs"], mutable=["losses"])
            added, means = added_by_routers(sown, experts)
            loss = training_step.weighted_loss(logits, part["targets"], part["weights"])
            loss /= batch["weights"].sum()
            total += loss + added / 2
            numbers.append({"loss": loss} | {name: x / 2 for name, x in means.items()})
        return total, jax.tree.map(jnp.add, *numbers)

    grads, numbers = jax.jit(jax.grad(wanted, has_aux=True))(params)
    expected = jax.tree.map(lambda p, g: p - g, params, grads)
    assert set(numbers) == {"loss", "balance_loss", "z_loss"}
    if chunked:
        monkeypatch.setattr(training_step, "CHUNK_LOGITS", 0)
    state = training_step.TrainState(
        params, plain.init(params), jnp.int32(0), jax.random.key_data(jax.random.key(0))
    )
    step = training_step.make_step(model, plain, config)
    new, found = step(jax.tree.map(jnp.copy, state), batch, None)
    chex.assert_trees_all_close(new.params, expected, atol=1e-5)
    chex.assert_trees_all_close({name: found[name] for name in numbers}, numbers, rtol=1e-5)


@pytest.mark.slow
def test_options_of_the_compiler(monkeypatch):
    """Those of a GPU are known to this release, and a step is the same by them."""
    e = an_experiment()
    model, optimizer = Tiny(e.model), training_step.make_optimizer(e.train)
    batch = next(iter(e.task.dataset(0, 8)))

    def stepped():
        params = model.init(jax.random.key(0), batch["inputs"])["params"]
        key = jax.random.key_data(jax.random.key(1))
        state = training_step.TrainState(params, optimizer.init(params), jnp.int32(0), key)
        return training_step.make_step(model, optimizer, e.train)(state, batch)

    want = stepped()
    given = training_step.COMPILER_OPTIONS["gpu"]
    monkeypatch.setattr(training_step, "COMPILER_OPTIONS", {jax.default_backend(): given})
    chex.assert_trees_all_equal(stepped(), want)


class Quiet(Tiny):
    """The model without its noise, which differs between the parts of a batch."""

    def has_rng(self, name):
        return False


def test_weighted_loss_against_float64():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 30, (2, 5, 7))
    targets = rng.integers(0, 7, (2, 5))
    weights = rng.integers(0, 3, (2, 5)).astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    expected = -(np.take_along_axis(log_p, targets[..., None], -1)[..., 0] * weights).sum()
    loss = training_step.weighted_loss(jnp.array(logits, jnp.float32), targets, weights)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_optimizer_against_the_equations_of_adamw(clip):
    config = TrainConfig(
        **{"steps": 3, "batch_size": 1, "learning_rate": 0.1, "schedule": "linear"},
        **{"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.3, "clip": clip},
    )
    params = {"dense": {"kernel": np.array([1.0, -2.0])}, "norm": {"scale": np.array([3.0])}}
    grads = [{"dense": {"kernel": np.array(k)}, "norm": {"scale": np.array(s)}} for k, s in GRADS]

    optimizer = training_step.make_optimizer(config)
    state, got = optimizer.init(params), params
    for gradient in grads:
        updates, state = jax.jit(optimizer.update)(gradient, state, got)
        got = optax.apply_updates(got, updates)

    m = v = np.zeros(3)
    p, decays = np.array([1.0, -2.0, 3.0]), np.array([1.0, 1.0, 0.0])
    for t, (kernel, scale) in enumerate(GRADS):
        g = np.array([*kernel, *scale])
        if clip:
            g = g * min(1, clip / np.linalg.norm(g))
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        direction = m / (1 - 0.8 ** (t + 1)) / (np.sqrt(v / (1 - 0.9 ** (t + 1))) + 1e-3)
        p = p - 0.1 * (1 - t / 3) * (direction + 0.3 * decays * p)
    np.testing.assert_allclose(
        np.concatenate([got["dense"]["kernel"], got["norm"]["scale"]]), p, rtol=1e-5
    )


GRADS = [([0.3, -0.1], [0.2]), ([4.0, 2.0], [-1.0]), ([-0.2, 0.1], [0.0])]


def test_decay_mask_matches_whole_components():
    params = {"block": {"scale": 1, "rescale": 2, "dense": {"kernel": 3}}, "embedding": 4}
    assert training_step.decay_mask(params, ("scale", "embedding", "bias")) == {
        "block": {"scale": False, "rescale": True, "dense": {"kernel": True}},
        "embedding": False,
    }
    assert not any(
        jax.tree.leaves(training_step.decay_mask(params["block"], ("dense", "scale", "rescale")))
    )
    with pytest.raises(ValueError, match="no parameter's path has the component 'kernl'"):
        training_step.decay_mask(params, ("kernl",))


def test_all_finite():
    tree = {"a": jnp.ones(3), "b": jnp.ones(2, jnp.bfloat16), "n": jnp.int32(1)}
    assert training_step.all_finite(tree)
    for name in "ab":
        assert not training_step.all_finite(tree | {name: tree[name].at[1].set(jnp.inf)})
