"""The fused kernels: interpreted on any machine, lowered to CUDA, and compiled where there is one.

The numerical standard is ``reference`` in float64, by way of the suite for all backends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tape_jax import testing
from tape_jax.attention import attention, attention_plan, pallas_blocks, pallas_triton
from tape_jax.attention.pallas_blocks import Tile, Tiles
from tests.attention.cases import BY_NAME, CASES, inputs, oracle
from tests.attention.test_backends import assert_close, expected, jit, run

INTERPRETED = {"implementation": "pallas", "interpret": True}
# Small blocks, so that short cases span several.
SMALL = {**INTERPRETED, "options": {"tiles": Tiles.same(16, 16)}}
# Tiles that are not square, and unlike in each kernel.
UNLIKE = {
    **INTERPRETED,
    "options": {"tiles": Tiles(Tile(16, 32), Tile(32, 16), Tile(16, 64))},
}
SUPPORTED = [case for case in CASES if case.bias is None and case.form != "tensor"]


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def qkve(length, heads=2, kv_heads=2, dim=16, batch=2, dtype=jnp.float32):
    """Random q, k, v in ``dtype`` and e in float32."""
    shapes = [(batch, length, h, dim) for h in (heads, kv_heads, kv_heads, kv_heads)]
    arrays = [normal(seed, *shape) for seed, shape in enumerate(shapes)]
    return [x.astype(dtype) for x in arrays[:3]] + arrays[3:]


def outputs_and_gradients(*args, **keywords):
    """``(o, a)`` and the gradients of a scalar of them to the first four arguments, in float32."""

    def loss(*args):
        o, a = attention(*args, **keywords)
        weights = [jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) for x in (o, a)]
        return jnp.sum(o * weights[0]) + jnp.sum(a * weights[1]), (o, a)

    gradients, out = jax.grad(loss, (0, 1, 2, 3), has_aux=True)(*args)
    return jax.tree.map(lambda x: x.astype(jnp.float32), (out, gradients))


@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_outputs_and_gradients(case):
    assert_close(run(case, "float32", **SMALL), expected(case.name), 1e-5)


def test_tiles_of_unlike_sizes():
    case = BY_NAME["window_bidirectional"]
    assert_close(run(case, "float32", **UNLIKE), expected(case.name), 1e-5)


def test_widths_and_table():
    """Widths that are no power of two, by the table's blocks, longer than the call."""
    case = dataclasses.replace(BY_NAME["causal"], batch=(1,), queries=17, dim=24, value_dim=40)
    with jax.enable_x64(True):
        want = run(case, "float64", implementation="reference")
    assert_close(run(case, "float32", **INTERPRETED), want, 1e-5)


def test_64_bit_types_enabled():
    """Indices stay 32-bit, ids may be 64-bit, and a float32 call gives the same."""
    case = BY_NAME["cross"]
    with jax.enable_x64(True):
        assert_close(run(case, "float32", **SMALL), expected(case.name), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float16", 5e-3)])
def test_half_precision(dtype, tolerance):
    case = BY_NAME["grouped_heads_shared_state"]
    got = run(case, dtype, **SMALL)
    # By the largest error for the same rounded inputs, by the norm of the error for exact ones.
    assert_close(got, expected(case.name, rounding=dtype), tolerance)
    for x, y in zip(*map(jax.tree.leaves, (got, expected(case.name))), strict=True):
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y)


def test_all_rows_hidden():
    """Exact zeros, in a block that is visited (its ranges of ids meet) and in one that is not."""
    args = qkve(33)
    mine = np.where(np.arange(33) < 20, 1, 9)
    keys = np.where(np.arange(33) % 2, 0, 2)
    f = jit(functools.partial(outputs_and_gradients, segment_ids=(mine, keys), **SMALL))
    out = f(*args)
    chex.assert_trees_all_equal(out, jax.tree.map(jnp.zeros_like, out))


