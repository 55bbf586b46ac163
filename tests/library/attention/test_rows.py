"""Functions that rewrite rows of logits or replace the softmax, and the backends that have them."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tape_jax._src.attention import BACKENDS, attention, attention_plan
from tape_jax._src.attention.shifted_groups import shifted_group_attention
from tests.library.attention.backends import assert_close, jit, normal, qkve
from tests.library.attention.cases import BY_NAME, call, inputs, oracle
from tests.selection import mostly_slow

# Blocks are small, and most cases have queries left over.
OPTIONS = {
    "reference": {"implementation": "reference"},
    "rows": {"implementation": "rows", "options": {"block_q": 4}},
}
# It leaves out keys that the causal rule hides from a whole block, and windows.
EVERY = {**OPTIONS, "query_blocks": {"implementation": "query_blocks", "options": {"block_q": 4}}}
# What has to be right beside the functions: offsets, segments, masks, windows, heads, states.
NAMES = (
    "two_batch_axes", "grouped_heads", "multi_query", "window_bidirectional", "before_the_keys",
    "cross", "cache", "tensor_cache", "decay_grouped", "mask_and_decay",
)  # fmt: skip
BOTH = ("logits_fn", "weights_fn")


def drawn(name):
    """Floats, everything else of a case, and what the functions close over."""
    case = BY_NAME[name]
    floats, fixed = inputs(case)
    rng = np.random.default_rng(3)
    closed = {
        "gate": rng.normal(size=(*case.batch, case.queries, case.heads)),
        "depth": rng.normal(size=(*case.batch, case.key_length)),
        "slope": rng.normal(size=case.heads),
    }
    return case, {**floats, **closed}, fixed


def functions(floats):
    """They read all that rows say: queries, places and what is visible."""
    gate = floats["gate"].reshape(-1, *floats["gate"].shape[-2:])
    depth = floats["depth"].reshape(-1, 1, 1, floats["depth"].shape[-1])

    def far(logits, rows):
        return rows.places[..., None, :, None] - jnp.arange(logits.shape[-1])

    def logits_fn(logits, rows):
        """Adds what the visible keys up to each sum up to, by gates of the queries."""
        own = jnp.swapaxes(gate[:, rows.queries], 1, 2)[..., None]
        keys = jnp.where(rows.visible, jnp.tanh(logits) * depth[..., : logits.shape[-1]], 0)
        waves = jnp.sin(floats["slope"][:, None, None] * far(logits, rows))
        return logits + own * jnp.cumsum(keys, axis=-1) + waves

    def weights_fn(logits, rows):
        """No softmax: sigmoids, twice that of the query's own key."""
        return jax.nn.sigmoid(logits) * (1 + (far(logits, rows) == 0))

    return {"logits_fn": logits_fn, "weights_fn": weights_fn}


def looped(case, floats, fixed, names):
    """``(o, a)`` by the loops of the other tests."""

    def rewrite(row, h, i, logits, visible):
        keys = np.where(visible, np.tanh(logits) * floats["depth"][row], 0)
        distance = i + case.query_offset - np.arange(len(logits))
        waves = np.sin(floats["slope"][h] * distance)
        return logits + floats["gate"][row][i, h] * np.cumsum(keys) + waves

    def weigh(i, logits):
        own = np.arange(len(logits)) == i + case.query_offset
        return (1 + own) / (1 + np.exp(-logits))

    given = {"rewrite": rewrite if "logits_fn" in names else None}
    return oracle(case, floats, fixed, **given, weigh=weigh if "weights_fn" in names else None)


def run(case, floats, fixed, names, **options):
    found = functions(floats)
    return call(attention, case, floats, fixed, **{name: found[name] for name in names}, **options)


CALLS = [
    (backend, name, given)
    for backend, name, given in itertools.product(EVERY, NAMES, ("logits_fn", "weights_fn", "both"))
    if backend in OPTIONS or BY_NAME[name].local_window_size is None
    if given == "both" or name == "grouped_heads"
]
QUICK = [
    ("reference", "grouped_heads", "both"),
    ("rows", "grouped_heads", "logits_fn"),
    ("rows", "grouped_heads", "weights_fn"),
    ("rows", "cross", "both"),
    ("rows", "cache", "both"),
    ("query_blocks", "grouped_heads", "both"),
]


