"""Encodings that act together, and what does not go together."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tape_jax import ModelConfig, positions
from tape_jax._src.positions.creation import options_of
from tape_jax.positions import create
from tests.models import DIGITS, encoding, normal, random_variables, small_model

COMBINATIONS = ("tape+alibi", "fox+alibi+t5", "abacus+fire", "learned+tape+fox")


def combined(kinds, **options):
    parts = [encoding(kind) for kind in kinds.split("+")]
    return create(parts, **options)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False])
def test_alibi_beside_rope_is_the_bias_of_its_paper(x64, is_causal):
    """One layer by hand: under the causal rule as a decay, else as a bias."""
    config = ModelConfig(13, hidden_size=16, num_layers=1, num_heads=2, position="rope+alibi")
    q, k, v = (jnp.asarray(normal(2, 7, 2, 8, seed=n)) for n in range(3))
    x, e = jnp.zeros((2, 7, 16)), positions.rotary_state(jnp.arange(7), 8)
    layer = positions.Layer(x, jnp.arange(7), None, is_causal, config.sizes, q, k)
    terms = config.position.layer_terms({}, layer)
    options = {"state": e, "attend_state": False, "is_causal": is_causal}
    got, _ = tape.attention(q, k, v, bias=terms.bias, log_decay=terms.log_decay, **options)
    distance = np.abs(np.arange(7)[:, None] - np.arange(7))
    bias = -np.array([2.0**-4, 2.0**-8])[:, None, None] * distance
    want, _ = tape.attention(q, k, v, bias=bias, **options)
    chex.assert_trees_all_close(got, want, atol=1e-12)


def test_slopes_are_learned_from_zero_or_from_the_paper_s():
    for slopes, want in (("learned_from_zero", [0, 0]), ("learned", [2.0**-4, 2.0**-8])):
        encoding = create("rope+alibi", slopes=slopes)
        sizes = small_model(encoding).config.sizes
        (spec,) = encoding.layer_params(sizes, updates=False).values()
        np.testing.assert_allclose(spec.init(jax.random.key(0), spec.shape, jnp.float32), want)


def test_options_go_to_the_one_that_has_them():
    found = create({"kind": "tape+alibi", "norm": "rms", "slopes": "learned"})
    assert found.encodings == (positions.Tape(norm="rms"), positions.Alibi(slopes="learned"))
    assert found == create(("tape", "alibi"), norm="rms", slopes="learned")
    assert found == create([{"kind": "tape", "norm": "rms"}, positions.Alibi(slopes="learned")])
    assert create(found, alpha=2.0).encodings[0].alpha == 2.0
    assert create(["rope"]) == positions.Rope()
    assert found.kind == "tape+alibi"
    assert hash(found) == hash(create(found))


@pytest.mark.parametrize(
    ("position", "options", "message"),
    [
        ("tape+rope", {}, "'tape' and 'rope' do not go together: each has a position state"),
        ("abacus+learned", {"digits": DIGITS}, "each adds to the embeddings"),
        ("rope+wall", {}, "'rope' and 'wall' do not go together"),
        ("cope+dape_alibi", {}, "each rewrites the logits"),
        ("path+cable", {}, "each scales the logits by a factor"),
        ("rope+none", {}, "'none' cannot be combined"),
        ("fox+fox", {}, "each encoding is taken once; got 'fox\\+fox'"),
        ("tape+", {}, "unknown position encoding ''"),
        ("tape+alibi", {"nrom": "rms"}, "unknown field 'nrom'.*did you mean 'norm'"),
        ("abacus+rope", {"digits": DIGITS, "slopes": 1}, "unknown field 'slopes'"),
        (["rope", 3], {}, "unknown position encoding 3"),
        (
            "rope",
            {"base": 3.0, "rope_base": 5.0},
            "each option of 'rope' is given once; got base, ",
        ),
        ("rope+alibi", {"axes": 2}, "'alibi' reads one position a token, 'rope' has axes = 2"),
    ],
)
def test_what_does_not_go_together(position, options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(13, position={"kind": position, **options})


def test_a_combination_is_of_encodings():
    with pytest.raises(ValueError, match="each of encodings must be of the type Encoding; got 'r"):
        positions.Combined(("rope", "alibi"))


def test_options_of_two_encodings():
    """The one with a state has the short name."""
    found = create("sinusoidal+rope", base=50.0, sinusoidal_base=100.0, learn_base=True)
    rope = positions.Rope(base=50.0, learn_base=True)
    assert found.encodings == (positions.Sinusoidal(base=100.0), rope)
    options = options_of(found)
    assert options["sinusoidal_base"] == 100.0
    assert options["base"] == 50.0
    assert options["learn_base"]
    assert create(options) == found
    assert create("rope+alibi", rope_base=50.0).encodings[0].base == 50.0
    assert create("rope+fox", axes=2).coordinate_axes == 2


@pytest.mark.parametrize("kinds", COMBINATIONS)
def test_options_make_it_again(kinds):
    found = combined(kinds)
    assert create(options_of(found)) == found
    assert create(json.loads(json.dumps(options_of(found)))) == found


def test_forget_gates_are_for_the_causal_rule():
    model, tokens = small_model("rope+fox", num_layers=1), jnp.ones((1, 2), int)
    with pytest.raises(ValueError, match="'fox' needs is_causal=True: what comes after"):
        jax.eval_shape(lambda: model.apply(random_variables(model), tokens, is_causal=False))
