"""Options in which families of decoders differ, against a decoder in float64 numpy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tape_jax.sharding import ShardingConfig
from tests.library.model.generate.passes import jit_apply
from tests.models import FLOAT64, assert_near, random_variables, small_model

VOCAB = 16
WIDE = {"vocab_size": VOCAB, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
GEMMA = {
    "norms": "both",
    "zero_centered_norms": True,
    "activation": "gelu",
    "embedding_scale": 4.0,
    "query_scale": 0.3,
    "qk_norm": "head",
    "logit_softcap": 0.8,
    "final_logit_softcap": 1.5,
    "tie_embeddings": True,
}
COHERE = {"norm": "layer", "parallel_block": True, "logits_scaling": 0.4, "local_window_size": 3}
OTHER = {
    "norm": "layer",
    "norms": "after",
    "qk_norm": "full",
    "zero_centered_norms": True,
    "activation": "gelu_exact",
    "residual_scale": 0.7,
}
FAMILIES = {"gemma": GEMMA, "cohere": COHERE, "other": OTHER, "relu": {"activation": "relu"}}
TOKENS = np.random.default_rng(3).integers(0, VOCAB, (2, 9))


def normalized(c, x, scale):
    if c.norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    return (
        x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * (scale + c.zero_centered_norms)
    )


def activation(c, x):
    if c.activation == "gelu":
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if c.activation == "gelu_exact":
        return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return np.maximum(x, 0) if c.activation == "relu" else x / (1 + np.exp(-x))


def capped(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


def attention(c, p, x):
    """Of one sequence ``x [T, hidden]``, by loops over heads and queries."""
    time, half = len(x), c.dim // 2

    def heads(name, number):
        y = x @ p[name]["kernel"]
        if c.qk_norm == "full" and name != "v":
            y = normalized(c, y, p[f"{name}_norm"]["scale"])
        y = y.reshape(time, number, c.dim)
        if c.qk_norm == "head" and name != "v":
            y = normalized(c, y, p[f"{name}_norm"]["scale"])
        return y

    def rotated(y):
        turns = np.outer(np.arange(time), 1e4 ** (-np.arange(half) / half))
        y = (y[..., :half] + 1j * y[..., half:]) * np.exp(1j * turns)[:, None]
        return np.concatenate([y.real, y.imag], -1)

    q, k = rotated(heads("q", c.num_heads)), rotated(heads("k", c.kv_heads))
    v, out = heads("v", c.kv_heads), np.zeros((time, c.num_heads, c.dim))
    scale = c.query_scale or c.dim**-0.5
    for h in range(c.num_heads):
        own = h // (c.num_heads // c.kv_heads)
        for i in range(time):
            first = 0 if c.local_window_size is None else max(0, i - c.local_window_size)
            seen = slice(first, i + 1)
            weights = np.exp(capped(k[seen, own] @ q[i, h] * scale, c.logit_softcap))
            out[i, h] = weights @ v[seen, own] / weights.sum()
    return out.reshape(time, -1) @ p["out"]["kernel"]


def mlp(c, p, x):
    gate, up, down = (p[name]["kernel"] for name in ("gate", "up", "down"))
    return (activation(c, x @ gate) * (x @ up)) @ down


def block(c, p, h):
    def norm(name, x):
        return normalized(c, x, p[name]["scale"])

    if c.parallel_block:
        x = norm("attention_norm", h)
        return h + attention(c, p["attention"], x) + mlp(c, p["mlp"], x)
    for name, sublayer in (("attention", attention), ("mlp", mlp)):
        x = h if c.norms == "after" else norm(f"{name}_norm", h)
        x = sublayer(c, p[name], x)
        if c.norms != "before":
            x = norm(f"{name}_norm" if c.norms == "after" else f"{name}_out_norm", x)
        h = h + x * c.residual_scale
    return h


def decoder(c, params, tokens):
    h = params["embedding"][tokens] * c.embedding_scale
    for layer in range(c.num_layers):
        h = block(c, jax.tree.map(lambda x, i=layer: x[i], params["layers_0"]), h)
    final = normalized(c, h, params["final_norm"]["scale"])
    head = params["embedding"].T if c.tie_embeddings else params["head"]["kernel"]
    return capped(final @ head / c.logits_scaling, c.final_logit_softcap)


def a_model(name, position="rope", **options):
    model = small_model(position, **{**WIDE, **FAMILIES[name], **options})
    return model, random_variables(model)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("x64")
def test_logits(name):
    model, variables = a_model(name, num_layers=2, **FLOAT64)
    params = jax.tree.map(np.asarray, variables["params"])
    wanted = [decoder(model.config, params, row) for row in TOKENS]
    np.testing.assert_allclose(jit_apply(model, variables, TOKENS), wanted, atol=1e-10)


@pytest.mark.slow
def test_on_a_mesh():
    """Values and gradients, parameters and heads split."""
    model, variables = a_model("other", "tape")
    sharding = ShardingConfig(data=2, fsdp=2, tensor=2).build(jax.devices()[:8])
    split = tape.Transformer(model.config, sharding=sharding)
    tokens = jnp.asarray(np.concatenate([TOKENS, TOKENS[::-1]]))

    def gradients(model, variables):
        loss = lambda v: jnp.sum(jnp.sin(model.apply(v, tokens)))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(variables)

    wanted = gradients(model, variables)
    found = gradients(split, jax.device_put(variables, sharding.of(split, variables)))
    assert_near(found[0], wanted[0])
    jax.tree.map(lambda a, b: assert_near(jax.device_get(a), b, 1e-4), found[1], wanted[1])


def test_activation_of_experts():
    """One expert is an MLP."""
    experts = tape.Experts(1, per_token=1, normalize=False)
    model, variables = a_model("relu", experts=experts, num_layers=1)
    plain = tape.Transformer(dataclasses.replace(model.config, experts=None))
    params = jax.tree.map(lambda x: x, variables["params"])
    kernels = params["layers_0"]["mlp"]
    del kernels["router"]
    params["layers_0"]["mlp"] = jax.tree.map(lambda x: x[:, 0], kernels)
    expected = jit_apply(plain, {"params": params}, TOKENS)
    assert_near(jit_apply(model, variables, TOKENS), expected)
