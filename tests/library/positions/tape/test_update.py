"""Implementations of the update against the one that writes the equations down."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, Transformer, init_update, update_state
from tape_jax.positions import SeparateCosSin
from tape_jax.sharding import ShardingConfig
from tests.models import normal
from tests.selection import mostly_slow

HIDDEN = 5
UNROLLED = {"implementation": "unrolled"}
# Query heads, state heads, what is mixed how, the norm, numbers of a head.
CASES = {
    "heads alike": (3, 3, "head_scale", "none", 8),
    "grouped": (4, 2, "head_scale", "rms", 8),
    "one state head": (3, 1, "head_scale", "none", 8),
    "matrix": (4, 2, "heads", "unit", 6),
    "nothing attended": (3, 3, "none", "none", 8),
}


def arguments(case, dtype="float64", *, batch=(2,), time=11, alpha=0.7):
    """Parameters, state, attended state, x, step size and the gradient of the result."""
    heads, kv_heads, mix, _, dim = CASES[case]
    shapes = jax.eval_shape(
        lambda: init_update(
            jax.random.key(0), HIDDEN, heads, num_kv_heads=kv_heads, width=7, attention_mix=mix
        )
    )
    params = {n: normal(*x.shape, seed=i) / 2 for i, (n, x) in enumerate(shapes.items())}
    e, d_out = (normal(*batch, time, kv_heads, dim, seed=seed) for seed in (5, 6))
    a = None if mix == "none" else normal(*batch, time, heads, dim, seed=7)
    x = normal(*batch, time, HIDDEN, seed=8)
    wide = "float64" if dtype == "float64" else "float32"
    cast = functools.partial(jax.tree.map, lambda z: jnp.asarray(z, wide))
    narrow = functools.partial(jax.tree.map, lambda z: jnp.asarray(z, dtype))
    return (cast(params), narrow(e), narrow(a), cast(x), cast(alpha)), narrow(d_out)


def result_and_gradients(args, d_out, norm="none", **options):
    def run(*args):
        return update_state(*args, norm=norm, magnitude=1.5, **options)

    @jax.jit
    def both(d_out, *args):
        out, pull = jax.vjp(run, *args)
        return out, pull(d_out)

    return both(d_out, *args)


def assert_near(got, want, tolerance):
    def near(path, got, want):
        got, want = (np.asarray(z, np.float64) for z in (got, want))
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < tolerance, (jax.tree_util.keystr(path), error)

    jax.tree_util.tree_map_with_path(near, got, want)


@functools.cache
def wanted(case, alpha=0.7, **shape):
    with jax.enable_x64(True):
        args, d_out = arguments(case, alpha=alpha, **shape)
        found = result_and_gradients(args, d_out, CASES[case][3], implementation="reference")
        return jax.tree.map(np.asarray, found)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("case", CASES)
def test_written_out_products(x64, case):
    args, d_out = arguments(case)
    assert_near(result_and_gradients(args, d_out, CASES[case][3], **UNROLLED), wanted(case), 1e-13)


def test_a_step_size_for_each_head():
    alpha = np.array([0.7, -0.2])
    with jax.enable_x64(True):
        args, d_out = arguments("grouped", alpha=alpha)
        want = result_and_gradients(args, d_out, implementation="reference")
    args, d_out = arguments("grouped", "float32", alpha=alpha)
    assert_near(result_and_gradients(args, d_out, **UNROLLED), want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(11, 8), (2, 11, 1, 8)])
def test_states_that_lack_axes(shape):
    (params, _, *rest), d_out = arguments("grouped", "float32")
    args = params, jnp.asarray(normal(*shape), "float32"), *rest
    want = result_and_gradients(args, d_out, implementation="reference")
    assert_near(result_and_gradients(args, d_out, **UNROLLED), want, 1e-5)


def test_one_row_of_states_on_a_mesh():
    """A state of one row, moved by outputs of many, with split heads."""
    (params, e, _, x, alpha), _ = arguments("grouped", "float32", batch=(4,))
    params, e = {n: z for n, z in params.items() if n != "mix"}, e[:1]
    sharding = ShardingConfig(data=2, tensor=2).build(jax.devices()[:4])

    def total(params, e, x, sharding=None):
        return jnp.sin(update_state(params, e, None, x, alpha, sharding=sharding)).sum()

    run = jax.jit(jax.value_and_grad(total, (0, 1, 2)), static_argnames="sharding")
    got, want = run(params, e, x, sharding=sharding), run(params, e, x)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-4)


def test_tensor_states_are_written_out(x64):
    (params, *_, x, alpha), _ = arguments("grouped")
    e, a, d_out = (normal(2, 11, n, 4, 2, 3, seed=n) for n in (2, 4, 2))
    args = params, e, a, x, alpha
    for norm, activation in (("none", "gelu"), ("rms", "silu")):
        run = functools.partial(result_and_gradients, args, d_out, norm, activation=activation)
        assert_near(run(**UNROLLED), run(implementation="reference"), 1e-13)


@pytest.mark.slow
def test_sums_of_narrow_states_are_wide():
    """Gradients of parameters, which add up all tokens, are those of the narrow numbers."""
    args, d_out = arguments("heads alike", "bfloat16", batch=(8,), time=64)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda z: jnp.asarray(z, "float64"), (args, d_out))
        _, (want, *_) = result_and_gradients(*exact, implementation="reference")
    _, (got, *_) = result_and_gradients(args, d_out, **UNROLLED)
    assert_near(got["mix"], want["mix"], 1e-2)


@pytest.mark.slow
def test_kept_for_the_backward_pass():
    """The arguments, and numbers of the gate: neither the sum of states nor matrices."""
    heads, dim = 8, 64
    params = init_update(jax.random.key(0), HIDDEN, heads)
    e, x = jnp.ones((2, 16, heads, dim)), jnp.ones((2, 16, HIDDEN))
    for name in ("reference", "unrolled"):
        run = functools.partial(update_state, implementation=name)
        _, pull = jax.vjp(run, params, e, 2 * e, x)
        kept = [z.shape for z in jax.tree.leaves(pull) if z.size >= e.size]
        assert len(kept) == 2
        assert not any(z.shape == (2, 16, heads, heads) for z in jax.tree.leaves(pull))


@pytest.mark.parametrize("mode", mostly_slow(["forward", "reverse"], "forward"))
def test_derivatives_of_second_order(x64, mode):
    """As in ``jax.hessian``, and in products of Hessians and vectors."""
    (params, e, a, x, alpha), d_e = arguments("grouped", time=2)

    def curvature(name):
        def run(e, alpha):
            return jnp.sum(jnp.sin(update_state(params, e, a, x, alpha, implementation=name)))

        slopes = jax.grad(run, (0, 1))
        if mode == "forward":
            return jax.jit(lambda: jax.jvp(slopes, (e, alpha), (d_e, alpha)))()
        return jax.jit(jax.grad(lambda e, alpha: jnp.vdot(d_e, slopes(e, alpha)[0]), (0, 1)))(
            e, alpha
        )

    assert_near(curvature("unrolled"), curvature("reference"), 1e-12)


class TestChoice:
    def test_of_itself(self, monkeypatch):
        (params, e, a, x, alpha), _ = arguments("grouped", "float32")

        def written(**options):
            run = functools.partial(update_state, **options)
            return "custom_vjp" in str(jax.make_jaxpr(run)(params, e, a, x, alpha))

        assert written()
        assert not written(implementation="reference")
        split = ShardingConfig(tensor=2).build(jax.devices()[:2])
        assert not written(sharding=split)
        # A GPU that the kernel does not run on, and a TPU.
        for platform in ("gpu", "tpu"):
            monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
            assert not written()

    def test_on_a_tpu(self, monkeypatch):
        """Without a matrix unit, but where heads are split: a product leaves a better layout."""
        args, d_out = arguments("matrix", "float32")
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
        whole, split = (
            ShardingConfig(**sizes).build(jax.devices()[:2])
            for sizes in ({"fsdp": 2}, {"tensor": 2})
        )

        def products(**options):
            def run(*args):
                return update_state(*args, **options)

            return str(jax.make_jaxpr(run)(*args)).count("dot_general")

        most = products(implementation="reference")
        assert products() == products(sharding=whole) == most - 2
        assert products(sharding=split) == most
        whole_states = ShardingConfig(tensor=2, rules=(("kv_heads", None),))
        assert products(sharding=whole_states.build(jax.devices()[:2])) == most - 2
        with pytest.raises(NotImplementedError, match="'sums': state heads are split over device"):
            update_state(*args, sharding=split, implementation="sums")
        found = result_and_gradients(args, d_out, implementation="sums")
        chex.assert_trees_all_close(
            found, result_and_gradients(args, d_out, implementation="reference"), rtol=1e-4
        )
        args = (init_update(jax.random.key(0), HIDDEN, 4, num_kv_heads=2, degree=3), *args[1:])
        # Mix, origin, target, and the mix of the MLP.
        assert products() == products(implementation="reference") - 4

    def test_what_is_not_written_out(self):
        (params, e, a, x, _), _ = arguments("grouped", "float32")
        for words, given in {
            "no product over heads": ({"mix": params["mix"]}, e, a, x),
            "a state that all heads share": (
                {n: z for n, z in params.items() if n != "mix"}, e[:, :, :1], None, x,
            ),
        }.items():  # fmt: skip
            with pytest.raises(NotImplementedError, match=f"'unrolled': .*{words}"):
                update_state(*given, **UNROLLED)
            np.testing.assert_array_equal(
                update_state(*given), update_state(*given, implementation="reference")
            )


def model(name, position="tape"):
    config = ModelConfig(
        vocab_size=7, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
        position=position, update_implementation=name,
    )  # fmt: skip
    return Transformer(config)


@pytest.mark.slow
def test_a_model_names_one():
    tokens = jnp.arange(6)[None] % 7
    variables = jax.tree.map(lambda z: z + 0.05, model(None).init(jax.random.key(0), tokens))
    names = model(["reference", "unrolled"])
    assert names.config.update_implementation == ("reference", "unrolled")
    want, found, of_names = (
        jax.jit(one.apply)(variables, tokens) for one in (model("reference"), model(None), names)
    )
    np.testing.assert_allclose(found, want, atol=1e-5)
    np.testing.assert_array_equal(of_names, want)


def called(implementation=None, **changed):
    def call():
        params = init_update(jax.random.key(0), HIDDEN, 4, num_kv_heads=2)
        given = {
            "state": jnp.ones((11, 2, 8)),
            "attended": jnp.ones((11, 4, 8)),
            "x": jnp.ones((11, HIDDEN)),
        }
        update_state(params, **(given | changed), implementation=implementation)

    return call


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (called("unroled"), "unknown update implementation 'unroled'.*did you mean 'unrolled'"),
        (called(("unrolled", "triton")), "unknown update implementation 'triton'"),
        (called(()), r"must be a name, several or None; got \(\)"),
        (called(alpha=[1.0]), r"alpha must be a number or an array; got \[1\.0\]"),
        (called(alpha=jnp.ones(3)), r"one for each of the 2 state heads; got shape \(3,\)"),
        (called(alpha=True), "alpha must be a number or an array; got True"),
        (called(x=jnp.ones((11, HIDDEN), int)), "x must be an array of floats; got int32"),
        (called(attended=[0.0]), "attended must be an array of floats; got list"),
        (called(state=jnp.ones((11, 8), int)), "state must be an array of floats; got int32$"),
        (called(state=None), r"got NoneType; give tape\.rotary_state\(\.\.\.\) to the first layer"),
        (lambda: model("pallas"), "unknown update implementation 'pallas'"),
        (lambda: model(()), r"must be a name, names or None; got \(\)"),
        (lambda: model("unrolled", "rope"), "position encoding 'rope' has no implementations"),
        (lambda: model("unrolled", SeparateCosSin()), "'tape_separate_cos_sin' has no implem"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()
