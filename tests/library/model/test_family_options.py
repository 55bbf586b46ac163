"""Options in which families of decoders differ, against a decoder in float64 numpy."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tape_jax import losses
from tape_jax.sharding import ShardingConfig
from tests.library.model.generate.passes import jit_apply, jit_extend, jit_prefill
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
    model, variables = a_model(name, **FLOAT64)
    params = jax.tree.map(np.asarray, variables["params"])
    wanted = [decoder(model.config, params, row) for row in TOKENS]
    np.testing.assert_allclose(model.apply(variables, TOKENS), wanted, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "position"), [("gemma", "tape"), ("cohere", "alibi"), ("other", "rope")]
)
def test_cached_decoding(name, position):
    model, variables = a_model(name, position)
    logits = jit_apply(model, variables, TOKENS)
    last, cache = jit_prefill(model, variables, jnp.asarray(TOKENS[:, :5]), capacity=9)
    assert_near(last, logits[:, :5])
    for i in range(5, 9):
        last, cache = jit_extend(model, variables, cache, jnp.asarray(TOKENS[:, i : i + 1]))
        assert_near(last[:, 0], logits[:, i])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma", "other"])
def test_on_a_mesh(name):
    """Values and gradients, parameters and heads split."""
    model, variables = a_model(name, "tape")
    sharding = ShardingConfig(data=2, fsdp=2, tensor=2).build(jax.devices()[:8])
    split = tape.Transformer(model.config, sharding=sharding)
    placed = jax.device_put(variables, sharding.of(split, variables))

    def loss(model, variables, tokens):
        return jnp.sum(jnp.sin(model.apply(variables, tokens)))

    tokens = jnp.asarray(np.concatenate([TOKENS, TOKENS[::-1]]))
    wanted = jax.jit(jax.value_and_grad(lambda v: loss(model, v, tokens)))(variables)
    found = jax.jit(jax.value_and_grad(lambda v: loss(split, v, tokens)))(placed)
    assert_near(found[0], wanted[0])
    jax.tree.map(lambda a, b: assert_near(jax.device_get(a), b, 1e-4), found[1], wanted[1])


@pytest.mark.slow
def test_parameters():
    found = a_model("gemma")[0].parameters()
    norms = {path for path, one in found.items() if one.role == "norms"}
    names = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
    inside = ("attention/q_norm", "attention/k_norm")
    assert norms == {f"layers_0/{x}/scale" for x in (*names, *inside)} | {"final_norm/scale"}
    assert "layers_0/mlp_norm/scale" not in a_model("cohere")[0].parameters()
    model = a_model("gemma")[0]
    start = model.init(jax.random.key(0), jnp.asarray(TOKENS))["params"]
    assert not start["layers_0"]["mlp_out_norm"]["scale"].any()


def test_activation_of_experts():
    """One expert is an MLP."""
    experts = tape.Experts(1, per_token=1, normalize=False)
    model, variables = a_model("relu", experts=experts)
    plain = tape.Transformer(dataclasses.replace(model.config, experts=None))
    params = jax.tree.map(lambda x: x, variables["params"])
    kernels = params["layers_0"]["mlp"]
    del kernels["router"]
    params["layers_0"]["mlp"] = jax.tree.map(lambda x: x[:, 0], kernels)
    assert_near(model.apply(variables, TOKENS), plain.apply({"params": params}, TOKENS))


@pytest.mark.slow
def test_bounded_logits_in_the_loss_without_logits():
    model, variables = a_model("gemma")
    cap = model.config.final_logit_softcap

    def chunked(variables):
        hidden = model.apply(variables, TOKENS, output="hidden")
        kernel = model.output_kernel(variables)
        return losses.cross_entropy(hidden, kernel, jnp.asarray(TOKENS), chunk=2, logit_softcap=cap)

    def whole(variables):
        log_p = jax.nn.log_softmax(model.apply(variables, TOKENS))
        return -jnp.take_along_axis(log_p, jnp.asarray(TOKENS)[..., None], -1).sum()

    found, wanted = (jax.value_and_grad(f)(variables) for f in (chunked, whole))
    chex.assert_trees_all_close(found, wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel_block": True, "norms": "both"}, "needs norms = 'before'; got norms = 'both'"),
        ({"norms": "around"}, "norms.*'around': expected one of 'before', 'after', 'both'"),
        ({"norm": "batch"}, "norm.*'batch': expected one of 'rms', 'layer'"),
        ({"activation": "swish"}, "activation.*'swish'"),
        ({"logit_softcap": 0}, "logit_softcap must be positive; got 0"),
        ({"zero_centered_norms": "yes"}, "zero_centered_norms"),
    ],
)
def test_misuse(options, message):
    with pytest.raises(ValueError, match=message):
        small_model("rope", **options)


@pytest.mark.parametrize("position", ["path", "path_fox", "wall"])
def test_bound_of_logits_that_an_encoding_makes(position):
    made = position.removesuffix("_fox")
    with pytest.raises(ValueError, match=f"logit_softcap = 2.0 .* '{made}' makes its logits"):
        small_model(position, logit_softcap=2.0)
