"""PaTH: its operator along time, and the keys that decoding rewrites."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tape_jax import ModelConfig, Transformer, positions
from tape_jax._src.attention import recorded_plans
from tape_jax._src.positions.contextual import householder
from tape_jax._src.positions.layer import Layer
from tests.models import FLOAT64, random_tokens, random_variables, small_model

DIM = 4
INTERLEAVED = [5, 5, 2, 5, 2, 2, 0, 5, 5, 0, 2, 5, 5]


def step_by_step(q, k, w, beta, ids):
    """``q_i^T H_i ... H_{j+1} k_j`` of one head, in loops: 0 across segments and after a query."""
    found = np.zeros((len(q), len(k)))
    for j in range(len(k)):
        key = k[j]
        for i in range(j, len(q)):
            if ids[i] != ids[j]:
                continue
            if i > j:
                key = key - beta[i] * (w[i] @ key) * w[i]
            found[i, j] = q[i] @ key
    return found


def inputs(time=13, heads=4, kv_heads=2, seed=0, dtype="float64"):
    """q, k, v, w, beta of a batch of two; some of each head's ``w`` are alike."""
    rng = np.random.default_rng(seed)
    shapes = [(2, time, n, DIM) for n in (heads, kv_heads, kv_heads, kv_heads)]
    q, k, v, w = (rng.normal(size=shape) for shape in shapes)
    w[:, 1:4] = w[:, :1]
    w /= np.linalg.norm(w, axis=-1, keepdims=True)
    beta = rng.uniform(0, 2, (2, time, kv_heads))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v, w, beta))


def segments(time=13):
    return jnp.asarray([np.resize(INTERLEAVED, time), np.arange(time) // 5 + 1], jnp.int32)


def expected(q, k, w, beta, ids):
    """The recurrence for all heads and rows of a batch."""
    groups = q.shape[2] // k.shape[2]
    k, w, beta = (np.repeat(x, groups, axis=2) for x in (k, w, beta))
    ids = np.zeros(q.shape[:2]) if ids is None else np.asarray(ids)
    of_head = [
        [
            step_by_step(q[b, :, h], k[b, :, h], w[b, :, h], beta[b, :, h], ids[b])
            for h in range(q.shape[2])
        ]
        for b in range(len(q))
    ]
    return np.asarray(of_head)


def attend(q, k, v, w, beta, ids, chunk, implementation=None, **options):
    """Attention whose logits are the operator's, in chunks."""
    config = ModelConfig(2, hidden_size=8, num_layers=1, num_heads=q.shape[2], head_dim=DIM)
    config = dataclasses.replace(config, num_kv_heads=k.shape[2], position=Given(chunk=chunk))
    x = jnp.zeros((*q.shape[:2], 8), q.dtype)
    layer = Layer(x, jnp.arange(q.shape[1]), ids, True, config.sizes, q=q, k=k)
    terms = config.position.layer_terms({"w": w, "beta": beta}, layer)
    blocks = {"options": {"block_q": 5}} if implementation == "rows" else {}
    return tape.attention(
        q, k, v, is_causal=True, segment_ids=ids, logits_fn=terms.logits_fn,
        implementation=implementation, **blocks, **options,
    )[0]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Given(positions.PathAttention):
    """PaTH with ``w`` and ``beta`` themselves as its parameters."""

    def projections(self, params, layer):
        return params["w"]

    def vectors(self, params, layer, z):
        return z

    def strengths(self, params, layer):
        return params["beta"]


def specified(q, k, v, w, beta, ids, local_window_size=None):
    """The same by the dense specification."""
    logits = householder.dense_products(q, k, w, beta, ids) / DIM**0.5
    i = np.arange(q.shape[1])
    seen = i[:, None] >= i
    if local_window_size is not None:
        seen = seen & (i >= i[:, None] - local_window_size)
    if ids is not None:
        seen = seen & (np.asarray(ids)[:, None, :, None] == np.asarray(ids)[:, None, None])
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", weights, jnp.repeat(v, q.shape[2] // v.shape[2], axis=2))


@pytest.mark.parametrize("packed", [False, True])
def test_the_specification_is_the_recurrence(x64, packed):
    q, k, _, w, beta = inputs()
    ids = segments() if packed else None
    found = householder.dense_products(q, k, w, beta, ids)
    np.testing.assert_allclose(found, expected(*map(np.asarray, (q, k, w, beta)), ids), atol=1e-12)
    own = jnp.einsum("bihd,bihd->bhi", q, jnp.repeat(k, 2, axis=2))
    chex.assert_trees_all_close(jnp.diagonal(found, axis1=2, axis2=3), own, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "packed", "window", "implementation"),
    [
        (1, False, None, "reference"),
        (3, True, None, "reference"),
        (3, True, 4, "rows"),
        (5, True, None, "rows"),
        (8, False, 4, "rows"),
        (64, True, 4, "reference"),
    ],
)
def test_chunks_equal_the_specification(x64, chunk, packed, window, implementation):
    """And so do gradients by everything."""
    ids, given = segments() if packed else None, inputs()

    def loss(function, given):
        out = function(*given, ids)
        return jnp.sum(jnp.sin(out)), out

    blockwise = functools.partial(
        attend, chunk=chunk, implementation=implementation, local_window_size=window
    )
    dense = functools.partial(specified, local_window_size=window)
    found = jax.jit(jax.value_and_grad(functools.partial(loss, blockwise), has_aux=True))(given)
    want = jax.value_and_grad(functools.partial(loss, dense), has_aux=True)(given)
    chex.assert_trees_all_close(found, want, atol=1e-10, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 8, 13])
