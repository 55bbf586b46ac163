"""Every attention backend against one table of cases.

The outputs of ``reference`` in float64 are compared with loops in numpy, its gradients with finite
differences; then it is the oracle of the others. To have a backend tested, add a line to BACKENDS,
or to GPU_BACKENDS if it runs on a GPU only, and say in REFUSED which cases it does not take.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.test_util import check_grads

from tape_jax import testing
from tape_jax._src.attention import api, attention, attention_plan, chunked
from tape_jax._src.attention.pallas_blocks import Tiles
from tests.attention.cases import BY_NAME, CASES, MASKED, bias_function, call, inputs, oracle
from tests.selection import mostly_slow

# Keywords of attention. Blocks are small, so that cases span several; those of splash cannot be.
BACKENDS = {
    "reference": {"implementation": "reference"},
    "chunked": {"implementation": "chunked", "options": {"block_q": 8, "block_k": 4}},
    "rows": {"implementation": "rows", "options": {"block_q": 4}},
    "query_blocks": {"implementation": "query_blocks", "options": {"block_q": 8}},
    "pallas": {
        "implementation": "pallas",
        "interpret": True,
        "options": {"tiles": Tiles.same(16, 16)},
    },
    "splash": {"implementation": "splash", "interpret": True},
}
GPU_BACKENDS = ("pallas", "tokamax_mosaic", "tokamax_triton", "cudnn")
COMPILED = {f"{name}_compiled": {"implementation": name} for name in GPU_BACKENDS}
# Cases of CASES for interpreters too slow for all: each kind of mask, state and shape once. Rows
# without keys have tests of their own.
SUBSET = {
    "pallas": (
        "causal", "two_batch_axes", "one_token", "shared_state", "grouped_heads_shared_state",
        "window_bidirectional", "cross", "window_passed", "cache", "own_query_state",
        "state_not_attended", "no_state", "decay", "decay_grouped", "decay_shared", "decay_cache",
        "decay_cross",
    ),
    "splash": (
        "two_batch_axes", "grouped_heads_shared_state", "window_bidirectional", "cross", "cache",
        "tensor_cache", "state_not_attended",
    ),
}  # fmt: skip

# Names of the cases that a backend refuses.
WITH_MASK = {case.name for case in MASKED}
WITH_BIAS = {case.name for case in CASES if case.bias is not None}
TENSOR = {case.name for case in CASES if case.form == "tensor"}
WITH_SEGMENTS = {case.name for case in CASES if case.segments is not None}
WITH_WINDOW = {case.name for case in CASES + MASKED if case.local_window_size is not None}
WITH_DECAY = {case.name for case in CASES if case.log_decay is not None}
KEYLESS_ROWS = {"before_the_keys", "window_passed"}
OFFSET = {case.name for case in CASES if case.query_offset}
VENDOR = WITH_MASK | WITH_BIAS | WITH_DECAY
REFUSED = {
    "reference": set(),
    "chunked": set(),
    "rows": set(),
    "query_blocks": WITH_WINDOW,
    "pallas": WITH_MASK | WITH_BIAS | TENSOR,
    "splash": VENDOR,
    # All of them, having no mesh; with one, test_ring.py has its tests.
    "ring": {case.name for case in CASES + MASKED},
    **dict.fromkeys(("tokamax", "tokamax_mosaic"), VENDOR | WITH_SEGMENTS | KEYLESS_ROWS | OFFSET),
    "tokamax_triton": VENDOR | WITH_SEGMENTS | KEYLESS_ROWS | OFFSET | WITH_WINDOW,
    "cudnn": VENDOR | WITH_SEGMENTS | KEYLESS_ROWS | OFFSET | {"window_bidirectional"},
}
ARRAYS = ("q", "k", "v", "state")
# Largest error relative to the largest value, against float64.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}

# Less optimisation halves the time that compilation takes; what is computed stays the same.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def skip_if_refused(test):
    """Skips a test of a call that the backend refuses. What is refused is itself tested."""

    @functools.wraps(test)
    def wrapped(*args, **keywords):
        try:
            return test(*args, **keywords)
        except NotImplementedError as reason:
            pytest.skip(str(reason))

    return wrapped


def each(*names, compiled=False, slow=()):
    """Runs a test for the named backends, all of BACKENDS if none, and compiled ones on a GPU."""
    chosen = [
        pytest.param(n, BACKENDS[n], id=n, marks=pytest.mark.slow if n in slow else ())
        for n in names or BACKENDS
    ]
    if compiled:
        chosen += [pytest.param(n, k, id=n, marks=pytest.mark.gpu) for n, k in COMPILED.items()]

    def decorate(test):
        return pytest.mark.parametrize(("backend", "keywords"), chosen)(skip_if_refused(test))

    return decorate


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def qkve(length, heads=2, kv_heads=2, dim=16, batch=2, dtype=jnp.float32):
    """Random q, k, v in ``dtype`` and a state in float32."""
    shapes = [(batch, length, h, dim) for h in (heads, kv_heads, kv_heads, kv_heads)]
    arrays = [normal(seed, *shape) for seed, shape in enumerate(shapes)]
    return [x.astype(dtype) for x in arrays[:3]] + arrays[3:]


def attend(q, k, v, state, **keywords):
    """attention with the state by position, for lists of arrays."""
    return attention(q, k, v, state=state, **keywords)


def outputs_and_gradients(*args, **keywords):
    """``(o, a)`` and the gradients of a scalar of them to the first four arguments, in float32."""

    def loss(*args):
        o, a = attend(*args, **keywords)
        weights = [jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) for x in (o, a)]
        return jnp.sum(o * weights[0]) + jnp.sum(a * weights[1]), (o, a)

    gradients, out = jax.grad(loss, (0, 1, 2, 3), has_aux=True)(*args)
    return jax.tree.map(lambda x: x.astype(jnp.float32), (out, gradients))


def run(case, dtype, rounding=None, **keywords):
    """Outputs and the gradients of all floats, for fixed cotangents; all as float64 numpy.

    Inputs and cotangents are rounded to the type ``rounding`` first.
    """

    def cast(x):
        return jnp.asarray(x.astype(jnp.dtype(rounding or dtype)), dtype)

    floats, fixed = inputs(case)
    rng = np.random.default_rng(1)

    @jit
    def outputs_and_gradients(floats):
        out, pull = jax.vjp(lambda f: call(attention, case, f, fixed, **keywords), floats)
        cotangents = jax.tree.map(lambda x: cast(rng.normal(size=x.shape)), out)
        return out, pull(cotangents)[0]

    out = outputs_and_gradients(jax.tree.map(cast, floats))
    chex.assert_trees_all_equal_dtypes(*jax.tree.leaves(out))
    return jax.tree.map(lambda x: np.asarray(x, np.float64), out)


@functools.cache
def expected(name, rounding="float64"):
    """Outputs and gradients of ``reference`` in float64."""
    with jax.enable_x64(True):
        return run(BY_NAME[name], "float64", rounding, implementation="reference")


def assert_close(got, want, tolerance):
    chex.assert_trees_all_equal_shapes(got, want)
    scale = jax.tree.map(lambda x: max(1.0, np.abs(x).max()), want)
    got, want = (jax.tree.map(np.divide, x, scale) for x in (got, want))
    chex.assert_trees_all_close(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES + MASKED, ids=str)
def test_reference_outputs(case):
    assert_close(expected(case.name)[0], oracle(case, *inputs(case)), TOLERANCE["float64"])


@pytest.mark.parametrize(
    "name", ["grouped_heads", "tensor", "bias_function", "cache", "decay_cross", "decay_cache"]
)
def test_reference_gradients(name, x64):
    """By finite differences."""
    case = BY_NAME[name]
    floats, fixed = inputs(case)
    f = jax.jit(lambda floats: call(attention, case, floats, fixed, implementation="reference"))
    check_grads(f, (jax.tree.map(jnp.asarray, floats),), order=1, modes=["rev"], rtol=1e-5)


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("backend", api.BACKENDS)
def test_refused_cases(backend):
    """A backend refuses what REFUSED says, and no more."""

    def refuses(case):
        floats, fixed = inputs(case)
        floats = {n: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for n, x in floats.items()}
        if case.bias == "function":
            floats |= {n: jnp.zeros(floats[n].shape) for n in ("bias", "phase")}
        return call(attention_plan, case, floats, fixed, implementation=backend).rejected

    assert {case.name for case in CASES + MASKED if refuses(case)} == REFUSED[backend]


# Cases that each backend is tried on at every change, as far as it takes them.
QUICK = {
    "grouped_heads", "multi_query", "window_bidirectional", "segments", "window_passed", "cache",
    "mask_heads", "grouped_heads_shared_state", "tensor_cache", "decay_grouped", "decay_cross",
}  # fmt: skip
PAIRS = [
    pytest.param(
        name,
        case,
        id=f"{name}-{case}",
        marks=() if case.name in QUICK else pytest.mark.slow,
    )
    for name in BACKENDS
    if name != "reference"
    for case in CASES + MASKED
    if case.name in SUBSET.get(name, BY_NAME) and case.name not in REFUSED[name]
]


@pytest.mark.parametrize(("backend", "case"), PAIRS)
def test_outputs_and_gradients(backend, case):
    got = run(case, "float32", **BACKENDS[backend])
    assert_close(got, expected(case.name), TOLERANCE["float32"])


@pytest.mark.parametrize(("block_q", "block_k"), [(4, 16), (19, 5)])
@pytest.mark.parametrize("name", ["grouped_heads", "cross", "decay_cross", "mask_and_decay"])
def test_blocks_of_any_size(name, block_q, block_k):
    options = {"block_q": block_q, "block_k": block_k}
    got = run(BY_NAME[name], "float32", implementation="chunked", options=options)
    assert_close(got, expected(name), TOLERANCE["float32"])


@each(compiled=True)
@pytest.mark.parametrize("dtype", mostly_slow(["float64", "bfloat16", "float16"], "bfloat16"))
def test_types(backend, keywords, dtype):
    """Within the tolerance for inputs that were rounded, and, by the norm, for exact ones."""
    taken = [n for n in ("grouped_heads", "grouped_heads_shared_state") if n not in
             REFUSED[keywords["implementation"]]]  # fmt: skip
    with jax.enable_x64(dtype == "float64"):
        got = run(BY_NAME[taken[0]], dtype, **keywords)
    assert_close(got, expected(taken[0], dtype), TOLERANCE[dtype])
    for x, y in zip(*map(jax.tree.leaves, (got, expected(taken[0]))), strict=True):
        assert np.linalg.norm(x - y) <= TOLERANCE[dtype] * np.linalg.norm(y)


@each("pallas", "splash")
def test_64_bit_types_enabled(backend, keywords):
    """A float32 call gives the same, whatever the type of its ids."""
    with jax.enable_x64(True):
        got = run(BY_NAME["cross"], "float32", **keywords)
    assert_close(got, expected("cross"), TOLERANCE["float32"])


@each(compiled=True)
def test_mixed_types(backend, keywords):
    """o has the type of v, a that of the state; both are as exact as the type of q allows."""
    case = BY_NAME["causal"]
    floats, fixed = inputs(case)
    types = {"q": jnp.bfloat16, "k": jnp.bfloat16, "v": jnp.float16, "state": jnp.float32}
    floats = {name: jnp.asarray(x, types[name]) for name, x in floats.items()}
    o, a = jit(lambda floats: call(attention, case, floats, fixed, **keywords))(floats)
    assert (o.dtype, a.dtype) == (jnp.float16, jnp.float32)
    got = jax.tree.map(lambda x: np.asarray(x, np.float64), (o, a))
    assert_close(got, expected("causal")[0], TOLERANCE["bfloat16"])


@pytest.mark.slow
@each(compiled=True)
def test_rows_without_keys_give_zeros(backend, keywords):
    case = BY_NAME["before_the_keys"]
    hidden = np.arange(case.queries) + case.query_offset < 0
    assert 0 < hidden.sum() < case.queries

    got = run(case, "float32", **keywords)
    assert_close(got, expected(case.name), TOLERANCE["float32"])
    (o, a), gradients = got
    for x in (o, a, gradients["q"], gradients["query_state"]):
        assert np.all(x[:, hidden] == 0)
        assert np.all(np.isfinite(x))
        assert np.any(x[:, ~hidden] != 0)


@each(compiled=True)
def test_all_rows_hidden(backend, keywords):
    """Exact zeros, in a block that is visited (its ranges of ids meet) and in one that is not."""
    args = qkve(33)
    mine = np.where(np.arange(33) < 20, 1, 9)
    keys = np.where(np.arange(33) % 2, 0, 2)
    f = jit(functools.partial(outputs_and_gradients, segment_ids=(mine, keys), **keywords))
    out = f(*args)
    chex.assert_trees_all_equal(out, jax.tree.map(jnp.zeros_like, out))


@each("splash", compiled=True)
def test_no_row_sees_a_key(backend, keywords):
    """Exact zeros where the causal rule hides every key."""
    q, k, v, e = qkve(5)
    f = functools.partial(
        outputs_and_gradients, is_causal=True, query_state=e, query_offset=-7, **keywords
    )
    out = jit(f)(q, k, v, e)
    chex.assert_trees_all_equal(out, jax.tree.map(jnp.zeros_like, out))


@pytest.mark.parametrize("shift", [-(2.0**20), np.finfo(np.float32).min])
def test_gradients_do_not_round_with_large_logits(shift):
    """A finite bias on whole rows, as some use it for padding; all logits are exact in float32."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.integers(-2, 3, (1, 33, 2, 4)), jnp.float32) for _ in range(3))
    bias = jnp.zeros((33, 33)).at[:, :16].set(shift)

    def gradients(implementation):
        def loss(q, k, v, bias):
            options = {"bias": bias, "is_causal": True, "implementation": implementation}
            return jnp.sum(jnp.sin(attention(q, k, v, scale=0.25, **options)[0]))

        return jax.grad(loss, (0, 1, 2, 3))(q, k, v, bias)

    assert_close(gradients("chunked"), gradients("reference"), TOLERANCE["float32"])


