"""Small models with random parameters, for the tests of everything that runs a model."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from tape_jax import ModelConfig, Transformer, positions

# Tests compile much and compute little.
jit_quickly = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)

VOCAB = 13
# Types of models that are compared to the last digits.
FLOAT64 = {"dtype": "float64", "param_dtype": "float64"}
DIGITS = tuple(range(3, 13))

# Options without which an encoding cannot be built, or that keep it small.
OPTIONS: dict[str, dict[str, Any]] = {
    "abacus": {"digits": DIGITS, "size": 40, "max_offset": 5},
    "learned": {"size": 40},
    "position_coupling": {
        "digits": DIGITS,
        "plus": 1,
        "equals": 2,
        "reverse_operands": True,
        "size": 40,
        "max_offset": 5,
    },
    "random_rope": {"range": 64},
}


def encoding(kind: str, **options: Any) -> positions.Encoding:
    """An encoding of the registry, small."""
    return positions.create(kind, **{**OPTIONS.get(kind, {}), **options})


def small_model(position: Any = "tape", **options: Any) -> Transformer:
    """Three layers of width 16 with two heads, or what ``options`` say."""
    small = {"hidden_size": 16, "num_layers": 3, "num_heads": 2, "intermediate_size": 24}
    small["vocab_size"] = VOCAB
    if isinstance(position, str):
        position = encoding(position)
    return Transformer(ModelConfig(position=position, **{**small, **options}))


@functools.lru_cache(maxsize=256)
def _shapes(model: Transformer) -> Any:
    axes = model.encoding.coordinate_axes
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    places = None if axes == 1 else jax.ShapeDtypeStruct((1, 2, axes), jnp.int32)
    return jax.eval_shape(
        lambda t, p: model.init(jax.random.key(0), t, positions=p), tokens, places
    )


def random_variables(model: Transformer, seed: int = 0, *, std: float = 0.2) -> Any:
    """Variables of ``model``: norms' scales near 1, everything else near 0, nothing exactly so.

    Initial values would test little: TAPE's updates start at zero.
    """
    generator = np.random.default_rng(seed)
    plain = dataclasses.replace(model.config, dtype="float32", param_dtype="float32")

    def draw(path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
        centre = float(path[-1].key == "scale")
        return jnp.asarray(generator.normal(centre, std, x.shape), model.config.param_dtype)

    return jax.tree.map_with_path(draw, _shapes(Transformer(plain)))


def without(variables, prefix):
    """Variables without those whose names, at any depth, begin with ``prefix``."""

    def keep(tree):
        return {
            name: keep(value) if isinstance(value, dict) else value
            for name, value in tree.items()
            if not name.startswith(prefix)
        }

    return keep(variables)


def assert_near(actual, expected, tolerance=1e-5):
    """Equality to ``tolerance``, relative to the largest value where that exceeds 1."""
    allowed = tolerance * max(1.0, float(jnp.abs(expected).max()))
    chex.assert_trees_all_close(actual, expected, atol=allowed, rtol=0)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers in float64."""
    return np.random.default_rng(seed).standard_normal(shape)


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
