"""Encodings that act together, and what does not go together."""

import dataclasses
import json
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tape_jax import ModelConfig, losses, positions
from tape_jax._src.positions.creation import options_of
from tape_jax.positions import Encoding, Param, Rope, create, registry
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
        ("rope+none", {}, "'none' cannot be combined; .*different layers give positions.Layers"),
        ("fox+fox", {}, "taken once; got 'fox\\+fox'. For encodings of different layers give"),
        ("tape+", {}, "unknown position encoding ''"),
        ("tape+alibi", {"nrom": "rms"}, "unknown field 'nrom'.*did you mean 'norm'"),
        ("abacus+rope", {"digits": DIGITS, "slopes": 1}, "unknown field 'slopes'"),
        (["rope", 3], {}, "unknown position encoding 3"),
        (
            "rope",
            {"base": 3.0, "rope_base": 5.0},
            "each option of 'rope' is given once; got base, ",
        ),
        ("rope+alibi", {"axes": 2}, "as each other; got {'rope': 2, 'alibi': 1}"),
    ],
)
def test_what_does_not_go_together(position, options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(13, position={"kind": position, **options})


def test_a_combination_is_of_encodings():
    with pytest.raises(ValueError, match="each of encodings must be of the type Encoding; got 'r"):
        positions.Combined(("rope", "alibi"))


@dataclasses.dataclass(frozen=True)
class Penalty(Encoding):
    """Adds the sum of its parameters to the loss."""

    kind: ClassVar[str] = "gg"
    acts_on: ClassVar[tuple[str, ...]] = ("bias",)

    def layer_params(self, sizes, *, updates):
        return {"w": Param((2,), jax.nn.initializers.ones, (None,))}

    def loss(self, params, progress):
        return sum(layer["w"].sum() for layer in params) * (1 + progress)


class Named(Penalty):
    """Its name, and that of its parameters, begin with another's."""

    kind: ClassVar[str] = "gg_w"


def test_the_losses_of_all_encodings_are_added():
    params = [{"gg_w": jnp.full(2, n), "gg_w_w": jnp.full(2, 10.0 * n)} for n in (1.0, 2.0)]
    assert create(["rope", Penalty()]).loss(params, 0.5) == 9
    assert create([Named(), Penalty(), "rope"]).loss(params, 0.5) == 99
    assert create("rope+alibi").loss(params, 0.5) is None
    relaxed = create(["tape_relaxed_equivariance", Penalty()], penalty=(3.0, 1.0))
    mirrored = [{**layer, "mirror": jnp.ones(4)} for layer in params]
    assert relaxed.loss(mirrored, 0.5) == 9 + 2 * 8


def test_the_loss_of_a_model_has_that_of_a_bias():
    """Its parameters have a prefix there, whatever encoding has the state."""
    for position in ([Penalty()], ["rope", Penalty()], [Penalty(), "tape", "alibi"]):
        model = small_model(create(position), num_layers=2)
        variables = model.init(jax.random.key(0), jnp.ones((1, 2), int))
        assert losses.added_by_encoding(model, variables["params"], 0.0) == 4


@dataclasses.dataclass(frozen=True)
class Scaled(Rope):
    """RoPE with a parameter whose name begins with another's."""

    kind: ClassVar[str] = "scaled"

    def layer_params(self, sizes, *, updates):
        return {"fox_gate": Param((1,), jax.nn.initializers.ones, (None,))}

    def layer_terms(self, params, layer):
        assert [*params] == ["fox_gate"]
        return super().layer_terms(params, layer)


def test_an_encoding_has_its_own_parameters_whatever_their_names():
    model = small_model(create([Scaled(), "fox"]), num_layers=1)
    model.init(jax.random.key(0), jnp.ones((1, 2), int))
    assert any(name.endswith("position_fox_gate") for name in model.parameters())


@dataclasses.dataclass(frozen=True)
class Grid(Encoding):
    """Biases logits by the distance of two tokens on a grid."""

    kind: ClassVar[str] = "grid"
    acts_on: ClassVar[tuple[str, ...]] = ("bias",)
    coordinate_axes: ClassVar[int] = 2

    def pair_bias(self, params, query, key, sizes):
        apart = jnp.abs(query[..., :, None, :] - key[..., None, :, :]).sum(-1)
        return -1.0 * apart[..., None, :, :]


def test_as_many_coordinates_as_each_other():
    both = create([Rope(axes=2), Grid(), "fox"])
    assert both.coordinate_axes == create([Grid(), "fox"]).coordinate_axes == 2
    model, tokens = small_model(both, num_layers=1), jnp.ones((1, 3), int)
    at = jnp.array([[[0, 1], [2, 0], [5, 5]]])
    variables = model.init(jax.random.key(0), tokens, positions=at)
    chex.assert_tree_all_finite(model.apply(variables, tokens, positions=at))
    for other in ("rope", "alibi"):
        with pytest.raises(ValueError, match=f"as each other; got .*'{other}': 1"):
            create([other, Grid()])


def acting(base, *places, **methods):
    """An encoding like ``base`` with other places, and with methods of its own."""
    return type("My", (base,), {"kind": "my", "acts_on": places, **methods})()


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (
            acting(Rope, "rotation"),
            "'my' acts on an unknown place, 'rotation': expected some of 'embedding', 'state', "
            "'scale', 'logits', 'weights', 'window', 'bias', 'decay'; got 'my\\+alibi'",
        ),
        (
            acting(Rope, "bias"),
            r"'my' overrides start, so 'state' must be in its acts_on; got \('b",
        ),
        (acting(Encoding, "bias", embed=lambda *given: None), "overrides embed, so 'embedding'"),
        (acting(Rope, "state", coordinates=None), "overrides coordinates, so 'embedding'"),
        (acting(Encoding, "bias", update_state=None), "overrides update_state, so 'state'"),
        (acting(positions.Window, "bias"), "overrides local_window_size, so 'window'"),
        (acting(positions.Inkling, "logits"), "overrides logits_scale, so 'scale'"),
    ],
)
def test_what_a_combination_would_leave_out_is_refused(mine, message):
    with pytest.raises(ValueError, match=message):
        create([mine, "alibi"])


def test_all_encodings_that_act_somewhere_combine():
    """With one that has other places."""
    for kind, cls in registry.items():
        others = (x for x in ("window", "rope") if not {*registry[x].acts_on} & {*cls.acts_on})
        for other in others if cls.acts_on else ():
            assert combined(f"{kind}+{other}").kind == f"{kind}+{other}"


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
