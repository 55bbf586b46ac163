"""Decoding with separate layers, so that a CPU reads parameters and caches in place.

A loop over layers has to cut each layer's part out of every stack: it copies all parameters and the
whole cache for each new token. This module does that once, before the loop over tokens. That loop
writes an array in place only if it is written and read in the same shape: none has axes of length
1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tape_jax._src.model.cache import Cache
from tape_jax._src.model.decoder import Transformer
from tape_jax._src.model.layout import restack, unrolled

# Of parameters, which exist twice while decoding.
MOST_BYTES = 2**30


class Loop(NamedTuple):
    """The model and the cache in the form that a loop over tokens works with.

    Attributes:
      model, variables: the model, in the layout that suits the loop.
      cache: the part of the cache that the loop carries.
      enter: makes the model's cache from what the loop carries.
      leave: its inverse.
      finish: makes a cache of the given form from what the loop carries.
    """

    model: Transformer
    variables: Any
    cache: Cache
    enter: Callable[[Cache], Cache]
    leave: Callable[[Cache], Cache]
    finish: Callable[[Cache], Cache]


def loop_over_tokens(model: Transformer, variables: Any, cache: Cache) -> Loop:
    """Returns the loop with separate layers if faster and memory suffices, otherwise as is."""
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(variables["params"]))
    fits = not model.config.scan_layers or size <= MOST_BYTES
    if jax.default_backend() != "cpu" or model.sharding is not None or not fits:
        return Loop(model, variables, cache, *(lambda cache: cache,) * 3)
    single = unrolled(model)
    variables = {**variables, "params": restack(variables["params"], model, single)}
    of_layers = [blocks.layers for blocks in model.blocks]
    by_layer = {
        layer: jax.tree.map(lambda x, i=i: x[i : i + 1], stacked)
        for stacked, numbers in zip(cache.layers, of_layers, strict=True)
        for i, layer in enumerate(numbers)
    }
    layers = tuple(by_layer[layer] for layer in range(model.config.num_layers))
    shapes = jax.tree.map(lambda x: x.shape, layers)

    def enter(cache: Cache) -> Cache:
        full = jax.tree.map(lambda x, shape: x.reshape(shape), cache.layers, shapes)
        return dataclasses.replace(cache, layers=full)

    def finish(cache: Cache) -> Cache:
        single = enter(cache).layers
        runs = ([single[layer] for layer in numbers] for numbers in of_layers)
        stacked = tuple(jax.tree.map(lambda *x: jnp.concatenate(x), *run) for run in runs)
        return dataclasses.replace(cache, layers=stacked)

    carried = _without_axes(dataclasses.replace(cache, layers=layers))
    return Loop(single, variables, carried, enter, _without_axes, finish)


def _without_axes(cache: Cache) -> Cache:
    """The cache without axes of length 1 in its layers."""

    def squeeze(x: jax.Array) -> jax.Array:
        return x.reshape([n for n in x.shape if n > 1])

    return dataclasses.replace(cache, layers=jax.tree.map(squeeze, cache.layers))
