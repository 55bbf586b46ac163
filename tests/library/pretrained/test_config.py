"""config.json: what is read, what is written, what is refused."""

import json

import chex
import jax.numpy as jnp
import pytest

import tape_jax as tape
from tape_jax import RopeScaling
from tape_jax._src.pretrained.llama import model_config, to_json
from tests.library.pretrained.folders import MHA
from tests.models import small_model


class TestConfig:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"architectures": ["MistralForCausalLM"]},
                r"MistralForCausalLM.*known are LlamaForCausal",
            ),
            ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
            ({"architectures": ..., "model_type": ...}, r"\[\] of model_type None"),
            ({"model_type": "mistral"}, "model_type 'mistral'"),
            ({"hidden_act": "quick_gelu"}, "hidden_act in config.json.*'quick_gelu'.*'silu'"),
            ({"attention_bias": "yes"}, "attention_bias must be true or false; got 'yes'"),
            ({"a_field_of_tomorrow": [1]}, r"'llama': a_field_of_tomorrow = \[1\]"),
            ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
            ({"vocab_size": ..., "hidden_size": None}, "lacks vocab_size, hidden_size"),
            ({"num_key_value_heads": 3}, "not a multiple of num_kv_heads"),
            ({"hidden_size": "64"}, "hidden_size must be a positive integer; got '64'"),
            ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number; got 'small'"),
            ({"rope_parameters": {"rope_type": "longer"}}, "'longer': expected one of"),
            (
                {"rope_parameters": {"rope_type": "longrope"}},
                "must be a list; got None",
            ),
            ({"rope_parameters": {"rope_type": "linear"}}, "factor must be a number; got None"),
            ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor.*0.5"),
            ({"rope_parameters": [1]}, r"must be an object; got \[1\]"),
        ],
    )
    def test_what_is_not_known_is_refused(self, changes, message):
        config = json.loads((MHA / "config.json").read_text()) | changes
        config = {name: value for name, value in config.items() if value is not ...}
        with pytest.raises(ValueError, match=message):
            model_config(config)

    def test_what_lacks_is_as_in_transformers(self):
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
            RopeScaling("yarn", factor=4.0, original_length=128, magnitude=1.5),
            RopeScaling("longrope", 2.5, 64, short_factor=(1, 2, 3), long_factor=(4, 5, 6)),
            RopeScaling("llama3", factor=8.0, original_length=256, low_freq_factor=2.0),
        ],
        ids=lambda scaling: scaling.kind,
    )
    def test_written_and_read_again(self, scaling):
        position = tape.positions.Rope(base=5000.0, scaling=scaling)
        model = small_model(position, num_kv_heads=1, head_dim=6, norm_eps=1e-3)
        assert model_config(json.loads(json.dumps(to_json(model)))) == model.config

    def test_ntk_is_written_as_its_base(self):
        model = small_model(tape.positions.Rope(scaling=RopeScaling("ntk", factor=2.0)))
        found = model_config(to_json(model)).position
        assert found.scaling == RopeScaling()
        ours = tape.rotary_state(jnp.arange(9), 8, 10_000.0, scaling=RopeScaling("ntk", factor=2.0))
        chex.assert_trees_all_close(tape.rotary_state(jnp.arange(9), 8, found.base), ours)
