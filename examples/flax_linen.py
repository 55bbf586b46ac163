"""Needs: optax. A Flax Linen decoder in which TAPE replaced RoPE.

It learns to repeat what it has read: python -m examples.flax_linen
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import tape_jax as tape
from examples.data import next_token_loss, repeated_halves

VOCAB, WIDTH, HEADS, LAYERS = 16, 64, 4, 3


class Block(nn.Module):
    @nn.compact
    def __call__(self, h, e):
        qkv = nn.DenseGeneral((3, HEADS, WIDTH // HEADS), use_bias=False)(nn.RMSNorm()(h))
        q, k, v = jnp.moveaxis(qkv, -3, 0)
        # With RoPE: q, k = tape.rotate(q, e), tape.rotate(k, e)
        # With RoPE: o = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        o, a = tape.attention(q, k, v, state=e, is_causal=True)  # TAPE
        h = h + nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False)(o)
        x = nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.RMSNorm()(h))))
        return h + x, tape.UpdateState(HEADS)(e, a, x)  # TAPE


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        h = nn.Embed(VOCAB, WIDTH, name="embedding")(tokens)
        e = tape.rotary_state(jnp.arange(tokens.shape[-1]), WIDTH // HEADS)
        for _ in range(LAYERS):
            h, e = Block()(h, e)  # TAPE
        return nn.Dense(VOCAB, name="head")(nn.RMSNorm()(h))


def main(steps=100):
    model = Decoder()
    params = model.init(jax.random.key(0), jnp.zeros((1, 32), jnp.int32))
    optimizer = optax.adam(3e-3)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, key):
        tokens = repeated_halves(key, 32, 32, VOCAB)
        loss, grads = jax.value_and_grad(lambda p: next_token_loss(model.apply(p, tokens), tokens))(
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
