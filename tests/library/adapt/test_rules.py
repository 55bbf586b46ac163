"""Which parameters train, and that the others cost neither gradients nor optimiser state."""

import chex
import jax
import jax.extend
import jax.numpy as jnp
import optax
import pytest
from flax.traverse_util import flatten_dict

from tape_jax import adapt
from tape_jax._src.model.block import MOST_UNROLLED
from tape_jax._src.model.config import Lora
from tape_jax.sharding import ParameterSpec
from tests.models import random_tokens, random_variables, small_model

MODEL = small_model("tape", lora=Lora(rank=2, targets=("q", "up")))
PARAMS = random_variables(MODEL)["params"]


def chosen(model, *rules):
    mask = flatten_dict(adapt.trainable_mask(model, rules), sep="/")
    assert set(mask) == set(model.parameters())
    assert {type(x) for x in mask.values()} == {bool}
    return {name for name, value in mask.items() if value}


LAYERS = ("layers_0", "layers_2")
MIXES = {f"layers_0/position_{name}" for name in ("mix", "wx", "up", "down")}
NORMS = {f"{x}/{name}_norm/scale" for x in LAYERS for name in ("attention", "mlp")}


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        (adapt.Position(), "position", MIXES),
        (adapt.Norms(), "norms", {*NORMS, "final_norm/scale"}),
        (adapt.Embeddings(), "embeddings", {"embedding", "head/kernel"}),
        (
            adapt.LoraFactors(),
            "lora",
            {
                f"{x}/{name}/lora_{f}"
                for x in LAYERS
                for name in ("attention/q", "mlp/up")
                for f in "ab"
            },
        ),
        (adapt.Everything(), "all", set(flatten_dict(PARAMS, sep="/"))),
        (
            adapt.Path("layers_*/attention/[kv]/kernel"),
            "path:layers_*/attention/[kv]/kernel",
            {f"{x}/attention/{name}/kernel" for x in LAYERS for name in "kv"},
        ),
        (adapt.Path("layers_2/*/scale"), "path:layers_2/*/scale", {x for x in NORMS if "2" in x}),
    ],
)
def test_rules(rule, text, expected):
    assert str(rule) == text
    assert adapt.parse_rule(text) == rule
    assert chosen(MODEL, rule) == chosen(MODEL, text) == expected


def test_a_rule_goes_by_what_a_parameter_is_declared_as_and_not_by_its_name():
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    own, other = ParameterSpec(shape, (None,), "position"), ParameterSpec(shape, (None,), None)
    assert adapt.Position().matches("layers_0/mlp/scale", own)
    assert not adapt.Position().matches("layers_0/position_up", other)
    assert not adapt.Norms().matches("final_norm/scale", own)
    assert not adapt.LoraFactors().matches("layers_0/attention/q/lora_a", other)
    assert not adapt.Embeddings().matches("head/kernel", other)


def test_a_rule_that_chooses_nothing_is_an_error():
    rope = small_model("rope", tie_embeddings=True)
    assert chosen(rope, "embeddings") == {"embedding"}
    for rules, words in (
        (["norms", "lora"], r"'lora' chooses none of .*layers_\*/attention/k/kernel"),
        (["norms", "path:layers_0/*"], r"'path:layers_0/\*' chooses none of"),
        ([], "at least one rule"),
        (["norm"], r"unknown rule 'norm'.*did you mean 'norms'"),
        (["path:"], r"unknown rule 'path:'"),
    ):
        with pytest.raises(ValueError, match=words):
            adapt.trainable_mask(rope, rules)


def test_partition_and_merge():
    mask = adapt.trainable_mask(MODEL, ["position", "norms"])
    trainable, frozen = adapt.partition(PARAMS, mask)
    chosen_names = {n for n, x in flatten_dict(trainable, sep="/").items() if x is not None}
    other_names = {n for n, x in flatten_dict(frozen, sep="/").items() if x is not None}
    assert chosen_names == chosen(MODEL, "position") | chosen(MODEL, "norms")
    assert other_names == set(flatten_dict(PARAMS, sep="/")) - chosen_names
    merged = adapt.merge(trainable, frozen)
    chex.assert_trees_all_equal_structs(merged, PARAMS)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (merged, PARAMS)), strict=True))


