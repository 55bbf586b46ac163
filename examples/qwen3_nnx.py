"""Needs: optax. A Qwen3 decoder in NNX, with a cache, in which TAPE replaced RoPE.

It learns to repeat what it has read, and then writes: python -m examples.qwen3_nnx
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import tape_jax as tape
import tape_jax.nnx
from examples.data import next_token_loss, repeated_halves

VOCAB, WIDTH, HEADS, KV_HEADS, DIM, LAYERS, BASE = 16, 64, 4, 2, 16, 3, 1e6
GROUPED = {"num_kv_heads": KV_HEADS}
NAMES = ("k", "v", "e")  # TAPE, in place of ("k", "v")


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.q_proj = nnx.LinearGeneral(WIDTH, (HEADS, DIM), use_bias=False, rngs=rngs)
        self.k_proj = nnx.LinearGeneral(WIDTH, (KV_HEADS, DIM), use_bias=False, rngs=rngs)
        self.v_proj = nnx.LinearGeneral(WIDTH, (KV_HEADS, DIM), use_bias=False, rngs=rngs)
        self.o_proj = nnx.LinearGeneral(
            (HEADS, DIM), WIDTH, axis=(-2, -1), use_bias=False, rngs=rngs
        )
        self.q_norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.k_norm = nnx.RMSNorm(DIM, rngs=rngs)

    def __call__(self, x, e, cache, index):
        q, k = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x))
        v = self.v_proj(x)
        # With RoPE: q, k = tape.rotate(q, e), tape.rotate(k, e)
        kv = {"k": tape.rotate(k, e), "v": v, "e": e}  # TAPE
        if cache is not None:
            kv = cache = {
                name: jax.lax.dynamic_update_slice_in_dim(cache[name], kv[name], index, axis=1)
                for name in NAMES
            }
        k, v = kv["k"], kv["v"]
        see = jnp.arange(k.shape[1]) <= index + jnp.arange(x.shape[1])[:, None]
        see = see[None, None]
        # With RoPE: o = jax.nn.dot_product_attention(tape.rotate(q, e), k, v, mask=see)
        states = {"state": kv["e"], "query_state": e, "keys_rotated": True}  # TAPE
        o, a = tape.attention(q, k, v, mask=see, **states)  # TAPE
        return self.o_proj(o), a, cache  # TAPE


class Block(nnx.Module):
    def __init__(self, rngs):
        self.input_layernorm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.self_attn = Attention(rngs)
        self.post_attention_layernorm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.gate_proj = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(3 * WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.update = tape.nnx.UpdateState(WIDTH, HEADS, **GROUPED, rngs=rngs)  # TAPE

    def __call__(self, h, e, cache=None, index=0):
        o, a, cache = self.self_attn(self.input_layernorm(h), e, cache, index)  # TAPE
        h = h + o
        x = self.post_attention_layernorm(h)
        x = self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))
        return h + x, self.update(e, a, x), cache  # TAPE


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embed_tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.lm_head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens, caches=None, index=0):
        h, time = self.embed_tokens(tokens), tokens.shape[-1]
        e = tape.rotary_state(index + jnp.arange(time), DIM, base=BASE)
        e = jnp.broadcast_to(e[:, None], (len(tokens), time, KV_HEADS, DIM))  # TAPE
        caches = list(caches or [None] * LAYERS)
        for n, layer in enumerate(self.layers):
            h, e, caches[n] = layer(h, e, caches[n], index)  # TAPE
        return self.lm_head(self.norm(h)), caches


def init_caches(batch, capacity):
    slots = jnp.zeros((batch, capacity, KV_HEADS, DIM))
    return [dict.fromkeys(NAMES, slots) for _ in range(LAYERS)]


def write(model, tokens, count):
    """Returns ``count`` more tokens, each the most likely."""
    index, end = 0, tokens.shape[-1] + count
    caches, new, written = init_caches(len(tokens), end), tokens, []
    run = nnx.jit(lambda model, *args: model(*args))
    for _ in range(count):
        logits, caches = run(model, new, caches, index)
        index, new = index + new.shape[-1], logits[:, -1:].argmax(-1)
        written.append(new)
    return jnp.concatenate(written, axis=-1)


def main(steps=100):
    model = Decoder(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, key):
        tokens = repeated_halves(key, 32, 32, VOCAB)
        loss, grads = nnx.value_and_grad(lambda m: next_token_loss(m(tokens)[0], tokens))(model)
        optimizer.update(model, grads)
        return loss

    keys = jax.random.split(jax.random.key(1), steps)
    losses = [float(step(model, optimizer, key)) for key in keys]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats in {steps} steps")
    text = repeated_halves(jax.random.key(2), 1, 32, VOCAB)
    prompt = text[:, :-4]
    print(f"written {write(model, prompt, 4)[0]}, the text {text[0, -4:]}")
    return losses


if __name__ == "__main__":
    main()
