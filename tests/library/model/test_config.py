"""Configurations: what they derive, what they refuse, and the words they refuse it in."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import Experts, ModelConfig, RopeScaling
from tape_jax._src.core.checks import choose, from_mapping, nearest, require
from tape_jax._src.model.config import Lora
from tape_jax.positions import Alibi, Rope, Tape


@dataclasses.dataclass(frozen=True)
class Mutable(Rope):
    """An encoding that cannot be a key."""

    extra: list = dataclasses.field(default_factory=list)


def test_nearest():
    assert nearest("fier", ["alibi", "fire"]) == " (did you mean 'fire'?)"
    assert nearest("zzzzz", ["alibi", "fire"]) == ""
    assert nearest(3, [2, 33]) == " (did you mean '33'?)"


def test_choose_names_the_alternatives_and_the_nearest():
    choose("form", "tensor", ("rotary", "tensor"))
    choose("form", None, (None, "tensor"))
    with pytest.raises(ValueError) as caught:
        choose("form", "tensr", ("rotary", "tensor"))
    assert str(caught.value) == (
        "unknown form 'tensr': expected one of 'rotary', 'tensor' (did you mean 'tensor'?)"
    )
    with pytest.raises(ValueError, match=r"unknown form \['rotary'\]"):
        choose("form", ["rotary"], ("rotary", "tensor"))


def test_require():
    require(True, "unused")
    with pytest.raises(ValueError, match=r"^the message$"):
        require(False, "the message")


def test_from_mapping():
    scaling = from_mapping(RopeScaling, {"kind": "linear", "factor": 2.0}, what="scaling")
    assert scaling == RopeScaling("linear", 2.0)
    with pytest.raises(
        ValueError,
        match=r"unknown field 'facto' of scaling \(did you mean 'factor'\?\); fields: ki",
    ):
        from_mapping(RopeScaling, {"facto": 2.0}, what="scaling")


class TestRopeScaling:
    def test_state_magnitude(self):
        assert RopeScaling().state_magnitude == 1.0
        assert RopeScaling("linear", 8.0, magnitude=3.0).state_magnitude == 1.0
        yarn = RopeScaling("yarn", 8.0)
        assert yarn.state_magnitude == pytest.approx(0.1 * math.log(8) + 1)
        assert dataclasses.replace(yarn, factor=0.5).state_magnitude == 1.0
        assert dataclasses.replace(yarn, magnitude=1.3).state_magnitude == 1.3
        longrope = RopeScaling("longrope", 8.0, original_length=64)
        assert longrope.state_magnitude == pytest.approx(math.sqrt(1.5))
        assert dataclasses.replace(longrope, factor=0.5).state_magnitude == 1.0

    def test_numbers_of_jax_can_be_hashed(self):
        config = ModelConfig(10, norm_eps=jnp.float32(1e-5), tie_embeddings=np.bool_(True))
        assert type(config.norm_eps) is float
        assert hash(config) == hash(dataclasses.replace(config))

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"kind": "yarm"}, r"unknown rope scaling 'yarm'.*did you mean 'yarn'"),
            ({"factor": 0.0}, r"factor must be positive; got 0\.0"),
            ({"factor": float("nan")}, r"factor must be a finite number; got nan"),
            ({"original_length": 0}, r"original_length must be a positive integer; got 0"),
            ({"original_length": 2.5}, r"original_length must be a positive integer; got 2\.5"),
            ({"factor": "a"}, r"rope scaling: factor must be a finite number; got 'a'"),
            ({"magnitude": float("inf")}, r"magnitude must be a finite number or None; got inf"),
            ({"truncate": "no"}, r"truncate must be True or False; got 'no'"),
            ({"kind": "longrope", "original_length": 1}, r"original_length above 1; got 1"),
            ({"kind": "longrope", "long_factor": 3.0}, r"must be a tuple of numbers; got 3\.0"),
            ({"kind": "longrope", "long_factor": (1, 0)}, r"must be positive; got \(1, 0\)"),
            (
                {"kind": "yarn", "short_factor": (2,)},
                r"short_factor and long_factor are of the kind 'longrope'; .* with 'yarn'",
            ),
            ({"beta_slow": 0}, r"beta_slow must be positive; got 0"),
            ({"beta_fast": 1}, r"beta_fast 1\.0 must exceed beta_slow 1\.0"),
            (
                {"low_freq_factor": 4.0, "high_freq_factor": 4.0},
                r"high_freq_factor 4\.0 must exceed low_freq_factor 4\.0",
            ),
        ],
    )
    def test_misuse(self, fields, words):
        with pytest.raises(ValueError, match=words):
            RopeScaling(**fields)


class TestLora:
    def test_scale(self):
        assert Lora(rank=4, alpha=6.0).scale == 1.5

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"rank": 0}, r"rank must be a positive integer; got 0"),
            ({"rank": 2.0}, r"rank must be a positive integer; got 2\.0"),
            ({"targets": ()}, r"targets must be a tuple of names of projections; got \(\)"),
            ({"rank": True}, r"rank must be a positive integer; got True"),
            ({"targets": "q"}, r"targets must be a tuple of names of projections; got 'q'"),
            ({"targets": ("q", "o_proj")}, r"unknown lora target 'o_proj': expected one of 'q'"),
        ],
    )
    def test_misuse(self, fields, words):
        with pytest.raises(ValueError, match=words):
            Lora(**fields)


class TestExperts:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"count": 0}, r"count must be a positive integer; got 0"),
            ({"count": 4.0}, r"count must be an integer; got 4\.0"),
            ({"count": 4, "per_token": 0}, r"per_token must be a positive integer; got 0"),
            ({"count": 4, "per_token": 5}, r"per_token = 5 exceeds count = 4"),
            ({"count": 4, "per_token": 1}, r"learns nothing; give normalize=False"),
            ({"count": 4, "balance": -0.1}, r"balance must not be negative; got -0\.1"),
            ({"count": 4, "z": -1}, r"z must not be negative; got -1"),
        ],
    )
    def test_misuse(self, fields, words):
        with pytest.raises(ValueError, match=words):
            Experts(**fields)


class TestModelConfig:
    def test_derived_sizes(self):
        c = ModelConfig(10, hidden_size=24, num_heads=4)
        assert (c.dim, c.kv_heads, c.mlp_size) == (6, 4, 96)
        assert c.embedding_std == pytest.approx(24**-0.5)
        c = ModelConfig(
            10,
            hidden_size=24,
            num_heads=5,
            num_kv_heads=1,
            head_dim=8,
            intermediate_size=7,
            init_scale=0.02,
        )
        assert (c.dim, c.kv_heads, c.mlp_size, c.embedding_std) == (8, 1, 7, 0.02)

    def test_is_a_frozen_hashable_value(self):
        a, b = ModelConfig(10), ModelConfig(10)
        assert a == b
        assert hash(a) == hash(b)
        assert hash(dataclasses.replace(a, position="rope")) != hash(a)
        with pytest.raises(dataclasses.FrozenInstanceError):
            a.vocab_size = 3

    def test_is_kept_in_one_form(self):
        want = ModelConfig(
            10, num_layers=2, head_dim=8, dtype="bfloat16", param_dtype="float16",
            state_dtype="float32", position=Tape(norm="rms", layers=(0, 1)),
            attention_implementation=("chunked", "reference"), lora=Lora(rank=2, targets=("q",)),
        )  # fmt: skip
        mapping = {"kind": "tape", "norm": "rms", "layers": [0, 1]}
        for position in (mapping, Tape(norm="rms", layers=[0, 1])):
            found = ModelConfig(
                np.int64(10), num_layers=np.int32(2), head_dim=np.array(8), dtype=jnp.bfloat16,
                param_dtype=np.float16, state_dtype=jnp.dtype("float32"), position=position,
                attention_implementation=["chunked", "reference"],
                lora=Lora(rank=np.int8(2), targets=["q"]),
            )  # fmt: skip
            assert found == want
            assert hash(found) == hash(want)
            assert repr(found) == repr(want)
        assert ModelConfig(10).position == Tape()
        assert ModelConfig(10, position="rope").position == Rope()
        again = dataclasses.replace(found, dtype=jnp.float32)
        assert (again.dtype, again.position) == ("float32", want.position)

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"position": "tpae"}, r"unknown position encoding 'tpae'.*did you mean 'tape'"),
            ({"position": {"kind": "tape", "nrom": "rms"}}, r"unknown field 'nrom'.*'norm'"),
            ({"position": RopeScaling()}, r"unknown position encoding RopeScaling"),
            ({"position": Alibi(on_heads=5)}, r"on_heads = 5 are more than the model's 4 heads"),
            (
                {"position": {"kind": "tape+fire", "still_heads": 4}},
                r"still_heads = 4 leaves none of the model's 4 state heads to rotate",
            ),
            ({"position": Mutable(extra=[1])}, r"an encoding must be hashable; Mutable\("),
            ({"attention_implementation": "chunkd"}, r"'chunkd'.*did you mean 'chunked'"),
            (
                {"attention_implementation": ("chunked", "refrence")},
                r"'refrence'.*did you mean 'reference'",
            ),
            ({"attention_implementation": ()}, r"must be a name, names or None; got \(\)"),
            ({"attention_implementation": 3}, r"must be a name, names or None; got 3"),
            ({"dtype": None}, r"unknown model dtype None"),
            ({"dtype": jnp.int32}, r"unknown model dtype 'int32'"),
            ({"vocab_size": True}, r"vocab_size must be a positive integer; got True"),
            ({"vocab_size": 0}, r"vocab_size must be a positive integer; got 0"),
            ({"hidden_size": 16.0}, r"hidden_size must be a positive integer; got 16\.0"),
            ({"num_layers": -1}, r"num_layers must be a positive integer; got -1"),
            ({"num_heads": "4"}, r"num_heads must be a positive integer; got '4'"),
            ({"num_kv_heads": 0}, r"num_kv_heads must be a positive integer or None; got 0"),
            ({"head_dim": 0}, r"head_dim must be a positive integer or None; got 0"),
            ({"intermediate_size": 1.5}, r"intermediate_size must be .* got 1\.5"),
            ({"max_length": 0}, r"max_length must be a positive integer or None; got 0"),
            (
                {"local_window_size": -1},
                r"local_window_size must be an integer from 0 on; got -1",
            ),
            ({"num_kv_heads": 3}, r"num_heads = 4 is not a multiple of num_kv_heads = 3"),
            ({"num_kv_heads": 8}, r"num_heads = 4 is not a multiple of num_kv_heads = 8"),
            ({"hidden_size": 18}, r"hidden_size = 18 is not a multiple of num_heads = 4; give he"),
            ({"head_dim": 7}, r"the head dimension must be even; got 7"),
            ({"hidden_size": 12}, r"the head dimension must be even; got 3"),
            ({"dtype": "float23"}, r"unknown model dtype 'float23'.*did you mean 'float32'"),
            ({"param_dtype": "int8"}, r"unknown model param_dtype 'int8'"),
            ({"state_dtype": "float16"}, r"unknown model state_dtype 'float16'"),
            ({"remat": "dot"}, r"unknown remat policy 'dot'.*did you mean 'dots'"),
            ({"shifted_groups": 0}, r"shifted_groups must be a positive integer or None; got 0"),
            ({"shifted_groups": 4, "num_kv_heads": 1}, r"must be even; got 1 key/value heads"),
            ({"experts": 2}, r"experts must be an Experts or None; got 2"),
            (
                {"experts": Experts(4), "lora": Lora(targets=("q", "down"))},
                r"low-rank terms are for projections that .* got lora.targets = \('q', 'down'\)",
            ),
            ({"tie_embeddings": "false"}, r"tie_embeddings must be True or False; got 'false'"),
            ({"scan_layers": 1}, r"scan_layers must be True or False; got 1"),
            ({"norm_eps": -1.0}, r"norm_eps must be a number from 0 on; got -1\.0"),
            ({"norm_eps": math.nan}, r"norm_eps must be a number from 0 on; got nan"),
            ({"init_scale": "1"}, r"init_scale must be a number from 0 on or None; got '1'"),
            ({"lora": {"rnk": 2}}, r"unknown field 'rnk' of model: lora .did you mean 'rank'"),
            ({"lora": 2}, r"lora must be a Lora or None; got 2"),
        ],
    )
    def test_misuse(self, fields, words):
        with pytest.raises(ValueError, match=words):
            ModelConfig(**{"vocab_size": 10, **fields})
