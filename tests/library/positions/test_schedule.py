"""Schedules: which encoding, state and window each layer has, whatever the loops over layers."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import flatten_dict

from tape_jax import RopeScaling, adapt, init_cache
from tape_jax._src.model.block import Block, unpacked
from tape_jax._src.model.inputs import Context
from tape_jax._src.model.layout import replaced, restack
from tape_jax.positions import Layers, Rope, Tape, Window, create, options_of
from tests.models import loss_and_gradients, random_tokens, random_variables, run, small_model

LOCAL = create("tape+window", size=2, base=50.0)
# Two states that are updated, one window, one layer without any, in a pattern and a rest.
POSITION = Layers([LOCAL, "tape", "none"])
TWICE = Layers("tape", every={3: "none"})
SIZES = {"num_layers": 9, "num_heads": 4, "num_kv_heads": 2}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Layers("rope", every={4: "none"}), "rope/rope/rope/none"),
        (Layers("rope", every={2: "none", 3: "alibi"}), "rope/none/alibi/none/rope/alibi"),
        (Layers("rope", every={4: "none", 2: "fox"}), "rope/fox/rope/none"),
        (Layers("rope", every={2: "fox", 4: "none"}), "rope/fox/rope/none"),
        (Layers(["rope", "none"], every={3: "fox"}), "rope/none/fox/none/rope/fox"),
        ("rope+window/rope", "rope+window/rope"),
        ({"kind": "rope/tape", "norm": "rms"}, "rope/tape"),
    ],
)
def test_patterns(given, expected):
    made = create(given)
    assert made.kind == expected
    assert create(options_of(made)) == made
    assert create(dataclasses.asdict(made)) == made


@pytest.mark.parametrize(
    ("position", "name", "kind", "give"),
    [
        ("rope+alibi/rope+alibi+fox", "on_heads", "rope+alibi+fox", "alibi_on_heads"),
        ("fox/wall+fox", "bias", "wall+fox", "fox_bias"),
        ("tape+inkling/inkling", "width", "tape+inkling", "inkling_width"),
    ],
)
def test_a_name_that_means_another_encoding_elsewhere_is_refused(position, name, kind, give):
    with pytest.raises(ValueError, match=rf"but not in '{re.escape(kind)}': give {give}"):
        create(position, **{name: 4})
    with pytest.raises(ValueError, match=give):
        create({"kind": position, name: 4})
    made = options_of(create(position, **{give: 4}))["encodings"]
    assert all(4 in options.values() for options in made)


def test_options_go_to_those_that_have_them():
    made = create("rope+window/rope/none", base=50.0, size=(3, 0))
    rope = Rope(base=50.0)
    assert made.encodings == (create([rope, Window((3, 0))]), rope, create("none"))
    made = create("rope+fox/fox", fox_bias=3.0)
    assert [encoding.members[-1].bias for encoding in made.encodings] == [3.0, 3.0]
    made = create("tape/rope", rope_base=5.0)
    assert [encoding.base for encoding in made.encodings] == [10_000.0, 5.0]


def test_what_layers_have():
    tape, rope = Tape(), Rope()
    found = Layers([tape, rope, "none"]).of_layers(7)
    assert [one.encoding.kind for one in found] == ["tape", "rope", "none"] * 2 + ["tape"]
    assert [one.member for one in found] == [0, 1, 2, 0, 1, 2, 0]
    # Nothing reads the state behind the last layer that has it.
    assert [one.updates for one in found] == [True, False, False, True, False, False, False]


@pytest.mark.parametrize(
    ("position", "updates"),
    [
        ("tape+window/tape", [True, False]),
        (Layers(["tape+alibi", "tape+fox", "tape+kerple"]), [True, True, True, False]),
        (
            Layers([Tape(layers=(1, 3)), "rope+fox", "tape+window"]),
            [False, False, True, False, False, False],
        ),
        (Layers([Tape(base=50.0), LOCAL, "tape"]), [True, False, False]),
    ],
)
def test_equal_parts_with_a_state_share_it(position, updates):
    """Whatever acts beside them."""
    found = create(position).of_layers(len(updates))
    assert [one.updates for one in found] == updates
    states = [one.encoding.state_part for one in found]
    assert [one.member for one in found] == [list(dict.fromkeys(states)).index(x) for x in states]


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [2, 8])
def test_a_window_that_shows_all_leaves_one_tape(num_layers):
    sizes = SIZES | {"num_layers": num_layers}
    tape, model = small_model(**sizes), small_model(create("tape+window/tape", size=9), **sizes)
    variables, tokens = random_variables(tape), random_tokens(2, 7)
    params = restack(variables["params"], tape, model)
    expected = run(tape, variables, tokens)
    chex.assert_trees_all_close(run(model, {"params": params}, tokens), expected, atol=1e-5)
    cache, found = init_cache(model, 2, 7), []
    for part in jnp.split(tokens, 7, axis=1):
        logits, cache = run(model, {"params": params}, part, cache=cache)
        found.append(logits)
    chex.assert_trees_all_close(jnp.concatenate(found, 1), expected, atol=1e-5)


@pytest.mark.slow
def test_each_layer_is_a_block_of_its_encoding():
    model = small_model(POSITION, **SIZES)
    variables, tokens = random_variables(model), random_tokens(2, 7)
    _, states = run(model, variables, tokens, return_states=True)
    context = Context(jnp.arange(7), None, None, 0, True)
    single = replaced(model, scan_layers=False)
    params = restack(variables["params"], model, single)
    expected = [LOCAL, Tape(), create("none")] * 3
    for layer, like in enumerate(POSITION.of_layers(9)):
        assert like.encoding == expected[layer]
        state = like.own(states.position[layer])
        one = dataclasses.replace(model.config, position=like.encoding)
        block = Block(one, like._replace(member=None))
        if like.updates:
            state = like.encoding.carry(state, (2, 7), model.config.sizes)
        carry = (states.hidden[layer], state if like.updates else None)
        own = {"params": params[f"layers_{layer}"]}
        (h, new), _ = jax.jit(block.apply)(own, carry, state, context, None)
        chex.assert_trees_all_close(h, states.hidden[layer + 1], atol=1e-5)
        if like.updates:
            following = like.own(states.position[layer + 1])
            chex.assert_trees_all_close(unpacked(new), following, atol=1e-5)
            assert float(jnp.abs(following - state).max()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("position", "remat"), [(POSITION, "none"), (TWICE, "groups")], ids=str)
def test_loops_over_patterns_change_nothing(position, remat):
    model = small_model(position, remat=remat, **SIZES)
    variables, tokens = random_variables(model), random_tokens(2, 6)
    single = replaced(model, scan_layers=False, remat="none")
    apart = {"params": restack(variables["params"], model, single)}
    loss, gradients = loss_and_gradients(model, variables, tokens)
    expected, wanted = loss_and_gradients(single, apart, tokens)
    chex.assert_trees_all_close(loss, expected, rtol=1e-5)
    back = restack(wanted["params"], single, model)
    chex.assert_trees_all_close(gradients["params"], back, atol=1e-5)


@pytest.mark.slow
def test_an_encoding_several_times_in_a_pattern():
    """Its state goes through all of its layers, and decoding is as the full pass."""
    model = small_model(TWICE, **SIZES)
    assert len(model.config.loops[0]) == 3
    variables, tokens = random_variables(model), random_tokens(2, 6)
    cache, found = init_cache(model, 2, 6), []
    for part in jnp.split(tokens, 2, axis=1):
        logits, cache = run(model, variables, part, cache=cache)
        found.append(logits)
    full = run(model, variables, tokens)
    chex.assert_trees_all_close(jnp.concatenate(found, 1), full, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"), [("tape/none", "tape/rope"), ("kerple/rope", "tape/kerple")]
)
def test_encodings_put_in_place_layer_by_layer(old, new):
    model = small_model(old, num_layers=6)
    variables = random_variables(model)
    changed, params = adapt.with_encoding(
        model, variables, new, key=jax.random.key(0), include_unrotated=old == "tape/none"
    )
    wanted = {path: spec.shape.shape for path, spec in changed.parameters().items()}
    found = flatten_dict(params["params"], sep="/")
    assert {path: x.shape for path, x in found.items()} == wanted
    before = restack(variables["params"], model, replaced(model, scan_layers=False))
    after = restack(params["params"], changed, replaced(changed, scan_layers=False))
    for layer in range(6):
        one, other = before[f"layers_{layer}"], after[f"layers_{layer}"]
        for name in set(one) & set(other):
            if jax.tree.map(jnp.shape, one[name]) == jax.tree.map(jnp.shape, other[name]):
                chex.assert_trees_all_equal(one[name], other[name])


def test_a_schedule_by_name_starts_as_the_model_does():
    """Also beside entries that have no start; a schedule of encodings has its own."""
    rope = Rope(base=50.0, scaling=RopeScaling("linear", 2.0))
    for position in ("rope+alibi/none", {"kind": "rope+alibi/none", "alibi_on_heads": 1}):
        first, second = adapt.in_place_of(rope, position).encodings
        assert (first.members[0], second.kind) == (rope, "none")
    tape, alone = adapt.in_place_of(rope, {"kind": "tape/rope", "base": 7.0}).encodings
    assert [(x.base, x.scaling.kind) for x in (tape, alone)] == [(7.0, "linear")] * 2
    for own in (Layers(["rope", "none"]), options_of(Layers(["rope", "none"]))):
        assert adapt.in_place_of(rope, own) == Layers(["rope", "none"])
    two = Layers([create([Rope(base=10.0), Window(3)]), Rope(base=20.0)])
    with pytest.raises(ValueError, match=r"start differently: 'rope' in 'rope/none' needs options"):
        adapt.in_place_of(two, "rope/none")
    assert adapt.in_place_of(two, {"kind": "rope/none", "base": 3.0}).encodings[0].base == 3.0
    assert adapt.in_place_of(two, "fox/none") == create("fox/none")


def test_windows_stay_where_the_rotation_is_dropped():
    model = small_model("rope+window", num_layers=2)
    key = jax.random.key(0)
    changed, _ = adapt.with_encoding(model, random_variables(model), "none", key=key)
    assert changed.encoding.kind == "window"
    biased = small_model("alibi+window/alibi", num_layers=2)
    with pytest.raises(ValueError, match=r"no layer of 'alibi\+window/alibi' rotates"):
        adapt.with_encoding(biased, random_variables(biased), "tape", key=key)


def test_one_loop_for_a_pattern():
    model = small_model("rope+window/rope+window/rope", num_layers=12)
    (loop,) = model.config.loops
    assert [list(blocks.layers) for blocks in loop] == [list(range(n, 12, 3)) for n in range(3)]
    shared = small_model("tape+window/tape", num_layers=12).config.loops
    assert [[list(x.layers) for x in loop] for loop in shared] == [
        [list(range(0, 10, 2)), list(range(1, 10, 2))],
        [[10]],
        [[11]],
    ]


def test_a_pattern_longer_than_the_model():
    """It fits if no encoding is left out."""
    position = Layers("rope", every={3: "none", 4: "fox"})
    found = [one.encoding.kind for one in small_model(position, num_layers=6).encoding.of_layers(6)]
    assert found == ["rope", "rope", "none", "fox", "rope", "none"]


@pytest.mark.slow
def test_windows_by_layer():
    """A token reaches as far back as the windows together let it."""
    model = small_model(Layers([Window(1), Window(3)]), num_layers=2)
    variables, tokens = random_variables(model), random_tokens(1, 12)
    changed = tokens.at[0, 4].set((tokens[0, 4] + 1) % 13)
    before, after = (run(model, variables, x) for x in (tokens, changed))
    moved = jnp.abs(before - after).max((0, 2)) > 1e-7
    assert jnp.flatnonzero(moved).tolist() == [4, 5, 6, 7, 8]


@pytest.mark.slow
def test_the_narrower_of_two_windows_holds():
    both = small_model(Layers([Window(1), Window((3, 4))]), num_layers=2, local_window_size=2)
    one = small_model(Layers([Window(1), Window(2)]), num_layers=2)
    variables, tokens = random_variables(one), random_tokens(1, 8)
    chex.assert_trees_all_equal(run(both, variables, tokens), run(one, variables, tokens))


def test_retrofit_changes_the_rotary_layers_alone():
    model = small_model("rope+window/rope/none", num_layers=7, num_heads=4, num_kv_heads=2)
    variables, tokens = random_variables(model), random_tokens(2, 9)
    taped, new = adapt.add_tape(model, variables, key=jax.random.key(0), norm="rms")
    assert taped.encoding.kind == "tape+window/tape/none"
    chex.assert_trees_all_close(run(taped, new, tokens), run(model, variables, tokens), atol=1e-5)
    scaled = adapt.with_scaling(model, RopeScaling("linear", 2.0))
    windowed, full, none = scaled.encoding.encodings
    assert windowed.members[0].scaling.kind == "none"
    assert (full.scaling.factor, none.kind) == (2.0, "none")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layers([]), "needs an encoding"),
        (lambda: Layers(["rope"]), "two encodings or more; got only 'rope'"),
        (lambda: Layers("rope", every=4), "every must map numbers of layers"),
        (lambda: create({"kind": "rope/none", "encodings": ["alibi", "none"]}), "contradict"),
        (lambda: Layers(["rope", "sinusoidal"]), "'sinusoidal' acts before the first layer"),
        (lambda: Layers(["rope", "rope/none"]), "cannot be part of another"),
        (lambda: Layers([Rope(axes=2), "alibi"]), "as many coordinates"),
        (lambda: Layers("rope", every={0: "none"}), "every must be a positive integer"),
        (lambda: Layers("rope", every={1: "fox", 2: "none"}), "leaves no layer to 'rope'"),
        (lambda: create(["rope/none", "alibi"]), "cannot be combined"),
        (lambda: create("rope/none", bsae=3.0), "did you mean 'base'"),
        (lambda: create(Layers(["rope", "none"]), base=3.0), "stand with its encodings"),
        (
            lambda: small_model("rope/rope/rope/none"),
            "schedule of 4 layers does not fit.* of 3, which leaves 'none' out",
        ),
        (
            lambda: small_model(Layers([Tape(layers=(0, 3)), "none"])),
            "goes past the 2 layers that have this encoding; of a schedule only those are counted",
        ),
        (lambda: Layers([Rope(axes=2), Rope(axes=3)]), r"as many coordinates.*got \[2, 3\]"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_cache_of_another_schedule_is_refused():
    model, other = small_model("rope/none"), small_model("none/rope")
    cache = init_cache(other, 1, 4)
    with pytest.raises(ValueError, match="another encoding"):
        jax.eval_shape(
            lambda: model.apply(random_variables(model), random_tokens(1, 2), cache=cache)
        )
