"""Frequencies against formulas one at a time."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import RopeScaling, rotary_state
from tape_jax._src.positions.fixed.frequencies import frequencies


def plain(dim: int, base: float) -> list[float]:
    return [base ** (-2 * j / dim) for j in range(dim // 2)]


class TestFrequencies:
    @pytest.mark.parametrize(
        ("scaling", "length", "base", "factor"),
        [
            (RopeScaling("linear", 3.0), None, 500.0, 1 / 3),
            (RopeScaling("ntk", 3.0), None, 500.0 * 3 ** (12 / 10), 1),
            # Past the trained length the stretch is 2 length / 16 - 1.
            (RopeScaling("dynamic", 2.0, original_length=16), None, 500.0, 1),
            (RopeScaling("dynamic", 2.0, original_length=16), 16, 500.0, 1),
            (RopeScaling("dynamic", 2.0, original_length=16), 40, 500.0 * 4 ** (12 / 10), 1),
            # Without lists of factors longrope interpolates beyond the trained length.
            (RopeScaling("longrope", 3.0, original_length=16), 16, 500.0, 1),
            (RopeScaling("longrope", 3.0, original_length=16), 17, 500.0, 1 / 3),
        ],
        ids=str,
    )
    def test_scaled(self, scaling, length, base, factor):
        """The plain frequencies of another base, times a factor."""
        want = [omega * factor for omega in plain(12, base)]
        np.testing.assert_allclose(frequencies(12, 500.0, scaling, length), want, rtol=1e-13)

    def test_partial_rotary(self):
        """The first dimensions rotate as a smaller head would, the others not at all."""
        np.testing.assert_allclose(
            frequencies(16, 500.0, partial_rotary_factor=0.5), [*plain(8, 500.0), 0, 0, 0, 0]
        )
        np.testing.assert_array_equal(frequencies(16, partial_rotary_factor=1.0), frequencies(16))
        np.testing.assert_array_equal(frequencies(16, partial_rotary_factor=0.0), np.zeros(8))
        e = rotary_state(jnp.arange(5), 16, partial_rotary_factor=0.5)
        np.testing.assert_array_equal(e[:, 4:8], jnp.ones((5, 4)))
        np.testing.assert_array_equal(e[:, 12:], jnp.zeros((5, 4)))

    @pytest.mark.parametrize("kind", ["yarn", "longrope"])
    def test_the_magnitude_is_of_what_rotates(self, kind):
        scaling = RopeScaling(kind, 4.0, magnitude=1.5)
        e = rotary_state(jnp.arange(5), 16, scaling=scaling, partial_rotary_factor=0.5)
        lengths = jnp.hypot(*jnp.split(e, 2, -1))
        np.testing.assert_allclose(lengths, [[1.5] * 4 + [1] * 4] * 5, rtol=1e-6)

    def test_llama3_by_wavelength(self):
        scaling = RopeScaling(
            "llama3", 8.0, original_length=8192, low_freq_factor=1.0, high_freq_factor=4.0
        )
        omega = np.array(plain(128, 500_000.0))
        smooth = np.clip((8192 * omega / (2 * np.pi) - 1) / (4 - 1), 0, 1)
        assert {0, 1} < set(smooth), "all three regions occur"
        want = (1 - smooth) * omega / 8 + smooth * omega
        np.testing.assert_allclose(frequencies(128, 500_000.0, scaling), want, rtol=1e-13)

    @pytest.mark.parametrize("truncate", [True, False])
    def test_yarn_by_rotations(self, truncate):
        """Dimensions between beta_slow and beta_fast rotations over the trained length blend."""
        dim, base, factor, original = 128, 10_000.0, 16.0, 4096
        scaling = RopeScaling("yarn", factor, original_length=original, truncate=truncate)
        got = frequencies(dim, base, scaling)

        def dimension(rotations):  # Where base^(-2d/dim) * original = 2 pi rotations.
            return dim / 2 * math.log(original / (2 * math.pi * rotations), base)

        low, high = dimension(32.0), dimension(1.0)
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        omega = np.array(plain(dim, base))
        interpolated = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
        want = omega / factor * interpolated + omega * (1 - interpolated)
        np.testing.assert_allclose(got, want, rtol=1e-12)

    def test_yarn_of_few_dimensions_is_finite(self):
        for dim, length in ((2, 4), (4, 1), (8, 2**30)):
            got = frequencies(dim, scaling=RopeScaling("yarn", 2.0, original_length=length))
            assert np.isfinite(got).all()
            assert (got > 0).all()


def test_a_factor_needs_a_kind():
    with pytest.raises(
        ValueError, match=r"factor = 4.0 needs a kind, such as 'linear'; got 'none'"
    ):
        RopeScaling(factor=4.0)
