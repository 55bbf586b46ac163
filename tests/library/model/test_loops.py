"""Layers in a loop, one by one, and recomputed: the same results, from less memory."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from tape_jax import Experts, Transformer, positions
from tape_jax._src.model import block
from tape_jax.sharding import ShardingConfig
from tests.models import (
    assert_near,
    jit_quickly,
    loss_and_gradients,
    random_tokens,
    random_variables,
    run,
    small_model,
)
from tests.selection import mostly_slow


def unstacked(model, variables):
    """Variables of a scanned model for the same model with ``scan_layers=False``."""
    params = dict(variables["params"])
    for blocks in model.blocks:
        stacked = params.pop(blocks.name)
        for i, layer in enumerate(blocks.layers):
            params[f"layers_{layer}"] = jax.tree.map(lambda x, i=i: x[i], stacked)
    return {"params": params}


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "options",
    [
        {"position": positions.Tape(layers=(1, 3)), "num_layers": 5},
        {"position": positions.RandomRope(range=64, each_layer=True)},
    ],
)
def test_scanned_layers_equal_unrolled_ones(options):
    scanned, unrolled = small_model(**options), small_model(**options, scan_layers=False)
    variables, tokens = random_variables(scanned), random_tokens(2, 7)
    other = unstacked(scanned, variables)
    chex.assert_trees_all_equal_shapes(other, random_variables(unrolled))
    logits, states = run(scanned, variables, tokens, return_states=True)
    expected, expected_states = run(unrolled, other, tokens, return_states=True)
    assert_near(logits, expected)
    chex.assert_trees_all_close(states, expected_states, atol=1e-4, rtol=1e-4)


def loops(model, variables, tokens):
    """Loops in the program of a forward pass."""
    program = jax.jit(functools.partial(model.apply, variables)).lower(tokens)
    return program.as_text().count("stablehlo.while")


@pytest.mark.parametrize(
    "position", mostly_slow(["rope", positions.Tape(layers=(1, 3)), "tape+fox"], "rope")
)
def test_layers_without_a_loop_equal_those_of_the_loop(position, monkeypatch):
    model = small_model(position, num_layers=4)
    variables, tokens = random_variables(model), random_tokens(2, 8)
    unrolled = loss_and_gradients(model, variables, tokens)
    whole = loops(model, variables, tokens)
    monkeypatch.setitem(block.MOST_UNROLLED, jax.default_backend(), 3)
    assert whole < loops(model, variables, tokens)
    again = jax.jit(functools.partial(loss_and_gradients.__wrapped__, model))
    chex.assert_trees_all_close(again(variables, tokens), unrolled, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"position": "rope"}, True),
        ({"position": "tape+alibi"}, True),
        ({"position": "rope", "num_layers": 9}, False),
        ({"position": "rope", "remat": "dots"}, False),
        ({"position": "cope"}, False),
        ({"position": "stickbreaking"}, False),
        ({"position": "tape+fire"}, False),
    ],
)
def test_a_cpu_has_few_layers_without_a_loop(options, expected, monkeypatch):
    model = small_model(**options)
    assert block.unrolls(model.config) == expected
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert not block.unrolls(model.config)


@pytest.mark.slow
def test_remat_changes_neither_loss_nor_gradients():
    tape = positions.Tape(norm="rms")
    plain = small_model(tape, num_layers=2)
    variables, tokens = random_variables(plain), random_tokens(2, 7)
    expected = loss_and_gradients(plain, variables, tokens)
    for path, gradient in jax.tree_util.tree_leaves_with_path(expected[1]):
        assert gradient.any(), f"{jax.tree_util.keystr(path)} learns nothing"
    for policy in ("dots", "full"):
        model = small_model(tape, num_layers=2, remat=policy)
        actual = loss_and_gradients(model, variables, tokens)
        chex.assert_trees_all_close(actual, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [True, False])
def test_full_remat_saves_only_what_enters_the_layers_and_dots_also_products(scan_layers):
    """On a mesh that gathers parameters the same is kept: what was gathered is not."""
    tokens = random_tokens(2, 8)

    def saved(policy, sharding=None):
        model = small_model("tape", remat=policy, scan_layers=scan_layers)
        variables = random_variables(model)
        model = Transformer(model.config, sharding=sharding)

        def loss(variables):
            return model.apply(variables, tokens).sum()

        _, residuals = jax.eval_shape(lambda v: jax.vjp(loss, v), variables)
        return sum(x.size for x in jax.tree.leaves(residuals))

    full, dots, none = map(saved, ("full", "dots", "none"))
    assert full < dots < none
    mesh = ShardingConfig(fsdp=2).build(jax.devices()[:2])
    assert [saved("full", mesh), saved("dots", mesh)] == [full, dots]


@pytest.mark.slow
def test_remat_in_groups_of_layers_keeps_less_and_changes_no_gradient():
    """Seven layers that update, in groups of three, three and one; the last is by itself."""
    tokens, ids = random_tokens(2, 8), jnp.array([[1] * 5 + [2] * 3, [1] * 6 + [0] * 2])
    plain = small_model("tape", num_layers=8)
    variables = random_variables(plain)

    def kept_and_gradients(remat):
        model = small_model("tape", num_layers=8, remat=remat)

        def loss(variables):
            return jnp.square(model.apply(variables, tokens, segment_ids=ids)).mean()

        _, residuals = jax.eval_shape(lambda v: jax.vjp(loss, v), variables)
        kept = sum(x.size for x in jax.tree.leaves(residuals))
        return kept, jit_quickly(jax.value_and_grad(loss))(variables)

    kept, expected = kept_and_gradients("full")
    in_groups, actual = kept_and_gradients("groups")
    chex.assert_trees_all_close(actual, expected, atol=1e-6, rtol=1e-4)
    width = plain.config.hidden_size + plain.config.kv_heads * plain.config.dim
    assert in_groups <= kept - 3 * tokens.size * width


@pytest.mark.slow
def test_groups_of_layers_with_states_in_bfloat16():
    tokens = random_tokens(2, 8)
    shape = {"num_layers": 6, "state_dtype": "bfloat16"}
    variables = random_variables(small_model("tape", **shape))
    full, groups = (
        loss_and_gradients(small_model("tape", **shape, remat=remat), variables, tokens)
        for remat in ("full", "groups")
    )
    chex.assert_trees_all_close(groups, full, atol=2e-2, rtol=2e-2)


def test_groups_of_layers_are_stacked_ones():
    for wrong in ({"scan_layers": False}, {"experts": Experts(2)}):
        with pytest.raises(ValueError, match=r"remat='groups' needs scan_layers=True and experts"):
            small_model("rope", remat="groups", **wrong)


@pytest.mark.parametrize("position", ["tape", positions.Tape(form="tensor")])
def test_remat_keeps_a_state_with_its_heads_in_one_axis(position):
    """A TPU would fill up a last axis of one head."""
    model, tokens = small_model(position, num_layers=4, remat="full"), random_tokens(2, 8)
    variables, c = random_variables(model), model.config
    e = jax.eval_shape(lambda v: model.apply(v, tokens, return_states=True), variables)[1]
    numbers = e.position[1].size // (2 * 8)
    _, residuals = jax.eval_shape(
        lambda v: jax.vjp(lambda v: model.apply(v, tokens).sum(), v), variables
    )
    shapes = [x.shape for x in jax.tree.leaves(residuals)]
    assert (3, 2, 8, numbers) in shapes
    assert (3, 2, 8, c.hidden_size) in shapes
    assert not [shape for shape in shapes if shape[:3] == (3, 2, 8) and len(shape) > 4]


@pytest.mark.slow
def test_a_single_layer_makes_its_gradients_at_once():
    """They leave one barrier, which keeps none that nobody wants."""
    tokens = random_tokens(1, 8)

    def program(remat, frozen=()):
        model = small_model("rope", num_layers=1, remat=remat)
        params = dict(random_variables(model)["params"])
        layer = dict(params.pop("layers_0"))
        fixed = {name: layer.pop(name) for name in frozen}

        def loss(params, layer):
            return model.apply({"params": params | {"layers_0": layer | fixed}}, tokens).sum()

        lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, layer)
        return lowered, len(jax.tree.leaves(layer))

    lowered, leaves = program("full")
    barriers = [line for line in lowered.as_text().splitlines() if "optimization_barrier" in line]
    assert all(line.split("optimization_barrier")[1].count("%") > leaves for line in barriers)
    assert len(barriers) == 2
    assert "optimization_barrier" not in program("none")[0].as_text()
    fewer = program("full", frozen=("attention", "mlp"))[0]
    flops, flops_fewer = (x.compile().cost_analysis()["flops"] for x in (lowered, fewer))
    assert flops_fewer < 0.9 * flops
