"""What is taken by the times of an H200, where this machine has measured nothing."""

import jax
import numpy as np
import pytest

from tape_jax._src.attention import attention_plan, hopper


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch, any_device):
    monkeypatch.setattr(hopper, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(hopper, "release", lambda package: (0, 0, 17))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def plan(length=2048, keys=None, *, dim=64, dtype="bfloat16", **keywords):
    q = jax.ShapeDtypeStruct((1, length, 2, dim), dtype)
    k = jax.ShapeDtypeStruct((1, keys or length, 2, dim), dtype)
    call = {"state": k, "query_state": q, "is_causal": True, **keywords}
    return attention_plan(q, k, k, **call)


@pytest.mark.parametrize(
    ("dtype", "dim", "state", "wanted"),
    [
        ("bfloat16", 64, True, ["tokamax_mosaic", "cudnn", "pallas"]),
        ("bfloat16", 64, False, ["cudnn", "tokamax_mosaic", "pallas"]),
        ("float16", 128, True, ["cudnn", "tokamax_mosaic", "pallas"]),
        ("float32", 64, True, []),
    ],
)
def test_order(dtype, dim, state, wanted):
    made = plan(dim=dim, dtype=dtype, attend_state=state)
    first, *others = [*wanted, "chunked", "rows", "reference"]
    assert made.implementation == first
    tried = [name for name, why in made.rejected.items() if "nothing was measured" not in why]
    assert tried == others
    assert ("times of an H200" in made.basis) == bool(wanted)


def test_what_libraries_refuse_is_for_our_kernel():
    assert plan(segment_ids=np.zeros((1, 2048), int)).implementation == "pallas"
    assert plan(log_decay=jax.ShapeDtypeStruct((2048, 1), "float32")).implementation == "pallas"
    assert plan(bias=jax.ShapeDtypeStruct((2048, 2048), "float32")).implementation == "chunked"
    assert plan(logits_fn=lambda logits, rows: logits).implementation == "rows"


def test_calls_unlike_those_that_were_timed():
    """Short ones, and steps and chunks of decoding, whose keys are far more than their queries."""
    assert plan(256).implementation == "tokamax_mosaic"
    assert plan(255).implementation == "chunked"
    assert plan(512, 4096, query_offset=3584).implementation == "chunked"
    assert plan(1, 2**16, query_offset=2**16 - 1).implementation == "chunked"
    assert plan(2048, 4096, query_offset=2048).implementation == "pallas"


@pytest.mark.parametrize("release", [(), (0, 0, 12)])
def test_a_release_that_was_not_measured(monkeypatch, release):
    monkeypatch.setattr(hopper, "release", lambda package: release)
    assert plan().implementation == "cudnn"


@pytest.mark.parametrize("capability", [None, (8, 0), (10, 0), (12, 0)])
def test_chips_that_were_not_measured(monkeypatch, capability):
    monkeypatch.setattr(hopper, "compute_capability", lambda: capability)
    made = plan()
    assert made.implementation == "chunked"
    assert "H200" not in made.basis


def test_releases(monkeypatch):
    monkeypatch.undo()
    assert hopper.release("jax") == jax.__version_info__
    assert hopper.release("no-such-package") == ()
