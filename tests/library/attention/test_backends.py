"""Every attention backend against one table of cases.

The outputs of ``reference`` in float64 are compared with loops in numpy, its gradients with finite
differences; then it is the oracle of the others.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tape_jax import testing
from tape_jax._src.attention import BACKENDS as IMPLEMENTATIONS
from tape_jax._src.attention import attention, attention_plan
from tests.library.attention.backends import (
    BACKENDS,
    GPU_BACKENDS,
    QUICK,
    REFUSED,
    SUBSET,
    TOLERANCE,
    assert_close,
    attend,
    each,
    expected,
    jit,
    outputs_and_gradients,
    qkve,
    run,
    skip_if_refused,
)
from tests.library.attention.cases import BY_NAME, CASES, MASKED, call, inputs, oracle
from tests.selection import mostly_slow

QUICK_OF_REFERENCE = (
    *QUICK, "no_batch", "window_of_two_sides", "bias_function", "cross", "before_the_keys",
    "cache", "softcap_and_decay", "mask_heads", "window_by_positions",
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    mostly_slow(CASES + MASKED, *(BY_NAME[name] for name in QUICK_OF_REFERENCE)),
    ids=str,
)
def test_reference_outputs(case):
    assert_close(expected(case.name)[0], oracle(case, *inputs(case)), TOLERANCE["float64"])


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ["grouped_heads", "tensor", "bias_function", "decay_cache"], "grouped_heads", "decay_cache"
    ),
)
def test_reference_gradients(name, x64):
    """By finite differences."""
    case = BY_NAME[name]
    floats, fixed = inputs(case)
    f = jax.jit(lambda floats: call(attention, case, floats, fixed, implementation="reference"))
    check_grads(f, (jax.tree.map(jnp.asarray, floats),), order=1, modes=["rev"], rtol=1e-5)


@pytest.mark.usefixtures("any_device")
def test_refused_cases():
    """Each backend refuses what REFUSED says, and no more."""
    refused = {name: set() for name in IMPLEMENTATIONS}
    for case in CASES + MASKED:
        floats, fixed = inputs(case)
        floats = {n: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for n, x in floats.items()}
        if case.bias == "function":
            floats |= {n: jnp.zeros(floats[n].shape) for n in ("bias", "phase")}
        plan = call(attention_plan, case, floats, fixed, implementation=tuple(IMPLEMENTATIONS))
        for name, reason in plan.rejected.items():
            if not reason.startswith("can do this call"):
                refused[name].add(case.name)
    assert refused == REFUSED


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


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("name", "block_q", "block_k"),
    [("cross", 4, 16), ("mask_and_decay", 19, 5), ("decay_cross", 19, 5)],
)
def test_blocks_of_any_size(name, block_q, block_k):
    options = {"block_q": block_q, "block_k": block_k}
    got = run(BY_NAME[name], "float32", implementation="chunked", options=options)
    assert_close(got, expected(name), TOLERANCE["float32"])


@each(
    "reference", "chunked", "pallas", "splash",
    compiled=True, slow=["reference", "pallas", "splash"], refused=[("splash", "float16")],
)  # fmt: skip
@pytest.mark.parametrize("dtype", mostly_slow(["bfloat16", "float16"], "bfloat16"))
def test_types(backend, keywords, dtype):
    """Within the tolerance for inputs that were rounded, and, by the norm, for exact ones."""
    name = "grouped_heads"
    if name in REFUSED[keywords["implementation"]]:
        name = "grouped_heads_shared_state"
    got = run(BY_NAME[name], dtype, **keywords)
    assert_close(got, expected(name, dtype), TOLERANCE[dtype])
    for x, y in zip(*map(jax.tree.leaves, (got, expected(name))), strict=True):
        assert np.linalg.norm(x - y) <= TOLERANCE[dtype] * np.linalg.norm(y)


@pytest.mark.slow
@each("pallas", "splash")
def test_64_bit_types_enabled(backend, keywords):
    """A float32 call gives the same, whatever the type of its ids."""
    with jax.enable_x64(True):
        got = run(BY_NAME["cross"], "float32", **keywords)
    assert_close(got, expected("cross"), TOLERANCE["float32"])


@each(compiled=True, slow=["rows", "query_blocks", "splash", "reference"])
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


@pytest.mark.mostly_slow
@each(compiled=True)
def test_all_rows_hidden(backend, keywords):
    """Exact zeros, in a block that is visited (its ranges of ids meet) and in one that is not."""
    args = qkve(33)
    mine = np.where(np.arange(33) < 20, 1, 9)
    keys = np.where(np.arange(33) % 2, 0, 2)
    f = jit(functools.partial(outputs_and_gradients, segment_ids=(mine, keys), **keywords))
    out = f(*args)
    chex.assert_trees_all_equal(out, jax.tree.map(jnp.zeros_like, out))


@each("splash", compiled=True, slow=["splash"])
def test_no_row_sees_a_key(backend, keywords):
    """Exact zeros where the causal rule hides every key, or all are behind a window."""
    q, k, v, e = qkve(5)
    for hidden in ({"query_offset": -7}, {"query_offset": 100, "local_window_size": 4}):
        f = functools.partial(
            outputs_and_gradients, is_causal=True, query_state=e, **hidden, **keywords
        )
        out = jit(f)(q, k, v, e)
        chex.assert_trees_all_equal(out, jax.tree.map(jnp.zeros_like, out))


@pytest.mark.mostly_slow
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

        return jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, bias)

    assert_close(gradients("chunked"), gradients("reference"), TOLERANCE["float32"])


@pytest.mark.slow
@each("reference", compiled=True)
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


HIDDEN = {
    "causal": ({"is_causal": True}, slice(0, 32), slice(32, 64)),
    "window": ({"local_window_size": 8}, slice(32, 64), slice(0, 16)),
    "segments": ({"segment_ids": np.repeat([3, -1], 32)}, slice(0, 32), slice(32, 64)),
    "mask_of_keys": ({"mask": np.repeat([True, False], 32)}, slice(0, 64), slice(32, 64)),
    "mask": (
        {"mask": np.kron([[1, 1], [1, 0]], np.ones((32, 32))) > 0},
        slice(32, 64),
        slice(32, 64),
    ),
}


@pytest.mark.mostly_slow
@each(
    "chunked", "pallas", slow=["pallas"], refused=[("pallas", "mask"), ("pallas", "mask_of_keys")]
)
@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_blocks_are_not_read(backend, keywords, name):
    """NaN there reaches no output and no gradient of rows that do not see them."""
    options, rows, unseen = HIDDEN[name]
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


@functools.cache
def temporary_bytes(backend, length, **shapes):
    """Temporary memory of forward and backward with [v | e], one head of 64, in bytes."""
    x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)

    def loss(*args, **shapes):
        o, a = attend(*args, is_causal=True, implementation=backend, **shapes)
        return jnp.sum(o**2) + jnp.sum(a**2)

    compiled = jit(jax.value_and_grad(loss, (0, 1, 2, 3))).lower(x, x, x, x, **shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("backend", ["chunked", "rows"])
def test_memory_is_linear(backend):
    """So 16,384 tokens fit in 2 GiB, with padding that a mask hides too."""

    def needed(length):
        mask = jax.ShapeDtypeStruct((1, 1, 1, length), bool)
        return temporary_bytes(backend, length, mask=mask)

    assert temporary_bytes("reference", 2048) > 4 * 2048**2
    assert needed(4096) < 2.2 * needed(2048)
    assert needed(4096) * 2.2**2 < 2 * 2**30


GPU_CASES = {
    **{f"causal_{t}": (t, {"is_causal": True}) for t in (1, 2, 63, 128, 1000, 4095, 4096)},
    "bidirectional": (333, {}),
    "window": (1025, {"is_causal": True, "local_window_size": 99}),
    "window_bidirectional": (515, {"local_window_size": 63}),
    "segments": (777, {"is_causal": True, "segment_ids": np.arange(777) // 100}),
    "grouped_heads": (257, {"is_causal": True, "heads": 8}),
    "decay": (1000, {"is_causal": True, "log_decay": -np.arange(1000.0)[:, None] / 100}),
}
# Of so few tokens the gradients of queries and keys are differences of like numbers, zero or small:
# their errors are relative to the largest gradient.
FEW = 16


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
def test_compiled(name, backend, dim, dtype):
    check_compiled(name, backend, dim, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [8, 16, 32, 80, 96, 256])
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_compiled_head_dims(backend, dim):
    check_compiled("causal_128", backend, dim, "bfloat16")


@skip_if_refused
def check_compiled(name, backend, dim, dtype):
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
    lengths = [jnp.linalg.norm(y) for y in jax.tree.leaves(want)]
    for x, y, own in zip(jax.tree.leaves(got), jax.tree.leaves(want), lengths, strict=True):
        size = max(lengths) if length < FEW else own
        assert jnp.linalg.norm(x - y) <= tolerance * size + 1e-6
