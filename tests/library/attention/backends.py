"""The attention backends that are tested, what each refuses, and how their results are compared.

``reference`` in float64 is the oracle of the others. To have a backend tested, add a line to
BACKENDS, or to GPU_BACKENDS if it runs on a GPU only, and say in REFUSED which cases it does not
take.
"""

from __future__ import annotations

import contextlib
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tape_jax._src.attention import attention
from tape_jax._src.attention.pallas_blocks import Tiles
from tests.library.attention.cases import BY_NAME, CASES, MASKED, call, inputs

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
# Cases that each backend is tried on at every change, as far as it takes them.
QUICK = ("grouped_heads", "window_passed", "tensor_cache", "decay_grouped")
BY_BLOCKS = (
    *QUICK, "bias_function", "cross", "cache", "window_of_two_sides", "decay_shared",
    "softcap_and_decay", "mask_and_decay",
)  # fmt: skip
# Cases that a backend is compared with reference on, all if it is not here: each kind of mask,
# state and shape that its own code tells apart, once. Rows without keys have tests of their own;
# test_properties.py draws further calls of some of them.
SUBSET = {
    "chunked": (
        *BY_BLOCKS, "segments", "tensor_grouped", "decay_cross", "mask_heads",
        "window_by_positions", "window_by_far_positions",
    ),
    "rows": BY_BLOCKS,
    "query_blocks": BY_BLOCKS,
    "pallas": (
        "grouped_heads_shared_state", "cross", "window_passed", "own_query_state",
        "state_not_attended", "wide_keys", "decay_grouped", "decay_cache", "decay_cross",
    ),
    "splash": (
        "two_batch_axes", "grouped_heads_shared_state", "window_bidirectional", "cross", "cache",
        "tensor_cache", "state_not_attended", "softcap", "wide_keys",
    ),
}  # fmt: skip
# Names of the cases that a backend refuses.
WITH_MASK = {case.name for case in MASKED}
WITH_BIAS = {case.name for case in CASES if case.bias is not None}
TENSOR = {case.name for case in CASES if case.form == "tensor"}
WITH_SEGMENTS = {case.name for case in CASES if case.segments is not None}
WITH_WINDOW = {case.name for case in CASES + MASKED if case.local_window_size is not None}
WITH_DECAY = {case.name for case in CASES if case.log_decay is not None}
WITH_SOFTCAP = {case.name for case in CASES if case.softcap is not None}
KEYLESS_ROWS = {"before_the_keys", "window_passed"}
OFFSET = {case.name for case in CASES if case.query_offset}
VENDOR = WITH_MASK | WITH_BIAS | WITH_DECAY
REFUSED = {
    "reference": set(),
    "chunked": set(),
    "rows": set(),
    "query_blocks": WITH_WINDOW,
    **dict.fromkeys(("pallas", "mosaic"), WITH_MASK | WITH_BIAS | TENSOR | WITH_SOFTCAP),
    "splash": VENDOR,
    # All of them, having no mesh; with one, test_ring.py has its tests.
    "ring": {case.name for case in CASES + MASKED},
    **dict.fromkeys(
        ("tokamax", "tokamax_mosaic"), VENDOR | WITH_SEGMENTS | WITH_SOFTCAP | KEYLESS_ROWS | OFFSET
    ),
    # All of them, whose widths are small and no powers of two.
    "tokamax_triton": {case.name for case in CASES + MASKED},
    "cudnn": VENDOR
    | WITH_SOFTCAP
    | WITH_SEGMENTS
    | KEYLESS_ROWS
    | OFFSET
    | {"window_bidirectional", "window_of_two_sides"},
}
ARRAYS = ("q", "k", "v", "state")
# Largest error relative to the largest value, against float64.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
# Less optimisation halves the time that compilation takes; what is computed stays the same.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


# What kernels on a GPU may say of these tests' calls. The table of cases says of which calls.
REFUSALS_ON_A_GPU = re.compile(
    "is(?: not)? in the kernel|as large as the logits|that sees no key|types (?:of q )?are"
    "|powers of two|are at most|hold keys of at most|takes no query_offset=|as many queries as keys"
    "|with 64-bit types|must be known when|needs (?:tokamax|a GPU of)"
)


def skip_if_refused(test):
    """Skips a test of a call that a kernel on a GPU refuses for a reason that is listed."""

    @functools.wraps(test)
    def wrapped(*args, **keywords):
        try:
            return test(*args, **keywords)
        except NotImplementedError as reason:
            if not REFUSALS_ON_A_GPU.search(str(reason)):
                raise
            pytest.skip(str(reason))

    return wrapped


def each(*names, compiled=False, slow=(), refused=()):
    """Runs a test for the named backends, all of BACKENDS if none, and compiled ones on a GPU.

    Args:
      *names: of BACKENDS.
      compiled: whether to add those of COMPILED.
      slow: names that are slow.
      refused: what must raise NotImplementedError: names of BACKENDS, or pairs of one and of the
        value that another parameter of the test then has.
    """
    chosen = [
        pytest.param(n, BACKENDS[n], id=n, marks=pytest.mark.slow if n in slow else ())
        for n in names or BACKENDS
    ]
    if compiled:
        chosen += [pytest.param(n, k, id=n, marks=pytest.mark.gpu) for n, k in COMPILED.items()]

    def decorate(test):
        @functools.wraps(test)
        def checked(backend, keywords, **others):
            if backend in COMPILED:
                return skip_if_refused(test)(backend, keywords, **others)
            calls = {backend, *((backend, str(value)) for value in others.values())}
            if calls & set(refused):
                with pytest.raises(NotImplementedError):
                    test(backend, keywords, **others)
                return None
            return test(backend, keywords, **others)

        return pytest.mark.parametrize(("backend", "keywords"), chosen)(checked)

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


def run(case, dtype, rounding=None, function=attention, **keywords):
    """Outputs and the gradients of all floats, for fixed cotangents; all as float64 numpy.

    Inputs and cotangents are rounded to the type ``rounding`` first.
    """

    def cast(x):
        return jnp.asarray(x.astype(jnp.dtype(rounding or dtype)), dtype)

    floats, fixed = inputs(case)
    rng = np.random.default_rng(1)

    @jit
    def outputs_and_gradients(floats):
        out, pull = jax.vjp(lambda f: call(function, case, f, fixed, **keywords), floats)
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


def lowered(platform, function, *shapes):
    """StableHLO of a function for ``cuda`` or ``tpu``, made on a machine without it."""
    target = contextlib.nullcontext()
    if platform == "cuda" and jax.__version_info__ >= (0, 11):
        from jax.sharding import AbstractDevice

        device = AbstractDevice("NVIDIA H100", None, "cuda")
        target = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    with target:
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