def loss(model, params, tokens):
    logits = model.apply({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def step(model, optimizer):
    """A training step ``(trainable, state, frozen, tokens)``, which gives the first two anew."""

    def update(trainable, state, frozen, tokens):
        def of_trainable(trainable):
            return loss(model, adapt.merge(trainable, frozen), tokens)

        updates, state = optimizer.update(jax.grad(of_trainable)(trainable), state, trainable)
        return optax.apply_updates(trainable, updates), state

    return update


def product_shapes(jaxpr):
    """Sizes, sorted, of the results of all matrix products, those in scans included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield tuple(sorted(equation.outvars[0].aval.shape))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from product_shapes(inner)


def size(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.slow
def test_frozen_parameters_have_neither_gradients_nor_optimiser_state():
    # So many layers that they run as a loop: one by one, each has a copy of its parameters.
    layers = MOST_UNROLLED["cpu"] + 1
    model = small_model("tape", hidden_size=64, intermediate_size=124, num_layers=layers)
    params, tokens = random_variables(model)["params"], jnp.zeros((1, 4), jnp.int32)
    optimizer = optax.adam(1e-2)
    function, shapes = step(model, optimizer), {}
    for rule in ("all", "position"):
        trainable, frozen = adapt.partition(params, adapt.trainable_mask(model, [rule]))
        args = (trainable, optimizer.init(trainable), frozen, tokens)
        shapes[rule] = set(product_shapes(jax.make_jaxpr(function)(*args).jaxpr))
    # Gradients of the kernels of one layer, and of the output projection.
    kernels = {(64, 64), (64, 124), (13, 64)}
    assert kernels <= shapes["all"]
    assert not kernels & shapes["position"]

    trained = chosen(model, "position")
    assert len(jax.tree.leaves(args[1])) == 1 + 2 * len(trained)
    # A count of steps and two moments for each trained parameter; a word of slack for each array.
    memory = jax.jit(function).lower(*args).compile().memory_analysis()
    optimised, slack = 4 + 2 * size(trainable), 8 * len(jax.tree.leaves(args))
    arguments = size(params) + optimised + tokens.nbytes
    assert 0 <= memory.argument_size_in_bytes - arguments <= slack
    assert 0 <= memory.output_size_in_bytes - size(trainable) - optimised <= 2 * slack
    # All that the step needs beside its arguments is smaller than gradients of the frozen ones.
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < size(frozen) / 2


@pytest.mark.slow
def test_a_step_follows_the_gradient_in_the_trainable_parameters_alone():
    model = small_model("tape", num_layers=2)
    params = random_variables(model)["params"]
    mask = adapt.trainable_mask(model, ["position", "norms"])
    trainable, frozen = adapt.partition(params, mask)
    optimizer = optax.sgd(0.5)
    tokens = random_tokens(2, 8)
    new, _ = jax.jit(step(model, optimizer))(trainable, optimizer.init(trainable), frozen, tokens)
    gradient = jax.jit(jax.grad(lambda p: loss(model, p, tokens)))(params)
    expected = jax.tree.map(lambda x, g, trains: x - 0.5 * g * trains, params, gradient, mask)
    chex.assert_trees_all_close(adapt.merge(new, frozen), expected, atol=1e-6)
    for x, y, trains in zip(*map(jax.tree.leaves, (expected, params, mask)), strict=True):
        assert bool((x != y).any()) == trains


def test_the_table_of_trainable_parameters():
    model = small_model("tape", num_layers=3)
    params = random_variables(model)["params"]
    whole = sum(x.size for x in jax.tree.leaves(params))
    lines = adapt.describe_trainable(model, ["position", "embeddings"]).splitlines()
    assert lines[0].split() == ["parameter", "number", "share", "of", f"{whole:,}"]
    rows = {line.split()[0]: int(line.split()[1]) for line in lines[1:-1]}
    assert rows["embedding"] == rows["head/kernel"] == 13 * 16
    assert rows["layers/position_wx"] == 2 * 16 * 8
    trained = 2 * 13 * 16 + 2 * (2 * 2 + 16 * 8 + 2 * 8 * 2)
    assert lines[-1].split() == ["in", "all", f"{trained:,}", f"{trained / whole:.4%}"]
