"""Biases against recorded tables and against definitions one pair at a time."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig
from tape_jax._src.positions.fixed.bias import alibi_slopes
from tape_jax.positions import Alibi, Fire, Kerple, Rope, T5Bias
from tests.paths import GOLDEN


def recorded(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}_tiny.npz") as archive:
        return {key: archive[key] for key in archive.files if not key.startswith("grad")}


def config(heads: int, **options) -> ModelConfig:
    return ModelConfig(5, hidden_size=8 * heads, num_heads=heads, **options)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "encoding", [Alibi(), Kerple(), Kerple("power"), Fire(), T5Bias()], ids=str
)
def test_integers_far_away_and_far_apart(encoding):
    """Distances are those of the integers: float32, and sums of int32, would lose them."""
    keys = (-(2**31), -5, 0, 2**31 - 1)
    specs = encoding.layer_params(config(2).sizes, updates=False)
    params = {
        name: spec.init(jax.random.key(0), spec.shape, jnp.float32) for name, spec in specs.items()
    }
    got = encoding.pair_bias(params, *[jnp.asarray(keys, jnp.int32)] * 2, config(2).sizes)
    with jax.enable_x64(True):
        wide = {name: x.astype(jnp.float64) for name, x in params.items()}
        sizes = config(2, dtype="float64").sizes
        want = encoding.pair_bias(wide, *[jnp.asarray(keys, jnp.int64)] * 2, sizes)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


class TestAlibi:
    def test_slopes(self):
        np.testing.assert_allclose(alibi_slopes(4), recorded("alibi")["f64/slopes"], rtol=1e-14)
        np.testing.assert_allclose(alibi_slopes(8), [2.0**-n for n in range(1, 9)], rtol=1e-14)
        # Six heads: those of four, then the first and third of eight.
        want = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
        np.testing.assert_allclose(alibi_slopes(6), want, rtol=1e-14)
        np.testing.assert_allclose(alibi_slopes(1), [2.0**-8], rtol=1e-14)

    def test_bias_is_the_recorded_one_up_to_a_constant_per_query(self):
        table = recorded("alibi")["model.layers.0.self_attn.alibi"][0, :, :, :17]
        places = jnp.arange(17)
        got = np.asarray(Alibi().pair_bias({}, places, places, config(4).sizes))
        visible = np.tril(np.ones((17, 17), bool))
        difference = np.where(visible, got - table, 0) - (got - table)[..., :1] * visible
        np.testing.assert_allclose(difference, 0, atol=1e-5)

    def test_bias_by_distance(self):
        got = Alibi().pair_bias(
            {}, jnp.array([[3], [7]]), jnp.array([[2, 9], [7, 0]]), config(2).sizes
        )
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
        kerple = Kerple(form)
        given = (jnp.asarray(query), jnp.asarray(key), config(3, dtype="float64"))
        got = kerple.pair_bias({k: jnp.asarray(x) for k, x in params.items()}, *given)
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

        found = jax.grad(loss)(params)
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
        with pytest.raises(ValueError, match=r"unknown kerple form 'pow'.*did you mean 'power'"):
            Kerple("pow")


class TestFire:
    def params(self, file):
        name = "model.layers.0.self_attn.rotary_emb"
        return {
            "w1": file[f"{name}.mlp.0.weight"].T,
            "b1": file[f"{name}.mlp.0.bias"],
            "w2": file[f"{name}.mlp.2.weight"].T,
            "b2": file[f"{name}.mlp.2.bias"],
            "c": file[f"{name}.c"].reshape(()),
            "multiplier": (file[f"{name}.L_multiplier"] * file[f"{name}.init_L"]).reshape(()),
        }

    @pytest.mark.mostly_slow
    @pytest.mark.parametrize("precision", ["float32", "float64"])
    def test_bias_is_the_recorded_one(self, precision):
        file = recorded("fire")
        with jax.enable_x64(precision == "float64"):
            params = {k: jnp.asarray(v, precision) for k, v in self.params(file).items()}
            got = Fire(threshold=1.0).pair_bias(
                params, jnp.arange(17), jnp.arange(17), config(4, dtype=precision)
            )
        assert got.dtype == precision
        want = file["fire_bias_0" if precision == "float32" else "f64/fire_bias_0"][0]
        visible = np.tril(np.ones((17, 17), bool))
        np.testing.assert_allclose(
            *(np.where(visible, x, 0) for x in (got, want)),
            atol=1e-12 if precision == "float64" else 1e-5,
        )

    def test_a_threshold_of_tokens_enters_as_written(self, x64):
        """``MLP(log(c (i - j) + 1) / (log(c max(i, L) + 1) + eps))``, one pair at a time."""
        rng = np.random.default_rng(0)
        fire = Fire(width=3, threshold=6.0, c=0.2, eps=1e-3)
        specs = fire.layer_params(config(2).sizes, updates=False)
        params = {name: rng.standard_normal(spec.shape) for name, spec in specs.items()}
        params |= {"c": np.array(0.2), "multiplier": np.array(0.5)}
        got = fire.pair_bias(params, jnp.arange(6), jnp.arange(6), config(2, dtype="float64"))
        for i in range(6):
            for j in range(i + 1):
                x = math.log(0.2 * (i - j) + 1) / (math.log(0.2 * max(i, 3.0) + 1) + 1e-3)
                hidden = np.maximum(x * params["w1"][0] + params["b1"], 0)
                want = hidden @ params["w2"] + params["b2"]
                np.testing.assert_allclose(got[:, i, j], want, atol=1e-12)

    def test_parameters(self):
        specs = Fire(width=5).layer_params(config(4).sizes, updates=False)
        values = {k: s.init(jax.random.key(0), s.shape, jnp.float32) for k, s in specs.items()}
        shapes = {k: v.shape for k, v in values.items()}
        assert shapes == {
            "w1": (1, 5),
            "b1": (5,),
            "w2": (5, 4),
            "b2": (4,),
            "c": (),
            "multiplier": (),
        }
        assert (float(values["c"]), float(values["multiplier"])) == (pytest.approx(0.1), 1.0)
        with pytest.raises(ValueError, match=r"fire: width must be positive; got 0"):
            Fire(width=0)


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
    def test_buckets_are_the_recorded_ones(self):
        file = recorded("t5rb")
        distance = jnp.arange(17)[:, None] - jnp.arange(17)
        got = T5Bias(buckets=12, max_distance=20).bucket(distance)
        np.testing.assert_array_equal(got, file["t5_bucket"])

    @pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (7, 50), (2, 9)])
    def test_buckets_by_definition(self, x64, buckets, furthest):
        half = buckets // 2
        ratio = math.log(furthest / half)

        def near_an_edge(d: int) -> bool:  # Where rounding decides.
            place = math.log(max(d, half) / half) / ratio * (buckets - half)
            return d > half and abs(place - round(place)) < 1e-6

        distances = [d for d in range(-5, 300) if not near_an_edge(d)]
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

    @pytest.mark.parametrize("options", [{"buckets": 1}, {"buckets": 8, "max_distance": 4}])
    def test_misuse(self, options):
        with pytest.raises(ValueError, match=r"t5: expected buckets >= 2 and max_distance > buck"):
            T5Bias(**options)


@pytest.mark.parametrize("encoding", [Alibi(), Fire(), T5Bias()], ids=lambda e: e.kind)
def test_bfloat16_models_have_float32_biases(encoding):
    """Positions above 256 stay apart: bias 1000 tokens back differs from 1001 or not at all."""
    c = config(2, dtype="bfloat16")
    specs = encoding.layer_params(c.sizes, updates=False)
    params = {
        k: s.init(jax.random.key(0), s.shape, jnp.bfloat16) + jnp.bfloat16(0.5)
        for k, s in specs.items()
    }
    places = jnp.arange(1000, 1004)
    got = encoding.pair_bias(params, places, places, c.sizes)
    assert got.dtype == jnp.float32
    assert "bias" in encoding.acts_on
    widened = {k: v.astype(jnp.float32) for k, v in params.items()}
    np.testing.assert_array_equal(got, encoding.pair_bias(widened, places, places, config(2).sizes))
    if encoding.kind != "t5":
        assert len(np.unique(got[0, 3])) == 4


def test_other_encodings_have_no_bias():
    with pytest.raises(NotImplementedError, match=r"'rope' does not bias the logits"):
        Rope().pair_bias({}, jnp.arange(3), jnp.arange(3), config(2).sizes)
