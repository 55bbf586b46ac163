"""What would be picked instead of this package: the same answers, and what is left out says why."""

from __future__ import annotations

import sys

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import peers
from benchmarks.train_step import PRESETS
from tape_jax import attention, rotary_state
from tape_jax._src.attention.choice import BACKENDS
from tape_jax._src.core.timing import Timing


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


def test_without_torch_the_reason_is_said(libraries, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(NotImplementedError, match=r"needs pip install '\.\[peers\]': .*torch"):
        peers.torch_step(PRESETS["tiny"].model, 1, 8)

    monkeypatch.setattr(peers, "Runner", lambda step: lambda: None)
    monkeypatch.setattr(
        peers, "take_turns", lambda found, repeats: dict.fromkeys(found, Timing((2.0,) * repeats))
    )
    peers.main(["--lengths", "16", "--repeats", "3"])
    out = capsys.readouterr().out
    assert "Hugging Face Llama, PyTorch: left out, needs pip install '.[peers]'" in out
    assert "model small, T = 16, batch 128" in out
    names = [line.split("|")[1].strip() for line in out.splitlines() if "| 2000 |" in line]
    libraries = [f"rope, {name} attention" for name in peers.LIBRARIES]
    assert names == ["rope", "tape", *libraries, "rope, again"]
