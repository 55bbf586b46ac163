"""Encodings added to the embeddings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig
from tape_jax._src.positions.fixed.additive import sinusoids
from tape_jax.positions import Abacus, Learned, Sinusoidal
from tests import models

CONFIG = ModelConfig(20, hidden_size=32, num_heads=4)


class TestSinusoidal:
    @pytest.mark.parametrize("width", [5, 6])
    def test_formula(self, x64, width):
        """An odd width ends with a sine."""
        got = sinusoids(jnp.array([[2, 3]]), width, base=100.0, dtype=jnp.float64)
        for place, row in zip((2, 3), got[0], strict=True):
            rates = [100.0 ** (-i / width) for i in (0, 2, 4)]
            want = [f(place * rate) for rate in rates for f in (np.sin, np.cos)][:width]
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
        with pytest.raises(ValueError, match=r"learned: positions must be integers.*float32"):
            learned.embed({"table": table}, jnp.arange(3.0), CONFIG.sizes, None)

    def test_sequences_longer_than_the_table_are_refused(self):
        model = models.small_model(Learned(size=5))
        variables = models.random_variables(model)
        with pytest.raises(ValueError, match=r"6 tokens exceeds .*'learned' of 5"):
            jax.eval_shape(model.apply, variables, jnp.zeros((1, 6), int))
        assert jax.eval_shape(model.apply, variables, jnp.zeros((1, 5), int)).shape == (1, 5, 13)


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
        tokens = np.array(tokens)
        ids = None if segment_ids is None else np.array(segment_ids)
        # Positions say nothing.
        found = jax.jit(Abacus(digits=(4, 5, 6, 7)).coordinates)(tokens, tokens + 37, ids)
        assert found.tolist() == want

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
        key = jax.random.key(0)
        got = jax.jit(embed)(places, key)
        np.testing.assert_array_equal(jnp.isnan(got), [False, False, True, True, True])
        np.testing.assert_array_equal(embed(places[:2], key), got[:2])
        with pytest.raises(ValueError, match=r"must lie in 0 \.\. 16; got 17"):
            embed(places[:3], key)

    def test_digits_are_kept_as_a_tuple_of_integers(self):
        for digits in ([4, 5], np.array([4, 5]), range(4, 6)):
            abacus = Abacus(digits=digits)
            assert hash(abacus) == hash(Abacus(digits=(4, 5)))
            assert [type(digit) for digit in abacus.digits] == [int, int]
