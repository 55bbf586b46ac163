"""Folders that this library wrote, read by transformers, where that is installed."""

import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tests.library.pretrained.test_families import FOLDERS

torch = pytest.importorskip("torch", reason="transformers reads folders with torch")
transformers = pytest.importorskip("transformers", reason="it is not installed")


@pytest.mark.parametrize("folder", FOLDERS)
def test_logits_are_equal(folder, tmp_path):
    model, variables = tape.from_pretrained(folder)
    tape.save_pretrained(tmp_path / "new", model, variables)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "new", attn_implementation="eager", dtype=torch.float32
    )
    tokens = np.load(folder / "expected.npz")["input_ids"]
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(model.apply(variables, jnp.asarray(tokens)), expected, atol=5e-5)
