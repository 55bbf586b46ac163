"""Who sees whom: windows, masks, packed sequences and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import Experts, RopeScaling, attention, init_cache, positions
from tape_jax._src.model import attention_layer
from tape_jax._src.positions.protocol import on_axes
from tests.library.model.generate.passes import jit_extend
from tests.models import (
    VOCAB,
    assert_near,
    encoding,
    random_tokens,
    random_variables,
    run,
    small_model,
)
from tests.selection import OF_EACH_SORT, mostly_slow


def banded(time, local_window_size):
    i, j = np.arange(time)[:, None], np.arange(time)
    return (j <= i) & (j >= i - local_window_size)


@pytest.mark.parametrize("length", [[9, 20, 30], [9]])
def test_a_length_broadcasts_to_batch_axes(length):
    scaling = RopeScaling("dynamic", 2.0, original_length=4)
    model = small_model(positions.Rope(scaling=scaling))
    variables, tokens = random_variables(model), random_tokens(6, 5).reshape(2, 3, 5)
    rows = np.broadcast_to(length, (2, 3)).reshape(6)
    apply = jax.jit(model.apply)
    expected = apply(variables, tokens.reshape(6, 5), length=jnp.asarray(rows))
    found = apply(variables, tokens, length=jnp.asarray(length))
    assert_near(found.reshape(expected.shape), expected)


def test_window_equals_its_mask():
    variables, tokens = random_variables(small_model("tape")), random_tokens(2, 9)
    expected = run(small_model("tape"), variables, tokens, mask=banded(9, 3))
    assert_near(run(small_model("tape", local_window_size=3), variables, tokens), expected)


def test_a_causal_mask_equals_causal():
    model = small_model("tape")
    variables, tokens = random_variables(model), random_tokens(2, 5)
    mask = jnp.tril(jnp.ones((5, 5), bool))
    assert_near(
        run(model, variables, tokens, mask=mask, is_causal=False), run(model, variables, tokens)
    )


def test_without_causality_every_token_is_seen():
    model = small_model("tape")
    variables, tokens = random_variables(model), random_tokens(1, 6)
    changed = tokens.at[0, -1].add(1)
    both = [run(model, variables, t, is_causal=False) for t in (tokens, changed)]
    assert jnp.abs(both[0] - both[1]).max(-1).min() > 1e-4


@pytest.mark.parametrize("kind", mostly_slow(OF_EACH_SORT, "tape", "learned"))
def test_padding_is_not_read_and_not_seen(kind):
    """Padded on either side, with ids and positions that no token has, a row stays what it is."""
    model, length = small_model(kind), 5
    variables, row = random_variables(model), random_tokens(length)
    tokens = jnp.full((3, 8), 10_000).at[0, :5].set(row).at[1, 3:].set(row).at[2, 1:6].set(row)
    ids = (tokens < VOCAB).astype(jnp.int32) * 4
    places = jnp.where(ids == 0, -9000, jnp.cumsum(ids // 4, axis=1) - 1)
    places = on_axes(places, model.encoding.coordinate_axes)
    expected = run(model, variables, row, length=length)
    for given in ({}, {"positions": places}):
        logits = run(model, variables, tokens, segment_ids=ids, length=length, **given)
        assert jnp.isfinite(logits).all()
        assert_near(logits[ids != 0].reshape(3, length, VOCAB), jnp.stack([expected] * 3))


DYNAMIC = RopeScaling("dynamic", 2.0, original_length=4)


OF_LENGTH = {
    "each layer": encoding("random_rope", each_layer=True),
    "tape": positions.Tape(scaling=DYNAMIC, form="tensor"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_LENGTH)
def test_the_width_of_a_batch_is_no_length(name):
    """Draws and dynamic scaling are for what each row really has, or for the length it is given."""
    model = small_model(OF_LENGTH[name], num_layers=2)
    variables, row = random_variables(model), random_tokens(7)
    expected = run(model, variables, row)
    for width in (8, 14):
        left, right = jnp.zeros((2, width), int), jnp.zeros((2, width), int)
        ids = left.at[0, -7:].set(1).at[1, -3:].set(1)
        left = left.at[0, -7:].set(row).at[1, -3:].set(row[:3])
        assert_near(run(model, variables, left, segment_ids=ids)[0, -7:], expected)
        right = right.at[0, :7].set(row).at[1, :3].set(row[:3])
        assert_near(run(model, variables, right, segment_ids=ids[:, ::-1])[0, :7], expected)
    told = jax.jit(model.apply)(variables, jnp.stack([row, row]), length=jnp.array([7, 14]))
    assert_near(told[0], expected)
    assert_near(told[1], run(model, variables, row, length=14))
    assert jnp.abs(run(model, variables, row, length=14) - expected).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random_rope", "tape"])
def test_a_row_that_is_all_padding_spoils_nothing(kind):
    """Its logits are finite, so that a loss with weight 0 there, and its gradients, are too."""
    model, tokens = small_model(kind, num_layers=1), random_tokens(2, 4)
    variables, ids = random_variables(model), jnp.array([[1, 1, 1, 1], [0, 0, 0, 0]])
    assert jnp.isfinite(run(model, variables, tokens, segment_ids=ids)).all()
    assert jnp.isfinite(model.apply(variables, tokens, segment_ids=ids)).all()


def test_nothing_but_padding():
    tokens, ids = jnp.ones((2, 3), int), jnp.zeros((2, 3), int)
    model = small_model("rope", experts=Experts(3))
    variables = random_variables(model)
    with pytest.raises(ValueError, match="all segment_ids are 0, which is padding"):
        model.apply(variables, tokens, segment_ids=ids)

    @jax.jit
    def balance(ids):
        _, sown = model.apply(variables, tokens, segment_ids=ids, mutable=["losses"])
        return sown["losses"]["layers_0"]["mlp"]["balance"][0]

    np.testing.assert_array_equal(balance(ids), 0)
    assert (balance(ids.at[0].set(3)) > 0).all()


@pytest.mark.parametrize("given", [{}, {"mask": jnp.ones((6, 6), bool)}, {"return_states": True}])
def test_a_window_counts_tokens_of_the_segment(given, monkeypatch):
    """Indices measure it, as kernels want, unless what is given or returned has an order."""
    model, calls = small_model("tape", local_window_size=1, num_layers=2), []
    variables, tokens = random_variables(model), random_tokens(2, 6)
    ids = jnp.array([[2, 1, 0, 2, 1, 2], [1, 1, 0, 2, 2, 0]])

    def attend(*args, **kwargs):
        calls.append(kwargs["window_positions"] is None)
        return attention(*args, **kwargs)

    monkeypatch.setattr(attention_layer, "attention", attend)
    found = model.apply(variables, tokens, segment_ids=ids, **given)
    assert calls
    assert set(calls) == {not given}
    logits, _ = found if "return_states" in given else (found, None)
    for row, name in np.ndindex(2, 2):
        own = ids[row] == name + 1
        assert_near(logits[row][own], run(model, variables, tokens[row][own]))


@pytest.mark.slow
def test_a_window_counts_no_padding_in_a_cache():
    model = small_model("tape", local_window_size=2)
    variables = random_variables(model)
    text = jnp.array([[1, 2, 3, 4, 5, 6]])
    want = run(model, variables, text)
    padded, ids = jnp.array([[1, 2, 3, 0, 0]]), jnp.array([[1, 1, 1, 0, 0]])
    cache = init_cache(model, 1, 10)
    first, cache = jit_extend(model, variables, cache, padded, segment_ids=ids)
    second, _ = jit_extend(model, variables, cache, text[:, 3:])
    assert_near(jnp.concatenate([first[:, :3], second], axis=1), want)
