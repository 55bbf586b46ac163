"""Kernels of other libraries: what is done around them, lowered for their hardware, and refused.

What is done around cuDNN's and tokamax's kernels is tested with implementations of the same
libraries that run anywhere in their place; the kernels themselves need their hardware.
"""

from __future__ import annotations

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax.attention import attention, attention_plan, vendor
from tape_jax.attention.partition import differentiable_over_batch_and_heads
from tests.attention.cases import BY_NAME
from tests.attention.lowering import lowered
from tests.attention.test_backends import (
    REFUSED,
    assert_close,
    assert_sharded_alone,
    expected,
    jit,
    outputs_and_gradients,
    qkve,
    run,
)

needs_tokamax = pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed"
)


class CudnnElsewhere(vendor.Cudnn):
    """The calls that go to cuDNN, answered by XLA."""

    types = ("float32",)

    def check_device(self, interpret):
        del interpret


class PartitionedElsewhere(CudnnElsewhere):
    """A kernel that is partitioned by itself, as jax's calls of cuDNN are."""

    def kernel(self, call, args):
        kernel = functools.partial(super().kernel, call)
        return differentiable_over_batch_and_heads(kernel, args, vendor.AXES)


class TokamaxElsewhere(vendor.Tokamax):
    """The calls that go to tokamax's kernels, answered by its XLA implementation."""

    types = ("float32",)

    def check_device(self, interpret):
        del interpret

    def here(self):
        return "xla"


@pytest.fixture
def stand_in(monkeypatch, request):
    """Puts an implementation that runs anywhere in a backend's place; gives its name."""
    name = request.param
    monkeypatch.setattr(vendor, "cudnn", CudnnElsewhere(implementation="xla"))
    monkeypatch.setattr(vendor, "tokamax", TokamaxElsewhere(("mosaic_gpu",)))
    return name


stand_ins = pytest.mark.parametrize(
    "stand_in", ["cudnn", pytest.param("tokamax", marks=needs_tokamax)], indirect=True
)
AROUND = (
    "no_batch", "grouped_heads_shared_state", "window_one", "own_query_state", "tensor_grouped",
    "state_not_attended", "window_bidirectional", "cache", "tensor_cache",
)  # fmt: skip


@stand_ins
@pytest.mark.parametrize("name", AROUND)
def test_around_the_kernel(stand_in, name):
    """Rotation, padding, masks, the value [v | e] and its parts, gradients."""
    if name in REFUSED[stand_in]:
        pytest.skip(f"{stand_in} refuses this case")
    assert_close(run(BY_NAME[name], "float32", implementation=stand_in), expected(name), 1e-5)


@stand_ins
def test_sharded_and_batched(monkeypatch, stand_in):
    """Every device has its rows and heads; vmap merges with the batch."""
    monkeypatch.setattr(vendor, "cudnn", PartitionedElsewhere(implementation="xla"))
    args = qkve(19, heads=4, kv_heads=4)

    def f(ids, *args, **implementation):
        del ids
        return outputs_and_gradients(*args, causal=True, **implementation)

    ids = jnp.zeros((2, 19), int)
    assert_sharded_alone(functools.partial(f, implementation=stand_in), f, ids, *args)

    def loss(k, q, v, e, **implementation):
        o, a = attention(q, k, v, e, causal=True, **implementation)
        return jnp.sum(jnp.sin(o)) + jnp.sum(a**2)

    q, k, v, e = args
    want = jit(jax.grad(functools.partial(loss, implementation="reference")))(k, q, v, e[:1])
    row = jax.grad(functools.partial(loss, implementation=stand_in))
    assert_close(jit(jax.vmap(row, in_axes=(0, 0, 0, None)))(k, q, v, e[0]), want, 1e-5)


@pytest.mark.parametrize("rule", [{"causal": True}, {"window": 40}], ids=str)
def test_splash_in_several_blocks(rule):
    """Lengths that are no multiple of a block; hidden blocks on both sides."""
    args = qkve(150, heads=2, kv_heads=1, dim=8, batch=1)
    ids = np.arange(150) // 60
    f = functools.partial(outputs_and_gradients, segment_ids=ids, **rule)
    splash = {"implementation": "splash", "interpret": True, "options": {"block": 128}}
    got = jit(functools.partial(f, **splash))(*args)
    assert_close(got, jit(functools.partial(f, implementation="reference"))(*args), 1e-5)


