"""Models on meshes with explicit axes: as on one device, split as their tokens are."""

import functools

import chex
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import NamedSharding

import tape_jax as tape
import tape_jax.linen
import tape_jax.nnx
from tape_jax import adapt, losses
from tape_jax.sharding import Sharding
from tests.library.core.test_explicit import mesh_of, put
from tests.models import normal, random_tokens, random_variables, small_model
from tests.selection import OF_EACH_SORT, mostly_slow


def placed(position, *, sharded=False, split=True, hidden_size=16):
    """A model, its variables and tokens, on one device and on a mesh."""
    mesh = mesh_of()
    sizes = {"vocab_size": 16, "hidden_size": hidden_size, "num_kv_heads": 2, "num_heads": 4}
    model = small_model(position, **sizes)
    variables, tokens = random_variables(model), random_tokens(4, 8) % 16
    places = Sharding(mesh).of(model, variables) if split else NamedSharding(mesh, P())
    there = model.clone(sharding=Sharding(mesh) if sharded else None)
    moved = jax.device_put(variables, places), *put(mesh, P("data", None), tokens)
    return mesh, (model, variables, tokens), (there, *moved)


@pytest.mark.parametrize(
    ("sharded", "split"),
    mostly_slow([(True, True), (False, True), (False, False)], (True, True)),
)
def test_training_step(sharded, split):
    def gradients(model, variables, tokens):
        def loss(variables):
            hidden = model.apply(variables, tokens, output="hidden")
            return losses.cross_entropy(hidden, model.output_kernel(variables), tokens)

        return jax.jit(jax.value_and_grad(loss))(variables)

    mesh, here, there = placed("tape", sharded=sharded, split=split)
    with jax.set_mesh(mesh):
        got = gradients(*there)
    chex.assert_trees_all_close(got, gradients(*here), atol=1e-4)
    for x, like in zip(jax.tree.leaves(got[1]), jax.tree.leaves(there[1]), strict=True):
        assert jax.typeof(x).sharding.spec == jax.typeof(like).sharding.spec


@pytest.mark.slow
def test_generation():
    @functools.partial(jax.jit, static_argnums=0)
    def talk(model, variables, tokens):
        logits, cache = tape.prefill(model, variables, tokens, capacity=20)
        more, cache = tape.extend(model, variables, cache, tokens[:, :2])
        new, cache = tape.decode(model, variables, cache, tokens[:, 0], 3)
        return tape.generate(model, variables, tokens, 4), logits, more, new, cache

    mesh, here, there = placed("tape", sharded=True)
    with jax.set_mesh(mesh):
        got = talk(*there)
    chex.assert_trees_all_close(got, talk(*here), atol=1e-4)
    assert [str(jax.typeof(x).sharding.spec[0]) for x in got[:4]] == ["data"] * 4
    assert jax.typeof(got[1]).sharding.spec[-1] == "tensor"
    assert jax.typeof(got[4].layers[0].k).sharding.spec[1] == "data"


@pytest.mark.parametrize("kind", mostly_slow([k for k in OF_EACH_SORT if k != "abacus"], "path"))
def test_every_encoding(kind):
    # Three coordinates need three frequencies.
    mesh, here, there = placed(kind, hidden_size=24)

    def run(model, variables, tokens):
        total = lambda v: jnp.mean(jnp.sin(model.apply(v, tokens)))  # noqa: E731
        return jax.jit(jax.value_and_grad(total))(variables)

    with jax.set_mesh(mesh):
        got = run(*there)
    chex.assert_trees_all_close(got, run(*here), atol=1e-5)


@pytest.mark.slow
def test_init_lies_where_the_model_says():
    mesh, (model, *_), (there, moved, tokens) = placed("tape", sharded=True)
    with jax.set_mesh(mesh):
        got = there.init(jax.random.key(0), tokens)
    chex.assert_trees_all_close(got, model.init(jax.random.key(0), jnp.zeros((4, 8), int)))
    for x, like in zip(jax.tree.leaves(got), jax.tree.leaves(moved), strict=True):
        assert jax.typeof(x).sharding.spec == jax.typeof(like).sharding.spec


