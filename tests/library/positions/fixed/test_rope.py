"""Starts of encodings by rotary states."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, RopeScaling, rotary_state, rotate
from tape_jax._src.positions.fixed.frequencies import frequencies
from tape_jax.positions import LongRope, MRope, RandomRope, Rope, Xpos

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
            angles = np.arange(5)[:, None] * frequencies(8) / np.array(factors)
            want = math.sqrt(1 + math.log(4) / math.log(8)) * np.exp(1j * angles)
            np.testing.assert_allclose(row[:, 0, :4] + 1j * row[:, 0, 4:], want, atol=1e-6)


class TestMRope:
    def test_equal_coordinates_are_rope(self):
        positions = jnp.broadcast_to(jnp.arange(5)[:, None], (5, 3))
        got = MRope(interleaved=True).start(positions, CONFIG.sizes)
        np.testing.assert_array_equal(got, Rope().start(jnp.arange(5), CONFIG.sizes))

    def test_an_axis_without_frequencies(self):
        positions = jnp.stack([jnp.arange(5), 2 * jnp.arange(5), 9 + jnp.arange(5)], axis=-1)
        mrope = MRope(sections=(2, 2, 0))
        mrope.check(CONFIG.sizes)
        found = mrope.start(positions, CONFIG.sizes)
        angles = positions[:, np.array([0, 0, 1, 1])] * frequencies(8)
        np.testing.assert_allclose(found[:, :4], np.cos(angles), atol=1e-6)

    def test_coordinates_of_text(self):
        with pytest.raises(ValueError, match=r"positions of shape \[\.\.\., T, 3\]; got \(5,\)"):
            MRope().start(jnp.arange(5), CONFIG.sizes)


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
