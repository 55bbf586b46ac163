"""Positions drawn in training, for every encoding."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, RandomPositions, grow_cache, init_cache, positions
from tape_jax._src.positions.drawing import drawn_positions
from tape_jax.positions import RandomRope, Rope
from tests.library.positions.test_decoding import stream_key
from tests.models import FLOAT64, encoding, random_tokens, random_variables, small_model

KINDS = ("spaced", "stretched", "shifted")
TOKENS = random_tokens(2, 6)
KEY = jax.random.key(5)


def model_of(kind, position="tape", size=40, **options):
    draw = None if kind is None else RandomPositions(kind, size)
    if isinstance(position, str) and "+" not in position:
        position = encoding(position, **({"threshold": 3.0} if position == "fire" else {}))
    return small_model(position, random_positions=draw, **{"num_layers": 2, **FLOAT64, **options})


@functools.partial(jax.jit, static_argnums=0)
def logits(model, variables, key=None, positions=None):
    rngs = None if key is None else {"positions": key}
    return model.apply(variables, TOKENS, rngs=rngs, positions=positions)


@pytest.mark.parametrize("kind", KINDS)
def test_draws(x64, kind):
    """In order, below the range, one for all rows as far as their lengths agree."""
    draw, places = RandomPositions(kind, 50), jnp.arange(6)
    keys = jax.random.split(KEY, 40)
    found = np.asarray(jax.jit(jax.vmap(lambda key: drawn_positions(draw, places, 6, key)))(keys))
    steps = np.diff(found)
    assert found.min() >= 0
    assert found.max() < 50
    assert found[:, -1].max() > 40
    assert len(np.unique(found[:, -1])) > 15
    if kind == "spaced":
        assert steps.min() >= 1
        assert len(np.unique(steps[0])) > 1
    elif kind == "stretched":
        chex.assert_trees_all_close(steps, steps[:, :1] * np.ones(5), atol=1e-12)
        assert 1 <= steps.min() < 1.5
        assert found[:, 0].max() == 0
    else:
        assert (steps == 1).all()
        assert found[:, 0].min() < 5
    # What is not known yet is not refused.
    run = jax.jit(drawn_positions, static_argnums=0)
    rows = run(draw, places, jnp.array([6, 2, 50]), KEY)
    chex.assert_trees_all_close(rows[0], run(draw, places, 6, KEY), atol=1e-12)
    chex.assert_trees_all_close(rows[1, :2], run(draw, places[:2], 2, KEY), atol=1e-12)
    assert (rows[1, 2:] == -1).all()
    with pytest.raises(ValueError, match="random_positions: 51 positions do not fit"):
        drawn_positions(draw, places, 51, KEY)
    with pytest.raises(ValueError, match=r"positions must lie in 0 \.\. 4; got 5"):
        drawn_positions(draw, places, 5, KEY)
    with pytest.raises(ValueError, match="random_positions: positions must be integers"):
        drawn_positions(draw, places / 2, 6, KEY)


CASES = [
    ("stretched", "rope+alibi"),
    ("shifted", "learned"),
    ("stretched", "fire"),
    ("spaced", "t5"),
]


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("kind", "position"), CASES)
def test_an_encoding_reads_what_is_drawn(x64, kind, position):
    """With the random stream; without it positions are plain."""
    model, plain = (model_of(k, position, num_layers=1) for k in (kind, None))
    variables = random_variables(plain)
    expected = logits(plain, variables)
    chex.assert_trees_all_equal(logits(model, variables), expected)
    key = jax.random.fold_in(stream_key(model, 5), 0)
    places = drawn_positions(model.config.random_positions, jnp.arange(6), 6, key)
    found = logits(model, variables, KEY)
    chex.assert_trees_all_close(found, logits(plain, variables, positions=places), atol=1e-12)
    assert np.abs(found - expected).max() > 1e-4


@pytest.mark.parametrize("each_layer", [False, True])
def test_spaced_is_random_rope(x64, each_layer):
    """With a draw of its own for each layer the state counts layers, too."""
    sizes, places = model_of(None, "random_rope").config.sizes, jnp.array([[0, 1, 4], [5, 2, 0]])
    encoding, draw = RandomRope(range=64, each_layer=each_layer), RandomPositions("spaced", 64)
    state = encoding.start(places, sizes, key=KEY, length=6)
    assert encoding.updates(1, 2) is each_layer
    for key in jax.random.split(KEY, sizes.num_layers) if each_layer else [KEY]:
        want = Rope().start(drawn_positions(draw, places, 6, key), sizes)
        for found in encoding.rotation(state):
            chex.assert_trees_all_equal(found, want)
        state = encoding.update_state({}, state, None, places) if each_layer else state


@pytest.mark.slow
def test_a_draw_is_for_one_capacity(x64):
    model = model_of("stretched")
    cache = init_cache(model, 1, 4, key=KEY)
    with pytest.raises(ValueError, match="depends on the capacity, 4"):
        grow_cache(model, cache, 8)
    assert grow_cache(model, init_cache(model, 1, 4), 8).capacity == 8
    assert grow_cache(model, init_cache(model, 1, 4, key=KEY, length=8), 8).capacity == 8


@pytest.mark.slow
def test_positions_out_of_range(x64):
    """An error or, where they are traced, no number; other rows do not notice."""
    model = model_of("shifted")
    variables = random_variables(model)
    places = jnp.array([[0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 4, 5]])
    found = logits(model, variables, KEY, positions=places)
    assert jnp.isnan(found[0, 5]).all()
    chex.assert_trees_all_close(found[1], logits(model, variables, KEY)[1], atol=1e-12)
    with pytest.raises(ValueError, match=r"positions must lie in 0 \.\. 5; got 6"):
        model.apply(variables, TOKENS, positions=places, rngs={"positions": KEY})


BY_CONTENT = {
    "none", "selective_rope", "grape_m_ctx", "repo", "mapformer_wm", "mapformer_em", "fox",
    "path", "cope", "stickbreaking", "abacus", "position_coupling", "cable", "dda_per_row", "wall",
    "window",
}  # fmt: skip


@pytest.mark.parametrize("position", [*positions.registry, "alibi+fox", "path+fox"])
def test_encodings_that_read_no_positions_refuse_a_draw(position):
    if {*position.split("+")} <= BY_CONTENT:
        with pytest.raises(ValueError, match=rf"which '{re.escape(position)}' does not; got Rand"):
            model_of("spaced", position)
    elif position not in ("random_rope", "mrope"):
        model_of("spaced", position)


def test_some_heads_of_a_combination_take_a_draw(x64):
    model = model_of("spaced", positions.create("rope+fox", on_heads=1))
    jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    model_of("stretched", positions.create(["rope", positions.Abacus(digits=(1, 2))]))
    model_of("spaced", positions.Repo(width=4, first_layer=1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RandomPositions(range=2**32), r"range must be less than 2\^31; got 4294967296"),
        (lambda: model_of("stretched", "learned"), "takes random_positions of the kinds .*shifted"),
        (lambda: model_of("stretched", "rope+t5"), "takes random_positions of the kinds"),
        (lambda: model_of("spaced", "random_rope"), r"takes random_positions of the kinds \(\)"),
        (lambda: ModelConfig(13, random_positions="spaced"), "must be a RandomPositions or None"),
        (lambda: model_of("spaced", "learned", 41), "range = 41 exceeds .* takes, 40 positions"),
        (lambda: model_of("spaced", Rope(axes=2)), "one position a token; 'rope' has axes = 2"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(ValueError, match=words):
        make()
