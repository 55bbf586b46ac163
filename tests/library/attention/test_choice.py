"""Which implementation takes a call: by name, by rules, and how a new one is added."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import tune
from tape_jax._src.attention import attention, attention_plan, choice, recorded_plans
from tape_jax._src.attention.tuning import records
from tape_jax._src.core import devices

X = jnp.ones((2, 6, 4, 8))
ARRAYS = dict.fromkeys(("q", "k", "v", "state"), X)


def test_choice_counts_all_heads_and_rows():
    """Pairs of one head and bytes of all logits: both must be few for ``reference``."""

    def choice(batch, length, heads, dtype="float32", keys=None):
        q = jax.ShapeDtypeStruct((batch, length, heads, 64), dtype)
        k = jax.ShapeDtypeStruct((batch, keys or length, 1, 64), dtype)
        return attention_plan(q, k, k).implementation

    assert choice(8, 128, 32) == "reference"
    assert choice(64, 128, 32) == choice(8, 128, 256) == choice(64, 64, 32, keys=256) == "chunked"
    assert choice(16, 128, 16, "bfloat16") == choice(16, 128, 16) == "reference"
    assert choice(64, 1, 32, keys=512) == "reference"
    assert choice(1, 256, 1) == choice(8, 256, 4) == choice(2, 1024, 4) == "query_blocks"
    assert choice(2, 4096, 4) == "chunked"


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_what_was_not_measured_is_not_chosen(monkeypatch, platform):
    """Kernels are neither taken nor imported on a machine that has measured nothing."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setitem(choice.BACKENDS, "pallas", "no.such.module")
    x = jax.ShapeDtypeStruct((1, 2048, 2, 64), "bfloat16")
    plan = attention_plan(x, x, x, state=x, is_causal=True)
    assert plan.implementation == "chunked"
    assert set(plan.rejected) == set(choice.BACKENDS) - {"chunked", "ring"}
    note = "nothing was measured here (python -m tape_jax.tune does)"
    assert plan.rejected["pallas"] == plan.rejected["splash"] == plan.basis == note
    assert plan.measured is None
    assert plan.options == {}
    with pytest.raises(NotImplementedError, match="cannot be imported here: ModuleNotFoundError"):
        attention(*[jnp.zeros(x.shape, x.dtype)] * 3, implementation="pallas")


@pytest.fixture
def registered(monkeypatch, register):
    """Registers a backend that the rules try first."""
    monkeypatch.setattr(choice, "RULES", (choice.Preference(("extra",)), *choice.RULES[1:]))
    return register


def refuse(request):
    raise NotImplementedError("not on this device")


def test_a_new_backend_is_used(registered):
    def attend(request, *, value=1.0):
        return jnp.full(X.shape, value), jnp.full(X.shape, -value)

    registered(check=lambda request: None, attend=attend)
    o, a = attention(**ARRAYS)
    assert (o == 1).all()
    assert (a == -1).all()
    o, _ = attention(**ARRAYS, implementation="extra", options={"value": 3.0})
    assert (o == 3).all()


def test_names_are_tried_in_order(registered):
    """The first that can is taken, by rules or by name."""
    registered(check=refuse, attend=None)
    assert attention_plan(**ARRAYS).rejected["extra"] == "not on this device"
    plan = attention_plan(**ARRAYS, implementation=("extra", "chunked", "reference"))
    assert plan.implementation == "chunked"
    assert plan.rejected == {
        "extra": "not on this device",
        "reference": "can do this call, but 'chunked' is tried first",
    }
    with recorded_plans() as plans:
        attention(**ARRAYS, implementation=["extra", "chunked", "reference"])
    assert plans == [dataclasses.replace(plan, operations=None)]
    with pytest.raises(NotImplementedError, match=r"'extra': not on .*; .*'pallas': needs a CUDA"):
        attention(**ARRAYS, implementation=("extra", "pallas"))


def test_what_is_refused_while_running_is_tried_elsewhere(registered):
    def attend(request):
        raise NotImplementedError("only seen while tracing")

    registered(check=lambda request: None, attend=attend)
    with recorded_plans() as plans:
        attention(**ARRAYS)
    assert plans[0].implementation == "query_blocks"
    assert plans[0].rejected["extra"] == "only seen while tracing"
    with pytest.raises(NotImplementedError, match="'extra': only seen while tracing"):
        attention(**ARRAYS, implementation="extra")