@pytest.mark.parametrize(
    ("options", "rows", "unseen"),
    [
        ({"causal": True}, slice(0, 32), slice(32, 64)),
        ({"window": 9}, slice(32, 64), slice(0, 16)),
        ({"segment_ids": np.repeat([3, -1], 32)}, slice(0, 32), slice(32, 64)),
    ],
    ids=["causal", "window", "segments"],
)
def test_hidden_blocks_are_not_read(options, rows, unseen):
    """NaN there reaches no output and no gradient of rows that do not see them."""
    q, k, v, e = qkve(64, heads=1, kv_heads=1, batch=1)

    @jit
    def f(k, v, e):
        def loss(q):
            o, a = attention(q, k, v, e, query_state=e * 0 + 1, **options, **SMALL)
            return jnp.sum(o[:, rows]) + jnp.sum(a[:, rows])

        return jax.value_and_grad(loss)(q)

    spoiled = [x.at[:, unseen].set(jnp.nan) for x in (k, v)]
    value, gradient = f(*spoiled, e)
    want_value, want_gradient = f(k, v, e)
    np.testing.assert_array_equal(value, want_value)
    np.testing.assert_array_equal(gradient[:, rows], want_gradient[:, rows])


def test_symmetries():
    q, k, v, e = qkve(24)
    ids = jnp.asarray(np.random.default_rng(5).integers(0, 2, (2, 24)))

    @jax.jit
    def f(q, k, v, e, ids):
        return attention(q, k, v, e, segment_ids=ids, **SMALL)

    testing.assert_permutation_equivariant(
        f, q, k, v, e, ids, in_axes=(1, 1, 1, 1, 1), out_axes=(1, 1)
    )
    testing.assert_phase_equivariant(
        lambda q, k, v, e: f(q, k, v, e, ids), q, k, v, e,
        in_states=(False, False, False, True), out_states=(False, True),
    )  # fmt: skip


def test_vmap_over_offsets():
    """query_offset may be traced, and batched by vmap, which merges it with the batch."""
    case = BY_NAME["cache"]
    floats = {name: jnp.asarray(x, jnp.float32) for name, x in inputs(case)[0].items()}

    @jit
    @functools.partial(jax.vmap, in_axes=(0, None, 0))
    def f(q, rest, offset):
        return attention(
            q, *rest, causal=True, window=case.window, keys_rotated=True, query_offset=offset,
            query_state=floats["query_state"], **SMALL,
        )  # fmt: skip

    offsets = [18, 3, -2]
    q = jnp.stack([floats["q"]] * 3)
    got = f(q, [floats[name] for name in "kve"], jnp.asarray(offsets))
    for n, offset in enumerate(offsets):
        want = oracle(dataclasses.replace(case, query_offset=offset), *inputs(case))
        assert_close(jax.tree.map(lambda x, n=n: np.asarray(x[n], np.float64), got), want, 1e-5)


def test_transformations():
    """Gradients of a rematerialised and scanned call and under vmap are those of ``reference``."""
    q, k, v, e = qkve(19)

    def loss(k, q, v, e, **implementation):
        o, a = attention(q, k, v, e, causal=True, **implementation)
        return jnp.sum(jnp.sin(o)) + jnp.sum(a**2)

    def scanned(k, q, v, e):
        def step(total, x):
            return total + jax.checkpoint(functools.partial(loss, **SMALL))(x, q, v, e), None

        return jax.lax.scan(step, 0.0, k[None])[0]

    want = jit(jax.grad(functools.partial(loss, implementation="reference")))
    assert_close(jit(jax.grad(scanned))(k, q, v, e), want(k, q, v, e), 1e-5)
    # All rows share the state of the first.
    row = jax.grad(functools.partial(loss, **SMALL))
    by_row = jit(jax.vmap(row, in_axes=(0, 0, 0, None)))
    assert_close(by_row(k, q, v, e[0]), want(k, q, v, e[:1]), 1e-5)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_sharded_over_batch_and_heads(kv_heads):
    """Each device runs the kernels on its rows and heads, and talks to no other."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    args = qkve(19, heads=4, kv_heads=kv_heads)
    ids = jnp.sort(jnp.asarray(np.random.default_rng(0).integers(0, 3, (2, 19))))
    rows, heads = PartitionSpec("data"), PartitionSpec("data", None, "model")

    def f(ids, *args, **implementation):
        return outputs_and_gradients(*args, causal=True, segment_ids=ids, **implementation)

    want = jit(functools.partial(f, implementation="reference"))(ids, *args)
    ids = jax.device_put(ids, NamedSharding(mesh, rows))
    args = jax.device_put(args, NamedSharding(mesh, heads))
    compiled = jit(functools.partial(f, **SMALL)).lower(ids, *args).compile()
    collective = r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    assert not re.search(collective, compiled.as_text())
    got = compiled(ids, *args)
    placed = NamedSharding(mesh, heads)
    assert all(x.sharding.is_equivalent_to(placed, x.ndim) for x in jax.tree.leaves(got))
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), atol=1e-5)


def test_sharded_time_is_gathered():
    """A sharded axis over which the kernels cannot be split gives the right result too."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    args = qkve(20, heads=2, kv_heads=1)
    want = jit(functools.partial(attention, causal=True, implementation="reference"))(*args)
    f = jit(functools.partial(attention, causal=True, **SMALL))
    got = f(*jax.device_put(args, NamedSharding(mesh, PartitionSpec("data", "model"))))
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), atol=1e-6)


