"""``Transformer`` inside of NNX: init, a mesh, training, a checkpoint, generation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import tape_jax as tape
from tape_jax.sharding import ShardingConfig

CONFIG = tape.ModelConfig(vocab_size=11, hidden_size=16, num_layers=2, num_heads=2)
TOKENS = jnp.arange(16).reshape(2, 8) % 11


def bridged(linen):
    return nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(0)).lazy_init(TOKENS)


def params_of(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def loss_of(model, tokens):
    logits = model(tokens)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def logits_of(model, tokens):
    return model(tokens)


@nnx.jit
def step(model, optimizer, tokens):
    loss, grads = nnx.value_and_grad(loss_of)(model, tokens)
    optimizer.update(model, grads)
    return loss


def trained(model, tokens, steps=3):
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return [float(step(model, optimizer, tokens)) for _ in range(steps)]


@pytest.mark.slow
def test_it_trains_is_saved_and_generates(tmp_path):
    linen = tape.Transformer(CONFIG)
    model = bridged(linen)
    wanted = jax.eval_shape(linen.init, jax.random.key(0), TOKENS)["params"]
    assert jax.tree.map(jnp.shape, params_of(model)) == jax.tree.map(jnp.shape, wanted)
    losses = trained(model, TOKENS)
    assert losses[-1] < losses[0] - 0.5
    variables = {"params": params_of(model)}
    np.testing.assert_allclose(
        logits_of(model, TOKENS), linen.apply(variables, TOKENS), rtol=1e-5, atol=1e-5
    )

    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "step", params_of(model))
    other = bridged(linen)
    assert not np.allclose(logits_of(other, TOKENS), logits_of(model, TOKENS))
    with ocp.StandardCheckpointer() as reader:
        nnx.update(other, reader.restore(tmp_path / "step", params_of(other)))
    np.testing.assert_array_equal(logits_of(other, TOKENS), logits_of(model, TOKENS))

    written = tape.generate(linen, {"params": params_of(other)}, TOKENS[:, :3], 3)
    tokens = TOKENS[:, :3]
    for _ in range(3):
        tokens = jnp.concatenate([tokens, logits_of(model, tokens)[:, -1:].argmax(-1)], 1)
    np.testing.assert_array_equal(written[:, -3:], tokens[:, -3:])


@pytest.mark.slow
def test_on_a_mesh_it_trains_as_on_one_device():
    sharding = ShardingConfig(data=1, fsdp=2).build(jax.devices()[:2])
    linen = tape.Transformer(CONFIG, sharding=sharding)
    model = bridged(tape.Transformer(CONFIG))
    wanted = trained(bridged(tape.Transformer(CONFIG)), TOKENS)
    split = bridged(linen)
    params = params_of(model)
    nnx.update(split, jax.device_put(params, sharding.of(linen, params)))
    kernel = params_of(split)["layers_0"]["attention"]["q"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) != kernel.shape
    np.testing.assert_allclose(trained(split, sharding.place(TOKENS)), wanted, rtol=1e-4)