def test_inverse(x64, size):
    system = np.tril(np.random.default_rng(0).uniform(-2, 2, (3, size, size)), -1)
    found = householder.inverse(jnp.asarray(system))
    np.testing.assert_allclose(found, np.linalg.inv(np.eye(size) + system), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_second_derivatives(x64):
    q, k, v, w, beta = inputs(time=5, heads=1, kv_heads=1)

    def loss(function, w):
        return jnp.sum(jnp.sin(function(q, k, v, w, beta, None)))

    blockwise = functools.partial(attend, chunk=2, implementation="reference")
    found, want = (
        jax.grad(lambda w, f=f: jnp.sum(jnp.sin(jax.grad(functools.partial(loss, f))(w))))(w)
        for f in (blockwise, specified)
    )
    chex.assert_trees_all_close(found, want, atol=1e-9)


@pytest.mark.slow
def test_bfloat16_sums_are_float32():
    given = inputs(time=61, dtype="bfloat16")
    wide = [x.astype(jnp.float32) for x in given]
    found = attend(*given, None, 8)
    assert found.dtype == jnp.bfloat16
    want = attend(*wide, None, 8)
    np.testing.assert_allclose(found.astype(jnp.float32), want, atol=0.02)


# --- The encoding in a model ---------------------------------------------------------------------


def model_of(position="path", **options):
    options = {"num_heads": 4, "num_kv_heads": 2, "num_layers": 2} | options
    return small_model(positions.create(position), **FLOAT64 | options)


def prefill(model, variables, tokens, *, capacity, **options):
    run = functools.partial(tape.prefill, model, capacity=capacity)
    return jax.jit(run)(variables, tokens, **options)


@pytest.mark.slow
def test_one_new_token_attends_by_any_implementation(x64):
    model = model_of(attention_implementation=("chunked", "rows"), num_layers=1)
    variables, tokens = random_variables(model), random_tokens(2, 5)
    full = jax.jit(model.apply)(variables, tokens)
    _, cache = prefill(model, variables, tokens[:, :4], capacity=6)
    with recorded_plans() as found:
        logits, _ = jax.jit(functools.partial(tape.extend, model))(variables, cache, tokens[:, 4:])
    assert {plan.implementation for plan in found} == {"chunked"}
    chex.assert_trees_all_close(logits[:, 0], full[:, -1], atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rewritten_keys_do_not_drift(dtype):
    """200 times rewritten, in float32 whatever the compute type."""
    exact = model_of(dtype="float32", param_dtype="float32", num_layers=1)
    model = Transformer(dataclasses.replace(exact.config, dtype=dtype))
    variables, tokens = random_variables(exact), random_tokens(1, 216)
    _, cache = prefill(model, variables, tokens[:, :16], capacity=216)
    assert cache.layers[0].k.dtype == jnp.float32
    assert cache.layers[0].v.dtype == jnp.dtype(dtype)

    def step(cache, token):
        logits, cache = tape.extend(model, variables, cache, token[:, None])
        return cache, logits[:, 0]

    _, found = jax.jit(lambda cache: jax.lax.scan(step, cache, tokens[:, 16:].T))(cache)
    found = jnp.swapaxes(found, 0, 1)
    want, same = (jax.jit(m.apply)(variables, tokens)[:, 16:] for m in (exact, model))
    if dtype == "float32":
        np.testing.assert_allclose(found, want, atol=1e-4)
    else:
        late = slice(100, None)
        off = [jnp.abs(x - want)[:, late].mean() for x in (found, same)]
        assert off[0] < 1.25 * off[1], f"decoding is off by {off[0]}, the full pass by {off[1]}"


@pytest.mark.slow
def test_gradients_pass_a_cache(x64):
    """Prefilling and one more token, against the full pass."""
    model = model_of({"kind": "path", "chunk": 2}, num_layers=1, scan_layers=False)
    variables, tokens = random_variables(model), random_tokens(1, 6)

    def cached(variables):
        _, cache = tape.prefill(model, variables, tokens[:, :5], capacity=6)
        return jnp.sum(jnp.sin(tape.extend(model, variables, cache, tokens[:, 5:])[0]))

    def full(variables):
        return jnp.sum(jnp.sin(model.apply(variables, tokens)[:, 5:]))

    found, want = (jax.jit(jax.grad(loss))(variables) for loss in (cached, full))
    chex.assert_trees_all_close(found, want, atol=1e-9)


@pytest.mark.slow
def test_any_batch_axes(x64):
    model = model_of("path", num_layers=1)
    variables, tokens = random_variables(model), random_tokens(2, 3, 7)
    ids = jnp.asarray([1, 1, 1, 2, 2, 1, 1])
    found = model.apply(variables, tokens, segment_ids=jnp.broadcast_to(ids, tokens.shape))
    for row, logits in zip(tokens.reshape(6, 7), found.reshape(6, 7, -1), strict=True):
        chex.assert_trees_all_close(
            model.apply(variables, row, segment_ids=ids), logits, atol=1e-12
        )


def test_parameters():
    config = model_of("path", num_layers=1).config

    def shapes(**options):
        specs = positions.PathAttention(**options).layer_params(config.sizes, updates=False)
        return {name: spec.shape for name, spec in specs.items()}

    beta = {"beta_kernel": (16, 2), "beta_bias": (2,)}
    assert shapes() == beta | {"w_down": (16, 32), "w_up": (32, 8), "w_taps": (8, 3)}
    assert shapes(rank=None, taps=0) == beta | {"w_kernel": (16, 8)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, r"rank must be a positive integer or None; got 0"),
        ({"taps": -1}, r"taps must be an integer from 0 on; got -1"),
        ({"chunk": 0}, r"chunk must be a positive integer; got 0"),
        ({"beta_max": 2.5}, r"0 < beta_max <= 2, .*got 2\.5"),
        ({"eps": 0.0}, r"eps must be positive; got 0"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(ValueError, match=words):
        positions.PathAttention(**options)


def test_wrong_calls():
    model = model_of(dtype="float32", param_dtype="float32")
    with pytest.raises(ValueError, match="'path' needs is_causal=True"):
        model.apply(random_variables(model), random_tokens(1, 4), is_causal=False)
    with pytest.raises(ValueError, match=r"'rope' and 'path' do not go together"):
        positions.create("rope+path")
