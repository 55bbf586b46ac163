"""The helpers themselves: that they pass what is right, and catch and place what is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import testing
from tape_jax.testing import SymmetryError


def key(seed: int = 0):
    return jax.random.key(seed)


def normal(*shape: int, seed: int = 0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


@pytest.mark.parametrize("reflection", [False, True])
@pytest.mark.parametrize("r", [1, 2, 5])
def test_random_orthogonal(x64, r, reflection):
    omega = testing.random_orthogonal(key(r), r, reflection=reflection)
    np.testing.assert_allclose(omega @ omega.T, np.eye(r), atol=1e-14)
    np.testing.assert_allclose(np.linalg.det(omega), -1 if reflection else 1, atol=1e-14)


def test_random_orthogonal_is_uniform(x64):
    draws = np.stack([testing.random_orthogonal(key(seed), 3) for seed in range(300)])
    # Every entry of a uniform element of O(3) has mean 0 and variance 1/3.
    np.testing.assert_allclose(draws.mean(0), np.zeros((3, 3)), atol=0.15)
    np.testing.assert_allclose((draws**2).mean(0), np.full((3, 3), 1 / 3), atol=0.08)
    assert 100 < (np.linalg.det(draws) < 0).sum() < 200


def test_random_permutation_moves_something():
    for seed in range(20):
        drawn = testing.random_permutation(key(seed), 2)
        np.testing.assert_array_equal(drawn, [1, 0])
    np.testing.assert_array_equal(np.sort(testing.random_permutation(key(), 9)), np.arange(9))
    with pytest.raises(ValueError, match="n >= 2; got 1"):
        testing.random_permutation(key(), 1)


def test_random_phases():
    phases = testing.random_phases(key(), 1000)
    assert phases.dtype == jnp.float32
    assert -np.pi <= phases.min() < -3.1
    assert 3.1 < phases.max() < np.pi


def test_random_state():
    assert testing.random_state(key(), (2, 5, 3, 8)).shape == (2, 5, 3, 8)
    tensor = testing.random_state(key(), (5, 3, 8), l=4, dtype=jnp.bfloat16)
    assert tensor.shape == (5, 3, 2, 4, 4)
    assert tensor.dtype == jnp.bfloat16
    assert testing.random_state(key(), (5, 3, 8), l=2, r=3).shape == (5, 3, 4, 2, 3)
    with pytest.raises(ValueError, match="l=3 does not divide"):
        testing.random_state(key(), (5, 3, 8), l=3)
    with pytest.raises(ValueError, match="even D"):
        testing.random_state(key(), (5, 3, 7))
    with pytest.raises(ValueError, match="r=2"):
        testing.random_state(key(), (5, 3, 8), r=2)
    for options, message in (
        ({"l": 0}, "l must be a positive integer or None; got 0"),
        ({"l": 2, "r": -1}, "r must be a positive integer or None; got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            testing.random_state(key(), (5, 3, 8), **options)
    with pytest.raises(ValueError, match=r"shape must be that of keys, \[.*D\]; got \(\)"):
        testing.random_state(key(), ())
    with pytest.raises(ValueError, match="each of shape must be an integer from 0 on; got -3"):
        testing.random_state(key(), (-3, 8))


@pytest.mark.parametrize("size", [-1, 0])
def test_sizes_that_do_not_exist(size):
    with pytest.raises(ValueError, match=f"r must be a positive integer; got {size}"):
        testing.random_orthogonal(key(), size, reflection=True)
    with pytest.raises(ValueError, match="n must be an integer from 0 on; got -1"):
        testing.random_phases(key(), -1)


@pytest.mark.parametrize(
    ("draw", "size"),
    [
        (testing.random_state, (5, 3, 8)),
        (testing.random_phases, 4),
        (testing.random_orthogonal, 4),
    ],
)
def test_types_that_are_disabled(draw, size):
    with pytest.raises(ValueError, match="dtype = float64 needs 64-bit types, which are disabled"):
        draw(None, size, dtype="float64")
    with jax.enable_x64(True):
        assert draw(None, size, dtype="float64").dtype == jnp.float64


def test_draws_do_not_depend_on_the_precision():
    def draw():
        return (
            testing.random_state(key(3), (4, 2, 8)),
            testing.random_phases(key(3), 4),
            testing.random_orthogonal(key(3), 4),
        )

    narrow = draw()
    with jax.enable_x64(True):
        wide = draw()
    for a, b in zip(narrow, wide, strict=True):
        assert (a.dtype, b.dtype) == (jnp.float32, jnp.float64)
        np.testing.assert_array_equal(a, np.asarray(b, np.float32))


def test_both_styles_of_keys_are_taken():
    legacy = testing.random_phases(jax.random.PRNGKey(7), 4)
    np.testing.assert_array_equal(legacy, testing.random_phases(jax.random.key(7), 4))
    assert not np.array_equal(legacy, testing.random_phases(None, 4))


def test_random_params_moves_floats_only():
    params = {"a": jnp.zeros((400, 3)), "b": jnp.ones((4, 2), jnp.bfloat16), "n": jnp.arange(3)}
    moved = testing.random_params(key(), params, std=0.5)
    np.testing.assert_array_equal(moved["n"], params["n"])
    assert moved["b"].dtype == jnp.bfloat16
    assert float(moved["a"].std()) == pytest.approx(0.5, rel=0.1)
    assert not bool((moved["b"] == 1).all())


def test_permutation_passes_for_masked_averages_and_catches_sums_over_time():
    x, mask = normal(3, 5, 2), jnp.tril(jnp.ones((5, 5), bool))
    axes = {"in_axes": (-2, {-2, -1}), "out_axes": -2}
    testing.assert_permutation_equivariant(lambda x, m: m @ x, x, mask, **axes)
    with pytest.raises(SymmetryError, match="permutation equivariance does not hold: output is"):
        testing.assert_permutation_equivariant(lambda x, m: jnp.cumsum(x, -2), x, mask, **axes)
    with pytest.raises(SymmetryError):  # A mask that stays behind.
        testing.assert_permutation_equivariant(
            lambda x, m: m @ x, x, mask, in_axes=(-2, None), out_axes=-2
        )


def test_failure_says_where_and_by_how_much(x64):
    def fn(x, scale):
        # Wrong in one output: something happens to index 3, whichever token is there.
        return {"right": x, "wrong": [x * scale, x.at[3, 1].add(0.25)]}

    x = jnp.arange(10.0).reshape(5, 2) / 10
    with pytest.raises(SymmetryError, match=r"off by 0\.25 at index \(\d, 1\)") as caught:
        testing.assert_permutation_equivariant(
            fn, x, 2.0, in_axes=(0, None), out_axes=0, key=key(1)
        )
    error = caught.value
    assert error.symmetry == "permutation equivariance"
    assert error.where == "output['wrong'][1]"
    assert error.difference == pytest.approx(0.25)
    assert error.allowed == pytest.approx(1e-10)
    moved = testing.random_permutation(key(1), 5)
    assert error.index in [(3, 1), (int(moved[3]), 1)]


def test_phase_equivariance():
    e, x = testing.random_state(None, (4, 2, 6)), normal(4, 3)

    def right(inputs):
        return {"e": inputs["e"] * 2, "n": jnp.hypot(*jnp.split(inputs["e"], 2, -1)), "none": None}

    states = {"e": True, "x": False}
    testing.assert_phase_equivariant(
        right,
        {"e": e, "x": x},
        in_states=(states,),
        out_states={"e": True, "n": False, "none": False},
    )
    with pytest.raises(SymmetryError, match="phase equivariance"):
        testing.assert_phase_equivariant(lambda e: e, e, in_states=True, out_states=False)
    with pytest.raises(SymmetryError) as caught:
        testing.assert_phase_equivariant(jnp.abs, e, in_states=True, out_states=True)
    assert caught.value.difference > 0.5


def test_orthogonal_equivariance_needs_reflections_too():
    e = testing.random_state(None, (4, 1, 3, 2, 2))
    check = testing.assert_orthogonal_equivariant
    check(lambda e: e @ e.mT @ e, e, in_states=True, out_states=True)
    # Adding the cofactor commutes with rotations but not with reflections.
    turn = jnp.array([[0.0, 1.0], [-1.0, 0.0]])
    with pytest.raises(SymmetryError, match=r"\(reflections\)") as caught:
        check(lambda e: e + turn.T @ e @ turn, e, in_states=True, out_states=True)
    assert caught.value.difference > 0.5
    with pytest.raises(SymmetryError, match=r"\(rotations\)"):
        check(lambda e: e * jnp.array([1.0, 2.0]), e, in_states=True, out_states=True)


def test_one_element_of_the_group_acts_on_all_states():
    """Products of one state with another are invariant only if both are transformed alike."""

    def complex_product(a, b):
        (ar, ai), (br, bi) = jnp.split(a, 2, -1), jnp.split(b, 2, -1)
        return a + b, ar * br + ai * bi

    rotary = [testing.random_state(key(i), (4, 2, 6)) for i in range(2)]
    testing.assert_phase_equivariant(
        complex_product, *rotary, in_states=True, out_states=(True, False)
    )
    tensor = [testing.random_state(key(i), (4, 2, 6), l=2, r=3) for i in range(2)]
    testing.assert_orthogonal_equivariant(
        lambda a, b: (a + b, a @ b.mT), *tensor, in_states=True, out_states=(True, False)
    )


def test_shift_invariance():
    testing.assert_shift_invariant(lambda t: t[:, None] - t, jnp.arange(5))
    testing.assert_shift_invariant(lambda t: t[:, None] - t, [0, 1, 2])
    testing.assert_shift_invariant(
        lambda t: t - t[:1], jnp.ones((5, 2)), shift=jnp.array([3.0, 4.5])
    )
    with pytest.raises(SymmetryError, match="positions by 9") as caught:
        testing.assert_shift_invariant(lambda t: t * 0.5, jnp.arange(5.0), shift=9)
    assert caught.value.difference == 4.5


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        (lambda t: t, {"shift": 0}, "shift = 0 moves no position"),
        (lambda t: t, {"shift": 256}, "shift = 256 moves no position"),
        (lambda t: None, {}, "returns no numbers"),
        (lambda t: t[:0], {}, "returns no numbers"),
        (lambda t: t, {"tolerance": float("nan")}, "tolerance must be a finite number or None"),
    ],
)
def test_checks_that_could_not_fail_are_refused(fn, options, message):
    with pytest.raises(ValueError, match=message):
        testing.assert_shift_invariant(fn, jnp.arange(5, dtype=jnp.int8), **options)


def test_complex_values_are_compared_whole():
    t = jnp.arange(5)
    testing.assert_shift_invariant(lambda t: jnp.exp(1j * (t - t[0])), t)
    with pytest.raises(SymmetryError, match="shift") as caught:
        testing.assert_shift_invariant(lambda t: 1 + 1j * t, t, shift=9)
    assert caught.value.difference == 9
    z = (normal(5) + 1j * normal(5, seed=1)).astype(jnp.complex64)
    testing.assert_causal(causal_sum, z, in_axes=0, out_axes=0)
    with pytest.raises(SymmetryError, match="on replaced"):
        testing.assert_causal(lambda z: z + 1j * z[::-1].imag, z, in_axes=0, out_axes=0)


def test_causality_catches_a_leak_by_a_gradient_of_the_imaginary_part_alone():
    @jax.custom_jvp
    def silent(x):
        return x + 0j

    silent.defjvp(lambda x, t: (x[0] + 0j, t[0] + 0.5j * jnp.roll(t[0], -1)))
    with pytest.raises(SymmetryError, match="gradient"):
        testing.assert_causal(silent, normal(5), in_axes=0, out_axes=0)


def causal_sum(x):
    return jnp.cumsum(x)


def causal_average(x):
    return jnp.cumsum(x, axis=-2)


def test_causality_passes():
    ids = jnp.array([[1, 2, 0, 1, 5]])
    testing.assert_causal(
        lambda ids, x: (causal_average(x + ids[..., None]), x.mean(-2)),
        ids,
        normal(1, 5, 2),
        in_axes=(-1, -2),
        out_axes=(-2, None),
    )


def test_causality_catches_a_leak_by_value():
    ids = jnp.array([1, 2, 0, 1, 5])
    with pytest.raises(SymmetryError, match=r"tokens from 4 on replaced.*index \(3,\)") as caught:
        testing.assert_causal(lambda i: i.at[3].add(i[4]), ids, in_axes=0, out_axes=0)
    assert caught.value.difference == 5  # 5 is followed by the smallest of the values, 0.


def test_causality_catches_a_leak_by_gradient_alone():
    x = normal(2, 5)

    @jax.custom_jvp
    def silent(x):
        return x

    silent.defjvp(lambda x, t: (x[0], t[0] + 0.5 * jnp.roll(t[0], -1, axis=-1)))
    with pytest.raises(
        SymmetryError, match=r"outputs before token 1\) does not hold: the gradient by argument\[0"
    ) as caught:
        testing.assert_causal(silent, x, in_axes=-1, out_axes=-1)
    assert caught.value.index[1] == 1
    assert caught.value.allowed == 0
    testing.assert_causal(silent, x, in_axes=-1, out_axes=-1, gradient_tolerance=10.0)


def test_nan_fails_and_equal_infinities_pass():
    x = normal(4, 2)
    check = testing.assert_permutation_equivariant
    check(lambda x: x.at[..., 0].set(-jnp.inf), x, in_axes=0, out_axes=0)
    with pytest.raises(SymmetryError, match="off by inf"):
        check(lambda x: x * jnp.nan, x, in_axes=0, out_axes=0)
    with pytest.raises(SymmetryError) as caught:  # Infinities excuse no other difference.
        check(lambda x: x.at[:, 0].set(-jnp.inf).at[0, 1].add(0.5), x, in_axes=0, out_axes=0)
    assert caught.value.difference == pytest.approx(0.5)


def test_tolerance_follows_the_type_and_the_size(x64):
    def nearly(scale):
        return lambda x: x + scale * jnp.arange(4.0, dtype=x.dtype)[:, None]

    check = testing.assert_permutation_equivariant
    x = normal(4, 2)
    check(nearly(1e-6), x.astype(jnp.float32), in_axes=0, out_axes=0)
    with pytest.raises(SymmetryError):
        check(nearly(1e-6), x, in_axes=0, out_axes=0)
    check(nearly(1e-6), x, in_axes=0, out_axes=0, tolerance=1e-5)
    check(nearly(1e-6), 1e6 * x, in_axes=0, out_axes=0)


def nothing(*xs):
    return xs


X = np.ones((3, 5, 2), np.float32)
PERMUTATION, CAUSAL = testing.assert_permutation_equivariant, testing.assert_causal
PHASE = testing.assert_phase_equivariant


@pytest.mark.parametrize(
    ("check", "args", "described", "problem"),
    [
        (PERMUTATION, (X,), {"in_axes": -4, "out_axes": -2}, "no axis -4"),
        (PERMUTATION, (X, X), {"in_axes": (-2, 0), "out_axes": -2}, r"lengths \[3, 5\]"),
        (PERMUTATION, (X,), {"in_axes": None, "out_axes": -2}, "none at all"),
        (PERMUTATION, (X,), {"in_axes": 1.5, "out_axes": -2}, "in_axes: .* integer; got 1.5"),
        (PERMUTATION, (X,), {"in_axes": (-2, -2), "out_axes": -2}, "in_axes = .* not describe"),
        (PERMUTATION, (X,), {"in_axes": -2, "out_axes": (-2, -2)}, "out_axes = .* not describe"),
        (PERMUTATION, (X,), {"in_axes": -2, "out_axes": 3}, r"out_axes: output\[0\].* no axis 3"),
        (PERMUTATION, (X,), {"in_axes": -2, "out_axes": -1}, r"output\[0\] .*\[2\].* 5 tokens"),
        (PERMUTATION, (X,), {"in_axes": -2, "out_axes": "time"}, "integer; got 'time'"),
        (PERMUTATION, (X,), {"in_axes": -2, "out_axes": True}, "integer; got True"),
        (CAUSAL, (X,), {"in_axes": -2, "out_axes": 3}, "out_axes: .* no axis 3"),
        (CAUSAL, (X,), {"in_axes": -2, "out_axes": 0}, r"\[3\].* 5 tokens"),
        (CAUSAL, (X,), {"in_axes": -2, "out_axes": {-2}}, "out_axes: .* not a set"),
        (CAUSAL, (X[:, :1],), {"in_axes": -2, "out_axes": -2}, "at least two tokens"),
        (CAUSAL, (X,), {"in_axes": {-2}, "out_axes": -2}, "in_axes: .* not a set"),
        (CAUSAL, (X,), {"in_axes": -2, "out_axes": None}, "names no time axis"),
        (CAUSAL, (np.ones(4, int),), {"in_axes": 0, "out_axes": 0}, "two values to exchange"),
        (PHASE, (X,), {"in_states": False, "out_states": False}, "none at all"),
        (PHASE, (X, X[0, 0, :1]), {"in_states": True, "out_states": True}, r"lengths \[1, 2\]"),
        (PHASE, (X, 2.0), {"in_states": True, "out_states": True}, r"argument\[1\], .* got 2\.0"),
        (PHASE, ([[1.0]],), {"in_states": True, "out_states": True}, r"argument.* got 1\.0"),
    ],
)
def test_wrong_calls(check, args, described, problem):
    with pytest.raises(ValueError, match=problem):
        check(nothing, *args, **described)
