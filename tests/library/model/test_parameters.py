"""Parameters: their shapes and number, and what shares them."""

import chex
import jax
import jax.numpy as jnp
import pytest

from tape_jax import ModelConfig, Transformer
from tests.models import assert_near, random_tokens, random_variables, run, small_model
from tests.selection import mostly_slow


@pytest.mark.parametrize(
    "options",
    mostly_slow([{"tie_embeddings": True}, {"dtype": "bfloat16"}], {"tie_embeddings": True}),
)
def test_logits_of_a_few_tokens_at_a_time(options):
    model = small_model("rope", num_layers=1, **options)
    variables, tokens = random_variables(model), random_tokens(2, 6)
    expected = run(model, variables, tokens)
    hidden = run(model, variables, tokens, output="hidden")
    chex.assert_shape(hidden, (2, 6, model.config.hidden_size))
    chex.assert_type(hidden, model.config.dtype)
    parts = [model.project(variables, hidden[:, i : i + 2]) for i in (0, 2, 4)]
    chex.assert_trees_all_equal_dtypes(parts[0], expected)
    assert_near(jnp.concatenate(parts, axis=1), expected)
    made = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, output="hidden"))
    chex.assert_trees_all_equal_shapes_and_dtypes(made, variables)


def test_the_number_of_parameters():
    layers, hidden, heads, kv, dim, mlp, vocab = 32, 4096, 32, 8, 128, 14336, 128256
    config = ModelConfig(
        vocab, hidden, layers, heads, num_kv_heads=kv, head_dim=dim, intermediate_size=mlp
    )
    shapes = jax.eval_shape(
        Transformer(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
    )
    block = hidden * dim * (2 * heads + 2 * kv) + 3 * hidden * mlp + 2 * hidden
    width = 4 * kv
    update = kv * heads + hidden * width + 2 * width * kv
    expected = layers * block + (layers - 1) * update + 2 * vocab * hidden + hidden
    assert sum(x.size for x in jax.tree.leaves(shapes)) == expected
    assert (expected - (layers - 1) * update) == 8_030_261_248, "Llama 3 8B"
