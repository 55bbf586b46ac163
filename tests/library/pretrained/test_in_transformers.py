"""Folders that this library wrote and read, against transformers, where that is installed."""

import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tests.library.pretrained.test_families import FOLDERS

torch = pytest.importorskip("torch", reason="transformers reads folders with torch")
transformers = pytest.importorskip("transformers", reason="it is not installed")

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = [FULL, SLIDING, SLIDING, FULL, FULL, SLIDING]
BIASES = {"attention_bias": True, "mlp_bias": True}


def rope(kind, **options):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 999.0, **options}}


LONG = rope(
    "longrope",
    original_max_position_embeddings=16,
    short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    long_factor=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
)
TWO_BASES = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 3000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 700.0},
}
# Options of random models of each family, beside those of the recorded folders.
VARIANTS = [
    ("Llama", BIASES | {"tie_word_embeddings": True, "head_dim": 16}),
    ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    ("Llama", rope("dynamic", factor=2.0) | {"max_position_embeddings": 16}),
    ("Mistral", {"sliding_window": 5, "head_dim": 16}),
    ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED}),
    ("Qwen3", {"use_sliding_window": True, "sliding_window": 4, "attention_bias": True}),
    ("Olmo2", rope("linear", factor=2.0) | {"attention_bias": True}),
    ("Olmo3", {"sliding_window": 5}),
    ("Olmo3", {"sliding_window": 5, "attention_bias": True, "layer_types": MIXED}),
    ("SmolLM3", {"no_rope_layer_interval": 3}),
    ("SmolLM3", BIASES | {"no_rope_layers": [0, 1, 1, 0, 1, 1], "use_sliding_window": False}),
    ("SmolLM3", {"use_sliding_window": True, "sliding_window": 5, "tie_word_embeddings": False}),
    ("Phi3", {"sliding_window": 5} | rope("default", partial_rotary_factor=0.67)),
    ("Phi3", {"original_max_position_embeddings": 16} | LONG),
    ("Gemma2", {"sliding_window": 5, "query_pre_attn_scalar": 20, "head_dim": 16}),
    ("Gemma2", {"attn_logit_softcapping": None, "attention_bias": True, "layer_types": MIXED}),
    ("Gemma3Text", {"sliding_window": 5, "query_pre_attn_scalar": 24}),
    ("Gemma3Text", {"sliding_window": 5, "layer_types": MIXED, "rope_parameters": TWO_BASES}),
    ("Granite", BIASES | {"embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    ("Cohere2", {"sliding_window": 5, "logit_scale": 0.3}),
    ("Cohere2", {"sliding_window": 5, "attention_bias": True, "layer_types": MIXED}),
]


def theirs(path, tokens):
    """Logits of a folder as transformers reads it."""
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
    with torch.no_grad():
        return model(torch.tensor(tokens.astype(np.int64))).logits.numpy()


@pytest.mark.parametrize("folder", FOLDERS)
def test_saved_folders(folder, tmp_path):
    model, variables = tape.from_pretrained(folder)
    tape.save_pretrained(tmp_path / "new", model, variables)
    tokens = np.load(folder / "expected.npz")["input_ids"]
    logits = model.apply(variables, jnp.asarray(tokens))
    np.testing.assert_allclose(logits, theirs(tmp_path / "new", tokens), atol=5e-5)


@pytest.mark.parametrize(("family", "options"), VARIANTS)
def test_options_of_families(family, options, tmp_path):
    torch.manual_seed(0)
    given = {"max_position_embeddings": 128, **SIZES, **options}
    config = getattr(transformers, f"{family}Config")(**given)
    cls = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")
    written = cls(config)
    with torch.no_grad():
        for parameter in written.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    written.save_pretrained(tmp_path / "old")
    tokens = np.random.default_rng(0).integers(3, 67, (2, 24))
    expected = theirs(tmp_path / "old", tokens)
    model, variables = tape.from_pretrained(tmp_path / "old")
    np.testing.assert_allclose(model.apply(variables, jnp.asarray(tokens)), expected, atol=5e-5)
    tape.save_pretrained(tmp_path / "new", model, variables)
    np.testing.assert_allclose(theirs(tmp_path / "new", tokens), expected, atol=5e-5)