@pytest.mark.parametrize(("backend", "name", "given"), mostly_slow(CALLS, *QUICK))
def test_outputs(backend, name, given, x64):
    names = BOTH if given == "both" else (given,)
    case, floats, fixed = drawn(name)
    want = looped(case, floats, fixed, names)
    floats = jax.tree.map(jnp.asarray, floats)
    found = jit(lambda x: run(case, x, fixed, names, **EVERY[backend]))(floats)
    assert_close(jax.tree.map(np.asarray, found), want, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["rows", "query_blocks"])
def test_gradients_by_finite_differences(backend, x64):
    """To all floats of the call, and to what the functions close over."""
    case, floats, fixed = drawn("mask_and_decay")
    f = jax.jit(lambda x: run(case, x, fixed, BOTH, **EVERY[backend]))
    floats = jax.tree.map(jnp.asarray, floats)
    check_grads(f, (floats,), order=1, modes=["rev"], rtol=1e-5)


def outputs_and_gradients(name, **options):
    case, floats, fixed = drawn(name)
    rng = np.random.default_rng(1)

    @jit
    def f(floats):
        out, pull = jax.vjp(lambda x: run(case, x, fixed, BOTH, **options), floats)
        return out, pull(jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), out))[0]

    return jax.tree.map(np.asarray, f(jax.tree.map(jnp.asarray, floats)))


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("name", "block_q"), [("cross", 5), ("cross", 1), ("grouped_heads", 99)])
def test_blocks_of_any_size(name, block_q, x64):
    """Gradients too; a block that begins within the one before counts its queries once."""
    found = outputs_and_gradients(name, implementation="rows", options={"block_q": block_q})
    assert_close(found, outputs_and_gradients(name, implementation="reference"), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("backend", OPTIONS)
def test_one_offset_for_each_row(backend, x64):
    """Places are then those of each row."""
    offsets = np.array([18, 5])
    case, floats, fixed = drawn("cache")
    arrays = {name: jnp.asarray(x) for name, x in floats.items()}
    found, shapes = functions(arrays), []
    arrays = {name: arrays[name] for name in ("q", "k", "v", "state", "query_state")}

    def noted(logits, rows):
        shapes.append((rows.queries.shape, rows.places.shape))
        return found["logits_fn"](logits, rows)

    given = {"is_causal": True, "local_window_size": 8, "keys_rotated": True, **OPTIONS[backend]}
    given |= {"logits_fn": noted, "weights_fn": found["weights_fn"]}
    got = attention(**arrays, query_offset=jnp.asarray(offsets), **given)
    assert set(shapes) == {((3,), (2, 3))}
    for n, offset in enumerate(offsets):
        moved = type(case)(**{**vars(case), "query_offset": int(offset)})
        want = looped(moved, floats, fixed, BOTH)
        assert_close(*([np.asarray(x[n]) for x in pair] for pair in (got, want)), 1e-12)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("backend", OPTIONS)
def test_a_row_without_keys_gives_what_its_weights_say(backend):
    """The softmax gives zeros; weights that look at no logit are the function's own affair."""
    q, k, v, _ = qkve(9)
    mask = np.arange(9)[:, None] != 3
    given = {"mask": mask, "is_causal": True, **OPTIONS[backend]}

    def o(**functions):
        return jit(lambda q: attention(q, k, v, **given, **functions)[0])(q)

    assert np.all(o(logits_fn=lambda logits, rows: logits + 1)[:, 3] == 0)
    assert np.all(o(weights_fn=lambda logits, rows: jax.nn.sigmoid(logits))[:, 3] == 0)
    given["is_causal"] = False
    every = o(weights_fn=lambda logits, rows: jnp.ones_like(logits))
    np.testing.assert_allclose(every, jnp.broadcast_to(v.sum(1)[:, None], v.shape), atol=1e-5)


def test_gradients_of_blocks_are_summed_wide():
    """In 16 bits a sum stays behind where its terms are too small for it."""
    q, k = jnp.zeros((1, 8192, 1, 2), jnp.bfloat16), jnp.zeros((1, 16, 1, 2), jnp.bfloat16)

    def total(v):
        return attention(q, k, v, implementation="rows", options={"block_q": 8})[0].sum()

    found = jax.jit(jax.grad(total))(k)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, 512)


