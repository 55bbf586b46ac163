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


def inputs(time=13, dtype="float64"):
    """q, k, v, w, beta of a batch of two; some of each head's ``w`` are alike."""
    rng = np.random.default_rng(0)
    q, k, v, w = (rng.normal(size=(2, time, heads, DIM)) for heads in (4, 2, 2, 2))
    w[:, 1:4] = w[:, :1]
    w /= np.linalg.norm(w, axis=-1, keepdims=True)
    beta = rng.uniform(0, 2, (2, time, 2))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v, w, beta))


def segments():
    return jnp.asarray([INTERLEAVED, np.arange(13) // 5 + 1], jnp.int32)


def expected(q, k, w, beta, ids):
    """The recurrence for all heads and rows of a batch."""
    k, w, beta = (np.repeat(x, 2, axis=2) for x in (k, w, beta))
    ids = np.zeros(q.shape[:2]) if ids is None else np.asarray(ids)
    found = np.empty((2, 4, q.shape[1], q.shape[1]))
    for b, h in np.ndindex(2, 4):
        found[b, h] = step_by_step(q[b, :, h], k[b, :, h], w[b, :, h], beta[b, :, h], ids[b])
    return found


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


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("chunk", "packed", "window", "implementation"),
    [
        (3, True, 4, "rows"),
        (1, False, None, "reference"),
        (5, True, None, "rows"),
        (64, True, 4, "reference"),
    ],
)
def test_chunks_equal_the_recurrence(x64, chunk, packed, window, implementation):
    ids, (q, k, v, w, beta) = segments() if packed else None, inputs()
    found = jax.jit(
        functools.partial(
            attend, ids=ids, chunk=chunk, implementation=implementation, local_window_size=window
        )
    )(q, k, v, w, beta)
    i = np.arange(13)
    seen = (i[:, None] >= i) & (i >= i[:, None] - (13 if window is None else window))
    if packed:
        seen = seen & (ids[:, :, None] == ids[:, None])[:, None]
    logits = np.where(seen, expected(*map(np.asarray, (q, k, w, beta)), ids) / DIM**0.5, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    want = np.einsum("bhij,bjhd->bihd", weights, np.repeat(v, 2, axis=2))
    np.testing.assert_allclose(found, want, atol=1e-10)


@pytest.mark.slow
def test_bfloat16_sums_are_float32():
    given = inputs(time=61, dtype="bfloat16")
    wide = [x.astype(jnp.float32) for x in given]
    run = jax.jit(lambda *given: attend(*given, None, 8))
    found, want = run(*given), run(*wide)
    assert found.dtype == jnp.bfloat16
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
def test_rewritten_keys_do_not_drift():
    """200 times rewritten, in float32 whatever the compute type."""
    exact = model_of(dtype="float32", param_dtype="float32", num_layers=1)
    model = Transformer(dataclasses.replace(exact.config, dtype="bfloat16"))
    variables, tokens = random_variables(exact), random_tokens(1, 216)
    _, cache = prefill(model, variables, tokens[:, :16], capacity=216)
    assert cache.layers[0].k.dtype == jnp.float32
    assert cache.layers[0].v.dtype == jnp.bfloat16

    def step(cache, token):
        logits, cache = tape.extend(model, variables, cache, token[:, None])
        return cache, logits[:, 0]

    _, found = jax.jit(lambda cache: jax.lax.scan(step, cache, tokens[:, 16:].T))(cache)
    found = jnp.swapaxes(found, 0, 1)
    want, same = (jax.jit(m.apply)(variables, tokens)[:, 16:] for m in (exact, model))
    off = [jnp.abs(x - want)[:, 100:].mean() for x in (found, same)]
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
    """Also with vectors that are one product and not smoothed."""
    model = model_of({"kind": "path", "rank": None, "taps": 0}, num_layers=1)
    variables, tokens = random_variables(model), random_tokens(2, 3, 7)
    ids = jnp.asarray([1, 1, 1, 2, 2, 1, 1])
    apply = jax.jit(lambda x: model.apply(variables, x, segment_ids=jnp.broadcast_to(ids, x.shape)))
    rows = apply(tokens.reshape(6, 7))
    chex.assert_trees_all_close(apply(tokens).reshape(rows.shape), rows, atol=1e-12)