@each(compiled=True)
def test_symmetries(backend, keywords):
    q, k, v, e = qkve(24)
    ids = jnp.asarray(np.random.default_rng(5).integers(0, 2, (2, 24)))
    if "segments" in REFUSED[keywords["implementation"]]:
        q, k, v, ids = *(x.astype(jnp.bfloat16) for x in (q, k, v)), None

    @jax.jit
    def f(q, k, v, e, ids):
        return attention(q, k, v, state=e, segment_ids=ids, **keywords)

    # Rotations by another phase round differently in bfloat16.
    tolerance = 5e-2 if ids is None else None
    testing.assert_permutation_equivariant(
        f, q, k, v, e, ids, in_axes=(1, 1, 1, 1, None if ids is None else 1), out_axes=(1, 1),
        tolerance=tolerance,
    )  # fmt: skip
    testing.assert_phase_equivariant(
        lambda q, k, v, e: f(q, k, v, e, ids), q, k, v, e,
        in_states=(False, False, False, True), out_states=(False, True), tolerance=tolerance,
    )  # fmt: skip


@pytest.mark.parametrize(
    "transform", mostly_slow(["jit_grad", "grad_jit", "vmap", "checkpoint", "scan"], "vmap", "scan")
)
def test_bias_closures(transform):
    """Gradients reach floats that a bias function closes over, whatever transforms the call."""
    case = BY_NAME["multi_query"]
    floats, fixed = inputs(case)
    floats = {n: jnp.asarray(x, jnp.float32) for n, x in floats.items()}
    rank = jnp.asarray(fixed["rank"])

    def f(floats, rank):
        bias = bias_function(jnp.tanh(floats["bias"]), floats["phase"], rank + 1)
        o, a = attend(
            *(floats[name] for name in ARRAYS), is_causal=True, bias=bias, **BACKENDS["chunked"]
        )
        return jnp.sum(jnp.sin(o)) + jnp.sum(a**2)

    def by_row(floats, rank):
        batched = dict.fromkeys(floats, 0) | {"bias": None}
        return jnp.sum(jax.vmap(f, in_axes=(batched, 0))(floats, rank))

    def by_scan(floats, rank):
        rest = {n: x for n, x in floats.items() if n != "bias"}

        def step(total, x):
            return total + f({**rest, "bias": x}, rank), None

        total, _ = jax.lax.scan(step, 0.0, floats["bias"][None])
        return total

    gradient = {
        "jit_grad": jit(jax.grad(f)),
        "grad_jit": jax.grad(jax.jit(f)),
        "vmap": jit(jax.grad(by_row)),
        "checkpoint": jit(jax.grad(jax.checkpoint(f))),
        "scan": jit(jax.grad(by_scan)),
    }[transform](floats, rank)
    assert_close(gradient, closure_gradients(), 2e-5)