@pytest.mark.parametrize("backend", OPTIONS)
def test_logits_are_wide_whatever_the_type(backend):
    q, k, v, _ = qkve(9, dtype="bfloat16")
    types = []

    def noted(logits, rows):
        types.append(logits.dtype)
        return logits.astype(jnp.bfloat16)

    o = attention(q, k, v, logits_fn=noted, weights_fn=noted, **OPTIONS[backend])[0]
    assert set(types) == {jnp.dtype("float32")}
    assert o.dtype == jnp.bfloat16


@pytest.mark.parametrize("name", BOTH)
def test_wrong_functions(name):
    q, k, v, _ = qkve(9)
    shape = rf"{name} must return.*\(2, 2, [49], 9\)"
    for wrong, words in (
        (3, f"{name} must be a function of logits and rows; got 3"),
        (lambda logits, rows: logits[..., :1], shape),
        (lambda logits, rows: rows.visible & (logits > 0), shape),
    ):
        with pytest.raises(ValueError, match=words):
            attention(q, k, v, **{name: wrong})
    with pytest.raises(ValueError, match=f"shifted_groups = 2 needs .* without {name}; got one"):
        shifted_group_attention(q[:, :8], k[:, :8], v[:, :8], groups=2, **{name: lambda x, _: x})


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("name", BOTH)
def test_other_backends_refuse(name):
    q, k, v, _ = qkve(9)
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    given = {"is_causal": True, name: lambda logits, rows: logits}
    plan = attention_plan(q, k, v, implementation=tuple(set(BACKENDS) - set(EVERY)), **given)
    assert plan.implementation is None
    for backend in ("chunked", "pallas", "splash", "cudnn"):
        assert f"{name}= is given rows of logits" in plan.rejected[backend]


def test_the_plan():
    """Short calls are for ``reference``, long ones for ``rows``."""

    def taken(time, **options):
        x = jax.ShapeDtypeStruct((2, time, 4, 32), jnp.float32)
        return attention_plan(x, x, x, is_causal=True, **options)

    same = {"logits_fn": lambda logits, rows: logits}
    assert taken(64, **same).implementation == "reference"
    own = {"logits_fn": lambda logits, rows: jnp.einsum("bhqs,hg->bgqs", logits, jnp.eye(4))}
    products = 2 * 2 * 4 * 64 * 64
    assert taken(64, **same).operations == products * 2 * 32
    assert taken(64, **own).operations == products * (2 * 32 + 4)
    plan = taken(4096, **same)
    assert plan.implementation == "rows"
    assert "rows of logits" in plan.rejected["chunked"]
    assert taken(4096).implementation == "chunked"


def test_vmap():
    """Of a call whose functions close over what is batched."""
    q, k, v, _ = qkve(19)
    gates = normal(7, 2, 19)

    def loss(q, gates, k, v, **options):
        def logits_fn(logits, rows):
            keys = gates[:, None, None, : logits.shape[-1]]
            return logits * gates[:, None, rows.queries, None] + keys

        o = attention(q, k, v, is_causal=True, logits_fn=logits_fn, **options)[0]
        return jnp.sum(jnp.sin(o))

    def by_row(*args):
        f = functools.partial(loss, **OPTIONS["rows"])
        return jnp.sum(jax.vmap(f)(*(x[:, None] for x in args)))

    want = jit(jax.grad(functools.partial(loss, **OPTIONS["reference"]), (0, 1, 2, 3)))
    found = jit(jax.grad(by_row, (0, 1, 2, 3)))(q, gates, k, v)
    assert_close(found, want(q, gates, k, v), 1e-5)
