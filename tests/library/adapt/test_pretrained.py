"""Adaptation of Llama checkpoints, and their way back to one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tape_jax import adapt
from tests.models import random_variables
from tests.paths import GOLDEN

pytest.importorskip("safetensors")

KEY = jax.random.key(7)
HF = GOLDEN / "hf"


def expected(name):
    with np.load(HF / name / "expected.npz") as file, np.load(HF / name / "double.npz") as wide:
        return {key: file[key] for key in file.files} | {"logits": wide["logits"]}


@jax.jit
def largest(x):
    return jnp.abs(x).max()


def test_tape_put_into_a_checkpoint_computes_the_same():
    golden = expected("llama3_gqa")
    model, variables = tape.from_pretrained(HF / "llama3_gqa")
    adapted, new = tape.add_tape(model, variables, key=KEY)
    tokens = golden["input_ids"]
    before, after = (jax.jit(m.apply)(v, tokens) for m, v in ((model, variables), (adapted, new)))
    assert largest(after - before) <= 1e-6 * largest(before)
    np.testing.assert_allclose(after, golden["logits"], atol=3e-5, rtol=0)


@pytest.mark.slow
def test_tape_put_into_a_checkpoint_in_float64(x64):
    tokens = expected("llama3_gqa")["input_ids"]
    model, variables = tape.from_pretrained(HF / "llama3_gqa", dtype="float64")
    adapted, new = tape.add_tape(model, variables, key=KEY)
    before, after = (jax.jit(m.apply)(v, tokens) for m, v in ((model, variables), (adapted, new)))
    assert largest(after - before) <= 1e-12 * largest(before)


@pytest.mark.slow
def test_merged_low_rank_terms_are_saved_as_a_checkpoint(tmp_path):
    golden = expected("llama3_gqa")
    model, variables = tape.from_pretrained(HF / "llama3_gqa")
    made = adapt.adapt(model, variables, "longlora", key=KEY, rank=4)
    random = random_variables(made.model, std=0.05)["params"]
    mask = adapt.trainable_mask(made.model, ["lora"])
    _, frozen = adapt.partition(made.variables["params"], mask)
    trained = {"params": adapt.merge(adapt.partition(random, mask)[0], frozen)}
    tokens = golden["input_ids"]
    full = adapt.full_attention(made.model)
    wanted = jax.jit(full.apply)(trained, tokens)
    assert largest(wanted - golden["logits"]) > 0.01

    merged, plain = adapt.merge_lora(made.model, trained)
    tape.save_pretrained(tmp_path / "merged", merged, plain, like=HF / "llama3_gqa")
    model, variables = tape.from_pretrained(tmp_path / "merged")
    assert model.config == dataclasses.replace(merged.config, dtype=model.config.dtype)
    actual = jax.jit(model.apply)(variables, tokens)
    assert largest(actual - wanted) <= 1e-5 * largest(wanted)
