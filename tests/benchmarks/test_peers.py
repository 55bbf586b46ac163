"""What would be picked instead of this package: the same answers, and what is left out says why."""

from __future__ import annotations

import sys

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import peers
from tape_jax import attention, rotary_state
from tape_jax._src.attention.choice import BACKENDS


@pytest.fixture
def libraries(monkeypatch):
    for name, backend in peers.LIBRARIES.items():
        monkeypatch.setitem(BACKENDS, name, backend)


def call(implementation, **options):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 9, 2, 8)), "float32") for _ in range(3))
    options = {"is_causal": True, "attend_state": False, **options}
    state = rotary_state(jnp.arange(9), 8)
    return attention(q, k, v, state=state, implementation=implementation, **options)[0]


@pytest.mark.parametrize("name", peers.LIBRARIES)
def test_libraries_agree_with_the_reference(libraries, name):
    chex.assert_trees_all_close(call(name), call("reference"), atol=1e-5)
    with pytest.raises(NotImplementedError, match="only causal attention of whole sequences"):
        call(name, local_window_size=3)


@pytest.mark.parametrize("model", ["small", "c4", "1b"])
def test_all_compute_in_float32(libraries, monkeypatch, model):
    """As PyTorch's Llama does by default."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(peers, "Runner", lambda step: step)
    found, _ = peers.rows(peers.PRESETS[model].model, 1, 16)
    assert {step.config.dtype for step in found.values()} == {"float32"}


@pytest.mark.slow
def test_the_command(libraries, monkeypatch, capsys):
    """It succeeds without PyTorch, and all other rows are measured."""
    monkeypatch.setitem(sys.modules, "torch", None)
    peers.main(["--model", "tiny", "--lengths", "16", "--tokens", "32", "--repeats", "1"])
    out = capsys.readouterr().out
    assert "Hugging Face Llama, PyTorch: left out, needs pip install '.[peers]'" in out
    assert out.count("| rope") == 4
    assert out.count("| tape") == 1