@pytest.mark.slow
def test_outside_jit():
    """A call that is not compiled gives the same, gradients of closures included."""
    case = BY_NAME["multi_query"]
    floats, fixed = inputs(case)
    floats = {n: jnp.asarray(x, jnp.float32) for n, x in floats.items()}

    def f(floats):
        o, a = call(attention, case, floats, fixed, **BACKENDS["chunked"])
        return jnp.sum(o) + jnp.sum(a)

    chex.assert_trees_all_close(jax.grad(f)(floats), jit(jax.grad(f))(floats), atol=1e-5)


@functools.cache
def closure_gradients():
    """The gradients of test_bias_closures by ``reference``, the bias given as an array."""
    case = BY_NAME["multi_query"]
    floats, fixed = inputs(case)
    index = np.arange(case.queries)

    def f(floats):
        bias = bias_function(jnp.tanh(floats["bias"]), floats["phase"], fixed["rank"] + 1)
        o, a = attend(
            *(floats[name] for name in ARRAYS),
            is_causal=True,
            bias=bias(index, index),
            implementation="reference",
        )
        return jnp.sum(jnp.sin(o)) + jnp.sum(a**2)

    with jax.enable_x64(True):
        return jit(jax.grad(f))(jax.tree.map(jnp.asarray, floats))


