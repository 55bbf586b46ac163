"""The attention of NNX and Linen for models of others, against that of the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tape_jax as tape
import tape_jax.linen
import tape_jax.nnx
from tape_jax import testing
from tests import models
from tests.selection import mostly_slow

BATCH, TIME, HEADS, KV_HEADS, WIDTH = 2, 6, 4, 2, 32
DIM = WIDTH // HEADS
GROUPED = {"num_heads": HEADS, "num_kv_heads": KV_HEADS}
ENCODINGS = ("tape", "tape+fox", "path", "cope")


def normal(*shape, seed=0):
    return jnp.asarray(models.normal(*shape, seed=seed))


@pytest.mark.parametrize("position", mostly_slow(ENCODINGS, "tape"))
def test_attention_is_that_of_the_model_and_decodes(position):
    """Against the layer of ``Transformer`` whose parameters it takes; then token by token."""
    config = tape.ModelConfig(
        11, WIDTH, num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, position=position
    )
    model, tokens = tape.Transformer(config), jnp.arange(BATCH * TIME).reshape(BATCH, TIME) % 11
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    params = testing.random_params(None, jax.tree.map(lambda x: jnp.ones(x.shape), variables))
    params = params["params"]
    _, states = model.apply({"params": params}, tokens, return_states=True)
    block = jax.tree.map(lambda x: x[0], params["layers_0"])

    layer = tape.nnx.Attention(WIDTH, **GROUPED, position=position, updates=False, rngs=nnx.Rngs(0))
    for name in ("q", "k", "v", "out"):
        getattr(layer, name)[...] = block["attention"][name]["kernel"]
    for name, value in block.items():
        if name.startswith("position_"):
            getattr(layer, name)[...] = value
    h = states.hidden[0]

    def norm(h, scale):
        return h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + config.norm_eps) * scale

    x = norm(h, block["attention_norm"]["scale"])
    call = nnx.jit(tape.nnx.Attention.__call__)
    out, attended, cache = call(layer, x)
    assert attended is None
    assert cache is None
    after = h + out
    y = norm(after, block["mlp_norm"]["scale"])
    mlp = {name: kernel["kernel"] for name, kernel in block["mlp"].items()}
    after = after + (jax.nn.silu(y @ mlp["gate"]) * (y @ mlp["up"])) @ mlp["down"]
    np.testing.assert_allclose(after, states.hidden[1], rtol=2e-4, atol=2e-4)

    linen = tape.linen.Attention(**GROUPED, position=position, updates=False)
    pure = {"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}
    np.testing.assert_array_equal(jax.jit(linen.apply)(pure, x)[0], out)

    cache, pieces = layer.init_cache(BATCH, TIME + 2), []
    for start, stop in ((0, 3), (3, 4), (4, TIME)):
        piece, _, cache = call(layer, x[:, start:stop], cache=cache, index=start)
        pieces.append(piece)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), out, rtol=2e-4, atol=2e-4)


def attention(x=None, *, position="tape", num_kv_heads=None, **options):
    """Makes a layer and, with ``x``, calls it."""
    made = {"position": position, "num_kv_heads": num_kv_heads, "rngs": nnx.Rngs(0)}
    layer = tape.nnx.Attention(WIDTH, HEADS, **made)
    cache = layer.init_cache(BATCH, 4)
    return layer if x is None else layer(x, cache=cache, **options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: attention(num_kv_heads=3), ValueError, "not a multiple"),
        (lambda: attention(position="sinusoidal"), NotImplementedError, "acts at the embeddings"),
        (lambda: attention(position="tap"), ValueError, "tap"),
        (lambda: attention(normal(BATCH, 3, 8)), ValueError, r"x must have shape \[..., T, 32\]"),
        (lambda: attention(normal(BATCH, TIME, WIDTH)), ValueError, "4 slots"),
        (
            lambda: attention(normal(BATCH, 1, WIDTH), segment_ids=jnp.ones((BATCH, 1), int)),
            ValueError,
            "a pair",
        ),
    ],
)
def test_wrong_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()
