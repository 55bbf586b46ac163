"""The modules of NNX and Linen for models of others, against the functions and the model."""

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
ENCODINGS = ("tape", "alibi", "tape+fox", "path", "selective_rope", "cope")


def normal(*shape, seed=0):
    return jnp.asarray(models.normal(*shape, seed=seed))


def moved(module):
    """Move all parameters: those of new encodings often do nothing."""
    params = nnx.state(module, nnx.Param)
    nnx.update(module, testing.random_params(None, params))
    return module


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_mix": "head_scale", "norm": "rms", "alpha": 0.5},
        {"alpha": jnp.float32(0.5), "implementation": ("reference", "sums")},
    ],
    ids=str,
)
def test_update_equals_the_function(options):
    update = moved(tape.nnx.UpdateState(WIDTH, **GROUPED, **options, rngs=nnx.Rngs(0)))
    e, a = normal(BATCH, TIME, KV_HEADS, DIM, seed=1), normal(BATCH, TIME, HEADS, DIM, seed=2)
    x = normal(BATCH, TIME, WIDTH)
    params = nnx.to_pure_dict(nnx.state(update, nnx.Param))
    names = ("alpha", "norm", "implementation")
    given = {name: options[name] for name in names if name in options}
    wanted = tape.update_state(params, e, a, x, num_kv_heads=KV_HEADS, **given)
    np.testing.assert_array_equal(update(e, a, x), wanted)
    linen = tape.linen.UpdateState(**GROUPED, **options)
    np.testing.assert_array_equal(linen.apply({"params": params}, e, a, x), wanted)
    assert not np.allclose(wanted, e)


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


class Block(nnx.Module):
    """A block of TAPE without norms."""

    def __init__(self, rngs):
        self.attention = tape.nnx.Attention(WIDTH, **GROUPED, qk_norm=True, rngs=rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.update = tape.nnx.UpdateState(WIDTH, **GROUPED, rngs=rngs)

    def __call__(self, h, e, cache=None, index=0):
        o, a, cache = self.attention(h, e, cache=cache, index=index)
        h = h + o
        x = nnx.silu(self.up(h))
        return h + x, self.update(e, a, x), cache


def start(index=0, time=TIME):
    e = tape.rotary_state(index + jnp.arange(time), DIM)
    return jnp.broadcast_to(e[:, None], (BATCH, time, KV_HEADS, DIM))


@pytest.mark.slow
def test_blocks_decode_as_they_read():
    blocks = [moved(Block(nnx.Rngs(n))) for n in range(2)]
    h, e = whole, _ = normal(BATCH, TIME, WIDTH), start()
    for block in blocks:
        h, e, _ = block(h, e)
    caches = [block.attention.init_cache(BATCH, TIME) for block in blocks]
    pieces = []
    for first, last in ((0, 4), (4, 5), (5, 6)):
        x, e = whole[:, first:last], start(first, last - first)
        for n, block in enumerate(blocks):
            x, e, caches[n] = nnx.jit(Block.__call__)(block, x, e, caches[n], first)
        pieces.append(x)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), h, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_scan_with_remat_is_the_loop():
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs):
        return Block(rngs)

    blocks = moved(stack(nnx.Rngs(0)))
    assert not np.allclose(*blocks.up.kernel[...])

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @nnx.remat
    def scanned(block, carry):
        return block(*carry)[:2]

    def loop(blocks, carry):
        graph, params = nnx.split(blocks)
        for n in range(2):
            block = nnx.merge(graph, jax.tree.map(lambda x: x[n], params))  # noqa: B023
            carry = block(*carry)[:2]
        return carry

    carry = normal(BATCH, TIME, WIDTH), start()

    def with_gradient(run):
        return nnx.jit(nnx.value_and_grad(lambda m: jnp.square(run(m, carry)[0]).mean()))(blocks)

    got, wanted = with_gradient(scanned), with_gradient(loop)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4), got, wanted)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_kv_heads": 3}, ValueError, "not a multiple"),
        ({"position": "sinusoidal"}, NotImplementedError, "acts at the embeddings"),
        ({"position": "mapformer_wm"}, NotImplementedError, "at the embeddings"),
        ({"position": "tap"}, ValueError, "tap"),
        ({"position": tape.positions.Tape(still_heads=1)}, NotImplementedError, "still_heads = 1"),
        (
            {"position": {"kind": "tape+alibi", "learn_alpha": True}},
            NotImplementedError,
            "UpdateState.* has no learn_alpha = True",
        ),
        ({"position": "tape_mix_head_dim"}, NotImplementedError, "UpdateState.* has no update of"),
    ],
    ids=str,
)
def test_wrong_options_are_errors(options, error, message):
    with pytest.raises(error, match=message):
        tape.nnx.Attention(WIDTH, HEADS, **options, rngs=nnx.Rngs(0))


def test_what_no_update_follows_may_have_any_update():
    for options in ({"still_heads": 1}, {"learn_alpha": True}):
        encoding = tape.positions.Tape(**options)
        layer = tape.nnx.Attention(WIDTH, HEADS, position=encoding, updates=False, rngs=nnx.Rngs(0))
        assert layer(normal(BATCH, TIME, WIDTH))[1] is None


def test_wrong_inputs_are_errors():
    layer = tape.nnx.Attention(WIDTH, HEADS, rngs=nnx.Rngs(0))
    cache = layer.init_cache(BATCH, 4)
    for shape in ((BATCH, TIME, 8), (0, TIME, 32)):
        with pytest.raises(ValueError, match=r"x must have shape \[..., T, 32\] and not be empty"):
            layer(jnp.zeros(shape))
    with pytest.raises(ValueError, match="4 slots"):
        layer(normal(BATCH, TIME, WIDTH), cache=cache)
    last = normal(BATCH, 1, WIDTH)
    for index in (jnp.zeros(BATCH, int), 1.0):
        with pytest.raises(ValueError, match="index must be an integer, of all rows; got"):
            layer(last, cache=cache, index=index)
    other = tape.nnx.Attention(WIDTH, HEADS, updates=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"of another layer: it has .*; this one's has .*\.e "):
        layer(last, cache=other.init_cache(BATCH, 4))
    with pytest.raises(ValueError, match="a pair"):
        layer(normal(BATCH, 1, WIDTH), cache=cache, segment_ids=jnp.ones((BATCH, 1), jnp.int32))
