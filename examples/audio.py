"""Needs: optax. Audio frames at positions in milliseconds, without a causal mask.

The model says which of two tones came first: python -m examples.audio
"""

import jax
import jax.numpy as jnp

import tape_jax as tape
from examples.classify import train
from examples.data import two_tones
from examples.plain_jax import HEADS, WIDTH, block, init_layer, norm

RATE, SAMPLES, FRAME, LAYERS = 8000.0, 1024, 64, 2


def init(key):
    first, last, *keys = jax.random.split(key, LAYERS + 2)
    return {
        "frame": jax.random.normal(first, (FRAME // 2 + 1, WIDTH)) / FRAME**0.5,
        "head": jax.random.normal(last, (WIDTH, 2)) / WIDTH**0.5,
        "layers": [init_layer(k) for k in keys],
    }


def apply(params, sounds):
    """Returns logits [B, 2] of sounds [B, 1024], at 8 kHz."""
    frames = sounds.reshape(-1, SAMPLES // FRAME, FRAME)
    h = jnp.log1p(jnp.abs(jnp.fft.rfft(frames))) @ params["frame"]
    milliseconds = jnp.arange(SAMPLES // FRAME) * (1000 * FRAME / RATE)
    e = tape.rotary_state(milliseconds, WIDTH // HEADS)
    for layer in params["layers"]:
        h, e = block(layer, h, e, is_causal=False)
    return norm(h).mean(axis=1) @ params["head"]


def main(steps=200):
    return train(init, apply, lambda key: two_tones(key, 64, SAMPLES, RATE), steps)


if __name__ == "__main__":
    main()
