"""Trains a classifier for the examples."""

import jax
import jax.numpy as jnp
import optax


def train(init, apply, draw, steps):
    """Trains ``apply(init(key), inputs)`` on batches ``(inputs, labels) = draw(key)``.

    Returns:
      The accuracy on fresh examples before and after.
    """
    params = init(jax.random.key(0))
    optimizer = optax.adam(2e-3)
    opt_state = optimizer.init(params)

    def loss_fn(params, inputs, labels):
        logits = apply(params, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(params, opt_state, key):
        loss, grads = jax.value_and_grad(loss_fn)(params, *draw(key))
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    @jax.jit
    def accuracy(params):
        inputs, labels = draw(jax.random.key(2))
        return jnp.mean(jnp.argmax(apply(params, inputs), axis=-1) == labels)

    before = float(accuracy(params))
    for key in jax.random.split(jax.random.key(1), steps):
        params, opt_state, _ = step(params, opt_state, key)
    after = float(accuracy(params))
    print(f"accuracy {100 * before:.0f} % -> {100 * after:.0f} % in {steps} steps")
    return before, after
