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
    return coupling(**options).coordinates(tokens, jnp.zeros_like(tokens), segments).tolist()


PLAIN = {"reverse_answer": False, "extra_digits": 1}


WRITTEN = [
    ("653+49=2070", {}, [4, 3, 2, 1, 3, 2, 1, 2, 3, 4, 5]),
    ("653+049=0702", PLAIN, [4, 3, 2, 1, 4, 3, 2, 6, 5, 4, 3, 2]),
    ("7+5=12", {**PLAIN, "couple_equals": False}, [2, 1, 2, 1, 3, 2]),
    ("12+3+4=19 5+15=2", {**PLAIN, "extra_digits": 0}, None),
    ("12", {}, [-1, -1]),
]


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("text", "options", "want"), WRITTEN)
def test_ids(text, options, want):
    if want is None:  # of several additions each has its own longest operand
        want = [3, 2, 1, 2, 1, 2, 4, 3, 2, 0, 2, 1, 3, 2, 4, 3]
    assert ids_of(text, **options) == want


def by_hand(text, reverse_operands):
    """Ids for reversed answers, number by number."""
    found = [1 if x in "+=" else 0 for x in text]
    start = None
    for n, x in enumerate([*text, " "]):
        if x.isdigit():
            start = n if start is None else start
        elif start is not None:
            up = reverse_operands or (start > 0 and text[start - 1] == "=")
            for i in range(start, n):
                found[i] = (i - start if up else n - 1 - i) + 2
            start = None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("reverse_operands", [False, True])
def test_ids_of_random_rows_and_segments(reverse_operands):
    generator = np.random.default_rng(0)
    letters = np.array(list("0123456+= "))
    texts = ["".join(generator.choice(letters, 19)) + " " for _ in range(60)]
    tokens = np.stack([encoded(text) for text in texts])
    expected = np.array([by_hand(text, reverse_operands) for text in texts])
    assert ids_of(tokens, reverse_operands=reverse_operands) == expected.tolist()
    # Two rows in one, their tokens between each other, and padding.
    order = generator.permuted(np.tile([5] * 20 + [3] * 20 + [0] * 4, (30, 1)), axis=1)
    packed, want = np.full(order.shape, 7), np.zeros(order.shape, int)
    for n in range(30):
        for segment, row in ((5, 2 * n), (3, 2 * n + 1)):
            packed[n, order[n] == segment] = tokens[row]
            want[n, order[n] == segment] = expected[row]
    found = np.array(ids_of(packed, order, reverse_operands=reverse_operands))
    np.testing.assert_array_equal(found[order != 0], want[order != 0])


TABLE = {"table": jnp.arange(40.0)[:, None]}


@pytest.mark.slow
def test_one_random_offset_moves_all_ids():
    encoding, ids = coupling(), jnp.asarray(ids_of(encoded("12+3=15 ")[None]))
    offsets = set()
    for seed in range(60):
        got = encoding.embed(TABLE, ids, CONFIG.sizes, jax.random.key(seed))[..., 0]
        assert got[0, -1] == 0
        (offset,) = set(np.asarray(got - ids)[0, :-1].tolist())
        offsets.add(offset)
    assert offsets == {0, 1, 2, 3, 4, 5}
    np.testing.assert_array_equal(encoding.embed(TABLE, ids, CONFIG.sizes, None)[..., 0], ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("1+12", {}, r"operands that are not reversed depend on where they end"),
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
    model = models.small_model(coupling(**PLAIN), vocab_size=14, **FLOAT64)
    variables = models.random_variables(model)
    tokens = jnp.asarray([encoded("653+49=0207 "), encoded("  7+12=019  ")])
    ids = jnp.asarray([[1] * 12, [0] * 2 + [4] * 10])
    full = jax.jit(model.apply)(variables, tokens, segment_ids=ids)
    extend = jax.jit(functools.partial(tape.extend, model))
    start = {"segment_ids": ids[:, :7], "capacity": 12}
    first, cache = tape.prefill(model, variables, tokens[:, :7], **start)
    found = [first]
    for n in range(7, 12):
        logits, cache = extend(variables, cache, tokens[:, n : n + 1])
        found.append(logits)
    np.testing.assert_allclose(
        jnp.concatenate(found, 1)[ids != 0], full[ids != 0], rtol=0, atol=1e-10
    )
    with pytest.raises(ValueError, match="in one call"):
        tape.prefill(model, variables, tokens[:, :5], capacity=12)


def test_misuse():
    with pytest.raises(ValueError, match=r"not reversed need extra_digits"):
        PositionCoupling(reverse_answer=False)
    for name, value in (("max_offset", -1), ("extra_digits", -1), ("size", 0)):
        with pytest.raises(ValueError, match=rf"position_coupling: {name} must be .*positive"):
            PositionCoupling(**{name: value})
    with pytest.raises(ValueError, match=r"digits must be token ids; got '45'"):
        PositionCoupling(digits="45")
    with pytest.raises(ValueError, match=r"plus must be an integer; got '\+'"):
        PositionCoupling(plus="+")
    with pytest.raises(ValueError, match=r"digits, plus and equals, the token ids, must be given"):
        PositionCoupling(digits=(1, 2), plus=3).check(CONFIG.sizes)
    for options in ({"plus": 14}, {"plus": EQUALS}, {"equals": -1}, {"digits": (3, 3)}):
        with pytest.raises(ValueError, match=r"must be different token ids in 0 .. 13"):
            coupling(**options).check(CONFIG.sizes)
    with pytest.raises(ValueError, match=r"size = 5 must exceed max_offset = 5"):
        coupling(size=5).check(CONFIG.sizes)
    assert coupling().max_length() is None