@each("pallas", "splash", slow=["splash"])
def test_transformations(backend, keywords):
    """Gradients of a rematerialised and scanned call and under vmap are those of ``reference``."""
    q, k, v, e = qkve(19)

    def loss(k, q, v, e, **implementation):
        o, a = attention(q, k, v, state=e, is_causal=True, **implementation)
        return jnp.sum(jnp.sin(o)) + jnp.sum(a**2)

    def scanned(k, q, v, e):
        def step(total, x):
            return total + jax.checkpoint(functools.partial(loss, **keywords))(x, q, v, e), None

        return jax.lax.scan(step, 0.0, k[None])[0]

    want = jit(jax.grad(functools.partial(loss, implementation="reference")))
    assert_close(jit(jax.grad(scanned))(k, q, v, e), want(k, q, v, e), 1e-5)
    # All rows share the state of the first.
    row = jax.grad(functools.partial(loss, **keywords))
    by_row = jit(jax.vmap(row, in_axes=(0, 0, 0, None)))
    assert_close(by_row(k, q, v, e[0]), want(k, q, v, e[:1]), 1e-5)


@pytest.mark.slow
@each("pallas", "splash", slow=["splash"])
@pytest.mark.parametrize("kv_heads", mostly_slow([4, 2], 2))
def test_sharded_over_batch_and_heads(backend, keywords, kv_heads):
    """Each device attends with its rows and heads, and talks to no other."""
    args = qkve(19, heads=4, kv_heads=kv_heads)
    ids = jnp.sort(jnp.asarray(np.random.default_rng(0).integers(0, 3, (2, 19))))

    def f(ids, *args, **implementation):
        return outputs_and_gradients(*args, is_causal=True, segment_ids=ids, **implementation)

    assert_sharded_alone(functools.partial(f, **keywords), f, ids, *args)


