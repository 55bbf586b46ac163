"""Our attention kernels, compiled for GPUs that are not here."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from benchmarks.aot import CHOSEN, AotProgram, compile_for
from tape_jax._src.attention import attention

needs_compilers = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None or jax.__version_info__ < (0, 11, 1),
    reason="needs the packages of `make test-aot`",
)
LENGTH = 1024
# Options of a call; arrays by their names.
CALLS = {
    "causal": {"is_causal": True},
    "all keys": {},
    "window": {"local_window_size": (100, 200)},
    "causal window": {"is_causal": True, "local_window_size": 128},
    "segments": {"is_causal": True, "segment_ids": "ids"},
    "no state": {"is_causal": True, "attend_state": False},
    "decay": {"is_causal": True, "log_decay": "decay"},
}


def program(implementation, dim, dtype, kv_heads, options):
    """Forward and backward of a call, the state in float32."""
    shapes = {
        "q": jax.ShapeDtypeStruct((2, LENGTH, 12, dim), dtype),
        **{n: jax.ShapeDtypeStruct((2, LENGTH, kv_heads, dim), dtype) for n in "kv"},
        "state": jax.ShapeDtypeStruct((2, LENGTH, kv_heads, dim), "float32"),
        "decay": jax.ShapeDtypeStruct((2, LENGTH, 12), "float32"),
    }

    def loss(floats, ids):
        given = floats | {"ids": ids}
        arrays = {name: given[name] for name in ("q", "k", "v", "state")}
        rest = {name: given.get(x, x) if isinstance(x, str) else x for name, x in options.items()}
        out = attention(**arrays, **rest, implementation=implementation)
        return sum(jnp.sum(x.astype(jnp.float32)) for x in out if x is not None)

    ids = jax.ShapeDtypeStruct((2, LENGTH), "int32")
    return AotProgram("call", lambda: (jax.jit(jax.grad(loss)), (shapes, ids)), 1.0)


@pytest.fixture(scope="module")
def processes():
    """Makes a process for a target: Mosaic GPU compiles all kernels of one for its first chip."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        yield functools.cache(
            lambda target: stack.enter_context(ProcessPoolExecutor(1, context, use_cpu))
        )


def use_cpu():
    """Looks for no GPU."""
    jax.config.update("jax_platforms", "cpu")


def kernels(target, *args):
    """Our own kernels of a program, by name."""
    device, *_ = CHOSEN[target].devices()
    got = compile_for(target, device, program(*args))
    assert not got.error
    found = {x.name.removeprefix("tape_attention_"): x for x in got.kernels}
    return {name: x for name, x in found.items() if name.endswith(("forward", "gradients"))}


@needs_compilers
@pytest.mark.parametrize("implementation", ["pallas", "mosaic"])
def test_a_plan_of_kernels_without_cudnn(implementation):
    """Made by a process that nothing told to use the CPU."""
    model = f"--config.model.attention_implementation={implementation}"
    config = ["--config=configs/c4_pretrain.py", "--config.model.num_layers=1", model]
    plan = ["plan", "--topology=h100:2", "--mesh", "tensor=2", "--config.train.batch_size=4"]
    found = subprocess.run(
        [sys.executable, "-m", "train.main", *plan, *config],
        env={k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"},
        capture_output=True,
        text=True,
    )
    assert "best: tensor=2 on h100:2" in found.stdout, found
    assert "cuDNN" not in found.stderr


@needs_compilers
@pytest.mark.parametrize("kv_heads", [12, 4])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a"])
def test_mosaic_spills_nothing(target, call, dim, kv_heads, processes):
    """Nor do products wait for one another (C7512, C7515); what a block has in memory is enough."""
    if (target, call, dim) == ("sm_90a", "decay", 128):
        pytest.skip("refused")
    args = target, "mosaic", dim, "bfloat16", kv_heads, CALLS[call]
    found = processes(target).submit(kernels, *args).result()
    names = ["forward", "key_gradients", "query_gradients", *["value_gradients"] * (dim == 128)]
    assert sorted(found) == names
    assert not any(x.serialized for x in found.values())
    assert not any(any(x.spills) for x in found.values())


@needs_compilers
@pytest.mark.parametrize(
    ("target", "axis"), [("sm_80", "batch"), *(("sm_90a", x) for x in ("batch", "heads", "group"))]
)
def test_mosaic_inside_shard_map(target, axis, processes):
    """Its own axes are none of the mesh's, whatever these are called."""
    assert not processes(target).submit(error_inside_shard_map, target, axis).result()


def error_inside_shard_map(target, axis):
    """Of a call on a mesh with this axis."""
    device, *_ = CHOSEN[target].devices()
    spec = PartitionSpec(axis)
    x = jax.ShapeDtypeStruct((2, LENGTH, 2, 64), "bfloat16")

    def call(q):
        return attention(q, q, q, state=q, is_causal=True, implementation="mosaic")

    def build():
        split = jax.shard_map(call, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(split), (x,)

    return compile_for(target, device, AotProgram("call", build, 1.0), axis).error


@needs_compilers
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
def test_triton_spills_nothing(target, dim, dtype):
    found = kernels(target, "pallas", dim, dtype, 12, CALLS["causal"])
    assert {"forward", "key_gradients", "query_gradients"} <= set(found)
    assert sum(sum(x.spills) for x in found.values()) == 0