@pytest.mark.parametrize("block", [0, -128, 64, 200])
def test_wrong_splash_block(block):
    splash = {"implementation": "splash", "interpret": True, "options": {"block": block}}
    with pytest.raises(ValueError, match=f"positive multiple of 128; got {block}"):
        attention(*qkve(8), **splash)


def lower(platform, dim, dtype="bfloat16", **keywords):
    """StableHLO of a call of 200 queries, and of its gradients."""
    q, kv, e = (
        jax.ShapeDtypeStruct((2, 200, heads, dim), t)
        for heads, t in ((4, dtype), (2, dtype), (2, "float32"))
    )
    forward = functools.partial(attention, **keywords)

    def gradients(*args):
        loss = lambda *args: sum(jnp.sum(x.astype(jnp.float32)) for x in forward(*args))  # noqa: E731
        return jax.grad(loss, (0, 1, 2, 3))(*args)

    return [lowered(platform, f, q, kv, kv, e) for f in (forward, gradients)]


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize(("dim", "dtype"), [(64, "bfloat16"), (128, "float32")])
@pytest.mark.parametrize("rule", [{"causal": True}, {"window": 70}, {}], ids=str)
def test_splash_lowers_to_tpu(dim, dtype, rule):
    forward, gradients = lower("tpu", dim, dtype, implementation="splash", **rule)
    assert forward.count("@tpu_custom_call(") == 1
    assert gradients.count("@tpu_custom_call(") == 3


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("backend", "calls"), [("cudnn", 2), ("cudnn_direct", 1)])
def test_cudnn_lowers_to_cuda(monkeypatch, backend, calls, dim):
    """Two calls, or one with values twice as wide; jax's own checks are met too."""
    monkeypatch.setattr(vendor.cudnn_calls, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(vendor.cudnn_calls, "check_compute_capability", lambda x: True)
    forward, gradients = lower("cuda", dim, implementation=backend, causal=True, window=70)
    assert forward.count("@__cudnn$fmhaSoftmax(") == calls
    assert gradients.count("@__cudnn$fmhaSoftmaxBackward(") == calls
    widest = 2 * dim if calls == 1 else dim
    assert f"tensor<2x200x2x{widest}xbf16>" in forward


@needs_tokamax
@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rule", [{}, {"window": 70}], ids=str)
@pytest.mark.parametrize(
    ("backend", "target"),
    [("tokamax_mosaic", "@mosaic_gpu_v2("), ("tokamax_triton", "@__gpu$xla.gpu.triton(")],
)
def test_tokamax_lowers_to_cuda(monkeypatch, backend, target, rule, dim):
    import tokamax
    from tokamax._src import gpu_utils

    monkeypatch.setattr(gpu_utils, "is_sm90", lambda device=None: True)
    monkeypatch.setattr(gpu_utils, "is_sm100", lambda device=None: False)
    with tokamax.config.cross_compile(True):
        forward, gradients = lower("cuda", dim, implementation=backend, causal=True, **rule)
    assert forward.count(target) == 1
    assert gradients.count(target) > 1


X = jax.ShapeDtypeStruct((1, 8, 2, 16), "bfloat16")
QKVE = dict.fromkeys("qkve", X)


def shaped(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


VENDORS = ("splash", "cudnn", "cudnn_direct", "tokamax", "tokamax_mosaic", "tokamax_triton")
REFUSALS = {
    "bias": ({"bias": shaped(8, 8)}, VENDORS, "bias= is not in the kernel"),
    "mask": ({"mask": shaped(8, 8, dtype="bool")}, VENDORS, "mask= is as large as the logits"),
    "segments": (
        {"segment_ids": shaped(1, 8, dtype="int32")},
        VENDORS[1:],
        "segment_ids= would need a mask as large",
    ),
    "float64": ({"q": shaped(1, 8, 2, 16, dtype="float64")}, VENDORS, "types of q are .*float64"),
    "float32": ({"q": shaped(1, 8, 2, 16, dtype="float32")}, VENDORS[1:], "types of q .*float32"),
    "float16": ({"q": shaped(1, 8, 2, 16, dtype="float16")}, VENDORS[:1], "types of q .*float16"),
    "traced_offset": (
        {"query_offset": shaped(dtype="int32")},
        VENDORS,
        "query_offset= must be known when",
    ),
    "hidden_rows": ({"causal": True, "query_offset": -1}, VENDORS[1:], "that sees no key"),
    "offset": ({"causal": True, "query_offset": 2}, VENDORS[1:3], "query_offset= is not in"),
    "window": ({"window": 3}, VENDORS[1:3], "window= needs causal=True"),
    "wide": (
        dict.fromkeys("qkve", shaped(1, 8, 2, 258)),
        VENDORS[1:2],
        "at most 256 here; got 264",
    ),
    "wide_together": (
        dict.fromkeys("qkve", shaped(1, 8, 2, 136)),
        VENDORS[2:3],
        "at most 256 here; got 272",
    ),
    "long": ({"window": 2**30}, VENDORS, "at most 536870912"),
}


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    keywords, backends, reason = REFUSALS[name]
    with jax.enable_x64(name == "float64"):
        for backend in backends:
            plan = attention_plan(**QKVE | keywords, implementation=backend)
            assert plan.implementation is None
            assert re.search(reason, plan.rejected[backend])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a machine without one does")
@pytest.mark.parametrize("backend", VENDORS)
def test_needs_its_hardware(monkeypatch, backend):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    wanted = "TPU" if backend == "splash" else "CUDA GPU"
    with pytest.raises(NotImplementedError, match=f"'{backend}': needs a {wanted}.*'cpu'"):
        attention(*qkve(8), implementation=backend)


@pytest.mark.parametrize("backend", VENDORS[1:])
def test_has_no_interpreter(backend):
    with pytest.raises(NotImplementedError, match=f"'{backend}': the kernel has no interpreted"):
        attention(*qkve(8), implementation=backend, interpret=True)


@pytest.mark.parametrize("backend", VENDORS[3:])
def test_missing_library_names_the_extra(monkeypatch, backend):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match=r"pip install tape-jax\[tokamax\]"):
        attention(*qkve(8), implementation=backend)


@pytest.mark.parametrize(
    ("backend", "capability", "reason"),
    [
        ("cudnn", (7, 5), r"8.0 \(Ampere\) or later; this one has 7.5"),
        ("cudnn_direct", (8, 0), r"9.0 \(Hopper\) or later; this one has 8.0"),
        ("tokamax_mosaic", (8, 0), r"Hopper or Blackwell; this one has 8.0"),
        ("tokamax", (7, 0), r"Hopper or Blackwell or of Ampere or later; this one has 7.0"),
    ],
)
def test_old_gpus(monkeypatch, backend, capability, reason):
    monkeypatch.setattr(vendor, "compute_capability", lambda: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    plan = attention_plan(**QKVE, implementation=backend)
    assert re.search(reason, plan.rejected[backend])


@pytest.mark.parametrize(
    ("capability", "kernel"), [((8, 0), "triton"), ((9, 0), "mosaic_gpu"), ((12, 0), "triton")]
)
def test_tokamax_takes_the_first_that_runs_here(monkeypatch, capability, kernel):
    monkeypatch.setattr(vendor, "compute_capability", lambda: capability)
    assert vendor.tokamax.here() == kernel


def test_cudnn_missing_or_old(monkeypatch):
    monkeypatch.setattr(vendor, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(vendor.cudnn_calls, "check_cudnn_version", lambda: 90900)
    rejected = attention_plan(**QKVE, implementation="cudnn_direct").rejected
    assert rejected["cudnn_direct"] == "needs cuDNN 9.10 or later; got version 90900"

    def missing():
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(vendor.cudnn_calls, "check_cudnn_version", missing)
    assert "not detected" in attention_plan(**QKVE, implementation="cudnn").rejected["cudnn"]


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("backend", ["splash", "tokamax"])
def test_64_bit_types_do_not_compile(x64, backend):
    rejected = attention_plan(**QKVE, implementation=backend).rejected
    assert rejected[backend] == "the kernel does not compile with 64-bit types enabled"
