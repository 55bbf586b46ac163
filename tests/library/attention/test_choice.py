"""Which implementation takes a call: by name, by rules, and how a new one is added."""

from __future__ import annotations

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax._src.attention import attention, attention_plan, choice, recorded_plans

X = jnp.ones((2, 6, 4, 8))
ARRAYS = dict.fromkeys(("q", "k", "v", "state"), X)


def plan_at(length, **keywords):
    x = jnp.zeros((1, length, 1, 2))
    return attention_plan(x, x, x, **keywords)


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


def test_choice_by_length():
    assert plan_at(64).implementation == "reference"
    plan = plan_at(1024)
    assert plan.implementation == "query_blocks"
    assert plan.rejected["reference"] == "can do this call, but 'query_blocks' is tried first"
    assert plan_at(1024, implementation="reference").implementation == "reference"


@pytest.fixture
def registered(monkeypatch):
    """Registers a backend, as one module and its name in the tables."""

    def register(**functions):
        module = types.ModuleType("tests.library.attention.extra_backend")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(choice.BACKENDS, "extra", module.__name__)
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


def test_a_backend_that_cannot_is_skipped(registered):
    registered(check=refuse, attend=None)
    o, _ = attention(**ARRAYS)
    np.testing.assert_allclose(o, 1, rtol=1e-6)
    assert attention_plan(**ARRAYS).rejected["extra"] == "not on this device"
    with pytest.raises(NotImplementedError, match="'extra': not on this device"):
        attention(**ARRAYS, implementation="extra")


def test_names_are_tried_in_order(registered):
    """The first that can is taken; only NotImplementedError leads on to the next."""
    registered(check=refuse, attend=None)
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


@pytest.mark.parametrize("error", [ImportError, AttributeError, RuntimeError])
def test_what_cannot_be_imported_is_a_reason(monkeypatch, tmp_path, error):
    """As with a library of another version: an automatic choice goes on, a name says why."""
    (tmp_path / "broken_backend.py").write_text(f"raise {error.__name__}('moved in jax 9')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(choice.BACKENDS, "extra", "broken_backend")
    monkeypatch.setattr(choice, "RULES", (choice.Preference(("extra",)), *choice.RULES))
    reason = f"cannot be imported here: {error.__name__}: moved in jax 9"
    attention(**ARRAYS)
    assert attention_plan(**ARRAYS).rejected["extra"] == reason
    assert attention_plan(**ARRAYS, implementation="extra").rejected == {"extra": reason}
    for options in (None, {"block_q": 4}):
        with pytest.raises(NotImplementedError, match=reason) as raised:
            attention(**ARRAYS, implementation="extra", options=options)
        assert isinstance(raised.value.__cause__.__cause__, error)


def test_an_error_in_a_backend_is_not_swallowed(registered):
    def attend(request):
        raise TypeError("a bug")

    registered(check=lambda request: None, attend=attend)
    with pytest.raises(TypeError, match="a bug"):
        attention(**ARRAYS)


@pytest.fixture
def on_hopper(monkeypatch, any_device):
    monkeypatch.setattr(choice, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(choice, "release", lambda package: (0, 0, 17))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def hopper_plan(length=2048, keys=None, *, dim=64, dtype="bfloat16", **keywords):
    q = jax.ShapeDtypeStruct((1, length, 2, dim), dtype)
    k = jax.ShapeDtypeStruct((1, keys or length, 2, dim), dtype)
    call = {"state": k, "query_state": q, "is_causal": True, **keywords}
    return attention_plan(q, k, k, **call)


@pytest.mark.parametrize(
    ("dtype", "dim", "state", "wanted"),
    [
        ("bfloat16", 64, True, ["tokamax_mosaic", "pallas", "cudnn"]),
        ("bfloat16", 64, False, ["cudnn", "pallas", "tokamax_mosaic"]),
        ("float16", 128, True, ["cudnn", "pallas", "tokamax_mosaic"]),
        ("float32", 64, True, ["pallas"]),
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_order(dtype, dim, state, wanted):
    made = hopper_plan(dim=dim, dtype=dtype, attend_state=state)
    first, *others = [*wanted, "chunked", "rows", "reference"]
    assert made.implementation == first
    tried = [name for name, why in made.rejected.items() if "nothing was measured" not in why]
    assert tried == others
    assert ("times of an H200" in made.basis) == (dtype != "float32")


@pytest.mark.usefixtures("on_hopper")
def test_what_libraries_refuse_is_for_our_kernel():
    decay = jax.ShapeDtypeStruct((2048, 1), "float32")
    bias = jax.ShapeDtypeStruct((2048, 2048), "float32")
    assert hopper_plan(segment_ids=np.zeros((1, 2048), int)).implementation == "pallas"
    assert hopper_plan(log_decay=decay).implementation == "pallas"
    assert hopper_plan(bias=bias).implementation == "chunked"
    assert hopper_plan(logits_fn=lambda logits, rows: logits).implementation == "rows"


@pytest.mark.usefixtures("on_hopper")
def test_calls_unlike_those_that_were_timed():
    """Short ones, and steps and chunks of decoding, whose keys are far more than their queries."""
    assert hopper_plan(256).implementation == "tokamax_mosaic"
    assert hopper_plan(255).implementation == "chunked"
    assert hopper_plan(512, 4096, query_offset=3584).implementation == "chunked"
    assert hopper_plan(1, 2**16, query_offset=2**16 - 1).implementation == "chunked"
    assert hopper_plan(2048, 4096, query_offset=2048).implementation == "pallas"


@pytest.mark.parametrize("release", [(), (0, 0, 12)])
@pytest.mark.usefixtures("on_hopper")
def test_a_release_that_was_not_measured(monkeypatch, release):
    monkeypatch.setattr(choice, "release", lambda package: release)
    assert hopper_plan().implementation == "pallas"


@pytest.mark.parametrize(
    ("capability", "options", "wanted"),
    [
        (None, {}, "chunked"),
        ((7, 5), {}, "chunked"),
        ((8, 0), {}, "cudnn"),
        ((8, 9), {"segment_ids": np.zeros((1, 2048), int)}, "pallas"),
        ((10, 0), {}, "tokamax_mosaic"),
        ((10, 0), {"local_window_size": 99}, "cudnn"),
        ((12, 0), {"dim": 128}, "cudnn"),
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_chips_that_were_not_measured(monkeypatch, capability, options, wanted):
    """They go by what libraries claim, and the plan says so."""
    monkeypatch.setattr(choice, "compute_capability", lambda: capability)
    made = hopper_plan(**options)
    assert made.implementation == wanted
    assert "H200" not in made.basis
    assert ("the libraries' own claims" in made.basis) == (wanted != "chunked")


@pytest.mark.usefixtures("on_hopper")
def test_windows_are_not_for_tokamax():
    """Whose kernel visits blocks backwards that a window hides."""
    assert hopper_plan(local_window_size=99).implementation == "cudnn"


def test_releases():
    assert choice.release("jax") == jax.__version_info__
    assert choice.release("no-such-package") == ()
