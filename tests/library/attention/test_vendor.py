"""Kernels of other libraries: what is done around them, lowered for their hardware, and refused.

What is done around cuDNN's and tokamax's kernels is tested with implementations of the same
libraries that run anywhere in their place; the kernels themselves need their hardware.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn_calls
from jax.extend import backend as jax_backend

from tape_jax._src.attention import (
    attention_plan,
    vendor_cudnn,
    vendor_tokamax,
)
from tape_jax._src.core import devices
from tests.library.attention.backends import (
    assert_close,
    attend,
    expected,
    jit,
    lowered,
    outputs_and_gradients,
    qkve,
    run,
)
from tests.library.attention.cases import BY_NAME
from tests.selection import mostly_slow

needs_tokamax = pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed"
)


class CudnnElsewhere(vendor_cudnn.Cudnn):
    """The calls that go to cuDNN, answered by XLA."""

    types = ("float32",)

    def check_device(self, interpret):
        del interpret


class TokamaxElsewhere(vendor_tokamax.Tokamax):
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
    monkeypatch.setattr(vendor_cudnn, "cudnn", CudnnElsewhere(implementation="xla"))
    monkeypatch.setattr(vendor_tokamax, "tokamax", TokamaxElsewhere(("mosaic_gpu",)))
    return name


stand_ins = pytest.mark.parametrize(
    "stand_in", ["cudnn", pytest.param("tokamax", marks=needs_tokamax)], indirect=True
)
AROUND = ("grouped_heads_shared_state", "own_query_state", "tensor_grouped", "state_not_attended")


@stand_ins
@pytest.mark.parametrize(
    "name", mostly_slow(AROUND, "grouped_heads_shared_state", "tensor_grouped")
)
def test_around_the_kernel(stand_in, name):
    """Rotation, padding, masks, the value [v | e] and its parts, gradients."""
    assert_close(run(BY_NAME[name], "float32", implementation=stand_in), expected(name), 1e-5)


@pytest.mark.parametrize(
    "rule", mostly_slow([{"is_causal": True}, {"local_window_size": 39}], {"local_window_size": 39})
)
def test_splash_in_several_blocks(rule):
    """Lengths that are no multiple of a block; hidden blocks on both sides."""
    args = qkve(150, heads=2, kv_heads=1, dim=8, batch=1)
    ids = np.arange(150) // 60
    f = functools.partial(outputs_and_gradients, segment_ids=ids, **rule)
    splash = {"implementation": "splash", "interpret": True, "options": {"block": 128}}
    got = jit(functools.partial(f, **splash))(*args)
    assert_close(got, jit(functools.partial(f, implementation="reference"))(*args), 1e-5)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (0, "positive multiple of 128; got 0"),
        (200, "positive multiple of 128; got 200"),
        ("128", "block must be an integer or None; got '128'"),
        (128.0, r"block must be an integer or None; got 128\.0"),
    ],
)
def test_wrong_splash_block(block, message):
    splash = {"implementation": "splash", "interpret": True, "options": {"block": block}}
    with pytest.raises(ValueError, match=message):
        attend(*qkve(8), **splash)


def lower(platform, dim, dtype="bfloat16", **keywords):
    """StableHLO of a call of 300 queries, and of its gradients."""
    q, kv, e = (
        jax.ShapeDtypeStruct((2, 300, heads, dim), t)
        for heads, t in ((4, dtype), (2, dtype), (2, "float32"))
    )
    forward = functools.partial(attend, **keywords)

    def gradients(*args):
        loss = lambda *args: sum(jnp.sum(x.astype(jnp.float32)) for x in forward(*args))  # noqa: E731
        return jax.grad(loss, (0, 1, 2, 3))(*args)

    return [lowered(platform, f, q, kv, kv, e) for f in (forward, gradients)]


@pytest.mark.slow
@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize(
    ("dim", "dtype", "rule"),
    [(64, "bfloat16", {"is_causal": True}), (128, "float32", {"local_window_size": 69})],
    ids=str,
)
def test_splash_lowers_to_tpu(dim, dtype, rule):
    forward, gradients = lower("tpu", dim, dtype, implementation="splash", **rule)
    assert forward.count("@tpu_custom_call(") == 1
    assert gradients.count("@tpu_custom_call(") == 3


@pytest.mark.usefixtures("any_device")
def test_cudnn_lowers_to_cuda(monkeypatch):
    """One call for values, one for states; jax's own checks are met too."""
    monkeypatch.setattr(cudnn_calls, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn_calls, "check_compute_capability", lambda x: True)
    forward, gradients = lower(
        "cuda", 64, implementation="cudnn", is_causal=True, local_window_size=69
    )
    assert forward.count("@__cudnn$fmhaSoftmax(") == 2
    assert gradients.count("@__cudnn$fmhaSoftmaxBackward(") == 2


@dataclasses.dataclass(frozen=True)
class Hopper:
    """What tokamax asks a device for."""

    device_kind: str = "NVIDIA H100"
    platform: str = "gpu"
    compute_capability: str = "9.0"
    core_count: int = 132


@needs_tokamax
@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize(
    ("name", "target", "rule"),
    [
        ("tokamax_mosaic", "@mosaic_gpu_v2(", {}),
        ("tokamax_mosaic", "@mosaic_gpu_v2(", {"local_window_size": 69}),
        ("tokamax_triton", "@__gpu$xla.gpu.triton(", {}),
    ],
)
def test_tokamax_lowers_to_cuda(monkeypatch, name, target, rule):
    import tokamax
    from tokamax._src import gpu_utils

    monkeypatch.setattr(gpu_utils, "is_sm90", lambda device=None: True)
    monkeypatch.setattr(gpu_utils, "is_sm100", lambda device=None: False)
    monkeypatch.setattr(jax_backend, "get_default_device", Hopper)
    with tokamax.config.cross_compile(True):
        forward, gradients = lower("cuda", 128, implementation=name, is_causal=True, **rule)
    assert forward.count(target) == 1
    assert gradients.count(target) > 1
    # Lengths are padded to 384: no mask is as large as the logits.
    assert "384x" in forward
    assert "384x384" not in forward + gradients


