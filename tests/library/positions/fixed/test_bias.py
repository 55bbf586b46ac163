"""Biases against recorded tables and against definitions one pair at a time."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, init_cache
from tape_jax._src.positions.fixed.bias import alibi_slopes
from tape_jax.positions import Alibi, Encoding, Fire, Kerple, Layer, T5Bias
from tests.models import assert_near, random_tokens, random_variables, run, small_model


def config(heads: int, **options) -> ModelConfig:
    return ModelConfig(5, hidden_size=8 * heads, num_heads=heads, **options)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("encoding", [Alibi(), Kerple(), Fire(), T5Bias()], ids=lambda e: e.kind)
def test_integers_far_away_and_far_apart(encoding):
    """Distances are those of the integers: float32, and sums of int32, would lose them."""
    keys = (-(2**31), -5, 0, 2**31 - 1)
    specs = encoding.layer_params(config(2).sizes, updates=False)
    params = {
        name: spec.init(jax.random.key(0), spec.shape, jnp.float32) for name, spec in specs.items()
    }

    def bias(dtype, integers):
        sizes, at = config(2, dtype=dtype).sizes, jnp.asarray(keys, integers)
        wide = {name: x.astype(dtype) for name, x in params.items()}
        return jax.jit(lambda p: encoding.pair_bias(p, at, at, sizes))(wide)

    got = bias("float32", jnp.int32)
    with jax.enable_x64(True):
        want = bias("float64", jnp.int64)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@dataclasses.dataclass(frozen=True)
class Grid(Encoding):
    """``-(h + 1)`` times the distance of two tokens on a grid, along rows and columns."""

    kind: ClassVar[str] = "grid"
    coordinate_axes: ClassVar[int] = 2

    def pair_bias(self, params, query, key, sizes):
        apart = jnp.abs(query[..., :, None, :] - key[..., None, :, :]).sum(-1)
        return -jnp.arange(1.0, sizes.num_heads + 1)[:, None, None] * apart[..., None, :, :]


def test_a_bias_of_several_coordinates():
    """Indices are of tokens, not of coordinates."""
    at = np.random.default_rng(0).integers(0, 9, (2, 5, 2))
    layer = Layer(jnp.zeros((2, 5, 16)), jnp.asarray(at), None, True, config(2).sizes)
    queries, keys = [4, 1], [0, 3, 4]
    got = Grid().layer_terms({}, layer).bias(jnp.array(queries), jnp.array(keys))
    apart = [[[np.abs(x[i] - x[j]).sum() for j in keys] for i in queries] for x in at]
    np.testing.assert_array_equal(got, np.einsum("h,bqk->bhqk", [-1, -2], apart))


def test_a_model_with_a_bias_of_several_coordinates():
    """A cache has the coordinates of earlier tokens."""
    model = small_model(Grid(), num_layers=2)
    variables, tokens = random_variables(model), random_tokens(2, 5)
    at = jnp.asarray(np.random.default_rng(0).integers(0, 3, (2, 5, 2)))
    full = run(model, variables, tokens, positions=at)
    cache, found = init_cache(model, 2, 5), []
    for part in (slice(0, 3), slice(3, 5)):
        logits, cache = run(model, variables, tokens[:, part], positions=at[:, part], cache=cache)
        found.append(logits)
    assert_near(jnp.concatenate(found, 1), full)


class TestAlibi:
    def test_slopes(self):
        np.testing.assert_allclose(alibi_slopes(8), [2.0**-n for n in range(1, 9)], rtol=1e-14)
        # Six heads: those of four, then the first and third of eight.
        want = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
        np.testing.assert_allclose(alibi_slopes(6), want, rtol=1e-14)

    def test_bias_by_distance(self):
        queries, keys = jnp.array([[3], [7]]), jnp.array([[2, 9], [7, 0]])
        got = Alibi().pair_bias({}, queries, keys, config(2).sizes)
        distances = np.array([[[1, 6]], [[0, 7]]])
        want = -np.array([2.0**-4, 2.0**-8])[:, None, None] * distances[:, None]
        np.testing.assert_allclose(got, want, rtol=1e-6)


class TestKerple:
    @pytest.mark.parametrize("form", ["log", "power"])
    def test_one_pair_at_a_time(self, form, x64):
        rng = np.random.default_rng(0)
        # Numbers beyond the bounds count as these.
        params = {"r1": np.array([0.4, -1.0, 1.3]), "r2": np.array([0.7, 1.5, 2.6])}
        query, key = rng.uniform(0, 9, (2, 4)), rng.uniform(0, 9, (2, 5))
        sizes = config(3, dtype="float64").sizes
        got = jax.jit(lambda *given: Kerple(form).pair_bias(*given, sizes))(params, query, key)
        for b, h, i, j in np.ndindex(2, 3, 4, 5):
            r1, r2, distance = params["r1"][h], params["r2"][h], abs(query[b, i] - key[b, j])
            want = -max(r1, 0.01) * (
                math.log(1 + r2 * distance) if form == "log" else distance ** min(r2, 2)
            )
            np.testing.assert_allclose(got[b, h, i, j], want, rtol=1e-12)

    @pytest.mark.parametrize("form", ["log", "power"])
    def test_gradients(self, form):
        """Finite at distance 0; none beyond a bound, which leaves the parameter as it is."""
        places = jnp.arange(5)
        params = {"r1": jnp.array([0.4, -1.0]), "r2": jnp.array([-0.7, 2.6])}

        def loss(params):
            return jnp.sum(Kerple(form).pair_bias(params, places, places, config(2).sizes))

        found = jax.jit(jax.grad(loss))(params)
        assert found["r1"][0] < 0
        assert found["r1"][1] == 0
        assert found["r2"][0] == 0
        assert (found["r2"][1] == 0) == (form == "power")
        assert np.isfinite(found["r2"][1])

    def test_parameters(self):
        for form, most in (("log", (2, 1)), ("power", (1, 2))):
            specs = Kerple(form).layer_params(config(1000).sizes, updates=False)
            for spec, highest in zip((specs["r1"], specs["r2"]), most, strict=True):
                drawn = spec.init(jax.random.key(0), spec.shape, jnp.float32)
                assert drawn.shape == (1000,)
                assert 0 <= drawn.min() < 0.01 * highest
                assert 0.99 * highest < drawn.max() <= highest


class TestFire:
    def test_a_threshold_of_tokens_enters_as_written(self, x64):
        """``MLP(log(c (i - j) + 1) / (log(c max(i, L) + 1) + eps))``, one pair at a time."""
        rng = np.random.default_rng(0)
        fire = Fire(width=3, threshold=6.0, c=0.2, eps=1e-3)
        specs = fire.layer_params(config(2).sizes, updates=False)
        params = {name: rng.standard_normal(spec.shape) for name, spec in specs.items()}
        params |= {"c": np.array(0.2), "multiplier": np.array(0.5)}
        sizes, at = config(2, dtype="float64").sizes, jnp.arange(6)
        got = jax.jit(lambda params: fire.pair_bias(params, at, at, sizes))(params)
        for i in range(6):
            for j in range(i + 1):
                x = math.log(0.2 * (i - j) + 1) / (math.log(0.2 * max(i, 3.0) + 1) + 1e-3)
                hidden = np.maximum(x * params["w1"][0] + params["b1"], 0)
                want = hidden @ params["w2"] + params["b2"]
                np.testing.assert_allclose(got[:, i, j], want, atol=1e-12)

    def test_parameters(self):
        specs = Fire(width=5).layer_params(config(4).sizes, updates=False)
        values = {k: s.init(jax.random.key(0), s.shape, jnp.float32) for k, s in specs.items()}
        assert (float(values["c"]), float(values["multiplier"])) == (pytest.approx(0.1), 1.0)
        assert values["w2"].shape == (5, 4)


def t5_bucket(distance: int, buckets: int, furthest: int) -> int:
    """Exact up to half of the buckets, then logarithmic."""
    half = buckets // 2
    if distance < 0:
        return 0
    if distance < half:
        return distance
    place = half + math.floor(
        math.log(distance / half) / math.log(furthest / half) * (buckets - half)
    )
    return min(place, buckets - 1)


class TestT5:
    def test_buckets_by_definition(self, x64):
        for buckets, furthest in ((32, 128), (7, 50), (2, 9)):
            half = buckets // 2
            ratio = math.log(furthest / half)
            # Not where rounding decides.
            places = [math.log(max(d, half) / half) / ratio * (buckets - half) for d in range(300)]
            distances = [d for d, x in enumerate(places) if d <= half or abs(x - round(x)) > 1e-6]
            distances = [-5, -1, *distances]
            got = T5Bias(buckets, furthest).bucket(jnp.array(distances))
            np.testing.assert_array_equal(got, [t5_bucket(d, buckets, furthest) for d in distances])
            assert got.max() == buckets - 1

    def test_bias_reads_the_table(self):
        encoding = T5Bias(buckets=4, max_distance=8)
        table = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
        query, key = jnp.array([[9, 2]]), jnp.array([[0, 8, 9]])
        got = encoding.pair_bias({"table": table}, query, key, config(3).sizes)
        for i, t in enumerate((9, 2)):
            for j, s in enumerate((0, 8, 9)):
                np.testing.assert_array_equal(got[0, :, i, j], table[t5_bucket(t - s, 4, 8)])
        assert encoding.layer_params(config(3).sizes, updates=True)["table"].shape == (4, 3)


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("encoding", [Fire(), Alibi(), T5Bias()], ids=lambda e: e.kind)
def test_bfloat16_models_have_float32_biases(encoding):
    """Positions above 256 stay apart: bias 1000 tokens back differs from 1001 or not at all."""
    c = config(2, dtype="bfloat16")
    specs = encoding.layer_params(c.sizes, updates=False)
    params = {
        k: s.init(jax.random.key(0), s.shape, jnp.bfloat16) + jnp.bfloat16(0.5)
        for k, s in specs.items()
    }
    places = jnp.arange(1000, 1004)
    widened = {k: v.astype(jnp.float32) for k, v in params.items()}
    got, want = (
        jax.jit(lambda p, sizes=sizes: encoding.pair_bias(p, places, places, sizes))(given)
        for given, sizes in ((params, c.sizes), (widened, config(2).sizes))
    )
    np.testing.assert_array_equal(got, want, strict=True)
    assert got.dtype == jnp.float32
    if encoding.kind != "t5":
        assert len(np.unique(got[0, 3])) == 4
