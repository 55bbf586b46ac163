"""Encodings added to the embeddings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig
from tape_jax._src.positions.fixed.additive import sinusoids
from tape_jax.positions import Abacus, Learned, Sinusoidal
from tests import models
from tests.paths import GOLDEN

CONFIG = ModelConfig(20, hidden_size=32, num_heads=4)


class TestSinusoidal:
    def test_recorded_table(self, x64):
        with np.load(GOLDEN / "sincos_tiny.npz") as archive:
            want = archive["f64/sinusoid"]
        np.testing.assert_allclose(
            sinusoids(jnp.arange(17), 32, dtype=jnp.float64), want, atol=1e-14
        )
        got = Sinusoidal().embed({}, jnp.arange(17), CONFIG.sizes, None)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, atol=1e-5)

    def test_an_odd_width_ends_with_a_sine(self, x64):
        got = sinusoids(jnp.array([[2, 3]]), 5, base=100.0, dtype=jnp.float64)
        for place, row in zip((2, 3), got[0], strict=True):
            rates = [100.0 ** (-i / 5) for i in (0, 2, 4)]
            want = [f(place * rate) for rate in rates for f in (np.sin, np.cos)][:5]
            np.testing.assert_allclose(row, want, atol=1e-14)

    def test_bfloat16_models_compute_angles_in_float32(self):
        config = ModelConfig(20, hidden_size=32, num_heads=4, dtype="bfloat16")
        got = Sinusoidal().embed({}, jnp.arange(1000, 1004), config, None)
        np.testing.assert_array_equal(got, sinusoids(jnp.arange(1000, 1004), 32))
        assert len(np.unique(got, axis=0)) == 4


class TestLearned:
    def test_reads_the_table(self):
        learned = Learned(size=7)
        assert learned.input_params(CONFIG.sizes)["table"].shape == (7, 32)
        table = jnp.arange(14.0).reshape(7, 2)
        got = learned.embed({"table": table}, jnp.array([[3, 0]]), CONFIG.sizes, None)
        np.testing.assert_array_equal(got, [[[6, 7], [0, 1]]])

    def test_sequences_longer_than_the_table_are_refused(self):
        model = models.small_model(Learned(size=5))
        variables = models.random_variables(model)
        with pytest.raises(ValueError, match=r"6 tokens exceeds .*'learned' of 5"):
            model.apply(variables, jnp.zeros((1, 6), int))
        assert jax.eval_shape(model.apply, variables, jnp.zeros((1, 5), int)).shape == (1, 5, 13)

    def test_misuse(self):
        with pytest.raises(ValueError, match=r"learned: size must be positive; got 0"):
            Learned(size=0)
        with pytest.raises(ValueError, match=r"learned: positions must be integers.*float32"):
            Learned().embed({"table": jnp.ones((3, 2))}, jnp.arange(3.0), CONFIG.sizes, None)


def places(tokens, segment_ids=None, digits=(4, 5, 6, 7)):
    tokens = jnp.asarray(tokens)
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids)
    got = Abacus(digits=digits).coordinates(tokens, jnp.zeros_like(tokens), segment_ids)
    return got.tolist()


class TestAbacus:
    PAD, PLUS = 0, 2

    @pytest.mark.parametrize(
        ("tokens", "want"),
        [
            ([4, 5, 6, 2, 7, 7, 3, 4], [1, 2, 3, 0, 1, 2, 0, 1]),
            ([0, 0, 0, 4, 4, 2, 4], [0, 0, 0, 1, 2, 0, 1]),
            ([4, 4, 4], [1, 2, 3]),
            ([2, 0, 1], [0, 0, 0]),
            ([7], [1]),
        ],
        ids=["several numbers", "left padding", "digits only", "no digits", "one token"],
    )
    def test_places_within_numbers(self, tokens, want):
        assert places(tokens) == want

    def test_rows_are_independent_and_segments_end_numbers(self):
        assert places([[4, 4, 2], [0, 4, 4]]) == [[1, 2, 0], [0, 1, 2]]
        assert places([4, 4, 4, 4, 2, 4], [1, 1, 2, 2, 2, 2]) == [1, 2, 1, 2, 0, 1]
        assert places([4, 4, 4], [0, 0, 0]) == [1, 2, 3]
        # The first token begins a number whatever its segment.
        assert places([4, 4, 4], [5, 5, 5]) == [1, 2, 3]

    def test_what_stands_between_the_tokens_of_a_segment_does_not_end_its_numbers(self):
        assert places([4, 0, 4, 2, 4], [3, 0, 3, 3, 3]) == [1, 0, 2, 0, 1]
        assert places([4, 4, 4, 4, 2, 4], [1, 2, 1, 2, 1, 2]) == [1, 1, 2, 2, 0, 3]
        assert places([4, 2, 4, 4], [2, 1, 1, 2]) == [1, 0, 1, 2]

    def test_places_do_not_depend_on_positions(self):
        tokens = jnp.array([4, 4, 2, 4])
        abacus = Abacus(digits=(4,))
        for positions in (jnp.arange(4), jnp.arange(4) + 37):
            np.testing.assert_array_equal(abacus.coordinates(tokens, positions), [1, 2, 0, 1])

    TABLE = jnp.arange(20.0)[:, None]

    def test_one_random_offset_moves_all_digits_and_nothing_else(self):
        abacus = Abacus(size=20, digits=(4,), max_offset=3)
        coordinates = jnp.array([[0, 1, 2], [1, 0, 1]])
        offsets = set()
        for seed in range(40):
            got = abacus.embed(
                {"table": self.TABLE}, coordinates, CONFIG.sizes, jax.random.key(seed)
            )
            moved = np.asarray(got)[..., 0] - np.asarray(coordinates)
            assert moved[0, 0] == moved[1, 1] == 0
            (offset,) = set(moved[coordinates > 0])
            offsets.add(int(offset))
        assert offsets == {0, 1, 2, 3}
        fixed = abacus.embed({"table": self.TABLE}, coordinates, CONFIG.sizes, None)
        np.testing.assert_array_equal(fixed[..., 0], coordinates)

    def test_places_beyond_the_table(self):
        """Refused or, where they are traced, NaN, whatever the offset is."""
        abacus, places = Abacus(size=20, digits=(4,), max_offset=3), jnp.array([0, 16, 17, 19, 20])

        def embed(places, key):
            return abacus.embed({"table": self.TABLE}, places, CONFIG.sizes, key)[:, 0]

        np.testing.assert_array_equal(embed(places[:-1], None), [0, 16, 17, 19])
        np.testing.assert_array_equal(jax.jit(embed)(places, None), [0, 16, 17, 19, np.nan])
        with pytest.raises(ValueError, match=r"abacus: places .* must lie in 0 \.\. 19; got 20"):
            embed(places, None)
        for seed in range(5):
            key = jax.random.key(seed)
            got = jax.jit(embed)(places, key)
            np.testing.assert_array_equal(jnp.isnan(got), [False, False, True, True, True])
            np.testing.assert_array_equal(embed(places[:2], key), got[:2])
            with pytest.raises(ValueError, match=r"must lie in 0 \.\. 16; got 17"):
                embed(places[:3], key)
        assert abacus.max_length() is None

    def test_digits_are_kept_as_a_tuple_of_integers(self):
        for digits in ([4, 5], np.array([4, 5]), range(4, 6)):
            abacus = Abacus(digits=digits)
            assert hash(abacus) == hash(Abacus(digits=(4, 5)))
            assert [type(digit) for digit in abacus.digits] == [int, int]

    def test_misuse(self):
        with pytest.raises(ValueError, match=r"abacus: digits must be token ids; got '45'"):
            Abacus(digits="45")
        for digits in ((4, 20), (-1, 3)):
            with pytest.raises(ValueError, match=r"digits must be token ids in 0 \.\. 19; got \("):
                Abacus(digits=digits).check(CONFIG.sizes)
        with pytest.raises(ValueError, match=r"abacus: digits, the token ids"):
            Abacus().check(CONFIG.sizes)
        with pytest.raises(ValueError, match=r"size = 20 must exceed max_offset = 20"):
            Abacus(digits=(4,), size=20, max_offset=20).check(CONFIG.sizes)
        with pytest.raises(ValueError, match=r"abacus: size must be positive; got -1"):
            Abacus(size=-1)