@pytest.mark.mostly_slow
@pytest.mark.parametrize("heads", [None, "tensor"])
def test_modules_in_models_of_others(heads):
    mesh, x = mesh_of(), jnp.asarray(normal(4, 8, 16), "float32")
    module = tape_jax.nnx.Attention(16, 4, num_kv_heads=2, rngs=nnx.Rngs(0))
    graph, params = nnx.split(module)
    linen = tape_jax.linen.Attention(4, num_kv_heads=2)
    variables = linen.init(jax.random.key(0), x)
    run = jax.jit(lambda p, v, x: (nnx.merge(graph, p)(x)[:2], linen.apply(v, x)[:2]))
    kernels = lambda p: p.ndim == 2 and heads  # noqa: E731
    with jax.set_mesh(mesh):
        place = lambda p: put(mesh, P(None, heads if kernels(p) else None), p)[0]  # noqa: E731
        got = run(*jax.tree.map(place, (params, variables)), *put(mesh, P("data"), x))
    chex.assert_trees_all_close(got, run(params, variables, x), atol=1e-5)
    assert jax.typeof(got[0][1]).sharding.spec[:3] == ("data", None, heads)


@pytest.mark.slow
def test_adapters():
    mesh, (model, variables, tokens), (_, moved, there) = placed("rope")
    with jax.set_mesh(mesh):
        retrofitted, new = adapt.add_tape(model, moved, key=jax.random.key(1))
        got = retrofitted.apply(new, there)
    chex.assert_trees_all_close(got, model.apply(variables, tokens), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "position", "options"),
    [
        ({"data": 2, "sequence": 2}, "tape/none", {}),
        ({"data": 2, "tensor": 2}, "tape", {"shifted_groups": 4}),
    ],
)
def test_rings_and_shifted_groups(sizes, position, options):
    sizes_of_heads = {"num_heads": 4, "num_kv_heads": 2, "vocab_size": 16}
    model = small_model(position, **sizes_of_heads, **options)
    variables, tokens = random_variables(model), random_tokens(4, 16)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=jax.devices()[:4])
    sharding = Sharding(mesh)
    moved = jax.device_put(variables, sharding.of(model, variables))
    with jax.set_mesh(mesh):
        got = jax.jit(model.clone(sharding=sharding).apply)(moved, sharding.place(tokens))
    chex.assert_trees_all_close(got, model.apply(variables, tokens), atol=1e-4)


@pytest.mark.slow
def test_sampling():
    mesh, logits = mesh_of(), jnp.asarray(normal(4, 16), "float32")
    options = {"key": jax.random.key(0), "top_k": 3, "top_p": 0.9}
    with jax.set_mesh(mesh):
        got = tape.sample_logits(*put(mesh, P("data", "tensor"), logits), **options)
    chex.assert_trees_all_equal(got, tape.sample_logits(logits, **options))
    assert jax.typeof(got).sharding.spec == P("data")


@pytest.mark.parametrize("tied", mostly_slow([True, False], True))
def test_the_output_projection_by_itself(tied):
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    model = small_model("rope", tie_embeddings=tied, vocab_size=16)
    variables, hidden = random_variables(model), normal(4, 3, 16).astype("float32")
    there = model.clone(sharding=Sharding(mesh))
    with jax.set_mesh(mesh):
        moved = jax.device_put(variables, Sharding(mesh).of(model, variables))
        got = there.project(moved, *put(mesh, P("data"), hidden))
    chex.assert_trees_all_close(got, model.project(variables, hidden), atol=1e-5)


def test_tokens_split_over_the_axis_of_the_vocabulary():
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    model = small_model("rope", tie_embeddings=True, vocab_size=16)
    variables, tokens = random_variables(model), random_tokens(4, 3) % 16
    moved = jax.device_put(variables, NamedSharding(mesh, P()))
    (moved["params"]["embedding"],) = put(mesh, P("fsdp"), variables["params"]["embedding"])
    with jax.set_mesh(mesh):
        (there,) = put(mesh, (("data", "fsdp"),), tokens)
        got = model.apply(moved, there)
        (hidden,) = put(mesh, (("data", "fsdp"),), jnp.ones((4, 3, 16)))
        projected = model.project(moved, hidden)
    chex.assert_trees_all_close(got, model.apply(variables, tokens), atol=1e-4)
    specs = {jax.typeof(x).sharding.spec for x in (got, projected)}
    assert specs == {P(("data", "fsdp"), None, None)}


def test_apply_passes_on_what_it_is_given():
    """Tokens by name, and methods that take none."""
    _, (model, variables, tokens), _ = placed("rope")
    chex.assert_trees_all_equal(
        model.apply(variables, tokens=tokens), model.apply(variables, tokens)
    )
    assert model.apply(variables, method=lambda module: module.config.num_layers) == 3