def assert_sharded_alone(function, reference, ids, *args):
    """Sharded over batch and heads, a function gives what the reference does, by itself.

    Args:
      function: of ids ``[B, T]`` and arrays ``[B, T, H, D]``.
      reference: likewise, with a keyword ``implementation``.
      ids, *args: its arguments.
    """
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    rows, heads = PartitionSpec("data"), PartitionSpec("data", None, "model")
    want = jit(functools.partial(reference, implementation="reference"))(ids, *args)
    ids = jax.device_put(ids, NamedSharding(mesh, rows))
    args = jax.device_put(args, NamedSharding(mesh, heads))
    compiled = jit(function).lower(ids, *args).compile()
    collective = r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    assert not re.search(collective, compiled.as_text())
    got = compiled(ids, *args)
    placed = NamedSharding(mesh, heads)
    assert all(x.sharding.is_equivalent_to(placed, x.ndim) for x in jax.tree.leaves(got))
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), atol=1e-5)


@each("pallas", "splash")
def test_sharded_time_is_gathered(backend, keywords):
    """A sharded axis over which the kernels cannot be split gives the right result too."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    args = qkve(20, heads=2, kv_heads=1)
    want = jit(functools.partial(attend, is_causal=True, implementation="reference"))(*args)
    f = jit(functools.partial(attend, is_causal=True, **keywords))
    got = f(*jax.device_put(args, NamedSharding(mesh, PartitionSpec("data", "model"))))
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), atol=1e-6)


@each()
def test_traced_offset(backend, keywords):
    """query_offset may be traced, and batched by vmap."""
    case = BY_NAME["cache"]
    floats = {name: jnp.asarray(x, jnp.float32) for name, x in inputs(case)[0].items()}

    @jit
    @functools.partial(jax.vmap, in_axes=(0, None, 0))
    def f(q, rest, offset):
        return attention(
            q, *rest[:2], state=rest[2], is_causal=True, local_window_size=case.local_window_size,
            keys_rotated=True, query_offset=offset, query_state=floats["query_state"], **keywords,
        )  # fmt: skip

    offsets = [18, 3, -2]
    q = jnp.stack([floats["q"]] * 3)
    got = f(q, [floats[name] for name in ARRAYS[1:]], jnp.asarray(offsets))
    for n, offset in enumerate(offsets):
        want = oracle(dataclasses.replace(case, query_offset=offset), *inputs(case))
        assert_close(jax.tree.map(lambda x, n=n: np.asarray(x[n], np.float64), got), want, 1e-5)


@pytest.mark.slow
@each(slow=["splash"])
def test_one_offset_for_each_row(backend, keywords):
    """Outputs and gradients are those of the rows, each by itself with its own offset."""
    case = BY_NAME["cache"]
    floats = {name: jnp.asarray(x, jnp.float32) for name, x in inputs(case)[0].items()}
    fixed = {"is_causal": True, "local_window_size": 9, "keys_rotated": True, **keywords}

    def loss(floats, offset):
        o, a = attention(**floats, query_offset=offset, **fixed)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(a)), (o, a)

    gradients = jax.grad(loss, has_aux=True)
    got = jit(gradients)(floats, jnp.array([18, 5]))
    both = zip(*(jnp.split(x, 2) for x in floats.values()), strict=True)
    rows = [
        gradients(dict(zip(floats, row, strict=True)), n)
        for row, n in zip(both, (18, 5), strict=True)
    ]
    chex.assert_trees_all_close(got, jax.tree.map(lambda *x: jnp.concatenate(x), *rows), atol=1e-5)


@each("chunked", "pallas", slow=["pallas"])
@pytest.mark.parametrize(
    ("options", "rows", "unseen"),
    [
        ({"is_causal": True}, slice(0, 32), slice(32, 64)),
        ({"local_window_size": 9}, slice(32, 64), slice(0, 16)),
        ({"segment_ids": np.repeat([3, -1], 32)}, slice(0, 32), slice(32, 64)),
        ({"mask": np.repeat([True, False], 32)}, slice(0, 64), slice(32, 64)),
        ({"mask": np.kron([[1, 1], [1, 0]], np.ones((32, 32))) > 0}, slice(32, 64), slice(32, 64)),
    ],
    ids=["causal", "window", "segments", "mask of keys", "mask"],
)
def test_hidden_blocks_are_not_read(backend, keywords, options, rows, unseen):
    """NaN there reaches no output and no gradient of rows that do not see them."""
    q, k, v, e = qkve(64, heads=1, kv_heads=1, batch=1)

    @jit
    def f(k, v, e):
        def loss(q):
            o, a = attention(q, k, v, state=e, query_state=e * 0 + 1, **options, **keywords)
            return jnp.sum(o[:, rows]) + jnp.sum(a[:, rows])

        return jax.value_and_grad(loss)(q)

    spoiled = [x.at[:, unseen].set(jnp.nan) for x in (k, v)]
    value, gradient = f(*spoiled, e)
    want_value, want_gradient = f(k, v, e)
    np.testing.assert_array_equal(value, want_value)
    np.testing.assert_array_equal(gradient[:, rows], want_gradient[:, rows])


def temporary_bytes(backend, length, **shapes):
    """Temporary memory of forward and backward with [v | e], one head of 64, in bytes."""
    x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)

    def loss(*args, **shapes):
        o, a = attend(*args, is_causal=True, implementation=backend, **shapes)
        return jnp.sum(o**2) + jnp.sum(a**2)

    compiled = jit(jax.value_and_grad(loss, (0, 1, 2, 3))).lower(x, x, x, x, **shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_chunked_memory_is_linear():
    def growth(backend, padding):
        def needed(length):
            mask = jax.ShapeDtypeStruct((1, 1, 1, length), bool)
            return temporary_bytes(backend, length, **({"mask": mask} if padding else {}))

        return needed(4096) / needed(2048)

    assert growth("reference", False) > 3.5
    assert growth("chunked", False) < 2.2
    assert growth("chunked", True) < 2.2


def test_chunked_fits_16k_tokens_in_2_gib():
    assert temporary_bytes("chunked", 16384) < 2 * 2**30


GPU_CASES = {
    **{f"causal_{t}": (t, {"is_causal": True}) for t in (1, 2, 63, 128, 1000, 4095, 4096)},
    "bidirectional": (333, {}),
    "window": (1025, {"is_causal": True, "local_window_size": 100}),
    "window_bidirectional": (515, {"local_window_size": 64}),
    "segments": (777, {"is_causal": True, "segment_ids": np.arange(777) // 100}),
    "grouped_heads": (257, {"is_causal": True, "heads": 8}),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "dim", "dtype"),
    [
        *[(name, dim, "bfloat16") for name in GPU_BACKENDS for dim in (64, 128)],
        *[("pallas", dim, "float32") for dim in (64, 128)],
        ("pallas", 96, "float16"),
    ],
)
@pytest.mark.parametrize("name", GPU_CASES)
@skip_if_refused
def test_compiled(name, backend, dim, dtype):
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
    f = functools.partial(outputs_and_gradients, **keywords, implementation=backend)
    got = jax.jit(f)(*args)
    tolerance = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-5}[dtype]
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.linalg.norm(x - y) <= tolerance * jnp.linalg.norm(y) + 1e-6


def test_an_equal_bias_function_is_not_compiled_anew():
    """Nor is another one taken for it, be it a constant or an array that differs."""
    q, k, v, e = qkve(19)
    table = jnp.arange(19.0)

    def attend(slope, table):
        def bias(i, j):
            return slope * table[jnp.abs(i[:, None] - j)]

        return attention(q, k, v, state=e, is_causal=True, bias=bias, implementation="chunked")[0]

    first, compiled = attend(0.25, table), chunked._attend_compiled._cache_size()
    chex.assert_trees_all_equal(attend(0.25, table), first)
    other_table = attend(0.25, -table)
    assert chunked._attend_compiled._cache_size() == compiled
    other_slope = attend(-0.25, table)
    chex.assert_trees_all_close(other_slope, other_table, atol=1e-6)
    assert jnp.abs(other_slope - first).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("transform", mostly_slow([jax.jit, jax.vmap], jax.vmap))
def test_chunked_names_who_has_second_derivatives(transform):
    q, k, v, e = qkve(19)

    def loss(q, implementation):
        options = {"state": e, "is_causal": True, "implementation": implementation}
        return jnp.sum(attention(q, k, v, **options)[0] ** 2)

    def squared(q, implementation):
        return jnp.sum(jax.grad(loss)(q, implementation) ** 2)

    given = q[None] if transform is jax.vmap else q
    second = transform(jax.grad(functools.partial(squared, implementation="reference")))(given)
    assert jnp.isfinite(second).all()
    with pytest.raises(NotImplementedError, match="second order: name implementation='reference'"):
        transform(jax.grad(functools.partial(squared, implementation="chunked")))(given)
