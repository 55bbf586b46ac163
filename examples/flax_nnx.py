"""Needs: optax. A Flax NNX decoder in which TAPE replaced RoPE.

It learns to repeat what it has read: python -m examples.flax_nnx
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import tape_jax as tape
from examples.data import next_token_loss, repeated_halves

VOCAB, WIDTH, HEADS, LAYERS = 16, 64, 4, 3


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.LinearGeneral(WIDTH, (3, HEADS, WIDTH // HEADS), rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, WIDTH // HEADS), WIDTH, axis=(-2, -1), rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        position = tape.init_update(rngs.params(), WIDTH, HEADS)  # TAPE
        self.position = nnx.data(jax.tree.map(nnx.Param, position))  # TAPE

    def __call__(self, h, e):
        q, k, v = jnp.moveaxis(self.qkv(self.attention_norm(h)), -3, 0)
        # With RoPE: q, k = tape.rotate(q, e), tape.rotate(k, e)
        # With RoPE: o = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        o, a = tape.attention(q, k, v, state=e, is_causal=True)  # TAPE
        h = h + self.out(o)
        x = self.down(nnx.gelu(self.up(self.mlp_norm(h))))
        params = {name: param[...] for name, param in self.position.items()}  # TAPE
        return h + x, tape.update_state(params, e, a, x)  # TAPE


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        h = self.embedding(tokens)
        e = tape.rotary_state(jnp.arange(tokens.shape[-1]), WIDTH // HEADS)
        for block in self.blocks:
            h, e = block(h, e)  # TAPE
        return self.head(self.norm(h))


def main(steps=100):
    model = Decoder(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, key):
        tokens = repeated_halves(key, 32, 32, VOCAB)
        loss, grads = nnx.value_and_grad(lambda m: next_token_loss(m(tokens), tokens))(model)
        optimizer.update(model, grads)
        return loss

    keys = jax.random.split(jax.random.key(1), steps)
    losses = [float(step(model, optimizer, key)) for key in keys]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats in {steps} steps")
    return losses


if __name__ == "__main__":
    main()
