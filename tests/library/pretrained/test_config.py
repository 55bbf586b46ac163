"""config.json: what is read, what is written, what is refused."""

import json

import chex
import jax.numpy as jnp
import pytest

import tape_jax as tape
from tape_jax import RopeScaling
from tape_jax._src.pretrained.llama import model_config, to_json
from tests.library.pretrained.folders import config_of
from tests.models import small_model

WINDOW = {"use_sliding_window": True, "sliding_window": 4}
YARN = {"rope_type": "yarn", "factor": 4.0}
TWO_BASES = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 5e4}}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama2_mha", {"architectures": ["MistralForCausalLM"]}, "known are LlamaForCausal"),
        ("llama2_mha", {"architectures": ..., "model_type": ...}, r"\[\] of model_type None"),
        ("qwen2_tiny", {"architectures": ["Qwen3ForCausalLM"]}, r"Qwen3ForCausalLM.*'qwen2'"),
        ("llama2_mha", {"hidden_act": "quick_gelu"}, "hidden_act.*'quick_gelu'.*'silu'"),
        ("llama2_mha", {"a_field_of_tomorrow": [1]}, r"'llama': a_field_of_tomorrow = \[1\]"),
        ("llama2_mha", {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ("llama2_mha", {"vocab_size": ..., "hidden_size": None}, "lacks vocab_size, hidden_size"),
        ("llama2_mha", {"hidden_size": "64"}, "hidden_size must be a positive integer; got '64'"),
        ("llama2_mha", {"rms_norm_eps": "small"}, "rms_norm_eps must be a number; got 'small'"),
        ("llama2_mha", {"rope_parameters": {"rope_type": "longer"}}, "'longer': expected one of"),
        ("llama2_mha", {"rope_parameters": {"rope_type": "longrope"}}, "must be a list; got None"),
        ("llama2_mha", {"rope_parameters": {"rope_type": "linear"}}, "factor must be a number"),
        ("llama2_mha", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_.*0.5"),
        ("llama2_mha", {"rope_parameters": [1]}, r"must be an object.*; got \[1\]"),
        (
            "llama2_mha",
            {"rope_parameters": {"factor": 4.0}},
            "with a factor must name their rope_t",
        ),
        ("llama2_mha", {"rope_parameters": YARN | {"attn_factor": 3.0}}, "field 'attn_factor'"),
        ("llama2_mha", {"rope_parameters": YARN | {"beta_fats": 3}}, "did you mean 'beta_fast'"),
        ("mistral_tiny", {"rope_parameters": TWO_BASES}, "must be equal here; got .*50000"),
        ("mistral_tiny", {"attention_bias": True}, "'mistral': attention_bias = True"),
        ("mistral_tiny", {"sliding_window": 0}, "sliding_window must be a positive integer"),
        ("qwen3_tiny", {"attention_bias": 1}, "attention_bias must be true or false; got 1"),
        ("qwen2_tiny", WINDOW | {"layer_types": ["round"]}, "full_attention, sliding_attent"),
        ("phi3_tiny", {"rope_parameters": {"partial_rotary_factor": 0}}, "above 0 and at most"),
        ("olmo2_tiny", {"scale_depth": 1.4}, "not known of model_type 'olmo2': scale_depth = 1.4"),
    ],
)
def test_what_is_not_known_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        model_config(config_of(name, **changes))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama2_mha", {"is_llama_config": True, "transformers.js_config": {}, "pruned_heads": {}}),
        ("llama2_mha", {"activation": "swiglu", "unsloth_version": "1", "use_bfloat16": False}),
        ("qwen2_tiny", {"use_mrope": False, "tf_legacy_loss": False}),
        ("phi3_tiny", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),
    ],
)
def test_fields_of_published_files_that_change_nothing(name, changes):
    assert model_config(config_of(name, **changes)) == model_config(config_of(name))


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_longrope_of_the_first_files_of_phi3(kind):
    count = model_config(config_of("phi3_tiny")).dim // 4
    factors = {"short_factor": [1.5] * count, "long_factor": [2.5] * count}
    changes = {"rope_parameters": None, "partial_rotary_factor": 0.5}
    found, wanted = (
        model_config(config_of("phi3_tiny", **changes, rope_scaling={"type": name, **factors}))
        for name in (kind, "longrope")
    )
    assert found == wanted
    assert found.position.scaling.kind == "longrope"


def test_what_lacks_is_as_in_transformers():
    sizes = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 12}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    found = model_config({"architectures": ["LlamaForCausalLM"], **sizes})
    assert (found.kv_heads, found.dim, found.norm_eps) == (2, 4, 1e-6)
    assert not found.tie_embeddings
    assert found.position == tape.positions.Rope(base=10_000.0)


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(),
        RopeScaling("linear", factor=2.5),
        RopeScaling("dynamic", factor=2.0, original_length=512),
        RopeScaling("yarn", factor=4.0, original_length=128, beta_fast=16.0, truncate=False),
        RopeScaling("longrope", 2.5, 64, short_factor=(1, 2, 3), long_factor=(4, 5, 6)),
        RopeScaling("llama3", factor=8.0, original_length=256, low_freq_factor=2.0),
    ],
    ids=lambda scaling: scaling.kind,
)
def test_written_and_read_again(scaling):
    position = tape.positions.Rope(base=5000.0, scaling=scaling)
    model = small_model(position, num_kv_heads=1, head_dim=6, norm_eps=1e-3)
    assert model_config(json.loads(json.dumps(to_json(model)))) == model.config


def test_ntk_is_written_as_its_base():
    scaling = RopeScaling("ntk", factor=2.0)
    found = model_config(to_json(small_model(tape.positions.Rope(scaling=scaling)))).position
    assert found.scaling == RopeScaling()
    ours = tape.rotary_state(jnp.arange(9), 8, 10_000.0, scaling=scaling)
    chex.assert_trees_all_close(tape.rotary_state(jnp.arange(9), 8, found.base), ours)
