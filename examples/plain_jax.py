"""Needs: optax. A decoder in plain JAX in which TAPE replaced RoPE.

It learns to repeat what it has read: python -m examples.plain_jax
"""

import jax
import jax.numpy as jnp
import optax

import tape_jax as tape
from examples.data import next_token_loss, repeated_halves

VOCAB, WIDTH, HEADS, LAYERS = 16, 64, 4, 3


def init_layer(key):
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    *keys, last = jax.random.split(key, len(shapes) + 1)
    params = {
        name: jax.random.normal(k, shape) / shape[0] ** 0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    params["position"] = tape.init_update(last, WIDTH, HEADS)  # TAPE
    return params


def init(key):
    first, *keys = jax.random.split(key, LAYERS + 1)
    embedding = jax.random.normal(first, (VOCAB, WIDTH)) / WIDTH**0.5
    return {"embedding": embedding, "layers": [init_layer(k) for k in keys]}


def norm(x):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def block(params, h, e, is_causal=True):
    q, k, v = jnp.split((norm(h) @ params["qkv"]).reshape(*h.shape[:-1], 3 * HEADS, -1), 3, -2)
    # With RoPE: q, k = tape.rotate(q, e), tape.rotate(k, e)
    # With RoPE: o = jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)
    o, a = tape.attention(q, k, v, state=e, is_causal=is_causal)  # TAPE
    h = h + o.reshape(h.shape) @ params["out"]
    x = jax.nn.gelu(norm(h) @ params["up"]) @ params["down"]
    e = tape.update_state(params["position"], e, a, x)  # TAPE
    return h + x, e  # TAPE


def apply(params, tokens):
    h = params["embedding"][tokens]
    e = tape.rotary_state(jnp.arange(tokens.shape[-1]), WIDTH // HEADS)
    for layer in params["layers"]:
        h, e = block(layer, h, e)  # TAPE
    return norm(h) @ params["embedding"].T


def main(steps=100):
    params = init(jax.random.key(0))
    optimizer = optax.adam(3e-3)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, key):
        tokens = repeated_halves(key, 32, 32, VOCAB)
        loss, grads = jax.value_and_grad(lambda p: next_token_loss(apply(p, tokens), tokens))(
            params
        )
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for key in jax.random.split(jax.random.key(1), steps):
        params, opt_state, loss = step(params, opt_state, key)
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats in {steps} steps")
    return losses


if __name__ == "__main__":
    main()
