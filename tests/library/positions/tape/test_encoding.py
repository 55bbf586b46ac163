"""TAPE's pure functions against float64 oracles in numpy, written from the equations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tape_jax import ModelConfig, RopeScaling, init_update, rotary_state, rotate, tensor_state
from tape_jax import update_state as jax_update_state
from tape_jax._src.positions.tape.encoding import update_params
from tape_jax.positions import Tape
from tests.models import normal

# Compiled, because hundreds of small operations one by one are slow.
update_state = jax.jit(jax_update_state, static_argnames=("norm", "activation", "num_kv_heads"))

ACTIVATION = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "identity": lambda x: x,
}


def oracle(e, a, x, params, alpha, activation="silu"):
    """One update by loops over tokens, as the reference writes it: up to width P, gate, down.

    ``e [T, H_kv, N]``, ``a [T, H_q, N]``, ``x [T, hidden]``.
    """
    out = np.empty_like(e)
    alpha = np.broadcast_to(alpha, e.shape[1])
    for t in range(len(e)):
        state = e[t].copy()
        if "mix" in params and params["mix"].ndim == 2:
            state += alpha[:, None] * (params["mix"] @ a[t])
        elif "mix" in params:
            group = a.shape[1] // e.shape[1]
            for query, scale in enumerate(params["mix"]):
                state[query // group] += alpha[query // group] * scale * a[t, query]
        if "up" in params:
            gate = ACTIVATION[activation](x[t] @ params["wx"])
            projected = gate[:, None] * (params["up"] @ state)
            state = state + alpha[:, None] * (params["down"] @ projected)
        out[t] = state
    return out


def random_update(heads, kv_heads, hidden=5, seed=3, width=7, **options):
    specs = update_params(hidden, heads, num_kv_heads=kv_heads, width=width, **options)
    return {
        name: normal(*spec.shape, seed=seed + i) for i, (name, spec) in enumerate(specs.items())
    }


class TestUpdate:
    def test_parameters_that_it_does_not_have(self):
        params = init_update(jax.random.key(0), 8, 2)
        e, a, x = normal(3, 4), normal(1, 3, 2, 4), normal(1, 3, 8)
        for wrong in ({"params": params}, params | {"mxi": params["mix"]}):
            with pytest.raises(ValueError, match=r"unknown parameter of an update '(params|mxi)'"):
                jax_update_state(wrong, e, a, x)
        with pytest.raises(ValueError, match="params must be of the type Mapping; got array"):
            jax_update_state(e, a, x, params)

    @pytest.mark.parametrize(
        ("block", "kv_heads", "mix", "mlp"),
        [
            ((8,), 4, "head_scale", True),
            ((8,), 2, "heads", True),
            ((8,), 1, "none", True),
            ((8,), 2, "head_scale", False),
            ((4, 2, 3), 4, "heads", False),
            ((4, 2, 3), 2, "head_scale", True),
            ((4, 2, 3), 1, "heads", True),
        ],
        ids=str,
    )
    def test_equals_the_projected_form(self, x64, block, kv_heads, mix, mlp):
        params = random_update(4, kv_heads, attention_mix=mix, mlp_mix=mlp)
        e, a = normal(2, 3, kv_heads, *block), normal(2, 3, 4, *block, seed=1)
        x = normal(2, 3, 5, seed=2)
        got = update_state(params, e, a, x, 0.7, num_kv_heads=kv_heads)
        n = math.prod(block)
        want = oracle(
            e.reshape(6, kv_heads, n), a.reshape(6, 4, n), x.reshape(6, 5), params, alpha=0.7
        )
        np.testing.assert_allclose(got, want.reshape(e.shape), atol=1e-12)

    @pytest.mark.parametrize("mix", ["head_scale", "heads"])
    def test_a_step_size_for_each_head(self, x64, mix):
        params = random_update(4, 2, attention_mix=mix)
        e, a, x = normal(3, 2, 8), normal(3, 4, 8, seed=1), normal(3, 5, seed=2)
        alpha = np.array([0.7, -0.2])
        got = update_state(params, e, a, x, alpha)
        np.testing.assert_allclose(got, oracle(e, a, x, params, alpha), atol=1e-12)

    @pytest.mark.parametrize("activation", ACTIVATION)
    def test_activations(self, x64, activation):
        params, e, x = random_update(2, 2, attention_mix="none"), normal(3, 2, 4), normal(3, 5)
        got = update_state(params, e, None, x, activation=activation)
        np.testing.assert_allclose(got, oracle(e, None, x, params, 1.0, activation), atol=1e-12)

    @pytest.mark.parametrize("shape", [(3, 8), (3, 1, 8), (2, 3, 1, 8)])
    def test_a_rotary_state_may_lack_axes(self, x64, shape):
        if shape == (3, 1, 8):  # Without a batch, so that the heads axis is one.
            x, a = normal(3, 5), normal(3, 4, 8, seed=1)
        else:
            x, a = normal(2, 3, 5), normal(2, 3, 4, 8, seed=1)
        e, params = normal(*shape, seed=2), random_update(4, 4)
        full = e[:, None] if e.ndim == 2 else e
        full = np.broadcast_to(full, (*x.shape[:-1], 4, 8))
        np.testing.assert_allclose(
            update_state(params, e, a, x), update_state(params, full, a, x), atol=1e-13
        )
        assert update_state({}, e, None, x, num_kv_heads=4).shape == full.shape

    def test_a_tensor_state_may_lack_axes(self, x64):
        x, a, e = normal(2, 3, 5), normal(2, 3, 4, 4, 2, 2, seed=1), normal(3, 1, 4, 2, 2, seed=2)
        params = random_update(4, 4)
        full = np.broadcast_to(e, a.shape)
        np.testing.assert_allclose(
            update_state(params, e, a, x), update_state(params, full, a, x), atol=1e-13
        )
        assert update_state({}, e, None, x, num_kv_heads=4).shape == full.shape

    def test_without_parameters_nothing_changes(self):
        e = jnp.asarray(normal(2, 3, 4, 8), jnp.float32)
        np.testing.assert_array_equal(update_state({}, e, None, jnp.ones((2, 3, 5))), e)

    def test_the_step_size_is_differentiable(self, x64):
        params, e, x = random_update(2, 2), normal(3, 2, 4), normal(3, 5)
        a = normal(3, 2, 4, seed=1)
        check_grads(
            lambda alpha: update_state(params, e, a, x, alpha), (0.8,), order=1, modes=["rev"]
        )

    def test_the_type_of_the_state_is_kept(self):
        params = init_update(jax.random.key(0), 5, 2)
        for dtype in (jnp.bfloat16, jnp.float32):
            e = jnp.ones((3, 2, 4), dtype)
            out = update_state(
                params, e, e.astype(jnp.float32), jnp.ones((3, 5), jnp.bfloat16), norm="rms"
            )
            assert out.dtype == dtype

    def test_gates_in_the_type_of_x_and_mixes_in_the_type_of_e(self):
        params = {k: jnp.asarray(v, jnp.float32) for k, v in random_update(2, 2).items()}
        e, a, x = normal(3, 2, 4), normal(3, 2, 4, seed=1), normal(3, 5)
        got = update_state(params, *(jnp.asarray(z, jnp.float32) for z in (e, a, x)))
        np.testing.assert_allclose(got, oracle(e, a, x, random_update(2, 2), 1.0), atol=1e-4)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"x": (5,)}, r"x must have shape \[\.\.\., T, hidden\]; got \(5,\)"),
            (
                {"a": None},
                r"params has a mix, so attended, the attended state, is needed; got None",
            ),
            ({"without": "down"}, r"all of wx, up and down, or none; got \['wx', 'up'\]"),
            (
                {"e": (2, 3, 3, 8)},
                r"state of shape \(2, 3, 3, 8\) has 3 heads; the parameters expect 2",
            ),
            ({"mix": (3,)}, r"mix of shape \(3,\) fits neither \(4,\) nor \(2, 4\)"),
            ({"mix": (4, 4)}, r"mix of shape \(4, 4\)"),
            ({"a": (2, 3, 3, 8)}, r"mix of shape \(2, 4\) fits neither \(3,\) nor \(2, 3\)"),
            ({"a": (2, 3, 4, 6)}, r"attended must have shape \(2, 3, 4, 8\) .*got \(2, 3, 4, 6\)"),
            ({"a": (2, 4, 4, 8)}, r"attended must have shape"),
            ({"wx": (6, 7)}, r"expected wx \[5, P\], up \[P, 2\], down \[2, P\]; got \(6, 7\)"),
            ({"down": (2, 6)}, r"expected wx .* \(2, 6\)"),
            (
                {"e": (2, 4, 2, 8), "mix": None},
                r"state of shape \(2, 4, 2, 8\) does not fit x of shape",
            ),
            (
                {"e": (5, 3, 2, 8)},
                r"state of shape \(5, 3, 2, 8\).*expected \(3, 8\) or \(2, 3, h, 8\)",
            ),
            ({"e": (3, 2, 8)}, r"state of shape \(3, 2, 8\) does not fit"),
            ({"e": (3, 2, 8), "mix": None}, r"state of shape \(3, 2, 8\) does not fit"),
            ({"e": (3, 2, 4, 2, 2), "mix": None}, r"state of shape \(3, 2, 4, 2, 2\) does not fit"),
            ({"e": (8,)}, r"\[T, D\] or more axes; got \(8,\)"),
        ],
    )
    def test_misfits(self, change, words):
        shapes = {"e": (2, 3, 2, 8), "a": (2, 3, 4, 8), "x": (2, 3, 5)} | {
            k: v for k, v in change.items() if k in "eax"
        }
        params = random_update(4, 2)
        params.pop(change.get("without"), None)
        for name in ("mix", "wx", "down"):
            if name in change and change[name] is None:
                del params[name]
            elif name in change:
                params[name] = np.zeros(change[name])
        e, a, x = (
            None if s is None else np.zeros(s) for s in (shapes["e"], shapes["a"], shapes["x"])
        )
        with pytest.raises(ValueError, match=words):
            jax_update_state(params, e, a, x)

    def test_unknown_options(self):
        e, x = jnp.zeros((3, 2, 8)), jnp.zeros((3, 5))
        with pytest.raises(ValueError, match=r"unknown norm 'rmse'.*did you mean 'rms'"):
            jax_update_state({}, e, None, x, norm="rmse")
        with pytest.raises(ValueError, match=r"unknown activation 'swish'"):
            jax_update_state({}, e, None, x, activation="swish")


class TestInitUpdate:
    def test_the_default_type_is_that_of_jax(self):
        for wide, dtype in ((False, jnp.float32), (True, jnp.float64)):
            with jax.enable_x64(wide):
                made = init_update(jax.random.key(0), 8, 2)
                assert {x.dtype for x in made.values()} == {jnp.dtype(dtype)}

    def test_sizes_that_are_none(self):
        with pytest.raises(ValueError, match="hidden_size must be a positive integer; got 0"):
            init_update(jax.random.key(0), 0, 2)

    def test_shapes(self):
        shapes = {k: v.shape for k, v in init_update(jax.random.key(0), 12, 6).items()}
        assert shapes == {"mix": (6, 6), "wx": (12, 24), "up": (24, 6), "down": (6, 24)}
        params = init_update(
            jax.random.key(0),
            12,
            6,
            num_kv_heads=2,
            width=5,
            attention_mix="head_scale",
            dtype=jnp.bfloat16,
        )
        shapes = {k: v.shape for k, v in params.items()}
        assert shapes == {"mix": (6,), "wx": (12, 5), "up": (5, 2), "down": (2, 5)}
        assert all(v.dtype == jnp.bfloat16 for v in params.values())
        grouped = init_update(jax.random.key(0), 12, 6, num_kv_heads=2, attention_mix="none")
        assert {k: v.shape for k, v in grouped.items()} == {
            "wx": (12, 8),
            "up": (8, 2),
            "down": (2, 8),
        }
        assert set(init_update(jax.random.key(0), 12, 6, mlp_mix=False)) == {"mix"}
        assert init_update(jax.random.key(0), 12, 6, mlp_mix=False, attention_mix="none") == {}

    def test_only_what_must_be_zero_is_zero(self):
        params = init_update(jax.random.key(0), 64, 4)
        assert not params["mix"].any()
        assert not params["up"].any()
        assert float(params["wx"].std()) == pytest.approx(1 / 8, rel=0.1)
        assert float(params["down"].std()) == pytest.approx(1 / 4, rel=0.3)
        other = init_update(jax.random.key(1), 64, 4)
        assert not np.array_equal(params["wx"], other["wx"])

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"attention_mix": "head"}, r"unknown attention_mix 'head'.*did you mean 'heads'"),
            ({"num_kv_heads": 4}, r"num_heads = 6 is not a multiple of num_kv_heads = 4"),
            ({"num_heads": 0}, r"num_heads = 0"),
            ({"width": 0}, r"the update's width must be positive; got 0"),
        ],
    )
    def test_misuse(self, options, words):
        with pytest.raises(ValueError, match=words):
            init_update(jax.random.key(0), 12, **{"num_heads": 6, **options})


class TestTensorState:
    @pytest.mark.slow
    @pytest.mark.parametrize(("l", "r"), [(2, 2), (2, 3), (4, 4), (4, 7), (8, 8)])
    def test_logits_are_those_of_rope(self, x64, l, r):
        positions = np.array([[0, 1, 5, 100], [3, 3, 2, 7]])
        q, k = normal(2, 4, 3, 8), normal(2, 4, 3, 8, seed=1)
        scaling = RopeScaling("yarn", 4.0, original_length=8)

        def logits(e):
            return np.einsum("bihd,bjhd->bhij", rotate(q, e), rotate(k, e))

        tensor = tensor_state(positions, 8, l, r, base=500.0, scaling=scaling)
        assert tensor.shape == (2, 4, 1, 8 // l, l, r)
        np.testing.assert_allclose(
            logits(tensor),
            logits(rotary_state(positions, 8, 500.0, scaling=scaling)[..., None, :]),
            atol=1e-12,
        )
        np.testing.assert_array_equal(tensor[..., l:], 0)

    def test_coordinates_and_dynamic_scaling_are_those_of_the_rotary_form(self, x64):
        q = normal(6, 1, 8)
        coordinates = np.stack([np.arange(6), np.arange(6)[::-1]], -1)
        np.testing.assert_allclose(
            np.linalg.norm(rotate(q, tensor_state(coordinates, 8, axes=2)), axis=-1),
            np.linalg.norm(q, axis=-1),
        )
        for options in ({"axes": 2}, {"scaling": RopeScaling("dynamic", 2.0, original_length=3)}):
            places = coordinates if "axes" in options else np.arange(6)
            np.testing.assert_allclose(
                rotate(q, tensor_state(places, 8, **options)),
                rotate(q, rotary_state(places, 8, **options)),
                atol=1e-13,
            )

    def test_a_start_of_ones_own(self):
        start = normal(2, 3, 1)
        got = tensor_state(jnp.arange(5), 6, 3, 1, start=start)
        assert got.shape == (5, 1, 2, 3, 1)
        np.testing.assert_array_equal(got, np.broadcast_to(np.float32(start), got.shape))
        got = tensor_state(np.zeros((7, 5, 2)), 6, 3, 1, start=start, axes=2)
        assert got.shape == (7, 5, 1, 2, 3, 1)

    @pytest.mark.slow
    def test_types(self, x64):
        assert tensor_state(jnp.arange(3), 8).dtype == jnp.float64
        assert tensor_state(jnp.arange(3), 8, dtype=jnp.bfloat16).dtype == jnp.bfloat16
        assert tensor_state(jnp.arange(3), 6, 3, 1, start=np.ones(1)).dtype == jnp.float64

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ((8, 3, 3), r"l must divide the head dimension: got l=3, r=3, head_dim=8"),
            ((8, 0, 2), r"l must divide"),
            ((8, 2, 0), r"l must divide .* r=0"),
            ((9, 3, 3), r"even l and r >= l; got l=3, r=3: give start= .*1, 3, 3, 3\]"),
            ((8, 4, 2), r"even l and r >= l; got l=4, r=2"),
        ],
    )
    def test_misuse(self, arguments, words):
        with pytest.raises(ValueError, match=words):
            tensor_state(jnp.arange(5), *arguments)

    def test_misfits(self):
        with pytest.raises(
            ValueError, match=r"start of shape \(3, 3\) does not broadcast to \(5, 1"
        ):
            tensor_state(jnp.arange(5), 8, 2, 2, start=np.zeros((3, 3)))
        with pytest.raises(ValueError, match=r"axes=2 expects coordinates .* got \(5,\)"):
            tensor_state(jnp.arange(5), 8, axes=2)


CONFIG = ModelConfig(13, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2)


class TestEncoding:
    def test_which_layers_update(self):
        def updating(**options):
            return [i for i in range(4) if Tape(**options).updates(i, 4)]

        assert updating() == [0, 1, 2]
        assert updating(layers=(1, 3)) == [1, 2]
        assert updating(layers=(2, 4)) == [2]
        assert updating(layers=(0, 0)) == []
        assert updating(attention_mix="none", mlp_mix=False) == []
        assert updating(attention_mix="none") == [0, 1, 2]

    def test_parameters(self):
        specs = Tape(learn_alpha=True, alpha=0.5, width=6).layer_params(CONFIG.sizes, updates=True)
        assert {name: spec.shape for name, spec in specs.items()} == {
            "mix": (2, 4),
            "wx": (32, 6),
            "up": (6, 2),
            "down": (2, 6),
            "alpha": (),
        }
        assert float(specs["alpha"].init(jax.random.key(0), (), jnp.float32)) == 0.5
        each = Tape(learn_alpha=True, alpha_per_head=True).layer_params(CONFIG.sizes, updates=True)
        assert each["alpha"].shape == (2,)
        assert Tape().layer_params(CONFIG.sizes, updates=False) == {}
        assert set(Tape(mlp_mix=False).layer_params(CONFIG.sizes, updates=True)) == {"mix"}

    @pytest.mark.parametrize("learned", [True, False])
    def test_update_is_the_pure_function_with_its_options(self, x64, learned):
        scaling = RopeScaling("yarn", 4.0, original_length=8)
        encoding = Tape(norm="rms", alpha=0.3, activation="tanh", scaling=scaling)
        params = random_update(4, 2, hidden=32)
        e, a, x = normal(3, 2, 8), normal(3, 4, 8, seed=1), normal(3, 32)
        given = params | {"alpha": jnp.asarray(0.6)} if learned else params
        want = update_state(
            params,
            e,
            a,
            x,
            0.6 if learned else 0.3,
            norm="rms",
            activation="tanh",
            magnitude=0.1 * math.log(4) + 1,
        )
        np.testing.assert_allclose(encoding.update_state(given, e, a, x), want, atol=1e-14)

    @pytest.mark.parametrize(
        ("form", "shape", "start"),
        [
            ("rotary", (8,), (5, 8)),
            ("rotary", (8,), (1, 5, 1, 8)),
            ("rotary", (8,), (3, 5, 2, 8)),
            ("tensor", (4, 2, 3), (5, 1, 4, 2, 3)),
            ("tensor", (4, 2, 3), (3, 5, 2, 4, 2, 3)),
        ],
    )
    def test_carried_states_have_all_axes(self, form, shape, start):
        state = normal(*start)
        got = Tape(form=form, r=3).carry(jnp.asarray(state), (3, 5), CONFIG.sizes)
        assert got.shape == (3, 5, 2, *shape)
        want = state[..., None, :] if form == "rotary" and state.ndim < 4 else state
        np.testing.assert_array_equal(got, np.broadcast_to(np.float32(want), got.shape))

    @pytest.mark.parametrize(
        "shape", [(4, 8), (1, 8), (8,), (5, 1, 8), (5, 2, 8), (3, 5, 8), (1, 5, 8), (3, 5, 3, 8)]
    )
    def test_a_state_that_does_not_fit_the_tokens(self, shape):
        """It has the shape ``[T, D]`` or all axes, and no meaning is guessed."""
        with pytest.raises(ValueError, match=r"the initial state .*shape"):
            Tape().carry(jnp.zeros(shape), (3, 5), CONFIG.sizes)

    @pytest.mark.parametrize("shape", [(4, 2, 2), (1, 4, 2, 2), (1, 1, 4, 2, 2), (3, 5, 4, 2, 2)])
    def test_a_tensor_state_that_does_not_fit_the_tokens(self, shape):
        with pytest.raises(ValueError, match="state"):
            Tape(form="tensor").carry(jnp.zeros(shape), (3, 5), CONFIG.sizes)

    def test_start(self):
        places = jnp.arange(5)
        for form, want in (
            ("rotary", rotary_state(places, 8, 100.0)),
            ("tensor", tensor_state(places, 8, 4, 5, base=100.0)),
        ):
            got = Tape(form=form, base=100.0, l=4, r=5).start(places, CONFIG.sizes)
            np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"form": "matrix"}, r"unknown tape form 'matrix'"),
            ({"attention_mix": "headscale"}, r"attention_mix .*did you mean 'head_scale'"),
            ({"activation": "silo"}, r"activation .*did you mean 'silu'"),
            ({"norm": "unitt"}, r"norm .*did you mean 'unit'"),
            ({"l": 0}, r"l and r must be positive; got l=0, r=2"),
            ({"r": -1}, r"l and r must be positive; got l=2, r=-1"),
            ({"width": 0}, r"width must be positive or None; got 0"),
            ({"layers": "last"}, r"layers must be 'all' or \(start, stop\).*got 'last'"),
            ({"layers": (2, 1)}, r"0 <= start <= stop; got \(2, 1\)"),
            ({"layers": (-1, 1)}, r"got \(-1, 1\)"),
            ({"layers": (1,)}, r"got \(1,\)"),
            ({"layers": (0.0, 1.5)}, r"got \(0\.0, 1\.5\)"),
            ({"base": 1.0}, r"tape: the rotary base must exceed 1; got 1\.0"),
            ({"axes": 0}, r"axes must be a positive integer; got 0"),
            (
                {"scaling": "linear"},
                r"scaling must be of the type RopeScaling or None; got 'linear'",
            ),
        ],
    )
    def test_misuse(self, options, words):
        with pytest.raises(ValueError, match=words):
            Tape(**options)

    def test_misfits_with_the_model(self):
        Tape(form="tensor", l=4, r=4).check(CONFIG.sizes)
        with pytest.raises(ValueError, match=r"l = 3 does not divide the head dimension 8"):
            Tape(form="tensor", l=3, r=3).check(CONFIG.sizes)
        Tape(layers=(1, 4)).check(CONFIG.sizes)
        with pytest.raises(ValueError, match=r"layers = \(1, 5\) goes past the model's 4 layers"):
            Tape(layers=(1, 5)).check(CONFIG.sizes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_states(dtype):
    """As near to the exact update of the same numbers as the type of the state allows."""
    e, a = (jnp.asarray(normal(9, 4, 8, seed=seed), dtype) for seed in (0, 1))
    x, params = normal(9, 5, seed=2), random_update(4, 4)
    got = jax_update_state(jax.tree.map(jnp.float32, params), e, a, jnp.float32(x))
    assert got.dtype == dtype
    want = oracle(np.float64(e), np.float64(a), x, params, 1.0)
    error = np.linalg.norm(np.float64(got) - want) / np.linalg.norm(want)
    assert error < 2 * float(jnp.finfo(dtype).eps)
