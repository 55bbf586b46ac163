"""Every family: logits as transformers has them in float64, there and back."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import tape_jax as tape
from tape_jax._src.model.layout import restack
from tape_jax._src.pretrained.families import FAMILIES
from tape_jax._src.pretrained.llama import model_config
from tests.library.pretrained.folders import BESIDE, HF, NAMES, checkpoint_files
from tests.models import assert_near, random_variables, small_model

SHIPPED = [
    *("gemma2_tiny", "granite_tiny", "mistral_tiny", "olmo2_tiny", "phi3_tiny", "qwen2_tiny"),
    "qwen3_tiny",
]
NOT_SHIPPED = [
    *("cohere2_tiny", "gemma3_text_tiny", "olmo3_tiny", "olmo3_yarn_tiny"),
    *("qwen2_window_tiny", "smollm3_tiny"),
]
LOCAL = tape.positions.create("rope+window", size=3)
GEMMA = {
    "norms": "both",
    "zero_centered_norms": True,
    "embedding_scale": 4.0,
    "query_scale": 20**-0.5,
    "final_logit_softcap": 3.0,
    "activation": "gelu",
    "tie_embeddings": True,
}
GEMMA2 = {**GEMMA, "position": tape.positions.Layers([LOCAL, "rope"]), "logit_softcap": 0.5}
SCALED = tape.positions.Rope(base=700.0, scaling=tape.RopeScaling("linear", factor=4.0))
GEMMA3 = {**GEMMA, "position": tape.positions.Layers([LOCAL, LOCAL, SCALED]), "qk_norm": "head"}
COHERE2 = {
    "position": tape.positions.Layers([LOCAL, "none"]),
    "norm": "layer",
    "parallel_block": True,
    "logits_scaling": 0.5,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 4}


def beside(name):
    here = pytest.mark.skipif(not (BESIDE / name).exists(), reason="not beside the repository")
    return pytest.param(BESIDE / name, id=name, marks=[here, pytest.mark.slow])


FOLDERS = [
    *(pytest.param(HF / name, id=name) for name in (*SHIPPED, *NAMES)),
    *map(beside, NOT_SHIPPED),
]


@pytest.mark.parametrize("folder", FOLDERS)
class TestFamilies:
    @pytest.mark.mostly_slow
    def test_logits_and_greedy_tokens(self, folder):
        model, variables = tape.from_pretrained(folder)
        expected, double = np.load(folder / "expected.npz"), folder / "double.npz"
        tokens = jnp.asarray(expected["input_ids"])
        logits, states = model.apply(variables, tokens, return_states=True)
        wanted = np.load(double)["logits"] if double.exists() else expected["logits_f64"]
        np.testing.assert_allclose(logits, wanted, atol=3e-5)
        for i, hidden in enumerate([*states.hidden[:-1], states.final_norm]):
            if f"hidden_{i}" in expected:
                assert_near(hidden, expected[f"hidden_{i}"], 3e-5)
        prompt, greedy = expected["prompt"], expected["greedy"]
        tokens = tape.generate(model, variables, jnp.asarray(prompt), greedy.shape[1])
        np.testing.assert_array_equal(tokens[:, -greedy.shape[1] :], greedy)

    @pytest.mark.mostly_slow
    def test_saved_folder_is_the_same(self, folder, tmp_path):
        model, variables = tape.from_pretrained(folder)
        tape.save_pretrained(tmp_path / "like", model, variables, like=folder)
        assert checkpoint_files(tmp_path / "like") == checkpoint_files(folder)
        tape.save_pretrained(tmp_path / "new", model, variables)
        again, same = tape.from_pretrained(tmp_path / "new")
        assert again.config == dataclasses.replace(model.config, head_dim=model.config.dim)
        jax.tree.map(np.testing.assert_array_equal, same, variables)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3_gqa", "phi3_tiny", "gemma2_tiny"])
def test_tape_is_added_without_a_difference(name):
    model, variables = tape.from_pretrained(HF / name)
    tokens = jnp.asarray(np.load(HF / name / "expected.npz")["input_ids"])
    new, added = tape.add_tape(model, variables, key=jax.random.key(0))
    before, after = model.apply(variables, tokens), new.apply(added, tokens)
    np.testing.assert_allclose(after, before, atol=1e-6)


def said_in_full(config):
    return dataclasses.replace(config, head_dim=config.dim, num_kv_heads=config.kv_heads)


def config_of(name, **changes):
    config = json.loads((HF / name / "config.json").read_text()) | changes
    return {key: value for key, value in config.items() if value is not ...}


class TestFields:
    @pytest.mark.parametrize(
        ("name", "changes", "message"),
        [
            (
                "qwen2_tiny",
                {"scale_depth": 1.4},
                "not known of model_type 'qwen2': scale_depth = 1.4",
            ),
            ("mistral_tiny", {"attention_bias": True}, "'mistral': attention_bias = True"),
            ("mistral_tiny", {"sliding_window": 0}, "sliding_window must be a positive integer"),
            ("qwen3_tiny", {"attention_bias": 1}, "attention_bias must be true or false; got 1"),
            ("qwen2_tiny", WINDOW | {"layer_types": ["round"]}, "full_attention, sliding_attent"),
            ("qwen2_tiny", WINDOW | {"layer_types": [[1]] * 4}, "full_attention, sliding_attent"),
            (
                "qwen3_tiny",
                WINDOW | {"layer_types": ..., "max_window_layers": "2"},
                "max_window_layers must be an integer; got '2'",
            ),
            (
                "phi3_tiny",
                {"rope_scaling": {"type": "su", "short_factor": [1.0]}},
                "long_factor must be a list; got None",
            ),
            ("phi3_tiny", {"rope_parameters": {"partial_rotary_factor": 0}}, "above 0 and at most"),
            ("qwen2_tiny", {"architectures": ["Qwen3ForCausalLM"]}, r"Qwen3ForCausalLM.*'qwen2'"),
            ("gemma2_tiny", {"sliding_window_size": 5}, "size = 5 contradicts sliding_window = 6"),
        ],
    )
    def test_what_is_not_known_is_refused(self, name, changes, message):
        with pytest.raises(ValueError, match=message):
            model_config(config_of(name, **changes))

    @pytest.mark.parametrize(
        ("changes", "kind"),
        [
            ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "rope/rope+window"),
            ({"layer_types": None, "max_window_layers": 3}, "rope/rope/rope/rope+window"),
            # What transformers takes where both are given.
            (
                {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2},
                "rope+window/rope+window/rope/rope",
            ),
            ({"layer_types": ["sliding_attention"] * 4}, "rope"),
        ],
    )
    def test_windows_in_some_layers(self, changes, kind):
        config = config_of("qwen2_tiny", use_sliding_window=True, sliding_window=4, **changes)
        found = model_config(config)
        assert found.position.kind == kind
        windows = {x.local_window_size for x in found.position.members} - {None}
        assert windows | {found.local_window_size} - {None} == {3}

    def test_layers_without_rotation(self, tmp_path):
        config = {"no_rope_layers": [1, 0, 0], "use_sliding_window": False}
        model = small_model("rope/none/none", tie_embeddings=True, num_kv_heads=2)
        variables = random_variables(model)
        tape.save_pretrained(tmp_path / "new", model, variables)
        written = json.loads((tmp_path / "new" / "config.json").read_text())
        assert written["model_type"] == "smollm3"
        assert {name: written[name] for name in config} == config
        again, same = tape.from_pretrained(tmp_path / "new")
        assert again.config == said_in_full(model.config)
        jax.tree.map(np.testing.assert_array_equal, same, variables)
        by_rule = {**written, "no_rope_layers": None, "no_rope_layer_interval": 2}
        assert model_config(by_rule).position.kind == "rope/none"

    def test_window_of_all_layers_is_kept_however_it_is_said(self, tmp_path):
        model = small_model(tape.positions.create("rope+window", size=3))
        tape.save_pretrained(tmp_path / "new", model, random_variables(model))
        assert tape.from_pretrained(tmp_path / "new")[0].config.local_window_size == 3

    def test_window_that_is_not_used_needs_no_layers(self):
        for name in ("qwen2_tiny", "qwen3_tiny"):
            unused = config_of(name, max_window_layers=None, layer_types=None)
            assert model_config(unused).local_window_size is None

    def test_window_of_gemma2_said_twice(self):
        twice = config_of("gemma2_tiny", sliding_window_size=6)
        assert model_config(twice) == model_config(config_of("gemma2_tiny"))

    def test_sliding_window_counts_the_own_token(self):
        assert model_config(config_of("mistral_tiny", sliding_window=7)).local_window_size == 6
        assert (
            model_config(config_of("mistral_tiny", sliding_window=None)).local_window_size is None
        )

    @pytest.mark.mostly_slow(4)
    @pytest.mark.parametrize(
        ("options", "family"),
        [
            ({}, "llama"),
            ({"biases": ("q", "k", "v", "out")}, "llama"),
            ({"local_window_size": 3}, "mistral"),
            ({"biases": ("q", "k", "v"), "local_window_size": 3}, "qwen2"),
            ({"qk_norm": "head", "biases": ["out", "q", "k", "v"]}, "qwen3"),
            (
                {"query_scale": 0.3, "logits_scaling": 0.6, "biases": ("gate", "up", "down")},
                "granite",
            ),
            ({"qk_norm": "full", "norms": "after", "biases": ("q", "k", "v", "out")}, "olmo2"),
            ({"activation": "gelu_exact"}, "llama"),
            (GEMMA2, "gemma2"),
            (GEMMA3, "gemma3_text"),
            (COHERE2, "cohere2"),
        ],
    )
    def test_model_is_saved_as_the_first_that_fits(self, options, family, tmp_path):
        model = small_model(**{"position": "rope", **options})
        variables = random_variables(model)
        tape.save_pretrained(tmp_path / "new", model, variables)
        config = json.loads((tmp_path / "new" / "config.json").read_text())
        assert (config["model_type"], config["architectures"]) == (
            family,
            [FAMILIES[family].architecture],
        )
        again, same = tape.from_pretrained(tmp_path / "new")
        assert again.config == said_in_full(model.config)
        jax.tree.map(np.testing.assert_array_equal, same, variables)

    def test_part_of_each_head_is_phi3s(self, tmp_path):
        position = tape.positions.Rope(partial_rotary_factor=0.5)
        model = small_model(position, head_dim=12, num_kv_heads=1, local_window_size=3)
        variables = random_variables(model)
        tape.save_pretrained(tmp_path / "new", model, variables)
        tensors = safetensors.numpy.load_file(tmp_path / "new" / "model.safetensors")
        q = np.asarray(variables["params"]["layers_0"]["attention"]["q"]["kernel"][1].T)
        rows = [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]
        fused = tensors["model.layers.1.self_attn.qkv_proj.weight"]
        np.testing.assert_array_equal(fused[12:24], q[12:24][rows])
        again, same = tape.from_pretrained(tmp_path / "new")
        assert again.config == model.config
        jax.tree.map(np.testing.assert_array_equal, same, variables)

    def test_factors_of_phi3_are_written_as_every_version_reads_them(self, tmp_path):
        scaling = {"kind": "longrope", "factor": 4.0, "original_length": 16}
        scaling |= {"short_factor": (1.0, 1.5, 2.0), "long_factor": (2.0, 3.0, 4.0)}
        scaling = tape.RopeScaling(**scaling)
        position = tape.positions.Rope(scaling=scaling, partial_rotary_factor=0.5)
        model = small_model(position, head_dim=12)
        tape.save_pretrained(tmp_path / "new", model, random_variables(model))
        written = json.loads((tmp_path / "new" / "config.json").read_text())
        assert written["rope_scaling"] == {
            "type": "longrope",
            "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [2.0, 3.0, 4.0],
        }
        lengths = ("original_max_position_embeddings", "max_position_embeddings")
        assert [written[name] for name in lengths] == [16, 64]
        assert model_config(written) == said_in_full(model.config)

    def test_part_of_a_head_must_be_even(self, copy):
        path = copy(HF / "phi3_tiny", rope_parameters={"partial_rotary_factor": 0.6})
        with pytest.raises(ValueError, match=r"12 numbers; got 0\.6, which rotates 7"):
            tape.from_pretrained(path)

    def test_saving_like_a_folder_of_a_family_keeps_the_family(self, copy, tmp_path):
        """A Phi 3 whose heads rotate as a whole could be a Llama too."""
        path = copy(HF / "phi3_tiny", rope_parameters={"rope_theta": 50.0})
        model, variables = tape.from_pretrained(path)
        tape.save_pretrained(tmp_path / "same", model, variables, like=path)
        assert checkpoint_files(tmp_path / "same") == checkpoint_files(path)
        scaled = tape.adapt.with_scaling(model, tape.RopeScaling("linear", factor=4.0))
        tape.save_pretrained(tmp_path / "new", scaled, variables, like=path)
        again, same = tape.from_pretrained(tmp_path / "new")
        assert again.config == scaled.config
        jax.tree.map(np.testing.assert_array_equal, same, variables)

    @pytest.mark.parametrize("family", ["llama3_gqa", "mistral_tiny", "olmo2_tiny", "phi3_tiny"])
    def test_saving_like_a_folder_keeps_what_the_model_has_not_changed(
        self, copy, tmp_path, family
    ):
        kept = {"max_position_embeddings": 131_072, "pad_token_id": 7}
        path = copy(HF / family, **kept)
        model, variables = tape.from_pretrained(path)
        changed, variables = tape.adapt.scale_theta(model, variables, 1e6)
        tape.save_pretrained(tmp_path / "new", changed, variables, like=path)
        written = json.loads((tmp_path / "new" / "config.json").read_text())
        assert {name: written[name] for name in kept} == kept
        again, _ = tape.from_pretrained(tmp_path / "new")
        assert again.config.position == changed.config.position

    @pytest.mark.parametrize(
        ("family", "change", "message"),
        [
            (
                "gemma2_tiny",
                lambda model: tape.adapt.scale_theta(model, {}, 1e6)[0],
                r"'gemma2' has one rotation for all layers; .*'rope\+window/rope': "
                "base = 10000.0 and base = 1000000.0; save",
            ),
            (
                "phi3_tiny",
                lambda model: tape.adapt.with_scaling(
                    model, tape.RopeScaling("yarn", 2.0, original_length=64)
                ),
                "family 'phi3' cannot say how the layers of 'rope' rotate",
            ),
        ],
    )
    def test_rotations_that_the_family_has_not(self, tmp_path, family, change, message):
        model, variables = tape.from_pretrained(HF / family)
        with pytest.raises(ValueError, match=message):
            tape.save_pretrained(tmp_path / "new", change(model), variables, like=HF / family)

    @pytest.mark.parametrize(
        ("model_type", "kind"),
        [
            ("gemma2", "rope+window/rope"),
            ("gemma3_text", "/".join(["rope+window"] * 5 + ["rope"])),
            ("cohere2", "rope+window/rope+window/rope+window/none"),
            ("olmo3", "rope+window/rope+window/rope+window/rope"),
        ],
    )
    def test_rules_of_layers_where_config_says_nothing(self, model_type, kind):
        sizes = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 12}
        sizes |= {"num_hidden_layers": 8, "num_attention_heads": 4, "model_type": model_type}
        found = model_config(sizes)
        assert found.position.kind == kind
        assert {x.local_window_size for x in found.position.members} == {None, 4095}

    def test_rotations_of_gemma3_in_the_older_form(self):
        sizes = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 12}
        sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "model_type": "gemma3_text"}
        older = {"rope_theta": 700.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
        older |= {"rope_local_base_freq": 50.0, "sliding_window_pattern": 3}
        newer = {"full_attention": {**older["rope_scaling"], "rope_theta": 700.0}}
        newer["sliding_attention"] = {"rope_theta": 50.0}
        newer = {"rope_parameters": newer, "layer_types": ["sliding_attention"] * 2}
        newer["layer_types"] += ["full_attention"]
        found = model_config(sizes | older)
        assert found == model_config(sizes | newer)
        local, _, full = found.position.encodings
        assert (local.members[0], full) == (tape.positions.Rope(base=50.0), SCALED)

    def test_cohere2_pairs_neighbours(self, tmp_path):
        model = small_model(head_dim=6, num_kv_heads=1, **COHERE2)
        variables = random_variables(model)
        tape.save_pretrained(tmp_path / "new", model, variables)
        tensors = safetensors.numpy.load_file(tmp_path / "new" / "model.safetensors")
        k = np.asarray(variables["params"]["layers_1"]["attention"]["k"]["kernel"].T)
        k = k.reshape(6, -1)
        stored = tensors["model.layers.1.self_attn.k_proj.weight"]
        np.testing.assert_array_equal(stored, k[[0, 3, 1, 4, 2, 5]])
        assert "model.layers.1.post_attention_layernorm.weight" not in tensors

    def test_fields_of_published_cohere2_files(self):
        sizes = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 12}
        sizes |= {"num_hidden_layers": 4, "num_attention_heads": 4, "model_type": "cohere2"}
        published = {"position_embedding_type": "rope_gptj", "use_parallel_block": True}
        assert model_config(sizes | published) == model_config(sizes)
        with pytest.raises(ValueError, match="'cohere2': use_qk_norm = True"):
            model_config(sizes | {"use_qk_norm": True})
        with pytest.raises(ValueError, match="'cohere2': rms_norm_eps = 1e-06"):
            model_config(sizes | {"rms_norm_eps": 1e-6})

    def test_layers_that_changed_are_written_anew(self, copy, tmp_path):
        """Fields of the folder it is saved like do not win over what the model is."""
        kinds = ["sliding_attention", "full_attention"] * 2
        path = copy(HF / "qwen2_tiny", use_sliding_window=True, sliding_window=4, layer_types=kinds)
        model, variables = tape.from_pretrained(path)
        late = tape.positions.Layers(
            [*model.encoding.encodings[1:]] * 2 + [model.encoding.encodings[0]] * 2
        )
        changed = tape.Transformer(
            dataclasses.replace(model.config, position=late, scan_layers=False)
        )
        params = restack(variables["params"], model, changed)
        tape.save_pretrained(tmp_path / "new", changed, {"params": params}, like=path)
        again, _ = tape.from_pretrained(tmp_path / "new")
        assert again.encoding == late

    @pytest.mark.parametrize(
        "position",
        [
            tape.positions.Rope(scaling=tape.RopeScaling("proportional", 4.0)),
            tape.positions.Layers(
                [
                    [tape.positions.Rope(partial_rotary_factor=0.5), tape.positions.Window(3)],
                    tape.positions.Rope(base=1e6),
                ]
            ),
        ],
    )
    def test_rotations_that_no_family_has_are_refused(self, position, tmp_path):
        model = small_model(position, norms="both", zero_centered_norms=True, qk_norm="head")
        model = model if isinstance(position, tape.positions.Layers) else small_model(position)
        with pytest.raises(ValueError, match=r"cannot say|no family|no place"):
            tape.save_pretrained(tmp_path / "new", model, random_variables(model))

    def test_scales_that_lack_are_one(self):
        scales = ("embedding_multiplier", "residual_multiplier", "attention_multiplier")
        config = model_config(config_of("granite_tiny", **dict.fromkeys(scales, ...)))
        assert (config.embedding_scale, config.residual_scale, config.query_scale) == (1, 1, 1)

    def test_model_of_no_family_is_refused(self, tmp_path):
        model = small_model("rope", biases=("q",), qk_norm="head")
        with pytest.raises(ValueError, match=r"no family of checkpoints has biases = \('q',\)"):
            tape.save_pretrained(tmp_path / "new", model, random_variables(model))
