"""Configurations: what they derive, what they refuse, and the words they refuse it in."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import Experts, ModelConfig, RopeScaling
from tape_jax._src.model.config import Lora
from tape_jax.positions import Alibi, Rope, Tape


@dataclasses.dataclass(frozen=True)
class Mutable(Rope):
    """An encoding that cannot be a key."""

    extra: list = dataclasses.field(default_factory=list)


def test_state_magnitude():
    assert RopeScaling().state_magnitude == 1.0
    assert RopeScaling("linear", 8.0, magnitude=3.0).state_magnitude == 1.0
    yarn = RopeScaling("yarn", 8.0)
    assert yarn.state_magnitude == pytest.approx(0.1 * math.log(8) + 1)
    assert dataclasses.replace(yarn, factor=0.5).state_magnitude == 1.0
    assert dataclasses.replace(yarn, magnitude=1.3).state_magnitude == 1.3
    longrope = RopeScaling("longrope", 8.0, original_length=64)
    assert longrope.state_magnitude == pytest.approx(math.sqrt(1.5))
    assert dataclasses.replace(longrope, factor=0.5).state_magnitude == 1.0


def test_is_kept_in_one_form():
    want = ModelConfig(
        10, num_layers=2, head_dim=8, dtype="bfloat16", param_dtype="float16",
        state_dtype="float32", position=Tape(norm="rms", layers=(0, 1)),
        attention_implementation=("chunked", "reference"), lora=Lora(rank=2, targets=("q",)),
        norm_eps=0.25, tie_embeddings=True,
    )  # fmt: skip
    mapping = {"kind": "tape", "norm": "rms", "layers": [0, 1]}
    for position in (mapping, Tape(norm="rms", layers=[0, 1])):
        found = ModelConfig(
            np.int64(10), num_layers=np.int32(2), head_dim=np.array(8), dtype=jnp.bfloat16,
            param_dtype=np.float16, state_dtype=jnp.dtype("float32"), position=position,
            attention_implementation=["chunked", "reference"],
            lora=Lora(rank=np.int8(2), targets=["q"]), norm_eps=jnp.float32(0.25),
            tie_embeddings=np.bool_(True),
        )  # fmt: skip
        assert found == want
        assert hash(found) == hash(want)
        assert repr(found) == repr(want)
    assert ModelConfig(10).position == Tape()
    assert ModelConfig(10, position="rope").position == Rope()
    again = dataclasses.replace(found, dtype=jnp.float32)
    assert (again.dtype, again.position) == ("float32", want.position)
    with pytest.raises(dataclasses.FrozenInstanceError):
        want.vocab_size = 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "yarm"}, r"unknown rope scaling 'yarm'.*did you mean 'yarn'"),
        ({"factor": 0.0}, r"factor must be positive; got 0\.0"),
        ({"kind": "longrope", "magnitude": 0.0}, r"magnitude must be positive; got 0\.0"),
        ({"kind": "yarn", "magnitude": -1.0}, r"magnitude must be positive; got -1\.0"),
        ({"original_length": 2.5}, r"original_length must be a positive integer; got 2\.5"),
        ({"magnitude": float("inf")}, r"magnitude must be a finite number or None; got inf"),
        ({"truncate": "no"}, r"truncate must be True or False; got 'no'"),
        ({"kind": "longrope", "original_length": 1}, r"original_length above 1; got 1"),
        ({"kind": "longrope", "long_factor": (1, 0)}, r"must be positive; got \(1, 0\)"),
        ({"kind": "yarn", "short_factor": (2,)}, r"are of the kind 'longrope'; .* with 'yarn'"),
        ({"beta_fast": 1}, r"beta_fast 1\.0 must exceed beta_slow 1\.0"),
        ({"low_freq_factor": 4.0, "high_freq_factor": 4.0}, r"must exceed low_freq_factor 4\.0"),
    ],
)
def test_misuse_of_scaling(fields, words):
    with pytest.raises(ValueError, match=words):
        RopeScaling(**fields)


@pytest.mark.parametrize(
    ("of", "fields", "words"),
    [
        (Lora, {"rank": 2.0}, r"rank must be a positive integer; got 2\.0"),
        (Lora, {"targets": "q"}, r"targets must be a tuple of names of projections; got 'q'"),
        (Lora, {"targets": ("q", "o_proj")}, r"unknown lora target 'o_proj': expected one of 'q'"),
        (Experts, {"count": 4, "per_token": 5}, r"per_token = 5 exceeds count = 4"),
        (Experts, {"count": 4, "per_token": 1}, r"learns nothing; give normalize=False"),
        (Experts, {"count": 4, "balance": -0.1}, r"balance must not be negative; got -0\.1"),
    ],
)
def test_misuse_of_parts(of, fields, words):
    with pytest.raises(ValueError, match=words):
        of(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"position": "tpae"}, r"unknown position encoding 'tpae'.*did you mean 'tape'"),
        ({"position": {"kind": "tape", "nrom": "rms"}}, r"unknown field 'nrom'.*'norm'"),
        ({"position": RopeScaling()}, r"unknown position encoding RopeScaling"),
        ({"position": Tape(layers=(1, 4)), "num_layers": 3}, r"\(1, 4\) goes past .* 3 layers"),
        ({"position": Tape(form="tensor", l=3), "head_dim": 8}, r"l = 3 does not divide the head"),
        ({"position": Alibi(on_heads=5)}, r"on_heads = 5 are more than the model's 4 heads"),
        ({"position": {"kind": "tape+fire", "still_heads": 4}}, r"leaves none of .* 4 state heads"),
        ({"position": Mutable(extra=[1])}, r"an encoding must be hashable; Mutable\("),
        ({"attention_implementation": ("chunked", "refrence")}, r"did you mean 'reference'"),
        ({"dtype": None}, r"unknown model dtype None"),
        ({"vocab_size": True}, r"vocab_size must be a positive integer; got True"),
        ({"num_kv_heads": 0}, r"num_kv_heads must be a positive integer or None; got 0"),
        ({"local_window_size": -1}, r"local_window_size must be an integer from 0 on; got -1"),
        ({"num_kv_heads": 3}, r"num_heads = 4 is not a multiple of num_kv_heads = 3"),
        ({"hidden_size": 18}, r"hidden_size = 18 is not a multiple of num_heads = 4; give he"),
        ({"head_dim": 7}, r"the head dimension must be even; got 7"),
        ({"state_dtype": "float16"}, r"unknown model state_dtype 'float16'"),
        ({"remat": "dot"}, r"unknown remat policy 'dot'.*did you mean 'dots'"),
        ({"remat": "groups", "scan_layers": False}, r"'groups' needs scan_layers=True and exp"),
        ({"remat": "groups", "experts": Experts(2)}, r"'groups' needs scan_layers=True and exp"),
        ({"shifted_groups": 4, "num_kv_heads": 1}, r"must be even; got 1 key/value heads"),
        ({"experts": Experts(4), "lora": Lora(targets=("q", "down"))}, r"got lora.targets = \('q'"),
        ({"tie_embeddings": "false"}, r"tie_embeddings must be True or False; got 'false'"),
        ({"norm_eps": math.nan}, r"norm_eps must be a number from 0 on; got nan"),
        ({"init_scale": "1"}, r"init_scale must be a number from 0 on or None; got '1'"),
        ({"experts": {"per_token": 2}}, r"model: experts lacks count; got {'per_token': 2}"),
        ({"lora": {"rnk": 2}}, r"unknown field 'rnk' of model: lora .did you mean 'rank'"),
        ({"parallel_block": True, "norms": "both"}, r"needs norms = 'before'; got norms = 'both'"),
        ({"activation": "swish"}, r"activation.*'swish'"),
        ({"logit_softcap": 0}, r"logit_softcap must be positive; got 0"),
        ({"position": "path", "logit_softcap": 2.0}, r"softcap = 2.0 .* 'path' makes its logits"),
    ],
)
def test_misuse(fields, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig(**{"vocab_size": 10, **fields})
