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
from jax.extend import backend

from tape_jax._src.attention import (
    attention,
    attention_plan,
    pallas_blocks,
    vendor_cudnn,
    vendor_tokamax,
)
from tests.library.attention.backends import (
    REFUSED,
    assert_close,
    assert_sharded_alone,
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
AROUND = (
    "no_batch", "grouped_heads_shared_state", "window_one", "own_query_state", "tensor_grouped",
    "state_not_attended", "window_bidirectional",
)  # fmt: skip


@stand_ins
@pytest.mark.parametrize(
    "name", mostly_slow(AROUND, "grouped_heads_shared_state", "tensor_grouped")
)
def test_around_the_kernel(stand_in, name):
    """Rotation, padding, masks, the value [v | e] and its parts, gradients."""
    if name in REFUSED[stand_in]:
        pytest.skip(f"{stand_in} refuses this case")
    assert_close(run(BY_NAME[name], "float32", implementation=stand_in), expected(name), 1e-5)


@pytest.mark.slow
@stand_ins
def test_sharded_and_batched(stand_in):
    """Every device has its rows and heads; vmap merges with the batch."""
    args = qkve(19, heads=4, kv_heads=4)

    def f(ids, *args, **implementation):
        del ids
        return outputs_and_gradients(*args, is_causal=True, **implementation)

    ids = jnp.zeros((2, 19), int)
    assert_sharded_alone(functools.partial(f, implementation=stand_in), f, ids, *args)

    def loss(k, q, v, e, **implementation):
        o, a = attention(q, k, v, state=e, is_causal=True, **implementation)
        return jnp.sum(jnp.sin(o)) + jnp.sum(a**2)

    q, k, v, e = args
    want = jit(jax.grad(functools.partial(loss, implementation="reference")))(k, q, v, e[:1])
    row = jax.grad(functools.partial(loss, implementation=stand_in))
    assert_close(jit(jax.vmap(row, in_axes=(0, 0, 0, None)))(k, q, v, e[0]), want, 1e-5)


@pytest.mark.parametrize(
    "rule",
    mostly_slow([{"is_causal": True}, {"local_window_size": 39}], {"local_window_size": 39}),
    ids=str,
)
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
@pytest.mark.parametrize("dim", [64, 128])
def test_cudnn_lowers_to_cuda(monkeypatch, dim):
    """One call for values, one for states; jax's own checks are met too."""
    monkeypatch.setattr(cudnn_calls, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn_calls, "check_compute_capability", lambda x: True)
    forward, gradients = lower(
        "cuda", dim, implementation="cudnn", is_causal=True, local_window_size=69
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
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("name", "target", "rule"),
    [
        ("tokamax_mosaic", "@mosaic_gpu_v2(", {}),
        ("tokamax_mosaic", "@mosaic_gpu_v2(", {"local_window_size": 69}),
        ("tokamax_triton", "@__gpu$xla.gpu.triton(", {}),
    ],
)
def test_tokamax_lowers_to_cuda(monkeypatch, name, target, rule, dim):
    import tokamax
    from tokamax._src import gpu_utils

    monkeypatch.setattr(gpu_utils, "is_sm90", lambda device=None: True)
    monkeypatch.setattr(gpu_utils, "is_sm100", lambda device=None: False)
    monkeypatch.setattr(backend, "get_default_device", Hopper)
    with tokamax.config.cross_compile(True):
        forward, gradients = lower("cuda", dim, implementation=name, is_causal=True, **rule)
    assert forward.count(target) == 1
    assert gradients.count(target) > 1
    # Lengths are padded to 384: no mask is as large as the logits.
    assert "384x" in forward
    assert "384x384" not in forward + gradients


X = jax.ShapeDtypeStruct((1, 8, 2, 16), "bfloat16")
ARRAYS = dict.fromkeys(("q", "k", "v", "state"), X)


def shaped(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


VENDORS = ("splash", "cudnn", "tokamax", "tokamax_mosaic", "tokamax_triton")
REFUSALS = {
    "bias": ({"bias": shaped(8, 8)}, VENDORS, "bias= is not in the kernel"),
    "mask": ({"mask": shaped(8, 8, dtype="bool")}, VENDORS, "mask= is not in the kernel"),
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
    "offset_a_row": (
        dict.fromkeys(ARRAYS, shaped(2, 8, 2, 16)) | {"query_offset": np.array([1, 2])},
        VENDORS,
        "one for all rows",
    ),
    "hidden_rows": ({"is_causal": True, "query_offset": -1}, VENDORS[1:], "that sees no key"),
    "offset": ({"is_causal": True, "query_offset": 2}, VENDORS[1:], "query_offset="),
    "window": ({"local_window_size": 2}, VENDORS[1:2], "local_window_size= needs is_causal=True"),
    "window_of_unlike_lengths": (
        {"q": shaped(1, 4, 2, 16), "query_state": shaped(1, 4, 2, 16), "local_window_size": 2},
        VENDORS[2:4],
        "local_window_size= needs as many queries as keys",
    ),
    "window_as_a_mask": (
        {"local_window_size": 2},
        VENDORS[4:],
        "Triton kernel takes a window as a mask as large as the logits",
    ),
    "wide_keys": (
        dict.fromkeys(ARRAYS, shaped(1, 8, 2, 256)),
        VENDORS[3:4],
        "keys of at most 128 and values and states of at most 256 together; got 256 and 512",
    ),
    "odd_widths": (
        dict.fromkeys(ARRAYS, shaped(1, 8, 2, 96)),
        VENDORS[4:],
        "powers of two, at least 16; got 96 of keys and 192 of values",
    ),
    "wide": (
        dict.fromkeys(ARRAYS, shaped(1, 8, 2, 258)),
        VENDORS[1:2],
        "at most 256 here; got 264",
    ),
}


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    keywords, backends, reason = REFUSALS[name]
    with jax.enable_x64(name == "float64"):
        for backend in backends:
            plan = attention_plan(**ARRAYS | keywords, implementation=backend)
            assert plan.implementation is None
            assert re.search(reason, plan.rejected[backend])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a machine without one does")
@pytest.mark.parametrize("backend", VENDORS)
def test_needs_its_hardware(monkeypatch, backend):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    wanted = "TPU" if backend == "splash" else "CUDA GPU"
    with pytest.raises(NotImplementedError, match=f"'{backend}': needs a {wanted}.*'cpu'"):
        attend(*qkve(8), implementation=backend)


@pytest.mark.parametrize("backend", VENDORS[1:])
def test_has_no_interpreter(backend):
    with pytest.raises(NotImplementedError, match=f"'{backend}': the kernel has no interpreted"):
        attend(*qkve(8), implementation=backend, interpret=True)


@pytest.mark.parametrize("backend", VENDORS[2:])
def test_missing_library_names_the_extra(monkeypatch, backend):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match=r"pip install tape-jax\[tokamax\]"):
        attend(*qkve(8), implementation=backend)


@pytest.mark.parametrize(
    ("backend", "capability", "reason"),
    [
        ("cudnn", (7, 5), r"8.0 \(Ampere\) or later; this one has 7.5"),
        ("tokamax_mosaic", (8, 0), r"Hopper or Blackwell; this one has 8.0"),
        ("tokamax", (7, 0), r"Hopper or Blackwell or of Ampere or later; this one has 7.0"),
    ],
)
def test_old_gpus(monkeypatch, backend, capability, reason):
    monkeypatch.setattr(pallas_blocks, "compute_capability", lambda: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    plan = attention_plan(**ARRAYS, implementation=backend)
    assert re.search(reason, plan.rejected[backend])


@pytest.mark.parametrize(
    ("capability", "kernel"), [((8, 0), "triton"), ((9, 0), "mosaic_gpu"), ((12, 0), "triton")]
)
def test_tokamax_takes_the_first_that_runs_here(monkeypatch, capability, kernel):
    monkeypatch.setattr(pallas_blocks, "compute_capability", lambda: capability)
    assert vendor_tokamax.tokamax.here() == kernel


def test_cudnn_is_missing(monkeypatch):
    """What jax says of it is the reason."""
    monkeypatch.setattr(pallas_blocks, "compute_capability", lambda: (9, 0))

    def missing():
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(cudnn_calls, "check_cudnn_version", missing)
    assert "not detected" in attention_plan(**ARRAYS, implementation="cudnn").rejected["cudnn"]


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("backend", ["splash", "tokamax"])
def test_64_bit_types_do_not_compile(x64, backend):
    rejected = attention_plan(**ARRAYS, implementation=backend).rejected
    assert rejected[backend] == "the kernel does not compile with 64-bit types enabled"


@pytest.mark.parametrize(
    ("version", "refused"), [(12_070, 0), (12_080, 1), (12_090, 1), (12_091, 0)]
)
def test_releases_of_cuda_that_miscompile(monkeypatch, version, refused):
    monkeypatch.setattr(vendor_tokamax, "cuda_versions", SimpleNamespace(
        cuda_runtime_get_version=lambda: version
    ))  # fmt: skip
    assert vendor_tokamax.miscompiles_causal() == refused
