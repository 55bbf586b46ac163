"""Implementations of the update against the one that writes the equations down."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tape_jax import ModelConfig, Transformer, init_update, update_state
from tape_jax.positions import SeparateCosSin, Tape
from tape_jax.sharding import ShardingConfig
from tests.models import normal

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


@pytest.mark.parametrize("alpha", [1.0, (0.7, -0.2)])
def test_step_sizes(alpha):
    alpha = alpha if isinstance(alpha, float) else np.array(alpha)
    with jax.enable_x64(True):
        args, d_out = arguments("grouped", alpha=alpha)
        want = result_and_gradients(args, d_out, implementation="reference")
    args, d_out = arguments("grouped", "float32", alpha=alpha)
    assert_near(result_and_gradients(args, d_out, **UNROLLED), want, 1e-5)


def test_activations(x64):
    args, d_out = arguments("grouped")
    run = functools.partial(result_and_gradients, args, d_out, activation="gelu")
    assert_near(run(**UNROLLED), run(implementation="reference"), 1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(11, 8), (1, 11, 2, 8), (2, 11, 1, 8)])
def test_states_that_lack_axes(shape):
    (params, _, *rest), d_out = arguments("grouped", "float32")
    args = params, jnp.asarray(normal(*shape), "float32"), *rest
    want = result_and_gradients(args, d_out, implementation="reference")
    assert_near(result_and_gradients(args, d_out, **UNROLLED), want, 1e-5)


def test_tensor_states_are_written_out(x64):
    (params, *_, x, alpha), _ = arguments("grouped")
    e, a, d_out = (normal(2, 11, n, 4, 2, 3, seed=n) for n in (2, 4, 2))
    args = params, e, a, x, alpha
    for norm in ("none", "rms"):
        want = result_and_gradients(args, d_out, norm, implementation="reference")
        assert_near(result_and_gradients(args, d_out, norm, **UNROLLED), want, 1e-13)


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


def test_forward_mode_over_reverse_mode(x64):
    """As in ``jax.hessian``, and in products of Hessians and vectors."""
    (params, e, a, x, alpha), d_e = arguments("grouped", time=2)

    def curvature(name):
        def run(e, alpha):
            return jnp.sum(jnp.sin(update_state(params, e, a, x, alpha, implementation=name)))

        return jax.jit(lambda: jax.jvp(jax.grad(run, (0, 1)), (e, alpha), (d_e, alpha)))()

    assert_near(curvature("unrolled"), curvature("reference"), 1e-12)


@pytest.mark.slow
def test_derivatives_of_second_order(x64):
    (params, e, a, x, alpha), _ = arguments("grouped", time=2)

    def run(e, alpha, **options):
        return update_state(params, e, a, x, alpha, norm="rms", **options)

    check_grads(functools.partial(run, implementation="reference"), (e, alpha), order=2, atol=1e-3)
    check_grads(functools.partial(run, **UNROLLED), (e, alpha), order=2, modes=["rev"], atol=1e-3)


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

    @pytest.mark.parametrize(
        ("names", "words"),
        [
            ("unroled", r"unknown update implementation 'unroled'.*did you mean 'unrolled'"),
            ("pallas", r"unknown update implementation 'pallas': expected one of 'reference'"),
            (("unrolled", "triton"), r"unknown update implementation 'triton'"),
            ((), r"must be a name, several or None; got \(\)"),
            (3, r"implementation must be a string or of the type Sequence or None; got 3"),
        ],
    )
    def test_wrong_names(self, names, words):
        args, _ = arguments("grouped", "float32")
        with pytest.raises(ValueError, match=words):
            update_state(*args, implementation=names)

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


class TestModel:
    def model(self, name, position="tape", **options):
        config = ModelConfig(
            vocab_size=7, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
            position=position, update_implementation=name, **options,
        )  # fmt: skip
        return Transformer(config)

    @pytest.mark.slow
    def test_names_one(self):
        tokens = jnp.arange(6)[None] % 7
        variables = self.model(None).init(jax.random.key(0), tokens)
        variables = jax.tree.map(lambda z: z + 0.05, variables)
        want = self.model("reference").apply(variables, tokens)
        np.testing.assert_allclose(self.model(None).apply(variables, tokens), want, atol=1e-5)
        names = self.model(["reference", "unrolled"])
        assert names.config.update_implementation == ("reference", "unrolled")
        np.testing.assert_array_equal(names.apply(variables, tokens), want)

    @pytest.mark.parametrize(
        ("position", "name", "words"),
        [
            (Tape(), "pallas", r"unknown update implementation 'pallas'"),
            (Tape(), (), r"must be a name, names or None; got \(\)"),
            ("rope", "unrolled", r"position encoding 'rope' has no implementations"),
            (SeparateCosSin(), "unrolled", r"'tape_separate_cos_sin' has no implementations"),
        ],
    )
    def test_wrong_names(self, position, name, words):
        with pytest.raises(ValueError, match=words):
            self.model(name, position)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"alpha": [1.0]}, r"alpha must be a number or an array; got \[1\.0\]"),
        ({"alpha": jnp.ones(3)}, r"one for each of the 2 state heads; got shape \(3,\)"),
        ({"alpha": True}, "alpha must be a number or an array; got True"),
        ({"x": [1.0]}, "x must be an array of floats; got list"),
        ({"x": jnp.ones((11, HIDDEN), int)}, "x must be an array of floats; got int32"),
        ({"attended": [0.0]}, "attended must be an array of floats; got list"),
        ({"state": jnp.ones((11, 8), int)}, "state must be an array of floats; got int32$"),
        ({"state": None}, r"got NoneType; give tape\.rotary_state\(\.\.\.\) to the first layer"),
    ],
)
def test_types_and_shapes_of_a_wrong_call(changed, words):
    params = init_update(jax.random.key(0), HIDDEN, 4, num_kv_heads=2)
    call = {
        "state": jnp.ones((11, 2, 8)),
        "attended": jnp.ones((11, 4, 8)),
        "x": jnp.ones((11, HIDDEN)),
    }
    with pytest.raises(ValueError, match=words):
        update_state(params, **(call | changed))
