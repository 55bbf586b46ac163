"""Rotary tables against recorded ones, and frequencies against formulas one at a time."""

import dataclasses
import fractions
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, RopeScaling, rotary_state, rotate, tensor_state
from tape_jax._src.positions.fixed.additive import sinusoids
from tape_jax._src.positions.fixed.rotary import frequencies
from tape_jax.positions import LongRope, MRope, RandomRope, Rope, Xpos
from tests.paths import GOLDEN


def recorded(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}_tiny.npz") as archive:
        return {key: archive[key] for key in archive.files if not key.startswith(("grad", "model"))}


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
            x[..., None] * plain(2 * n, 50.0) for x, n in zip(coordinates.T, counts, strict=True)
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


CONFIG = ModelConfig(5, hidden_size=16, num_layers=3, num_heads=2)


class TestRope:
    def test_start(self):
        scaling = RopeScaling("dynamic", 2.0, original_length=4)
        start = Rope(base=100.0, scaling=scaling).start(jnp.arange(5), CONFIG.sizes, length=12)
        want = rotary_state(np.arange(5), 8, 100.0, scaling=scaling, length=12)
        np.testing.assert_array_equal(start, want)

    def test_where_positions_have_a_batch_states_have_heads(self):
        places = jnp.arange(5)
        alone, batched = (
            Xpos().start(x, CONFIG.sizes) for x in (places, jnp.stack([places + 7, places]))
        )
        for one, two in zip(jax.tree.leaves(alone), jax.tree.leaves(batched), strict=True):
            assert (one.shape, two.shape) == ((5, 8), (2, 5, 1, 8))
            np.testing.assert_array_equal(two[1, :, 0], one)

    def test_a_learned_base(self, x64):
        factor = 0.5
        rope = Rope(base=100.0, partial_rotary_factor=factor, learn_base=True)
        (spec,) = rope.input_params(CONFIG.sizes).values()
        untrained = {"log_stretch": spec.init(jax.random.key(0), spec.shape, jnp.float64)}
        trained = {"log_stretch": jnp.log(3.0)}
        for params, base in ((None, 100.0), (untrained, 100.0), (trained, 300.0)):
            got = rope.start(jnp.arange(50), CONFIG.sizes, dtype=jnp.float64, params=params)
            want = rotary_state(
                np.arange(50), 8, base, partial_rotary_factor=factor, dtype=jnp.float64
            )
            np.testing.assert_allclose(got, want, atol=1e-12)

    @pytest.mark.parametrize("learn_base", [False, True])
    def test_longrope_of_rows_of_their_own_lengths(self, learn_base):
        scaling = RopeScaling(
            "longrope", 4.0, 8, short_factor=(1, 2, 3, 4), long_factor=(5, 6, 7, 8)
        )
        rope = LongRope(scaling=scaling, learn_base=learn_base)
        params = {"log_stretch": jnp.float32(0)} if learn_base else None
        positions = jnp.broadcast_to(jnp.arange(5), (2, 5))
        got = rope.start(positions, CONFIG.sizes, length=jnp.array([8, 9]), params=params)
        for row, factors in zip(got, (scaling.short_factor, scaling.long_factor), strict=True):
            angles = np.arange(5)[:, None] * plain(8, 10_000.0) / np.array(factors)
            want = math.sqrt(1 + math.log(4) / math.log(8)) * np.exp(1j * angles)
            np.testing.assert_allclose(row[:, 0, :4] + 1j * row[:, 0, 4:], want, atol=1e-6)


class TestMRope:
    def test_equal_coordinates_are_rope(self):
        positions = jnp.broadcast_to(jnp.arange(5)[:, None], (5, 3))
        got = MRope(interleaved=True).start(positions, CONFIG.sizes)
        np.testing.assert_array_equal(got, Rope().start(jnp.arange(5), CONFIG.sizes))


