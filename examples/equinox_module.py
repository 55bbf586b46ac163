"""Needs: equinox, optax. An Equinox decoder in which TAPE replaced RoPE.

It learns to repeat what it has read: python -m examples.equinox_module
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import tape_jax as tape
from examples.data import next_token_loss, repeated_halves

VOCAB, WIDTH, HEADS, LAYERS = 16, 64, 4, 3


class Block(eqx.Module):
    attention_norm: eqx.nn.RMSNorm
    mlp_norm: eqx.nn.RMSNorm
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    position: dict[str, jax.Array]  # TAPE

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.attention_norm, self.mlp_norm = eqx.nn.RMSNorm(WIDTH), eqx.nn.RMSNorm(WIDTH)
        self.qkv = eqx.nn.Linear(WIDTH, 3 * WIDTH, key=keys[0])
        self.out = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=keys[2])
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=keys[3])
        self.position = tape.init_update(keys[4], WIDTH, HEADS)  # TAPE

    def __call__(self, h, e):
        qkv = jax.vmap(self.qkv)(jax.vmap(self.attention_norm)(h))
        q, k, v = jnp.moveaxis(qkv.reshape(h.shape[0], 3, HEADS, -1), 1, 0)
        # With RoPE: q, k = tape.rotate(q, e), tape.rotate(k, e)
        # With RoPE: o = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        o, a = tape.attention(q, k, v, state=e, is_causal=True)  # TAPE
        h = h + jax.vmap(self.out)(o.reshape(h.shape))
        x = jax.vmap(lambda y: self.down(jax.nn.gelu(self.up(self.mlp_norm(y)))))(h)
        return h + x, tape.update_state(self.position, e, a, x)  # TAPE


class Decoder(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        first, last, *keys = jax.random.split(key, LAYERS + 2)
        self.embedding = eqx.nn.Embedding(VOCAB, WIDTH, key=first)
        self.blocks = [Block(k) for k in keys]
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, VOCAB, key=last)

    def __call__(self, tokens):
        h = jax.vmap(self.embedding)(tokens)
        e = tape.rotary_state(jnp.arange(tokens.shape[-1]), WIDTH // HEADS)
        for block in self.blocks:
            h, e = block(h, e)  # TAPE
        return jax.vmap(lambda x: self.head(self.norm(x)))(h)


def main(steps=100):
    model = Decoder(jax.random.key(0))
    optimizer = optax.adam(3e-3)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, opt_state, key):
        tokens = repeated_halves(key, 32, 32, VOCAB)
        loss, grads = eqx.filter_value_and_grad(
            lambda m: next_token_loss(jax.vmap(m)(tokens), tokens)
        )(model)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    losses = []
    for key in jax.random.split(jax.random.key(1), steps):
        model, opt_state, loss = step(model, opt_state, key)
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats in {steps} steps")
    return losses


if __name__ == "__main__":
    main()