X = jax.ShapeDtypeStruct((1, 8, 2, 16), "bfloat16")
ARRAYS = dict.fromkeys(("q", "k", "v", "state"), X)


def shaped(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def tensor_call(channels):
    """Heads of 64 with states ``[1, 8, 2, 32, 2, channels]``."""
    given = dict.fromkeys(("q", "k", "v"), shaped(1, 8, 2, 64))
    return given | dict.fromkeys(("state", "query_state"), shaped(1, 8, 2, 32, 2, channels))


VENDORS = ("splash", "cudnn", "tokamax", "tokamax_mosaic", "tokamax_triton")
WIDE_KEYS = "keys of at most 128 and values and states of at most 256 together; got 256 and 512"
# What test_backends.py has no cases of.
REFUSALS = [
    (VENDORS, "bias= is not in the kernel", {"bias": shaped(8, 8)}),
    (VENDORS[1:], "types of q .*float32", {"q": shaped(1, 8, 2, 16, dtype="float32")}),
    (VENDORS[:1], "types of q .*float16", {"q": shaped(1, 8, 2, 16, dtype="float16")}),
    (VENDORS, "must be known when", {"query_offset": shaped(dtype="int32")}),
    (
        VENDORS,
        "one for all rows",
        dict.fromkeys(ARRAYS, shaped(2, 8, 2, 16)) | {"query_offset": np.array([1, 2])},
    ),
    (
        VENDORS[2:4],
        "local_window_size= needs as many queries as keys",
        {"q": shaped(1, 4, 2, 16), "query_state": shaped(1, 4, 2, 16), "local_window_size": 2},
    ),
    (VENDORS[4:], "takes a window as a mask as large as", {"local_window_size": 2}),
    (VENDORS[3:4], WIDE_KEYS, dict.fromkeys(ARRAYS, shaped(1, 8, 2, 256))),
    (VENDORS[4:], "powers of two, .*; got 96 of keys", dict.fromkeys(ARRAYS, shaped(1, 8, 2, 96))),
    (VENDORS[1:2], "at most 256 here; got 264", dict.fromkeys(ARRAYS, shaped(1, 8, 2, 258))),
    # Kernels get rotated keys, which the tensor form makes M * R wide.
    (VENDORS[4:], "powers of two, .*; got 96 of keys", tensor_call(3)),
    (VENDORS[1:2], "at most 256 here; got 384", tensor_call(12) | {"attend_state": False}),
]


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize(("backends", "reason", "keywords"), REFUSALS)
def test_refusals(backends, reason, keywords):
    for backend in backends:
        plan = attention_plan(**ARRAYS | keywords, implementation=backend)
        assert plan.implementation is None
        assert re.search(reason, plan.rejected[backend])


@pytest.mark.usefixtures("any_device")
def test_64_bit_types(x64):
    """Enabled, they do not compile in some kernels; none takes float64."""
    for backend, keywords, reason in (
        *((name, {"q": shaped(1, 8, 2, 16, dtype="float64")}, "types of q") for name in VENDORS),
        ("splash", {}, "does not compile with 64-bit types"),
        ("tokamax", {}, "does not compile with 64-bit types"),
    ):
        plan = attention_plan(**ARRAYS | keywords, implementation=backend)
        assert reason in plan.rejected[backend]


def rejected(backend, **keywords):
    return attention_plan(**ARRAYS, implementation=backend, **keywords).rejected[backend]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a machine without one does")
def test_what_is_not_here(monkeypatch):
    """Hardware, an interpreter, and a library."""
    for name in VENDORS[1:]:
        assert "the kernel has no interpreted" in rejected(name, interpret=True)
    for installed, words in ((object(), "needs a CUDA GPU"), (None, "tape-jax[tokamax]")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=installed: found)
        for name in VENDORS[2:]:
            assert words in rejected(name)
    assert "needs a TPU" in rejected("splash")
    assert "needs a CUDA GPU" in rejected("cudnn")

    def missing():
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(devices, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(cudnn_calls, "check_cudnn_version", missing)
    assert "not detected" in rejected("cudnn")


@pytest.mark.parametrize(
    ("backend", "capability", "reason"),
    [
        ("cudnn", (7, 5), r"8.0 \(Ampere\) or later; this one has 7.5"),
        ("tokamax_mosaic", (8, 0), r"Hopper or Blackwell; this one has 8.0"),
    ],
)
def test_old_gpus(monkeypatch, backend, capability, reason):
    monkeypatch.setattr(devices, "compute_capability", lambda: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert re.search(reason, rejected(backend))


@pytest.mark.parametrize(("capability", "kernel"), [((8, 0), "triton"), ((9, 0), "mosaic_gpu")])
def test_tokamax_takes_the_first_that_runs_here(monkeypatch, capability, kernel):
    monkeypatch.setattr(devices, "compute_capability", lambda: capability)
    assert vendor_tokamax.tokamax.here() == kernel


@pytest.mark.parametrize(("version", "refused"), [(12_070, 0), (12_080, 1), (12_091, 0)])
def test_releases_of_cuda_that_miscompile(monkeypatch, version, refused):
    monkeypatch.setattr(vendor_tokamax, "cuda_versions", SimpleNamespace(
        cuda_runtime_get_version=lambda: version
    ))  # fmt: skip
    assert vendor_tokamax.miscompiles_causal() == refused
