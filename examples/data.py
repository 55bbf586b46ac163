"""Synthetic data for the examples."""

import jax
import jax.numpy as jnp

Array = jax.Array


def repeated_halves(key: Array, batch: int, length: int, vocab_size: int) -> Array:
    """Returns token ids [batch, length] whose second half repeats the first."""
    half = jax.random.randint(key, (batch, length // 2), 0, vocab_size, jnp.int32)
    return jnp.concatenate([half, half], axis=1)


def next_token_loss(logits: Array, tokens: Array) -> Array:
    """Returns the mean cross entropy, in nats, of the second half's tokens."""
    half = tokens.shape[1] // 2
    log_p = jax.nn.log_softmax(logits[:, half - 1 : -1])
    return -jnp.take_along_axis(log_p, tokens[:, half:, None], axis=-1).mean()


def two_spots(key: Array, batch: int, size: int, patch: int) -> tuple[Array, Array]:
    """Returns noisy images [batch, size, size] with a bright and a dark spot, and labels.

    Labels [batch] are 1 where the bright spot is higher. The spots lie in different rows of
    patches; the place of one says little by itself, only their relation tells.
    """
    keys = jax.random.split(key, 4)
    image = 0.3 * jax.random.normal(keys[0], (batch, size, size))
    order = jax.vmap(lambda k: jax.random.permutation(k, size // patch)[:2])
    patch_rows = order(jax.random.split(keys[1], batch))
    rows = patch * patch_rows + jax.random.randint(keys[2], (batch, 2), 0, patch)
    columns = jax.random.randint(keys[3], (batch, 2), 0, size)
    index = jnp.arange(batch)[:, None]
    image = image.at[index, rows, columns].set(jnp.array([3.0, -3.0]))
    return image, (rows[:, 0] < rows[:, 1]).astype(jnp.int32)


def two_tones(key: Array, batch: int, samples: int, rate: float) -> tuple[Array, Array]:
    """Returns sounds [batch, samples] of a high and a low tone, and labels.

    Labels [batch] are 1 where the high tone comes first. Both tones last a quarter of the sound.
    """
    keys = jax.random.split(key, 3)
    t = jnp.arange(samples) / rate
    high_first = jax.random.bernoulli(keys[0], 0.5, (batch,))
    starts = jnp.sort(jax.random.uniform(keys[1], (batch, 2), maxval=0.35), axis=1)
    starts = (starts + jnp.array([0.0, 0.4])) * samples / rate
    starts = jnp.where(high_first[:, None], starts, starts[:, ::-1])

    def tone(start: Array, hertz: float) -> Array:
        sounding = (t >= start[:, None]) & (t < start[:, None] + samples / rate / 4)
        return jnp.sin(2 * jnp.pi * hertz * t) * sounding

    noise = 0.1 * jax.random.normal(keys[2], (batch, samples))
    sound = tone(starts[:, 0], rate / 8) + tone(starts[:, 1], rate / 32) + noise
    return sound, high_first.astype(jnp.int32)
