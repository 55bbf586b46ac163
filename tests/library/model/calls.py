"""Calls of small models, compiled quickly, that the tests of the model share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.models import VOCAB, jit_quickly


@functools.partial(
    jit_quickly,
    static_argnums=0,
    static_argnames=("is_causal", "length", "output", "return_states"),
)
def run(model, variables, tokens, **options):
    return model.apply(variables, tokens, **options)


@functools.partial(jit_quickly, static_argnums=0)
def loss_and_gradients(model, variables, tokens):
    def loss(variables):
        logits = jax.nn.log_softmax(model.apply(variables, tokens[:, :-1]))
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    return jax.value_and_grad(loss)(variables)


def random_tokens(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, shape), jnp.int32)
