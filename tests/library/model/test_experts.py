"""A mixture of experts against a loop over tokens, and inside of the decoder."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tape_jax import Experts, Transformer
from tape_jax._src.model.experts import mixture, route, router_logits, router_losses
from tape_jax._src.model.layout import restack
from tape_jax.losses import added_by_routers
from tape_jax.sharding import ShardingConfig
from tests.models import FLOAT64, random_tokens, random_variables, small_model

WIDTH, INNER, COUNT = 6, 10, 5
EXPERTS = Experts(COUNT, balance=0.5, z=0.25)


def arrays(tokens=(2, 7), dtype=np.float64, seed=0):
    """Tokens, the router's kernel and the experts' kernels."""
    rng = np.random.default_rng(seed)
    shapes = {"gate": (COUNT, WIDTH, INNER), "up": (COUNT, WIDTH, INNER)}
    shapes["down"] = (COUNT, INNER, WIDTH)
    kernels = {name: jnp.asarray(rng.normal(size=s), dtype) for name, s in shapes.items()}
    x, router = rng.normal(size=(*tokens, WIDTH)), rng.normal(size=(WIDTH, COUNT))
    return jnp.asarray(x, dtype), jnp.asarray(router, dtype), kernels


def expert(x, kernels, i):
    """What expert ``i`` says of one token, in numpy."""
    gate, up, down = (np.asarray(kernels[name][i], np.float64) for name in ("gate", "up", "down"))
    wide = x @ gate
    return (wide / (1 + np.exp(-wide)) * (x @ up)) @ down


def probabilities(x, router):
    logits = np.exp(np.asarray(x, np.float64) @ np.asarray(router, np.float64))
    return logits / logits.sum(-1, keepdims=True)


def by_loop(x, router, kernels, experts):
    """The specification: token by token, expert by expert."""
    out = np.zeros(x.shape)
    shares = probabilities(x, router)
    for token in np.ndindex(x.shape[:-1]):
        best = sorted(range(COUNT), key=lambda i, p=shares[token]: -p[i])[: experts.per_token]
        total = sum(shares[token][i] for i in best) if experts.normalize else 1.0
        for i in best:
            out[token] += shares[token][i] / total * expert(np.asarray(x[token]), kernels, i)
    return out


@functools.partial(jax.jit, static_argnums=3)
def run(x, router, kernels, experts):
    return mixture(x, router_logits(x, router), kernels, experts)[0]


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "options",
    [
        {"per_token": COUNT},
        {},
        {"normalize": False},
        {"per_token": 1, "normalize": False},
    ],
    ids=str,
)
@pytest.mark.usefixtures("x64")
def test_equals_a_loop_over_tokens(options):
    experts = Experts(COUNT, **options)
    for tokens in ((2, 7), (1,)):
        x, router, kernels = arrays(tokens)
        expected = by_loop(x, router, kernels, experts)
        np.testing.assert_allclose(run(x, router, kernels, experts), expected, atol=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_gradients():
    """Of tokens, router and experts; those of experts that nobody takes are zero."""
    experts = Experts(COUNT)
    args = arrays((9,))
    check_grads(lambda *args: run(*args, experts), args, order=1, modes=["rev"], atol=1e-6)
    x, router, kernels = args
    one = jax.grad(lambda k: run(x[:1], router, k, experts).sum())(kernels)
    (taken,), _ = route(router_logits(x[:1], router), experts)
    used = {name: np.flatnonzero(np.abs(g).sum((1, 2))) for name, g in one.items()}
    chex.assert_trees_all_equal(used, dict.fromkeys(used, np.sort(taken)))


def test_no_token_depends_on_others():
    """Whatever experts the others crowd into."""
    x, router, kernels = arrays((8,), np.float32)
    experts = Experts(COUNT)
    whole = run(x, router, kernels, experts)
    crowded = run(x.at[1:].set(x[0]), router, kernels, experts)
    np.testing.assert_allclose(crowded, np.broadcast_to(whole[0], whole.shape), atol=2e-5)
    changed = run(x.at[3].add(5.0), router, kernels, experts)
    np.testing.assert_allclose(np.delete(changed, 3, 0), np.delete(whole, 3, 0), atol=2e-5)
    assert np.abs(changed[3] - whole[3]).max() > 0.1


def test_router_is_computed_in_float32():
    """Logits that bfloat16 cannot tell apart are told apart, and the output keeps its type."""
    x, router, kernels = arrays((4,), np.float32)
    x = x.astype(jnp.bfloat16)
    logits = router_logits(x, router)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, np.asarray(x, np.float32) @ np.asarray(router), atol=1e-5)
    kernels = jax.tree.map(lambda k: k.astype(jnp.bfloat16), kernels)
    out, chosen = mixture(x, logits, kernels, Experts(COUNT))
    assert (out.dtype, chosen.dtype) == (jnp.bfloat16, jnp.int32)
    expected = by_loop(x.astype(jnp.float32), router, kernels, Experts(COUNT))
    np.testing.assert_allclose(out, expected, atol=2e-2 * np.abs(expected).max())


def test_router_losses():
    """By hand: three tokens, of which the last is padding, and four experts."""
    logits = jnp.log(jnp.array([[4.0, 2, 1, 1], [2, 4, 1, 1], [1, 1, 1, 5]]))
    chosen = jnp.array([[0, 1], [1, 0], [3, 0]])
    losses = jax.jit(router_losses)
    found = losses(logits, chosen, jnp.array([1, 1, 0]))
    assert found["balance"] == pytest.approx(4 * (1 / 2 * 3 / 8 + 1 / 2 * 3 / 8))
    assert found["z"] == pytest.approx(np.log(8) ** 2)
    found = losses(logits, chosen)
    assert found["balance"] == pytest.approx(4 * (3 * 7 + 2 * 7 + 7) / 8 / 3 / 6, rel=1e-5)
    even = losses(jnp.zeros((4, 4)), jnp.arange(4)[:, None])
    assert even["balance"] == pytest.approx(1)
    crowded = losses(jnp.zeros((6, 4)).at[:, 2].set(50.0), jnp.full((6, 1), 2))
    assert crowded["balance"] == pytest.approx(4)
    assert not any(losses(logits, chosen, jnp.zeros(3, jnp.int32)).values())


def sown_by(model, variables, tokens, **options):
    return model.apply(variables, tokens, mutable=["losses"], **options)


@pytest.mark.slow
def test_in_the_decoder(x64):
    """Scanned or not, recomputed or not: the same logits, gradients and losses of routers."""
    small = {"num_layers": 2, **FLOAT64}
    model = small_model("rope", experts=EXPERTS, **small)
    tokens = random_tokens(2, 6)
    variables = random_variables(model)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
    assert set(shapes) == {"params"}
    mlp = jax.tree.map(jnp.shape, variables["params"]["layers_0"]["mlp"])
    kernels = {"router": (2, 16, 5), "gate": (2, 5, 16, 24), "down": (2, 5, 24, 16)}
    chex.assert_trees_all_equal(
        mlp, {name: {"kernel": s} for name, s in (kernels | {"up": kernels["gate"]}).items()}
    )

    def results(model, variables):
        def loss(variables):
            logits, sown = sown_by(model, variables, tokens)
            added, means = added_by_routers(sown, EXPERTS)
            return jnp.square(logits).mean() + added, (logits, added, means)

        return jax.jit(jax.grad(loss, has_aux=True))(variables)

    gradients, (logits, added, means) = results(model, variables)
    # Without being asked for their losses, routers are silent.
    chex.assert_trees_all_close(jax.jit(model.apply)(variables, tokens), logits, rtol=1e-12)
    assert set(means) == {"balance_loss", "z_loss"}
    expected = 2 * (0.5 * means["balance_loss"] + 0.25 * means["z_loss"])
    np.testing.assert_allclose(added, expected, rtol=1e-12)

    each = Transformer(dataclasses.replace(model.config, scan_layers=False, remat="dots"))
    found, values = results(each, {"params": restack(variables["params"], model, each)})
    chex.assert_trees_all_close(values, (logits, added, means), rtol=1e-10)
    expected = restack(gradients["params"], model, each)
    chex.assert_trees_all_close(found["params"], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("remat", "products"), [("none", 9), ("dots", 9), ("full", 12)])
def test_products_are_kept_where_matrix_products_are(remat, products):
    """Three products forward, twice as many backward; if all is recomputed, three more."""
    model = small_model("rope", experts=EXPERTS, num_layers=1, remat=remat)
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    step = jax.make_jaxpr(jax.grad(lambda v, x: model.apply(v, x).sum()))
    assert str(step(variables, tokens)).count("ragged_dot_general[") == products


def test_padding_does_not_count_for_the_balance():
    model = small_model("rope", experts=EXPERTS, num_layers=1)
    variables = random_variables(model)
    tokens = jnp.array([[1, 2, 3, 4, 5]])

    @jax.jit
    def losses(tokens, ids):
        return added_by_routers(sown_by(model, variables, tokens, segment_ids=ids)[1], EXPERTS)[1]

    padded = losses(tokens, jnp.array([[1, 1, 1, 0, 0]]))
    other = losses(tokens.at[:, 3:].set(7), jnp.array([[1, 1, 1, 0, 0]]))
    chex.assert_trees_all_close(other, padded, rtol=1e-6)
    documents = losses(tokens, jnp.array([[1, 1, 1, 2, 2]]))
    assert all(abs(documents[name] - padded[name]) > 1e-6 for name in padded)


@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tensor": 2}, {"tensor": 4, "sequence": 2}], ids=str)
def test_a_lenient_mesh_leaves_whole_what_it_does_not_divide(sizes):
    """The width of tokens, or that of experts and the length."""
    x, router, kernels = arrays((2, 7), np.float32)
    sharding = dataclasses.replace(ShardingConfig(**sizes).build(), strict=False)

    def both(sharding):
        def total(x, router, kernels):
            logits = router_logits(x, router, sharding)
            return jnp.sin(mixture(x, logits, kernels, EXPERTS, sharding)[0]).sum()

        return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(x, router, kernels)

    chex.assert_trees_all_close(both(sharding), both(None), rtol=1e-4, atol=1e-4)


def test_rules_that_would_split_whole_experts():
    sharding = ShardingConfig(tensor=2, rules=(("experts", "tensor"), ("mlp", None))).build(2)
    x, router, kernels = arrays((2, 4), np.float32)
    with pytest.raises(ValueError, match=r"rule for 'experts' names tensor.*let 'mlp' be split"):
        mixture(x, router_logits(x, router), kernels, Experts(COUNT), sharding)