@pytest.mark.parametrize("error", [ImportError, RuntimeError])
def test_what_cannot_be_imported_is_a_reason(monkeypatch, tmp_path, error):
    """As with a library of another version: an automatic choice goes on, a name says why."""
    (tmp_path / "broken_backend.py").write_text(f"raise {error.__name__}('moved in jax 9')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(choice.BACKENDS, "extra", "broken_backend")
    monkeypatch.setattr(choice, "RULES", (choice.Preference(("extra",)), *choice.RULES))
    reason = f"cannot be imported here: {error.__name__}: moved in jax 9"
    assert attention_plan(**ARRAYS).rejected["extra"] == reason
    with pytest.raises(NotImplementedError, match=reason) as raised:
        attention(**ARRAYS, implementation="extra", options={"block_q": 4})
    assert isinstance(raised.value.__cause__.__cause__, error)


def test_an_error_in_a_backend_is_not_swallowed(registered):
    def attend(request):
        raise TypeError("a bug")

    registered(check=lambda request: None, attend=attend)
    with pytest.raises(TypeError, match="a bug"):
        attention(**ARRAYS)


@pytest.fixture
def on_hopper(monkeypatch, any_device):
    monkeypatch.setattr(devices, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(choice, "release", lambda package: (0, 0, 17))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def hopper_plan(length=2048, keys=None, *, dim=64, dtype="bfloat16", **keywords):
    q = jax.ShapeDtypeStruct((1, length, 2, dim), dtype)
    k = jax.ShapeDtypeStruct((1, keys or length, 2, dim), dtype)
    call = {"state": k, "query_state": q, "is_causal": True, **keywords}
    return attention_plan(q, k, k, **call)


def test_an_assumed_device_has_the_choice_of_a_real_one(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(records, "known", lambda: pytest.fail("measured on this machine"))
    segments = jax.ShapeDtypeStruct((1, 2048), jnp.int32)
    for capability, wanted in (((9, 0), "pallas"), (None, "chunked")):
        with tune.assume_device(capability):
            assert hopper_plan(segment_ids=segments).implementation == wanted


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ({"dim": 64}, ["tokamax_mosaic", "pallas", "cudnn"]),
        ({"attend_state": False}, ["cudnn", "pallas", "tokamax_mosaic"]),
        ({"dtype": "float16", "dim": 128}, ["cudnn", "pallas", "tokamax_mosaic"]),
        ({"dtype": "float32"}, ["pallas"]),
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_order(call, wanted):
    made = hopper_plan(**call)
    first, *others = [*wanted, "chunked", "rows", "reference"]
    assert made.implementation == first
    tried = [name for name, why in made.rejected.items() if "nothing was measured" not in why]
    assert tried == others
    assert ("times of an H200" in made.basis) == (call.get("dtype") != "float32")


SEGMENTS = {"segment_ids": np.zeros((1, 2048), int)}


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        # What libraries refuse is for our kernel; tokamax's visits blocks that a window hides.
        (SEGMENTS, "pallas"),
        ({"log_decay": jax.ShapeDtypeStruct((2048, 1), "float32")}, "pallas"),
        ({"local_window_size": 99}, "cudnn"),
        ({"bias": jax.ShapeDtypeStruct((2048, 2048), "float32")}, "chunked"),
        ({"logits_fn": lambda logits, rows: logits}, "rows"),
        # Short calls, and decoding, whose keys are far more than its queries, were not timed.
        ({"length": 256}, "tokamax_mosaic"),
        ({"length": 255}, "chunked"),
        ({"length": 512, "keys": 4096, "query_offset": 3584}, "chunked"),
        ({"keys": 4096, "query_offset": 2048}, "pallas"),
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_calls_unlike_those_that_were_timed(call, wanted):
    assert hopper_plan(**call).implementation == wanted


@pytest.mark.parametrize(
    ("capability", "release", "call", "wanted"),
    [
        ((7, 5), (0, 0, 17), {}, "chunked"),
        ((8, 0), (0, 0, 17), {}, "cudnn"),
        ((8, 9), (0, 0, 17), SEGMENTS, "pallas"),
        ((10, 0), (0, 0, 17), {}, "tokamax_mosaic"),
        ((10, 0), (0, 0, 17), {"local_window_size": 99}, "cudnn"),
        ((9, 0), (0, 0, 12), {}, "pallas"),
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_what_was_not_measured_goes_by_claims(monkeypatch, capability, release, call, wanted):
    """Chips, and on a known chip releases of libraries; the plan says so."""
    monkeypatch.setattr(devices, "compute_capability", lambda: capability)
    monkeypatch.setattr(choice, "release", lambda package: release)
    made = hopper_plan(**call)
    assert made.implementation == wanted
    if capability != (9, 0):
        assert "H200" not in made.basis
        assert ("the libraries' own claims" in made.basis) == (wanted != "chunked")
