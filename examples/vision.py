"""Needs: optax. Image patches at two-dimensional positions, without a causal mask.

The model says which of two spots is higher up: python -m examples.vision
"""

import jax
import jax.numpy as jnp

import tape_jax as tape
from examples.classify import train
from examples.data import two_spots
from examples.plain_jax import HEADS, WIDTH, block, init_layer, norm

SIZE, PATCH, LAYERS = 16, 4, 2


def init(key):
    first, last, *keys = jax.random.split(key, LAYERS + 2)
    return {
        "patch": jax.random.normal(first, (PATCH * PATCH, WIDTH)) / PATCH,
        "head": jax.random.normal(last, (WIDTH, 2)) / WIDTH**0.5,
        "layers": [init_layer(k) for k in keys],
    }


def apply(params, images):
    """Returns logits [B, 2] of images [B, 16, 16]."""
    side = SIZE // PATCH
    patches = images.reshape(-1, side, PATCH, side, PATCH).swapaxes(2, 3)
    h = patches.reshape(-1, side * side, PATCH * PATCH) @ params["patch"]
    coordinates = jnp.stack(jnp.meshgrid(jnp.arange(side), jnp.arange(side), indexing="ij"), -1)
    e = tape.rotary_state(coordinates.reshape(-1, 2), WIDTH // HEADS, base=100.0, axes=2)
    for layer in params["layers"]:
        h, e = block(layer, h, e, is_causal=False)
    return norm(h).mean(axis=1) @ params["head"]


def main(steps=300):
    return train(init, apply, lambda key: two_spots(key, 64, SIZE, PATCH), steps)


if __name__ == "__main__":
    main()
