"""Position coupling: ids that digits of like weight share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tape_jax import ModelConfig
from tape_jax.positions import PositionCoupling
from tests import models
from tests.models import FLOAT64

PLUS, EQUALS, SPACE, PAD = 10, 11, 12, 13
IDS = {"+": PLUS, "=": EQUALS, " ": SPACE}
CONFIG = ModelConfig(14, hidden_size=32, num_heads=4)


def coupling(**options):
    given = {"digits": tuple(range(10)), "plus": PLUS, "equals": EQUALS, "size": 40}
    return PositionCoupling(**{**given, "max_offset": 5, **options})


def encoded(text):
    return np.array([IDS[x] if x in IDS else int(x) for x in text])


def ids_of(text, segments=None, **options):
    tokens = jnp.asarray(encoded(text) if isinstance(text, str) else text)
    if segments is not None:
        segments = jnp.asarray(segments)
    run = jax.jit(coupling(**options).coordinates)
    return run(tokens, jnp.zeros_like(tokens), segments).tolist()


PLAIN = {"reverse_answer": False, "extra_digits": 1}
MORE = {"reverse_operands": True}


WRITTEN = [
    ("653+49=2070", {}, [4, 3, 2, 1, 3, 2, 1, 2, 3, 4, 5]),
    ("653+49=2070 12", MORE, [2, 3, 4, 1, 2, 3, 1, 2, 3, 4, 5, 0, 2, 3]),
    ("653+049=0702", PLAIN, [4, 3, 2, 1, 4, 3, 2, 6, 5, 4, 3, 2]),
    ("7+5=12", {**PLAIN, "couple_equals": False}, [2, 1, 2, 1, 3, 2]),
    # Of several additions each has its own longest operand.
    (
        "12+3+4=19 5+15=2",
        {**PLAIN, "extra_digits": 0},
        [3, 2, 1, 2, 1, 2, 4, 3, 2, 0, 2, 1, 3, 2, 4, 3],
    ),
    ("12", {}, [-1, -1]),
]


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize(("text", "options", "want"), WRITTEN)
def test_ids(text, options, want):
    assert ids_of(text, **options) == want


def test_ids_of_segments_between_each_other():
    texts = "653+49=2070", "12+3=5 7+1=8"
    alone = [ids_of(text, **MORE) for text in texts]
    order = np.random.default_rng(0).permutation([5] * 11 + [3] * 12 + [0] * 3)
    packed, want = np.full(26, 7), np.full(26, -2)
    for segment, text, own in zip((5, 3), texts, alone, strict=True):
        packed[order == segment], want[order == segment] = encoded(text), own
    found = np.array(ids_of(packed, order, **MORE))
    np.testing.assert_array_equal(found[order != 0], want[order != 0])


def test_narrow_tokens_are_no_wide_signs():
    options = MORE | {"plus": 256 + IDS["+"]}
    narrow = ids_of(encoded("6+4").astype(np.uint8), **options)
    assert narrow == ids_of(encoded("6+4").astype(np.int32), **options)


TABLE = {"table": jnp.arange(40.0)[:, None]}


@pytest.mark.slow
def test_one_random_offset_moves_all_ids():
    encoding, ids = coupling(), jnp.asarray(ids_of(encoded("12+3=15 ")[None]))
    keys = jax.vmap(jax.random.key)(jnp.arange(60))
    embed = jax.vmap(lambda key: encoding.embed(TABLE, ids, CONFIG.sizes, key)[0, :, 0])
    moved = np.asarray(jax.jit(embed)(keys) - ids[0])
    assert not moved[:, -1].any()
    assert (moved[:, :-1] == moved[:, :1]).all()
    assert set(moved[:, 0].tolist()) == {0, 1, 2, 3, 4, 5}
    np.testing.assert_array_equal(encoding.embed(TABLE, ids, CONFIG.sizes, None)[..., 0], ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("1+12", {}, "operands that are not reversed depend on where they end"),
        ("1+1=123", PLAIN, r"an answer has more digits than its longest operand and .* = 1 more"),
        ("1" * 39 + "+", {}, r"position ids must lie in 0 .. 39; got 40"),
    ],
)
def test_what_has_no_id_is_refused_or_nan(text, options, words):
    encoding = coupling(**options)
    ids = jnp.asarray(ids_of(text, **options))
    with pytest.raises(ValueError, match=words):
        encoding.embed(TABLE, ids, CONFIG.sizes, None)
    for key in (None, jax.random.key(0)):
        got = jax.jit(lambda x, key=key: encoding.embed(TABLE, x, CONFIG.sizes, key))(ids)[:, 0]
        limit = 40 if key is None else 35
        np.testing.assert_array_equal(jnp.isnan(got), (ids < 0) | (ids >= limit))


@pytest.mark.slow
def test_decoding_goes_on_behind_a_prompt(x64):
    """Answers are written token by token; a prompt may not be cut within a number."""
    model = models.small_model(coupling(**PLAIN), vocab_size=14, num_layers=1, **FLOAT64)
    variables = models.random_variables(model)
    tokens = jnp.asarray([encoded("653+49=0207 "), encoded("  7+12=019  ")])
    ids = jnp.asarray([[1] * 12, [0] * 2 + [4] * 10])
    full = jax.jit(model.apply)(variables, tokens, segment_ids=ids)
    extend = jax.jit(functools.partial(tape.extend, model))
    prefill = jax.jit(functools.partial(tape.prefill, model, capacity=12))
    first, cache = prefill(variables, tokens[:, :7], segment_ids=ids[:, :7])
    found = [first]
    for n in range(7, 12):
        logits, cache = extend(variables, cache, tokens[:, n : n + 1])
        found.append(logits)
    np.testing.assert_allclose(
        jnp.concatenate(found, 1)[ids != 0], full[ids != 0], rtol=0, atol=1e-10
    )
    with pytest.raises(ValueError, match="in one call"):
        tape.prefill(model, variables, tokens[:, :5], capacity=12)


def test_what_needs_more_digits():
    with pytest.raises(ValueError, match="answers that are not reversed need extra_digits"):
        PositionCoupling(reverse_answer=False)
