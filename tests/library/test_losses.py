"""The chunked cross entropy against the plain one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import Experts, Transformer, losses
from tape_jax.losses import added_by_routers, cross_entropy
from tape_jax.sharding import ShardingConfig
from tests.models import random_variables, small_model


def plain(hidden, kernel, targets, weights, logit_softcap=None):
    logits = (hidden @ kernel).astype(jnp.promote_types(hidden.dtype, "float32"))
    if logit_softcap:
        logits = logit_softcap * jnp.tanh(logits / logit_softcap)
    log_p = jax.nn.log_softmax(logits)
    return -(jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0] * weights).sum()


def arrays(batch=(3,), length=11, dim=6, vocab=17, dtype=jnp.float64):
    rng = np.random.default_rng(0)
    floats = [(*batch, length, dim), (dim, vocab), (*batch, length)]
    hidden, kernel, weights = (jnp.asarray(rng.normal(size=s), dtype) for s in floats)
    return hidden, kernel, jnp.asarray(rng.integers(0, vocab, (*batch, length))), weights


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("batch", "chunk", "cap"), [((3,), 4, 1.5), ((), None, None)])
@pytest.mark.usefixtures("x64")
def test_equals_the_plain_one(batch, chunk, cap):
    """Gradients to the hidden states, the kernel and the weights too; 11 tokens leave a rest."""
    hidden, kernel, targets, weights = arrays(batch)

    def both(loss):
        function = jax.value_and_grad(lambda h, k, w: loss(h, k, targets, w), (0, 1, 2))
        return jax.jit(function)(hidden, kernel, weights)

    capped = functools.partial(cross_entropy, chunk=chunk, logit_softcap=cap)
    found, expected = both(capped), both(functools.partial(plain, logit_softcap=cap))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)
    narrow = cross_entropy(hidden.astype(jnp.float32), kernel, targets, weights, chunk=chunk)
    assert narrow.dtype == jnp.float32
    unweighted = cross_entropy(hidden, kernel, targets, chunk=chunk)
    np.testing.assert_allclose(unweighted, plain(hidden, kernel, targets, 1), rtol=1e-13)


@pytest.mark.usefixtures("x64")
def test_labels_that_are_none():
    """Without weight they change nothing, with it nothing is a number any more."""
    hidden, kernel, targets, weights = arrays()
    ignore = jnp.zeros(targets.shape, bool).at[0, 2:5].set(True).at[2, -1].set(True)

    @jax.jit
    def both(targets, weights):
        loss = functools.partial(cross_entropy, targets=targets, chunk=4)
        return jax.value_and_grad(lambda h, k: loss(h, k, weights=weights), (0, 1))(hidden, kernel)

    without = jnp.where(ignore, 0, weights)
    expected = both(targets, without)
    for ignored in (-1, 17):
        marked = jnp.where(ignore, ignored, targets)
        found = both(marked, without)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)
        loss, (to_hidden, to_kernel) = both(marked, weights)
        assert jnp.isnan(loss)
        assert jnp.isnan(to_kernel).any()
        np.testing.assert_array_equal(jnp.isnan(to_hidden).all(-1), ignore)


def test_memory_does_not_hold_the_logits():
    args = arrays((2,), 512, 8, 1024, jnp.float32)

    def temporary(loss):
        step = jax.jit(jax.grad(loss, (0, 1)))
        return step.lower(*args).compile().memory_analysis().temp_size_in_bytes

    logits = 2 * 512 * 1024 * 4
    assert temporary(plain) >= logits
    assert temporary(functools.partial(cross_entropy, chunk=16)) < logits / 4


def test_gradients_of_chunks_are_summed_wide():
    hidden, kernel = jnp.ones((2048, 1), jnp.bfloat16), jnp.zeros((1, 4), jnp.bfloat16)

    def gradient(chunk):
        targets = jnp.zeros(2048, jnp.int32)
        return jax.jit(jax.grad(lambda k: cross_entropy(hidden, k, targets, chunk=chunk)))(kernel)

    np.testing.assert_array_equal(gradient(1), [[-1536, 512, 512, 512]])


def test_a_mesh_that_does_not_divide_the_sequence():
    sharding = ShardingConfig(sequence=2).build(2)
    args = arrays((2,), 5, vocab=16, dtype=jnp.float32)
    with pytest.raises(ValueError, match="into 2 parts, which do not divide 5 tokens"):
        cross_entropy(*args, sharding=sharding)
    lenient = dataclasses.replace(sharding, strict=False)
    found = jax.jit(functools.partial(cross_entropy, sharding=lenient))(*args)
    np.testing.assert_allclose(found, plain(*args), rtol=1e-5)


def test_a_chunk_holds_the_logits_of_one_device(monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_LOGITS", 64)
    args = arrays((4,), 16, vocab=16, dtype=jnp.float32)
    sharding = ShardingConfig(fsdp=2, sequence=2, tensor=2).build()
    loss = functools.partial(cross_entropy, sharding=sharding)
    # Of each token 2 rows of 8 logits are there, so 4 of its 8 tokens fit.
    assert "length=2" in str(jax.make_jaxpr(loss)(*args))
    np.testing.assert_allclose(jax.jit(loss)(*args), plain(*args), rtol=1e-5)


@pytest.mark.slow
def test_with_a_model_on_a_mesh():
    """The kernel that the model names, tokens split over batch and sequence, and the vocabulary."""
    model = small_model(vocab_size=16, num_layers=1, tie_embeddings=True)
    sharding = ShardingConfig(fsdp=2, sequence=2, tensor=2).build()
    split = Transformer(model.config, sharding=sharding)
    variables = random_variables(model)
    _, _, targets, weights = arrays((2,), 8, vocab=16, dtype=jnp.float32)

    def expected(variables):
        logits = model.apply(variables, targets)
        return plain(logits, jnp.eye(16), targets, weights)

    def found(variables):
        hidden = split.apply(variables, targets, output="hidden")
        kernel = split.output_kernel(variables)
        return cross_entropy(hidden, kernel, targets, weights, chunk=3, sharding=sharding)

    x, y = (jax.jit(jax.value_and_grad(f))(variables) for f in (found, expected))
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


HIDDEN, KERNEL, TARGETS, WEIGHTS = arrays(dtype=jnp.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: cross_entropy(HIDDEN, KERNEL.T, TARGETS, WEIGHTS),
            r"expected hidden .* got float32 \(3, 11, 6\), float32 \(17, 6\)",
        ),
        (
            lambda: cross_entropy(HIDDEN, KERNEL, TARGETS, WEIGHTS[:, :10]),
            r"\(3, 11\) and float32 \(3, 10\)",
        ),
        (lambda: cross_entropy(HIDDEN, KERNEL, TARGETS, chunk=0), "must be positive; got 0"),
        *(
            (
                lambda cap=cap: cross_entropy(HIDDEN, KERNEL, TARGETS, logit_softcap=cap),
                f"logit_softcap must be positive; got {cap}",
            )
            for cap in (0.0, -1.0)
        ),
        (lambda: cross_entropy(HIDDEN + 1j, KERNEL, TARGETS), "hidden .* got complex64"),
        (lambda: added_by_routers({}, Experts(2)), r"sown must be \{'losses': .* got keys \[\]"),
        (lambda: added_by_routers(None, Experts(2)), r"sown must be \{'losses': .* got None"),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