@pytest.fixture
def cuda_here(monkeypatch):
    """Takes the device check out of the way: for lowering, which needs no device."""
    monkeypatch.setattr(pallas_triton, "_check_device", lambda interpret: None)


def lowered_to_cuda(function, *shapes):
    """StableHLO for CUDA, made on a machine without it."""
    target = contextlib.nullcontext()
    if jax.__version_info__ >= (0, 11):
        from jax.sharding import AbstractDevice

        device = AbstractDevice("NVIDIA H100", None, "cuda")
        target = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    with target:
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("cuda_here")
def test_tensor_float_lowers_to_cuda():
    x = jax.ShapeDtypeStruct((1, 64, 2, 64), "float32")

    def kernel(allow_tf32):
        options = {"allow_tf32": allow_tf32}
        f = functools.partial(attention, implementation="pallas", options=options)
        return lowered_to_cuda(f, x, x, x, x)

    assert kernel(True) != kernel(False)


@pytest.mark.usefixtures("cuda_here")
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [64, 128])
def test_lowers_to_cuda(dim, dtype, x64):
    """One kernel forward, two backward."""
    with jax.enable_x64(x64):
        q = jax.ShapeDtypeStruct((2, 200, 4, dim), dtype)
        kv = jax.ShapeDtypeStruct((2, 200, 2, dim), dtype)
        e = jax.ShapeDtypeStruct((2, 200, 2, dim), "float32")
        ids = jax.ShapeDtypeStruct((2, 200), "int32")

        def forward(q, k, v, e, ids):
            return attention(q, k, v, e, window=70, segment_ids=ids, implementation="pallas")

        def backward(q, k, v, e, ids):
            loss = lambda *args: sum(jnp.sum(x) for x in forward(*args, ids))  # noqa: E731
            return jax.grad(loss, (0, 1, 2, 3))(q, k, v, e)

        call = "custom_call @__gpu$xla.gpu.triton"
        assert lowered_to_cuda(forward, q, kv, kv, e, ids).count(call) == 1
        assert lowered_to_cuda(backward, q, kv, kv, e, ids).count(call) == 3


def test_state_that_is_not_attended_costs_nothing():
    """The kernels then write no ``a`` and no gradient of it, and read no state they need not."""
    x = jax.ShapeDtypeStruct((1, 32, 2, 16), "float32")

    def kernels(**keywords):
        def loss(*qkv):
            return jnp.sum(attention(*qkv, **keywords, **INTERPRETED)[0])

        text = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x))
        return [text.count(f"{op}[") for op in ("dot_general", "masked_load", "masked_swap")]

    state = jnp.ones((1, 32, 2, 16))
    plain, rotary = kernels(), kernels(e=state, attend_state=False)
    assert plain[0] == rotary[0] < kernels(e=state)[0]
    cached = {"e": state, "query_state": state, "keys_rotated": True}
    without = kernels(query_state=state, keys_rotated=True)
    assert kernels(attend_state=False, **cached) == without


