"""Rotary states against recorded tables and exact angles."""

import fractions
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, RopeScaling, rotary_state, tensor_state
from tape_jax._src.positions.fixed.additive import sinusoids
from tape_jax._src.positions.fixed.frequencies import frequencies
from tape_jax.positions import Rope
from tests.paths import GOLDEN


def recorded(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}_tiny.npz") as archive:
        return {key: archive[key] for key in archive.files if not key.startswith(("grad", "model"))}


class TestRotaryState:
    @pytest.mark.parametrize("name", ["rope", "yarn"])
    def test_recorded_tables(self, x64, name):
        """Of YaRN with its magnitude."""
        file = recorded(name)
        scaling = RopeScaling("yarn", 4.0, original_length=64) if name == "yarn" else None
        np.testing.assert_allclose(
            frequencies(8, scaling=scaling), file["f64/inv_freq"], rtol=1e-14
        )
        got = rotary_state(jnp.arange(17), 8, scaling=scaling)
        np.testing.assert_allclose(got[:, :4], file["f64/rope_cos"][:, :4], atol=1e-14)
        np.testing.assert_allclose(got[:, 4:], file["f64/rope_sin"][:, 4:], atol=1e-14)

    def test_types(self):
        """In bfloat16, 257 is 256: angles must not be computed in it, states may be rounded."""
        positions = jnp.arange(256, 300)
        got, wide = rotary_state(positions, 64, dtype=jnp.bfloat16), rotary_state(positions, 64)
        assert wide.dtype == jnp.float32
        np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16), strict=True)
        config = ModelConfig(5, hidden_size=64, num_heads=1, dtype="bfloat16")
        start = Rope().start(positions, config.sizes, dtype=jnp.bfloat16)
        np.testing.assert_array_equal(start, got)
        narrow = jnp.asarray([3.0, 200.0], jnp.bfloat16)
        wide = narrow.astype(jnp.float32)
        np.testing.assert_array_equal(rotary_state(narrow, 8), rotary_state(wide, 8))
        with jax.enable_x64(True):
            assert rotary_state(jnp.arange(3), 8).dtype == jnp.float64

    @pytest.mark.parametrize(("axes", "counts"), [(2, (2, 2)), (3, (2, 1, 1))])
    def test_coordinates_share_out_the_frequencies(self, x64, axes, counts):
        coordinates = np.random.default_rng(0).uniform(-9, 9, (3, 5, axes))
        angles = [
            x[..., None] * frequencies(2 * n, 50.0)
            for x, n in zip(coordinates.T, counts, strict=True)
        ]
        turns = np.exp(1j * np.concatenate(angles, axis=-1).swapaxes(0, 1))
        got = rotary_state(coordinates, 8, 50.0, axes=axes)
        np.testing.assert_allclose(got[..., :4] + 1j * got[..., 4:], turns, atol=1e-14)

    def test_dynamic_scaling_takes_the_number_of_positions(self, x64):
        scaling = RopeScaling("dynamic", 2.0, original_length=4)
        for positions, axes in ((np.arange(12), 1), (np.ones((12, 2)), 2)):
            got = rotary_state(positions, 8, scaling=scaling, axes=axes)
            want = rotary_state(positions, 8, scaling=scaling, axes=axes, length=12)
            np.testing.assert_array_equal(got, want)
            assert not np.allclose(got, rotary_state(positions, 8, axes=axes))

    @pytest.mark.slow
    def test_dynamic_scaling_by_row(self, x64):
        """As if each row were alone, below the trained length and above, traced or not."""
        scaling = RopeScaling("dynamic", 2.0, original_length=4)
        options = {"scaling": scaling, "log_stretch": jnp.asarray(0.3), "axes": 3}
        positions = jnp.arange(6.0)[:, None] * jnp.arange(1, 4)
        state = functools.partial(rotary_state, positions, 8, **options)
        want = jnp.stack([state(length=n) for n in (2, 4, 9)])[None]
        for call in (state, jax.jit(state)):
            np.testing.assert_allclose(call(length=jnp.array([[2, 4, 9]])), want, atol=1e-13)


class TestIntegersFarAway:
    """Angles of integers are exact, however large they are."""

    PLACES = (0, 7, 4095, 4096, 10**6, 2**24, 2**24 + 1, 2**31 - 1, -(2**24) - 3, -(2**31))

    def wanted(self):
        turn = fractions.Fraction(2 * math.pi)
        omega = [fractions.Fraction(x) for x in frequencies(64)]
        angle = np.array([[float(p * x % turn) for x in omega] for p in self.PLACES])
        return np.concatenate([np.cos(angle), np.sin(angle)], axis=-1)

    @pytest.mark.mostly_slow
    @pytest.mark.parametrize("wide", [False, True])
    def test_states(self, wide):
        with jax.enable_x64(wide):
            p = jnp.asarray(self.PLACES, jnp.int64 if wide else jnp.int32)
            state = functools.partial(rotary_state, head_dim=64, dtype=jnp.float32)
            for call in (state, jax.jit(state)):
                found = call(p)
                np.testing.assert_allclose(found[3:], self.wanted()[3:], atol=1e-6)
                np.testing.assert_allclose(found[:3], self.wanted()[:3], atol=3e-4)

    def test_sinusoids(self):
        found = sinusoids(jnp.asarray(self.PLACES, jnp.int32), 64)
        want = np.stack(np.split(self.wanted(), 2, axis=-1)[::-1], axis=-1).reshape(found.shape)
        np.testing.assert_allclose(found[3:], want[3:], atol=1e-6)

    def test_what_cannot_be_told_apart_is_nan(self):
        stretch = jnp.float32(0.1)
        state = rotary_state(jnp.array([5, 2**24]), 8, log_stretch=stretch)
        assert np.isfinite(state[0]).all()
        assert np.isnan(state[1]).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head_dim": 7}, "head dimension must be even; got 7"),
        ({"head_dim": 0}, "head dimension must be a positive integer; got 0"),
        ({"positions": np.zeros((4, 5)), "axes": 5}, r"axes must lie in 1\.\.4 .*got 5"),
        ({"axes": 2}, r"coordinates of shape \[\.\.\., T, 2\]; got \(4,\)"),
        ({"positions": np.int32(4)}, "got a scalar"),
        ({"positions": np.ones(4, bool)}, "positions must be integers or floats; got bool"),
        ({"positions": jnp.uint32([0, 2**31])}, "must fit in int32; got uint32 up to 2147483648"),
        ({"partial_rotary_factor": -1}, "partial_rotary_factor is a share from 0 to 1; got -1"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor is a share from 0 to 1; got 2"),
        ({"dtype": jnp.int32}, "dtype 'int32': expected one of None, 'float32'"),
        ({"length": 4.5}, r"length must be an integer or integers .*; got float32 of shape \(\)"),
        ({"length": -1}, "length must be positive; got -1"),
        ({"log_stretch": np.ones(3)}, r"must be a scalar .*; got float32 of shape \(3,\)"),
        ({"log_stretch": 1j}, "log_stretch must be a scalar floating-point array; got complex64"),
    ],
)
def test_refused_calls(options, words):
    with pytest.raises(ValueError, match=words):
        rotary_state(**{"positions": np.arange(4), "head_dim": 8, **options})


@pytest.mark.parametrize("wrong", [{"base": 1.0}, {"length": -1}, {"dtype": jnp.int32}], ids=str)
def test_a_tensor_state_has_the_same_checks(wrong):
    with pytest.raises(ValueError, match=r"base must exceed|length must be|dtype 'int32'"):
        tensor_state(jnp.arange(4), 8, **wrong)
