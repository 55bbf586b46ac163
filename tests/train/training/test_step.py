"""A step of training: its loss, its gradient, what the optimiser makes of it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tape_jax._src.model.config import Experts, ModelConfig
from tape_jax.losses import added_by_routers
from tests.models import VOCAB, random_variables, small_model
from tests.train.training.tiny import Tiny, an_experiment
from train.experiment import TrainConfig
from train.training import step as training_step


class Quiet(Tiny):
    """The model without its noise, which differs between the parts of a batch."""

    def has_rng(self, name):
        return False


def fresh_state(params, optimizer):
    """A copy, for a step donates its state."""
    params = jax.tree.map(jnp.copy, params)
    key = jax.random.key_data(jax.random.key(0))
    return training_step.TrainState(params, optimizer.init(params), jnp.int32(0), key)


def test_accumulation_gives_the_gradient_of_the_whole_batch():
    model = Quiet(ModelConfig(vocab_size=19, hidden_size=8, num_heads=2))
    batch = next(iter(an_experiment().task.dataset(0, 12)))
    batch["weights"][:4] = 0  # Parts of unequal weight: their means must not simply be averaged.
    params = jax.jit(model.init)(jax.random.key(0), batch["inputs"])["params"]
    plain = optax.sgd(1.0)
    config = TrainConfig(steps=5, batch_size=12, learning_rate=1.0, accumulate=3)
    step = training_step.make_step(model, plain, config)
    state, values = step(fresh_state(params, plain), batch, None)

    def mean_loss(params):
        logits = model.apply({"params": params}, batch["inputs"])
        loss = training_step.weighted_loss(logits, batch["targets"], batch["weights"])
        return loss / batch["weights"].sum()

    loss, grads = jax.jit(jax.value_and_grad(mean_loss))(params)
    expected = jax.tree.map(lambda p, g: p - g, params, grads)
    chex.assert_trees_all_close(state.params, expected, atol=1e-6)
    np.testing.assert_allclose(values["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(values["gradient_norm"], optax.tree.norm(grads), rtol=1e-5)


@pytest.mark.slow
def test_routers_add_their_losses_to_what_is_minimised(monkeypatch):
    """To the gradient, not to the reported loss; every part of a batch is balanced by itself.

    The logits, which the step makes in chunks here, are made at once for comparison.
    """
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
    monkeypatch.setattr(training_step, "CHUNK_LOGITS", 0)
    step = training_step.make_step(model, plain, config)
    new, found = step(fresh_state(params, plain), batch, None)
    chex.assert_trees_all_close(new.params, expected, atol=1e-5)
    chex.assert_trees_all_close({name: found[name] for name in numbers}, numbers, rtol=1e-5)


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


GRADS = [([0.3, -0.1], [0.2]), ([4.0, 2.0], [-1.0]), ([-0.2, 0.1], [0.0])]


def test_optimizer_against_the_equations_of_adamw():
    """The second gradient is clipped."""
    config = TrainConfig(
        **{"steps": 3, "batch_size": 1, "learning_rate": 0.1, "schedule": "linear"},
        **{"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.3, "clip": 0.5},
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
        g = g * min(1, 0.5 / np.linalg.norm(g))
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        direction = m / (1 - 0.8 ** (t + 1)) / (np.sqrt(v / (1 - 0.9 ** (t + 1))) + 1e-3)
        p = p - 0.1 * (1 - t / 3) * (direction + 0.3 * decays * p)
    np.testing.assert_allclose(
        np.concatenate([got["dense"]["kernel"], got["norm"]["scale"]]), p, rtol=1e-5
    )


def test_the_first_moment_has_a_type_of_its_own():
    config = an_experiment(moment_dtype="bfloat16").train
    state = training_step.make_optimizer(config).init({"scale": jnp.ones(3)})
    types = {name: optax.tree.get(state, name)["scale"].dtype for name in ("mu", "nu")}
    assert types == {"mu": jnp.bfloat16, "nu": jnp.float32}


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


def test_the_rate_after_a_skipped_step_is_that_of_its_number():
    """It is the one that is logged: the first update of AdamW without decay moves by it."""
    wanted = an_experiment(skip=1, warmup=0.0, schedule="linear", weight_decay=0.0, eps=1e-12)
    model, optimizer = Quiet(wanted.model), training_step.make_optimizer(wanted.train)
    batch = next(iter(wanted.task.dataset(0, 8)))
    params = jax.jit(model.init)(jax.random.key(0), batch["inputs"])["params"]
    step = training_step.make_step(model, optimizer, wanted.train)
    bad = {**batch, "weights": batch["weights"] * np.nan}
    state, values = step(fresh_state(params, optimizer), bad)
    assert values["skipped"]
    state, values = step(state, batch)
    moved = max(
        float(jnp.abs(x).max())
        for x in jax.tree.leaves(jax.tree.map(jnp.subtract, state.params, params))
    )
    np.testing.assert_allclose(values["learning_rate"], 0.01 * 11 / 12, rtol=1e-6)
    np.testing.assert_allclose(moved, values["learning_rate"], rtol=1e-4)


def test_all_finite():
    tree = {"a": jnp.ones(3), "b": jnp.ones(2, jnp.bfloat16), "n": jnp.int32(1)}
    assert training_step.all_finite(tree)
    for name in "ab":
        assert not training_step.all_finite(tree | {name: tree[name].at[1].set(jnp.inf)})


@pytest.mark.slow
def test_options_of_the_compiler(monkeypatch):
    """Those of a GPU are known to this release, and a step is the same by them."""
    e = an_experiment()
    model, optimizer = Tiny(e.model), training_step.make_optimizer(e.train)
    batch = next(iter(e.task.dataset(0, 8)))

    def stepped():
        params = model.init(jax.random.key(0), batch["inputs"])["params"]
        step = training_step.make_step(model, optimizer, e.train)
        return step(fresh_state(params, optimizer), batch)

    want = stepped()
    given = training_step.COMPILER_OPTIONS["gpu"]
    monkeypatch.setattr(training_step, "COMPILER_OPTIONS", {jax.default_backend(): given})
    chex.assert_trees_all_equal(stepped(), want)


@pytest.mark.slow
def test_packed_text_has_its_places_on_every_axis():
    """Where all coordinates are one, multimodal RoPE is RoPE."""
    rng, ids = np.random.default_rng(0), np.array([[1, 1, 1, 2, 2, 2, 2, 2]] * 2)
    part = {
        "inputs": rng.integers(0, VOCAB, (2, 8)),
        "targets": rng.integers(0, VOCAB, (2, 8)),
        "weights": np.ones((2, 8), np.float32),
        "segment_ids": ids,
        "positions": np.array([[0, 1, 2, 5, 6, 7, 8, 9]] * 2),
    }
    part = {name: jnp.asarray(x) for name, x in part.items()}
    rope, mrope = small_model("rope"), small_model("mrope")
    variables = random_variables(rope)
    losses = [
        training_step.part_loss(model, variables, part, jax.random.key(0), jnp.float32(1))[0]
        for model in (rope, mrope)
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