class TestXpos:
    def test_logits_decay_with_the_distance_of_means(self, x64):
        """Of each frequency by ``s_j^(n / 512)`` over n tokens."""
        places = jnp.array([[-1, 1], [510, 514], [1025, 1023]])
        xpos = Xpos(scale_base=512.0, axes=2)
        queries, keys = xpos.start(places, CONFIG.sizes, dtype=jnp.float64)
        product = np.hypot(queries[:, :4], queries[:, 4:]) * np.hypot(keys[0, :4], keys[0, 4:])
        scales = (2 * np.arange(4) + 0.4 * 8) / (1.4 * 8)
        np.testing.assert_allclose(product, scales ** [[0], [1], [2]], rtol=1e-12)

    def test_a_length_for_each_row(self):
        """Positions are shared, and as many as there are heads of keys."""
        start = functools.partial(Xpos().start, sizes=CONFIG.sizes)
        places, lengths = jnp.arange(2), jnp.array([2, 400])
        for found, *rows in zip(
            start(places, length=lengths), *(start(places, length=n) for n in (2, 400)), strict=True
        ):
            chex.assert_trees_all_close(found, jnp.stack(rows)[:, :, None], atol=1e-6)

    def test_what_does_not_rotate_does_not_decay(self, x64):
        """The rotating half of 8 dimensions decays as a head of 4 does."""
        places = jnp.arange(0, 2000, 700)
        small = dataclasses.replace(CONFIG.sizes, head_dim=4)
        whole = Xpos().start(places, small, dtype=jnp.float64)
        half = Xpos(partial_rotary_factor=0.5).start(places, CONFIG.sizes, dtype=jnp.float64)
        for e, rotating in zip(half, whole, strict=True):
            e = e.reshape(3, 2, 4)
            np.testing.assert_allclose(
                np.hypot(*e[..., :2].swapaxes(0, 1)),
                np.hypot(*rotating.reshape(3, 2, 2).swapaxes(0, 1)),
            )
            np.testing.assert_array_equal(e[:, 0, 2:], 1)
            np.testing.assert_array_equal(e[:, 1, 2:], 0)

    @pytest.mark.slow
    @pytest.mark.parametrize(("dtype", "length"), [("float16", 22_000), ("bfloat16", 258_000)])
    def test_scales_are_numbers_at_every_length(self, dtype, length):
        """Products of near tokens are what they are anywhere else; where they cannot be, no number.

        From a middle at 0, scales would overflow float16 at 18,000 tokens, float32 at 145,000.
        """
        config = dataclasses.replace(CONFIG, dtype=dtype)
        start = functools.partial(Xpos().start, sizes=config.sizes, length=length)
        # Also of small queries and keys, whose products with the scales must not vanish.
        small = 1.0 if dtype == "float16" else 2.0**-8
        ones = jnp.full((4, 1, 8), small, dtype)
        for first in (0, length // 2, length - 4):
            states = start(first + jnp.arange(4))
            q, k = (np.asarray(rotate(ones, e), np.float64)[:, 0] / small for e in states)
            # |q_i| |k_i| of each frequency: 1, since both rotations have the same angle.
            q, k = (np.hypot(x[:, :4], x[:, 4:]) for x in (q, k))
            np.testing.assert_allclose(q * k, 2, rtol=1e-2)
            slow = 0.4 / 1.4
            np.testing.assert_allclose(q[3, 0] * k[0, 0], 2 * slow ** (3 / 2048), rtol=1e-2)
        far = jnp.array([2 * length])
        assert all(jnp.isnan(e).all() for e in jax.jit(start)(far))
        with pytest.raises(ValueError, match=rf"xpos: in {dtype}, positions may lie up to \d+ tok"):
            start(far)


def test_the_draw_of_random_rope_follows_the_key_and_is_fixed_without_one():
    def draw(key=None, **options):
        return RandomRope(range=300, **options).start(jnp.arange(20), CONFIG.sizes, key=key)

    np.testing.assert_array_equal(draw(), draw())
    assert not np.array_equal(draw(), draw(seed=1))
    assert not np.array_equal(*(draw(jax.random.key(seed)) for seed in (0, 1)))
    assert RandomRope(range=17).max_length() == 17


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


def test_a_factor_needs_a_kind():
    with pytest.raises(
        ValueError, match=r"factor = 4.0 needs a kind, such as 'linear'; got 'none'"
    ):
        RopeScaling(factor=4.0)


@pytest.mark.parametrize("wrong", [{"base": 1.0}, {"length": -1}, {"dtype": jnp.int32}], ids=str)
def test_a_tensor_state_has_the_same_checks(wrong):
    with pytest.raises(ValueError, match=r"base must exceed|length must be|dtype 'int32'"):
        tensor_state(jnp.arange(4), 8, **wrong)


def test_coordinates_of_text():
    with pytest.raises(ValueError, match=r"positions of shape \[\.\.\., T, 3\]; got \(5,\)"):
        MRope().start(jnp.arange(5), CONFIG.sizes)
