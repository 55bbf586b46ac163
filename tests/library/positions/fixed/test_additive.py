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
            jax.eval_shape(model.apply, variables, jnp.zeros((1, 6), int))
        assert jax.eval_shape(model.apply, variables, jnp.zeros((1, 5), int)).shape == (1, 5, 13)


def places(tokens, segment_ids=None):
    abacus, tokens = Abacus(digits=(4, 5, 6, 7)), jnp.asarray(tokens)
    # Positions say nothing.
    at = jnp.arange(tokens.shape[-1]) + 37
    if segment_ids is None:
        return jax.jit(abacus.coordinates)(tokens, at).tolist()
    return jax.jit(abacus.coordinates)(tokens, at, jnp.asarray(segment_ids)).tolist()


class TestAbacus:
    @pytest.mark.parametrize(
        ("tokens", "segment_ids", "want"),
        [
            ([4, 5, 6, 2, 7, 7, 3, 4], None, [1, 2, 3, 0, 1, 2, 0, 1]),
            ([0, 0, 0, 4, 4, 2, 4, 4], None, [0, 0, 0, 1, 2, 0, 1, 2]),
            ([[4, 4, 2, 4], [0, 4, 4, 4]], None, [[1, 2, 0, 1], [0, 1, 2, 3]]),
            ([7], None, [1]),
            # Segments end numbers; the first token begins one whatever its segment.
            ([4, 4, 4, 4, 2, 4], [5, 5, 2, 2, 2, 2], [1, 2, 1, 2, 0, 1]),
            # What stands between the tokens of a segment does not end its numbers.
            ([4, 0, 4, 2, 4, 4], [3, 0, 3, 3, 3, 3], [1, 0, 2, 0, 1, 2]),
            ([4, 4, 4, 4, 2, 4], [1, 2, 1, 2, 1, 2], [1, 1, 2, 2, 0, 3]),
            ([4, 2, 4, 4, 4, 4], [2, 1, 1, 2, 0, 0], [1, 0, 1, 2, 1, 2]),
        ],
        ids=str,
    )
    def test_places_within_numbers(self, tokens, segment_ids, want):
        assert places(tokens, segment_ids) == want

    TABLE = jnp.arange(20.0)[:, None]

    def test_one_random_offset_moves_all_digits_and_nothing_else(self):
        abacus = Abacus(size=20, digits=(4,), max_offset=3)
        coordinates = jnp.array([[0, 1, 2], [1, 0, 1]])

        @jax.jit
        @jax.vmap
        def moved_by(key):
            return abacus.embed({"table": self.TABLE}, coordinates, CONFIG.sizes, key)[..., 0]

        moved = np.asarray(moved_by(jax.vmap(jax.random.key)(jnp.arange(40)))) - coordinates
        assert not moved[:, coordinates == 0].any()
        offsets = moved[:, coordinates > 0]
        assert (offsets == offsets[:, :1]).all()
        assert set(offsets[:, 0].tolist()) == {0, 1, 2, 3}
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
        for seed in range(2):
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


def checked(**options):
    return lambda: Abacus(**options).check(CONFIG.sizes)


def at_fractions():
    Learned().embed({"table": jnp.ones((3, 2))}, jnp.arange(3.0), CONFIG.sizes, None)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (at_fractions, "learned: positions must be integers.*float32"),
        (checked(digits=(4, 20)), r"digits must be token ids in 0 \.\. 19; got \("),
        (checked(digits=(-1, 3)), r"digits must be token ids in 0 \.\. 19; got \("),
        (checked(), "abacus: digits, the token ids"),
        (checked(digits=(4,), size=20, max_offset=20), "size = 20 must exceed max_offset = 20"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(ValueError, match=words):
        make()
