"""Rotary tables against recorded ones, and frequencies against formulas one at a time."""

import dataclasses
import fractions
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, RopeScaling, rotary_state, rotate, tensor_state
from tape_jax._src.positions.fixed.additive import sinusoids
from tape_jax._src.positions.fixed.rotary import frequencies
from tape_jax.positions import LongRope, MRope, PRope, RandomRope, Rope, Tape, Xpos, Yarn
from tests.paths import GOLDEN


def recorded(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}_tiny.npz") as archive:
        return {key: archive[key] for key in archive.files if not key.startswith(("grad", "model"))}


def plain(dim: int, base: float) -> list[float]:
    return [base ** (-2 * j / dim) for j in range(dim // 2)]


class TestFrequencies:
    def test_plain_and_yarn_are_the_recorded_ones(self):
        np.testing.assert_allclose(frequencies(8), recorded("rope")["f64/inv_freq"], rtol=1e-14)
        scaling = RopeScaling("yarn", 4.0, original_length=64)
        np.testing.assert_allclose(
            frequencies(8, scaling=scaling), recorded("yarn")["f64/inv_freq"], rtol=1e-14
        )

    def test_linear(self):
        want = [omega / 3 for omega in plain(12, 500.0)]
        np.testing.assert_allclose(
            frequencies(12, 500.0, RopeScaling("linear", 3.0)), want, rtol=1e-14
        )

    def test_ntk_keeps_the_fastest_and_interpolates_the_slowest(self):
        got = frequencies(12, 500.0, RopeScaling("ntk", 3.0))
        assert got[0] == 1.0
        assert got[-1] == pytest.approx(plain(12, 500.0)[-1] / 3, rel=1e-13)
        np.testing.assert_allclose(got, plain(12, 500.0 * 3 ** (12 / 10)), rtol=1e-13)
        assert frequencies(2, 500.0, RopeScaling("ntk", 3.0)) == [1.0]

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

    @pytest.mark.parametrize(("length", "stretch"), [(None, 1), (10, 1), (16, 1), (40, 4), (64, 7)])
    def test_dynamic_follows_the_length(self, length, stretch):
        """Factor 2, trained on 16: the stretch is 2 length / 16 - 1 past the trained length."""
        got = frequencies(12, 500.0, RopeScaling("dynamic", 2.0, original_length=16), length)
        np.testing.assert_allclose(got, plain(12, 500.0 * stretch ** (12 / 10)), rtol=1e-13)

    def test_longrope_without_lists(self):
        """Up to the trained length plain ones, beyond it as linear interpolation."""
        scaling = RopeScaling("longrope", 3.0, original_length=16)
        np.testing.assert_allclose(frequencies(12, 500.0, scaling, 16), plain(12, 500.0))
        np.testing.assert_allclose(3 * frequencies(12, 500.0, scaling, 17), plain(12, 500.0))

    def test_llama3_by_wavelength(self):
        scaling = RopeScaling(
            "llama3", 8.0, original_length=8192, low_freq_factor=1.0, high_freq_factor=4.0
        )
        want = []
        for omega in plain(128, 500_000.0):
            wavelength = 2 * math.pi / omega
            if wavelength < 8192 / 4:
                want.append(omega)
            elif wavelength > 8192:
                want.append(omega / 8)
            else:
                smooth = (8192 / wavelength - 1) / (4 - 1)
                want.append((1 - smooth) * omega / 8 + smooth * omega)
        got = frequencies(128, 500_000.0, scaling)
        np.testing.assert_allclose(got, want, rtol=1e-13)
        kinds = np.round(got / plain(128, 500_000.0), 6)
        assert {1.0, 0.125} < set(kinds), "all three regions occur"

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
        for d, (omega, scaled) in enumerate(zip(plain(dim, base), got, strict=True)):
            interpolated = min(max((d - low) / (high - low), 0), 1)
            want = omega / factor * interpolated + omega * (1 - interpolated)
            assert scaled == pytest.approx(want, rel=1e-12)
            if original * omega / (2 * math.pi) > 40:
                assert scaled == pytest.approx(omega)
            if original * omega / (2 * math.pi) < 0.8:
                assert scaled == pytest.approx(omega / factor)

    def test_yarn_of_few_dimensions_is_finite(self):
        for dim, length in ((2, 4), (4, 1), (8, 2**30)):
            got = frequencies(dim, scaling=RopeScaling("yarn", 2.0, original_length=length))
            assert np.isfinite(got).all()
            assert (got > 0).all()


class TestRotaryState:
    def test_recorded_tables(self, x64):
        file = recorded("rope")
        got = rotary_state(jnp.arange(17), 8)
        np.testing.assert_allclose(got[:, :4], file["f64/rope_cos"][:, :4], atol=1e-14)
        np.testing.assert_allclose(got[:, 4:], file["f64/rope_sin"][:, 4:], atol=1e-14)

    def test_recorded_tables_of_yarn_with_its_magnitude(self, x64):
        file = recorded("yarn")
        scaling = RopeScaling("yarn", 4.0, original_length=64)
        got = rotary_state(jnp.arange(17), 8, scaling=scaling)
        np.testing.assert_allclose(got[:, :4], file["f64/rope_cos"][:, :4], atol=1e-14)
        np.testing.assert_allclose(got[:, 4:], file["f64/rope_sin"][:, 4:], atol=1e-14)

    def test_float32_far_away(self):
        """Angles of 10^5 radians are rounded to 2^-8; the product with them is exact to that."""
        positions = np.array([0, 1, 1000, 131_071])
        angles = positions[:, None] * np.float32(plain(16, 1e4))
        got = rotary_state(positions, 16)
        want = np.concatenate([np.cos(angles), np.sin(angles)], -1)
        np.testing.assert_allclose(got, want, atol=2**-7)
        np.testing.assert_allclose(got[:3], want[:3], atol=1e-4)

    def test_bfloat16_keeps_far_positions_apart(self):
        """In bfloat16, 257 is 256: angles must not be computed in it, states may be rounded."""
        positions = jnp.arange(256, 300)
        got = rotary_state(positions, 64, dtype=jnp.bfloat16)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(
            got, rotary_state(positions, 64, dtype=jnp.float32).astype(jnp.bfloat16)
        )
        assert len(np.unique(np.asarray(got, np.float32), axis=0)) == 44
        config = ModelConfig(5, hidden_size=64, num_heads=1, dtype="bfloat16")
        start = Rope().start(positions, config.sizes, dtype=jnp.bfloat16)
        np.testing.assert_array_equal(start, got)

    @pytest.mark.parametrize("narrow", [jnp.bfloat16, jnp.float16])
    def test_narrow_positions_are_widened_first(self, narrow):
        positions = jnp.asarray([3.0, 200.0], narrow)
        np.testing.assert_array_equal(
            rotary_state(positions, 8), rotary_state(positions.astype(jnp.float32), 8)
        )

    def test_default_type_follows_x64(self):
        assert rotary_state(jnp.arange(3), 8).dtype == jnp.float32
        with jax.enable_x64(True):
            assert rotary_state(jnp.arange(3), 8).dtype == jnp.float64
            assert rotary_state(jnp.arange(3), 8, dtype=jnp.float32).dtype == jnp.float32

    def test_batches_and_fractions(self, x64):
        positions = np.array([[0.0, 0.5], [2.25, -1.0]])
        angles = positions[..., None] * plain(6, 100.0)
        want = np.concatenate([np.cos(angles), np.sin(angles)], -1)
        np.testing.assert_allclose(rotary_state(positions, 6, 100.0), want, atol=1e-14)

    @pytest.mark.parametrize(("axes", "counts"), [(2, (2, 2)), (3, (2, 1, 1)), (4, (1, 1, 1, 1))])
    def test_coordinates_share_out_the_frequencies(self, x64, axes, counts):
        coordinates = np.random.default_rng(0).integers(0, 9, (3, 5, axes))
        angles = np.concatenate(
            [
                coordinates[..., i, None] * np.array(plain(2 * count, 50.0))
                for i, count in enumerate(counts)
            ],
            axis=-1,
        )
        got = rotary_state(coordinates, 8, 50.0, axes=axes)
        np.testing.assert_allclose(
            got, np.concatenate([np.cos(angles), np.sin(angles)], -1), atol=1e-14
        )

    def test_dynamic_scaling_takes_the_number_of_positions(self, x64):
        scaling = RopeScaling("dynamic", 2.0, original_length=4)
        for positions, axes in ((np.arange(12), 1), (np.ones((12, 2)), 2)):
            got = rotary_state(positions, 8, scaling=scaling, axes=axes)
            want = rotary_state(positions, 8, scaling=scaling, axes=axes, length=12)
            np.testing.assert_array_equal(got, want)
            assert not np.allclose(got, rotary_state(positions, 8, axes=axes))

    @pytest.mark.slow
    @pytest.mark.parametrize("options", [{}, {"axes": 3}, {"partial_rotary_factor": 0.75}])
    def test_dynamic_scaling_by_row(self, x64, options):
        """As if each row were alone, below the trained length and above, traced or not."""
        scaling = RopeScaling("dynamic", 2.0, original_length=4)
        options = {"scaling": scaling, "log_stretch": jnp.asarray(0.3), **options}
        lengths = jnp.array([[2, 4, 9]])
        positions = jnp.arange(6.0)[:, None] * jnp.arange(1, 4) if "axes" in options else range(6)
        state = functools.partial(rotary_state, jnp.asarray(positions), 8, **options)
        want = jnp.stack([state(length=n) for n in (2, 4, 9)])[None]
        assert jnp.abs(want[0, 2] - want[0, 1]).max() > 0.02
        for call in (state, jax.jit(state)):
            np.testing.assert_allclose(call(length=lengths), want, atol=1e-13)

    @pytest.mark.parametrize(
        ("positions", "dim", "axes", "words"),
        [
            (np.arange(4), 7, 1, r"head dimension must be even; got 7"),
            (np.arange(4), 0, 1, r"head dimension must be a positive integer; got 0"),
            (np.arange(4), 8.0, 1, r"head_dim must be an integer; got 8\.0"),
            (np.arange(4), 8, 0, r"axes must be a positive integer; got 0"),
            (np.zeros((4, 5)), 8, 5, r"axes must lie in 1\.\.4 .*got 5"),
            (np.arange(4), 8, 2, r"coordinates of shape \[\.\.\., T, 2\]; got \(4,\)"),
            (np.zeros((4, 3)), 8, 2, r"got \(4, 3\)"),
            (np.int32(4), 8, 1, r"got a scalar"),
            (np.ones(4, bool), 8, 1, r"positions must be integers or floats; got bool"),
            ("x", 8, 1, r"positions must be an array; got 'x'"),
            (jnp.uint32([0, 2**31]), 8, 1, r"must fit in int32; got uint32 up to 2147483648"),
        ],
    )
    def test_misuse(self, positions, dim, axes, words):
        with pytest.raises(ValueError, match=words):
            rotary_state(positions, dim, axes=axes)


CONFIG = ModelConfig(5, hidden_size=16, num_layers=3, num_heads=2)


class TestRope:
    def test_start_and_rotation(self):
        scaling = RopeScaling("linear", 2.0)
        rope = Rope(base=100.0, scaling=scaling)
        start = rope.start(jnp.arange(5), CONFIG.sizes)
        np.testing.assert_array_equal(start, rotary_state(np.arange(5), 8, 100.0, scaling=scaling))
        queries, keys = rope.rotation(start)
        assert queries is start
        assert keys is start
        assert not rope.updates(0, 3)
        assert Rope(axes=2).coordinate_axes == 2

    @pytest.mark.parametrize("kind", [Rope, Xpos])
    def test_where_positions_have_a_batch_states_have_heads(self, kind):
        places = jnp.arange(5)
        alone, batched = (
            kind().start(x, CONFIG.sizes) for x in (places, jnp.stack([places + 7, places]))
        )
        for one, two in zip(jax.tree.leaves(alone), jax.tree.leaves(batched), strict=True):
            assert (one.shape, two.shape) == ((5, 8), (2, 5, 1, 8))
            np.testing.assert_array_equal(two[1, :, 0], one)

    @pytest.mark.parametrize("factor", [1.0, 0.5])
    def test_a_learned_base(self, x64, factor):
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
        assert Rope().input_params(CONFIG.sizes) == {}

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

    def test_length_reaches_dynamic_scaling(self):
        rope = Rope(scaling=RopeScaling("dynamic", 2.0, original_length=4))
        got = rope.start(jnp.arange(5), CONFIG.sizes, length=12)
        want = rotary_state(np.arange(5), 8, scaling=rope.scaling, length=12)
        np.testing.assert_array_equal(got, want)

    def test_misuse(self):
        with pytest.raises(ValueError, match=r"rope: the rotary base must exceed 1; got 0\.5"):
            Rope(base=0.5)
        with pytest.raises(ValueError, match=r"rope: axes must be a positive integer; got 0"):
            Rope(axes=0)
        with pytest.raises(
            ValueError, match=r"rope: scaling must be of the type RopeScaling .*; got 'ntk'"
        ):
            Rope(scaling="ntk")
        with pytest.raises(ValueError, match=r"scaling\.kind must be 'yarn'; got 'linear'"):
            Yarn(scaling=RopeScaling("linear", 2.0))
        with pytest.raises(ValueError, match=r"scaling\.kind must be 'longrope'; got 'linear'"):
            LongRope(scaling=RopeScaling("linear", 2.0))
        factors = RopeScaling("longrope", 2.0, long_factor=(1, 2, 3))
        words = r"long_factor must hold one number for each of the 4 frequencies; got 3"
        with pytest.raises(ValueError, match=words):
            ModelConfig(10, 16, num_heads=2, position=LongRope(scaling=factors))
        tape = Tape(scaling=RopeScaling("longrope", 2.0), partial_rotary_factor=0.5)
        with pytest.raises(ValueError, match=r"partial_rotary_factor must be 1; got 0\.5"):
            ModelConfig(10, 16, num_heads=2, position=tape)
        with pytest.raises(ValueError, match=r"scaling\.kind must be 'proportional'; got 'linear'"):
            PRope(scaling=RopeScaling("linear", 2.0))


class TestMRope:
    def test_equal_coordinates_are_rope(self):
        positions = jnp.broadcast_to(jnp.arange(5)[:, None], (5, 3))
        got = MRope(interleaved=True).start(positions, CONFIG.sizes)
        np.testing.assert_array_equal(got, Rope().start(jnp.arange(5), CONFIG.sizes))

    def test_misuse(self):
        with pytest.raises(ValueError, match=r"mrope: axes must exceed 1; got 1"):
            MRope(axes=1)
        with pytest.raises(ValueError, match=r"one number for each of the 3 axes; got \(4, 4\)"):
            MRope(sections=(4, 4))
        with pytest.raises(ValueError, match=r"sections must be an integer from 0 on; got -1"):
            MRope(sections=(4, 1, -1))
        with pytest.raises(ValueError, match=r"\(16, 24, 24\) must add up to the 4 frequencies"):
            ModelConfig(10, 16, num_heads=2, position=MRope(sections=(16, 24, 24)))
        with pytest.raises(
            ValueError, match=r"expects positions of shape \[\.\.\., T, 3\]; got \(5,\)"
        ):
            MRope().start(jnp.arange(5), CONFIG.sizes)


class TestXpos:
    def test_recorded_tables(self, x64):
        """The reference's scales are 1 in the middle of its longest sequence, ours of this one."""
        file = recorded("xpos")
        queries, keys = Xpos().start(jnp.arange(17), CONFIG.sizes, dtype=jnp.float64)
        q, k = (np.asarray(x[:, :4]) + 1j * np.asarray(x[:, 4:]) for x in (queries, keys))
        np.testing.assert_allclose(np.angle(q / k), 0, atol=1e-14)
        freqs = file["f64/xpos_freqs"][:, :4]
        np.testing.assert_allclose(np.angle(q * np.exp(-1j * freqs)), 0, atol=1e-12)
        scale = file["f64/xpos_scale"][:, :4]
        middle = np.sqrt(scale[8] * scale[9])
        np.testing.assert_allclose(np.abs(q), scale / middle, rtol=1e-12)
        np.testing.assert_allclose(np.abs(k), middle / scale, rtol=1e-12)

    def test_logits_decay_with_distance(self, x64):
        """The fastest frequency by ``(0.4 / 1.4)^(n / 512)`` over n tokens."""
        queries, keys = Xpos(scale_base=512.0).start(
            jnp.array([0, 512, 1024]), CONFIG.sizes, dtype=jnp.float64
        )
        product = np.hypot(queries[:, 0], queries[:, 4]) * np.hypot(keys[0, 0], keys[0, 4])
        np.testing.assert_allclose(product, [1, 0.4 / 1.4, (0.4 / 1.4) ** 2], rtol=1e-12)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("dtype", "length"), [("float16", 22_000), ("bfloat16", 258_000), ("float32", 258_000)]
    )
    def test_scales_are_numbers_at_every_length(self, dtype, length):
        """Products of near tokens are what they are anywhere else; where they cannot be, no number.

        The scale of a key would be exp(1.25 / 2048 t) from a middle at 0, which overflows float16
        at 18,000 tokens and float32 at 145,000.
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

    def test_coordinates_decay_with_their_mean(self, x64):
        plain = Xpos().start(jnp.array([3.0]), CONFIG.sizes, dtype=jnp.float64)[0]
        got = Xpos(axes=2).start(jnp.array([[2.0, 4.0]]), CONFIG.sizes, dtype=jnp.float64)[0]
        modulus = [np.hypot(x[:, :4], x[:, 4:]) for x in (plain, got)]
        np.testing.assert_allclose(*modulus, rtol=1e-12)


def drawn(state) -> np.ndarray:
    """Positions read off a state of two frequencies, 1 and 0.01."""
    state = np.asarray(state, np.float64)
    return np.round(np.arctan2(state[..., 3], state[..., 1]) * 100).astype(int)


class TestRandomRope:
    CONFIG = ModelConfig(5, hidden_size=4, num_layers=3, num_heads=1)

    def draw(self, length, key=None, **options):
        encoding = RandomRope(range=300, **options)
        return encoding.start(jnp.arange(length), self.CONFIG.sizes, key=key)

    @pytest.mark.slow
    def test_draws_are_sorted_in_range_and_without_repeats(self):
        firsts, lasts = [], []
        for seed in range(20):
            got = drawn(self.draw(60, jax.random.key(seed)))
            assert (np.diff(got) > 0).all()
            firsts.append(got[0])
            lasts.append(got[-1])
        assert 0 <= min(firsts) < 5
        assert 295 < max(lasts) < 300
        np.testing.assert_array_equal(drawn(self.draw(300)), np.arange(300))

    def test_the_draw_follows_the_key_and_is_fixed_without_one(self):
        fixed = self.draw(60)
        np.testing.assert_array_equal(fixed, self.draw(60))
        assert not np.array_equal(fixed, self.draw(60, seed=1))
        one, other = (self.draw(60, jax.random.key(seed)) for seed in (0, 1))
        assert not np.array_equal(one, other)
        np.testing.assert_array_equal(one, self.draw(60, jax.random.key(0)))

    def test_positions_index_the_draw(self):
        encoding = RandomRope(range=300)
        all_of_them = encoding.start(jnp.arange(8), self.CONFIG.sizes, length=8)
        some = encoding.start(jnp.array([[2, 5], [7, 0]]), self.CONFIG.sizes, length=8)
        np.testing.assert_array_equal(some[:, :, 0], np.asarray(all_of_them)[[[2, 5], [7, 0]]])

    @pytest.mark.slow
    @pytest.mark.parametrize("each_layer", [False, True])
    def test_rows_draw_for_their_own_length(self, each_layer):
        """As if each were alone; what is beyond it is refused or, if not known yet, NaN."""
        encoding = RandomRope(range=300, each_layer=each_layer)

        def start(positions, length):
            state = encoding.start(
                positions, self.CONFIG.sizes, length=length, key=jax.random.key(3)
            )
            return state[0] if each_layer else state

        lengths = jnp.array([4, 1, 300, 301])
        batch = jnp.squeeze(jax.jit(start)(jnp.arange(4), lengths), -2)
        for i, length in enumerate((4, 1, 300)):
            alone = start(jnp.arange(min(length, 4)), length)
            np.testing.assert_array_equal(batch[..., i, : alone.shape[-2], :], alone)
        assert jnp.isnan(batch[..., 1, 1:, :]).all()
        assert jnp.isnan(batch[..., 3, :, :]).all()
        with pytest.raises(ValueError, match=r"positions must lie in 0 \.\. 0; got 1"):
            start(jnp.arange(4), lengths[:2])
        with pytest.raises(ValueError, match=r"301 positions do not fit"):
            start(jnp.arange(4), lengths)

    def test_one_draw_per_layer(self):
        tables, layer = self.draw(20, jax.random.key(0), each_layer=True)
        assert tables.shape == (3, 20, 4)
        draws = drawn(tables)
        assert (np.diff(draws, axis=-1) > 0).all()
        assert len(np.unique(draws, axis=0)) == 3
        encoding = RandomRope(range=300, each_layer=True)
        assert encoding.updates(2, 3)
        state = (tables, layer)
        for i in range(3):
            queries, keys = encoding.rotation(state)
            np.testing.assert_array_equal(queries, tables[i])
            np.testing.assert_array_equal(keys, tables[i])
            state = encoding.update_state({}, state, None, jnp.zeros((20, 4)))

    def test_one_draw_serves_all_layers_otherwise(self):
        assert not RandomRope().updates(0, 3)
        assert RandomRope(range=17).max_length() == 17

    def test_misuse(self):
        with pytest.raises(ValueError, match=r"301 positions do not fit into range = 300"):
            self.draw(301)
        with pytest.raises(ValueError, match=r"301 positions"):
            RandomRope(range=300).start(jnp.arange(5), self.CONFIG.sizes, length=301)
        with pytest.raises(ValueError, match=r"random_rope: positions must be integers"):
            RandomRope().start(jnp.arange(5.0), self.CONFIG.sizes)
        with pytest.raises(ValueError, match=r"one coordinate is drawn per token; got 2"):
            RandomRope(axes=2)
        with pytest.raises(ValueError, match=r"range must be positive; got 0"):
            RandomRope(range=0)


class TestIntegersFarAway:
    """Angles of integers are exact, however large they are."""

    PLACES = (0, 7, 4095, 4096, 10**6, 2**24, 2**24 + 1, 2**31 - 1, -(2**24) - 3, -(2**31))

    def wanted(self, scaling=None):
        turn = fractions.Fraction(2 * math.pi)
        omega = [fractions.Fraction(x) for x in frequencies(64, scaling=scaling)]
        angle = np.array([[float(p * x % turn) for x in omega] for p in self.PLACES])
        state = np.concatenate([np.cos(angle), np.sin(angle)], axis=-1)
        return state * (scaling or RopeScaling()).state_magnitude

    @pytest.mark.mostly_slow
    @pytest.mark.parametrize(
        ("scaling", "wide"),
        [(None, False), (RopeScaling("yarn", 4.0, original_length=64), True)],
    )
    def test_states(self, scaling, wide):
        with jax.enable_x64(wide):
            p = jnp.asarray(self.PLACES, jnp.int64 if wide else jnp.int32)
            state = functools.partial(rotary_state, head_dim=64, scaling=scaling, dtype=jnp.float32)
            for call in (state, jax.jit(state)):
                found = call(p)
                np.testing.assert_allclose(found[3:], self.wanted(scaling)[3:], atol=1e-6)
                np.testing.assert_allclose(found[:3], self.wanted(scaling)[:3], atol=3e-4)

    def test_sinusoids(self):
        p = jnp.asarray(self.PLACES, jnp.int32)
        found = sinusoids(p, 64)
        want = np.stack(np.split(self.wanted(), 2, axis=-1)[::-1], axis=-1).reshape(len(p), -1)
        np.testing.assert_allclose(found[3:], want[3:], atol=1e-6)

    def test_what_cannot_be_told_apart_is_nan(self):
        stretch = jnp.float32(0.1)
        state = rotary_state(jnp.array([5, 2**24]), 8, log_stretch=stretch)
        assert np.isfinite(state[0]).all()
        assert np.isnan(state[1]).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partial_rotary_factor": -1}, "partial_rotary_factor is a share from 0 to 1; got -1"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor is a share from 0 to 1; got 2"),
        ({"base": -1e4}, "the rotary base must exceed 1; got -10000"),
        ({"scaling": "linear"}, "scaling must be of the type RopeScaling or None; got 'linear'"),
        (
            {"dtype": jnp.int32},
            "unknown (rotary|tensor)_state: dtype 'int32': expected one of None, 'float32'",
        ),
        ({"dtype": "x"}, "dtype must be a type of numbers; got 'x'"),
        ({"axes": 0}, "axes must be a positive integer; got 0"),
        ({"axes": True}, "axes must be an integer; got True"),
        ({"base": np.inf}, "base must be a finite number; got inf"),
        ({"partial_rotary_factor": "a"}, "partial_rotary_factor must be a finite number; got 'a'"),
        ({"length": 4.5}, r"length must be an integer or integers .*; got float32 of shape \(\)"),
        ({"length": True}, "length must be positive; got True"),
        ({"length": "x"}, "length must be an integer or an array or None; got 'x'"),
        (
            {"log_stretch": np.ones(3)},
            r"log_stretch must be a scalar .*; got float32 of shape \(3,\)",
        ),
        ({"log_stretch": 1j}, "log_stretch must be a scalar floating-point array; got complex64"),
        ({"length": -1}, "length must be positive; got -1"),
    ],
)
@pytest.mark.parametrize("state", [rotary_state, tensor_state])
def test_a_state_has_the_checks_of_the_encoding(state, options, words):
    with pytest.raises(ValueError, match=words):
        state(jnp.arange(4), 8, **options)
