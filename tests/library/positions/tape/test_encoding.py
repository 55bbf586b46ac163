"""TAPE's pure functions against float64 oracles in numpy, written from the equations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, RopeScaling, init_update, rotary_state, rotate, tensor_state
from tape_jax import update_state as jax_update_state
from tape_jax._src.positions.tape.encoding import update_params
from tape_jax.positions import Tape
from tests.models import normal
from tests.selection import mostly_slow

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
    @pytest.mark.parametrize(
        ("block", "kv_heads", "mix", "mlp", "alpha"),
        [
            ((8,), 4, "heads", True, (0.7, -0.2, 1.0, 0.3)),
            ((8,), 2, "head_scale", True, (0.7, -0.2)),
            ((8,), 1, "none", True, 0.7),
            ((4, 2, 3), 2, "heads", False, 0.7),
            ((4, 2, 3), 2, "head_scale", True, 0.7),
        ],
        ids=str,
    )
    def test_equals_the_projected_form(self, x64, block, kv_heads, mix, mlp, alpha):
        params = random_update(4, kv_heads, attention_mix=mix, mlp_mix=mlp)
        e, a = normal(2, 3, kv_heads, *block), normal(2, 3, 4, *block, seed=1)
        x, alpha = normal(2, 3, 5, seed=2), np.array(alpha)
        got = update_state(params, e, a, x, alpha, num_kv_heads=kv_heads)
        n = math.prod(block)
        want = oracle(e.reshape(6, kv_heads, n), a.reshape(6, 4, n), x.reshape(6, 5), params, alpha)
        np.testing.assert_allclose(got, want.reshape(e.shape), atol=1e-12)

    def test_activations(self, x64):
        params, e, x = random_update(2, 2, attention_mix="none"), normal(3, 2, 4), normal(3, 5)
        for name in ACTIVATION:
            got = update_state(params, e, None, x, activation=name)
            np.testing.assert_allclose(got, oracle(e, None, x, params, 1.0, name), atol=1e-12)

    @pytest.mark.parametrize("shape", [(3, 8), (3, 1, 8), (2, 3, 1, 8), (3, 1, 4, 2, 2)], ids=str)
    def test_a_state_may_lack_axes(self, x64, shape):
        # Without a batch the second axis of three is the heads.
        batch, block = () if shape == (3, 1, 8) else (2,), (8,) if shape[-1] == 8 else (4, 2, 2)
        x, a = normal(*batch, 3, 5), normal(*batch, 3, 4, *block, seed=1)
        e, params = normal(*shape, seed=2), random_update(4, 4)
        full = np.broadcast_to(e[:, None] if e.ndim == 2 else e, a.shape)
        got, want = (update_state(params, z, a, x) for z in (e, full))
        np.testing.assert_allclose(got, want, atol=1e-13)
        assert jax_update_state({}, e, None, x, num_kv_heads=4).shape == full.shape

    def test_narrow_states(self):
        """As near to the exact update of the same numbers as the type of the state allows."""
        e, a = (jnp.asarray(normal(9, 4, 8, seed=seed), jnp.bfloat16) for seed in (0, 1))
        x, params = normal(9, 5, seed=2), random_update(4, 4)
        got = update_state(jax.tree.map(jnp.float32, params), e, a, jnp.float32(x))
        assert got.dtype == jnp.bfloat16
        want = oracle(np.float64(e), np.float64(a), x, params, 1.0)
        error = np.linalg.norm(np.float64(got) - want) / np.linalg.norm(want)
        assert error < 2 * float(jnp.finfo(jnp.bfloat16).eps)

    def test_the_type_of_the_state_is_kept(self):
        params, e = init_update(jax.random.key(0), 5, 2), jnp.ones((3, 2, 4), jnp.bfloat16)
        a, x = e.astype(jnp.float32), jnp.ones((3, 5), jnp.bfloat16)
        assert update_state(params, e, a, x, norm="rms").dtype == jnp.bfloat16

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"x": (5,)}, r"x must have shape \[\.\.\., T, hidden\]; got \(5,\)"),
            ({"a": None}, "params has a mix, so attended, the attended state, is needed; got None"),
            ({"down": None}, r"all of wx, up and down, or none; got \['wx', 'up'\]"),
            ({"mxi": (4,)}, r"unknown parameter of an update 'mxi'"),
            ({"e": (2, 3, 3, 8)}, r"state of shape .* has 3 heads; the parameters expect 2"),
            ({"mix": (3,)}, r"mix of shape \(3,\) fits neither \(4,\) nor \(2, 4\)"),
            ({"a": (2, 3, 4, 6)}, r"attended must have shape \(2, 3, 4, 8\) .*got \(2, 3, 4, 6\)"),
            ({"wx": (6, 7)}, r"expected wx \[5, P\], up \[P, 2\], down \[2, P\]; got \(6, 7\)"),
            ({"e": (2, 4, 2, 8), "mix": None}, r"state of shape .* does not fit x of shape"),
            ({"e": (5, 3, 2, 8)}, r"state of .*expected \(3, 8\) or \(2, 3, h, 8\)"),
            ({"e": (3, 2, 8)}, r"state of shape \(3, 2, 8\) does not fit"),
            ({"e": (3, 2, 4, 2, 2), "mix": None}, r"state of shape .* does not fit"),
            ({"e": (8,)}, r"\[T, D\] or more axes; got \(8,\)"),
            ({"mix": ()}, r"params\['mix'\] must be an array with axes, as init_update makes it"),
        ],
    )
    def test_misfits(self, change, words):
        shapes = {name: x.shape for name, x in random_update(4, 2).items()}
        shapes |= {"e": (2, 3, 2, 8), "a": (2, 3, 4, 8), "x": (2, 3, 5)} | change
        made = {name: None if s is None else np.zeros(s) for name, s in shapes.items()}
        e, a, x = (made.pop(name) for name in "eax")
        params = {name: z for name, z in made.items() if z is not None}
        with pytest.raises(ValueError, match=words):
            jax_update_state(params, e, a, x)

    @pytest.mark.parametrize("heads", [0, -2])
    def test_heads_are_a_positive_number(self, heads):
        words = f"num_kv_heads must be a positive integer or None; got {heads}"
        with pytest.raises(ValueError, match=words):
            init_update(jax.random.key(0), 8, 4, num_kv_heads=heads)
        with pytest.raises(ValueError, match=words):
            jax_update_state({}, np.zeros((3, 8)), None, np.zeros((3, 5)), num_kv_heads=heads)


class TestInitUpdate:
    def test_shapes_and_types(self):
        def made(**options):
            found = jax.eval_shape(lambda: init_update(jax.random.key(0), 12, 6, **options))
            assert {x.dtype for x in found.values()} <= {
                jnp.dtype(options.get("dtype", jnp.zeros(()).dtype))
            }
            return {name: x.shape for name, x in found.items()}

        whole = {"mix": (6, 6), "wx": (12, 24), "up": (24, 6), "down": (6, 24)}
        for wide in (False, True):
            with jax.enable_x64(wide):
                assert made() == whole
        narrow = made(num_kv_heads=2, width=5, attention_mix="head_scale", dtype=jnp.bfloat16)
        assert narrow == {"mix": (6,), "wx": (12, 5), "up": (5, 2), "down": (2, 5)}
        grouped = made(num_kv_heads=2, attention_mix="none")
        assert grouped == {"wx": (12, 8), "up": (8, 2), "down": (2, 8)}
        assert set(made(mlp_mix=False)) == {"mix"}

    def test_only_what_must_be_zero_is_zero(self):
        params = init_update(jax.random.key(0), 64, 4, degree=3)
        for name in ("mix", "up", "target"):
            assert not params[name].any()
        assert params["origin"].all()
        assert float(params["wx"].std()) == pytest.approx(1 / 8, rel=0.1)
        assert float(params["down"].std()) == pytest.approx(1 / 4, rel=0.3)


class TestTensorState:
    @pytest.mark.parametrize(("l", "r"), mostly_slow([(2, 2), (4, 7), (8, 8)], (4, 7)))
    def test_logits_are_those_of_rope(self, x64, l, r):
        positions = np.array([[0, 1, 5, 100], [3, 3, 2, 7]])
        q, k = normal(2, 4, 3, 8), normal(2, 4, 3, 8, seed=1)
        scaling = RopeScaling("yarn", 4.0, original_length=8)

        @jax.jit
        def logits(e):
            return jnp.einsum("bihd,bjhd->bhij", rotate(q, e), rotate(k, e))

        tensor = tensor_state(positions, 8, l, r, base=500.0, scaling=scaling)
        assert tensor.shape == (2, 4, 1, 8 // l, l, r)
        rotary = rotary_state(positions, 8, 500.0, scaling=scaling)[..., None, :]
        np.testing.assert_allclose(logits(tensor), logits(rotary), atol=1e-12)
        np.testing.assert_array_equal(tensor[..., l:], 0)

    def test_coordinates_and_dynamic_scaling_are_those_of_the_rotary_form(self, x64):
        q, places = normal(6, 1, 8), np.arange(6)
        dynamic = RopeScaling("dynamic", 2.0, original_length=3)
        for at, options in ((np.stack([places, places[::-1]], -1), {"axes": 2}),
                            (places, {"scaling": dynamic})):  # fmt: skip
            states = tensor_state(at, 8, **options), rotary_state(at, 8, **options)
            np.testing.assert_allclose(*(rotate(q, e) for e in states), atol=1e-13)

    @pytest.mark.parametrize("share", [0.0, 0.5])
    def test_what_does_not_rotate_is_not_scaled(self, x64, share):
        q, scaling = normal(6, 1, 8), RopeScaling("yarn", 4.0, original_length=16)
        options = {"scaling": scaling, "partial_rotary_factor": share}
        states = (make(np.arange(6), 8, **options) for make in (tensor_state, rotary_state))
        np.testing.assert_allclose(*(rotate(q, e) for e in states), atol=1e-13)

    def test_a_start_of_ones_own(self):
        start = normal(2, 3, 1)
        got = tensor_state(jnp.arange(5), 6, 3, 1, start=start)
        assert got.shape == (5, 1, 2, 3, 1)
        np.testing.assert_array_equal(got, np.broadcast_to(np.float32(start), got.shape))
        got = tensor_state(np.zeros((7, 5, 2)), 6, 3, 1, start=start, axes=2)
        assert got.shape == (7, 5, 1, 2, 3, 1)
        with jax.enable_x64(True):
            assert tensor_state(jnp.arange(3), 6, 3, 1, start=np.ones(1)).dtype == jnp.float64
            assert tensor_state(jnp.arange(3), 8, dtype=jnp.bfloat16).dtype == jnp.bfloat16


CONFIG = ModelConfig(13, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2)


class TestEncoding:
    def test_parameters(self):
        def params(updates=True, **options):
            return Tape(**options).layer_params(CONFIG.sizes, updates=updates)

        alpha = params(learn_alpha=True, alpha=0.5)["alpha"]
        assert float(alpha.init(jax.random.key(0), alpha.shape, jnp.float32)) == 0.5
        assert params(learn_alpha=True, alpha_per_head=True)["alpha"].shape == (2,)
        assert params(updates=False) == {}
        assert set(params(mlp_mix=False)) == {"mix"}
        assert not Tape(attention_mix="none", mlp_mix=False).updates(0, 4)

    @pytest.mark.parametrize("learned", [{"alpha": 0.6}, {}], ids=str)
    def test_update_is_the_pure_function_with_its_options(self, x64, learned):
        scaling = RopeScaling("yarn", 4.0, original_length=8)
        encoding = Tape(norm="rms", alpha=0.3, activation="tanh", scaling=scaling)
        params = random_update(4, 2, hidden=32)
        e, a, x = normal(3, 2, 8), normal(3, 4, 8, seed=1), normal(3, 32)
        options = {"norm": "rms", "activation": "tanh", "magnitude": 0.1 * math.log(4) + 1}
        want = update_state(params, e, a, x, learned.get("alpha", 0.3), **options)
        got = jax.jit(encoding.update_state)(params | learned, e, a, x)
        np.testing.assert_allclose(got, want, atol=1e-14)

    @pytest.mark.parametrize(
        ("form", "shape", "start"),
        [
            ("rotary", (8,), (5, 8)),
            ("rotary", (8,), (1, 5, 1, 8)),
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
        ("form", "shape"),
        [
            *[("rotary", x) for x in ((4, 8), (8,), (5, 1, 8), (5, 2, 8), (3, 5, 8), (3, 5, 3, 8))],
            *[("tensor", x) for x in ((4, 2, 2), (1, 4, 2, 2), (3, 5, 4, 2, 2))],
        ],
    )
    def test_a_state_that_does_not_fit_the_tokens(self, form, shape):
        """It has the shape ``[T, D]`` or all axes, and no meaning is guessed."""
        with pytest.raises(ValueError, match=r"state .*shape"):
            Tape(form=form).carry(jnp.zeros(shape), (3, 5), CONFIG.sizes)

    def test_start(self):
        got = Tape(form="tensor", base=100.0, l=4, r=5).start(jnp.arange(5), CONFIG.sizes)
        np.testing.assert_array_equal(got, tensor_state(jnp.arange(5), 8, 4, 5, base=100.0))


def started(*arguments, **options):
    return lambda: tensor_state(jnp.arange(5), *arguments, **options)


def initial(**options):
    return lambda: init_update(jax.random.key(0), **{"hidden_size": 12, "num_heads": 6, **options})


def updated(**options):
    return lambda: jax_update_state({}, jnp.zeros((3, 2, 8)), None, jnp.zeros((3, 5)), **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (updated(norm="rmse"), "unknown norm 'rmse'.*did you mean 'rms'"),
        (updated(activation="swish"), "unknown activation 'swish'"),
        (initial(attention_mix="head"), "unknown attention_mix 'head'.*did you mean 'heads'"),
        (initial(num_kv_heads=4), "num_heads = 6 is not a multiple of num_kv_heads = 4"),
        (initial(num_heads=0), "num_heads = 0"),
        (initial(width=0), "the update's width must be positive; got 0"),
        (started(8, 3, 3), "l must divide the head dimension: got l=3, r=3, head_dim=8"),
        (started(8, 0, 2), "l must divide"),
        (started(9, 3, 3), r"even l and r >= l; got l=3, r=3: give one, start= .*1, 3, 3, 3\]"),
        (started(8, 4, 2), "even l and r >= l; got l=4, r=2"),
        (started(8, 2, 2, start=np.zeros((3, 3))), r"shape \(3, 3\) does not broadcast to"),
        (started(8, axes=2), r"axes=2 expects coordinates .* got \(5,\)"),
    ],
)  # fmt: skip
def test_refusals(make, words):
    with pytest.raises(ValueError, match=words):
        make()