X = np.ones((1, 4, 2, 16), np.float32)
REFUSED = {
    "bias": ({"bias": np.ones((4, 4), np.float32)}, "bias="),
    "bias_function": ({"bias": lambda i, j: 0.1 * (i[:, None] - j)}, "bias="),
    "mask": ({"mask": np.ones((4, 4), bool)}, "mask="),
    "tensor": ({"e": np.ones((1, 4, 2, 8, 2, 2), np.float32)}, "rotary form"),
    "odd": (dict.fromkeys("qkv", X[..., :15]) | {"e": None}, "even; got 15"),
    "wide": (dict.fromkeys("qkv", X.repeat(9, -1)) | {"e": None}, "at most 128; got 144"),
    "wide_values": ({"v": X.repeat(9, -1)}, "at most 128; got 16 and, of values, 144"),
    "long": ({"window": 2**30}, "at most 536870912"),
    "far": ({"query_offset": 2**30}, "at most 536870912"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    keywords, message = REFUSED[name]
    with pytest.raises(NotImplementedError, match=message):
        attention(**dict.fromkeys("qkve", X) | keywords, **INTERPRETED)


def test_float64_is_refused(x64):
    with pytest.raises(NotImplementedError, match="got float64"):
        attention(X, X, X, X.astype(np.float64), **INTERPRETED)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="what a machine without a GPU does")
def test_needs_a_gpu_unless_interpreted():
    with pytest.raises(NotImplementedError, match="needs a CUDA GPU, but jax runs on 'cpu'"):
        attention(X, X, X, X, implementation="pallas")
    plan = attention_plan(X, X, X, X)
    assert plan.implementation != "pallas"
    assert plan.rejected["pallas"].startswith("needs a CUDA GPU")


def test_is_taken_only_if_named(monkeypatch):
    monkeypatch.setattr(pallas_triton, "_check_device", lambda interpret: None)
    plan = attention_plan(X, X, X, X)
    assert plan.implementation != "pallas"
    assert plan.rejected["pallas"].startswith("has never run on its hardware")
    assert attention_plan(X, X, X, X, implementation="pallas").implementation == "pallas"


def test_old_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(pallas_triton, "compute_capability", lambda: (7, 5))
    with pytest.raises(NotImplementedError, match=r"8\.0 \(Ampere\) or later; .* \(7, 5\)"):
        attention(X, X, X, X, implementation="pallas")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"queries": 48}, "queries must be a power of two.*got 48"),
        ({"keys": 8}, "keys must be a power of two, at least 16; got 8"),
        ({"warps": 3}, "warps must be 1, 2, 4, 8 or 16; got 3"),
        ({"stages": 0}, "stages must be at least 1; got 0"),
    ],
)
def test_wrong_tiles(sizes, message):
    with pytest.raises(ValueError, match=message):
        Tile(**{"queries": 16, "keys": 16, **sizes})


def test_table_of_tiles(monkeypatch):
    """Chips with little shared memory get smaller blocks; every type and width has some."""

    def areas(capability):
        monkeypatch.setattr(pallas_blocks, "compute_capability", lambda: capability)
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
            for width in (16, 64, 66, 128):
                tile = pallas_blocks.default_tiles(dtype, width).forward
                yield tile.queries * tile.keys

    large, small = list(areas((9, 0))), list(areas((8, 6)))
    assert all(x > y for x, y in zip(large, small, strict=True))
    assert list(areas(None)) == large


GPU_CASES = {
    **{f"causal_{t}": (t, {"causal": True}) for t in (1, 2, 63, 128, 1000, 4095, 4096)},
    "bidirectional": (333, {}),
    "window": (1025, {"causal": True, "window": 100}),
    "window_bidirectional": (515, {"window": 64}),
    "segments": (777, {"causal": True, "segment_ids": np.arange(777) // 100}),
    "grouped_heads": (257, {"causal": True, "heads": 8}),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(64, "bfloat16"), (128, "bfloat16"), (64, "float32"), (128, "float32"), (96, "float16")],
)
@pytest.mark.parametrize("name", GPU_CASES)
def test_compiled(name, dim, dtype):
    """Against ``reference`` in float32; NaN in memory that was freed must not come through."""
    length, keywords = GPU_CASES[name]
    keywords = dict(keywords)
    args = qkve(length, heads=keywords.pop("heads", 2), dim=dim, batch=1, dtype=dtype)
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in args]
        want = jax.jit(
            functools.partial(outputs_and_gradients, **keywords, implementation="reference")
        )(*wide)
    jax.block_until_ready([jnp.full(2**24, jnp.nan) for _ in range(4)])
    f = functools.partial(outputs_and_gradients, **keywords, implementation="pallas")
    got = jax.jit(f)(*args)
    tolerance = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-5}[dtype]
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.linalg.norm(x - y) <= tolerance * jnp.linalg.norm(y) + 1e-6
