"""Placement of a model's results on a mesh with explicit axes: rows lie as the tokens' rows do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tape_jax._src.core.explicit import Names, joined, names_of
from tape_jax._src.model.cache import Cache


def outputs(given: Mapping[str, Any], shapes: Any) -> Any:
    """Mesh axes of each axis of the results of :func:`tape_jax.prefill` and its kin.

    Args:
      given: their arguments: ``variables``, ``tokens``, ``token`` or ``prompts``, maybe ``cache``.
      shapes: of their results.
    """
    tokens = next((given[name] for name in ("tokens", "token", "prompts") if name in given), None)
    cache = given.get("cache")
    lead = names_of(tokens)
    if cache is not None:
        rows = joined("the batch of tokens and cache", *lead[:1], *names_of(cache.tokens)[:1])
        lead = (rows, *lead[1:])
    shape = jnp.shape(tokens) if isinstance(tokens, jax.Array) else ()
    vocab = _vocab_names(given.get("variables"))

    def place(x: Any) -> Names:
        whole = (None,) * x.ndim
        if not shape or x.shape[:1] != shape[:1]:
            return whole
        if x.shape[: len(shape)] != shape:
            return (*lead[:1], *whole[1:])
        found = (*lead, *whole[len(lead) :])
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        names, size = vocab
        is_logits = is_float and x.shape == (*shape, size)
        return (*found[:-1], names) if is_logits else found

    def place_tree(tree: Any) -> Any:
        if isinstance(tree, Cache):
            return _cache(tree, cache, lead[:1])
        return jax.tree.map(place, tree)

    return jax.tree.map(place_tree, shapes, is_leaf=lambda x: isinstance(x, Cache))


def logits(given: Mapping[str, Any], shapes: Any) -> Names:
    """Mesh axes of the results of ``model.project``."""
    del shapes
    return (*names_of(given["hidden"])[:-1], _vocab_names(given["variables"])[0])


def parameters(given: Mapping[str, Any], shapes: Any) -> Any:
    """Mesh axes of the results of ``model.init``: those of the model's rules, if any."""
    model = given["model"]
    if model.sharding is None:
        return jax.tree.map(lambda x: (None,) * x.ndim, shapes)
    return jax.tree.map(lambda place: tuple(place.spec), model.sharding.of(model, shapes))


def _cache(new: Any, old: Any, rows: Names) -> Any:
    """Mesh axes of a cache: those of the previous one, else batches split as ``rows``."""
    if old is not None:
        return jax.tree.map(lambda _, x: names_of(x), new, old)

    def place(x: Any) -> Names:
        return (*rows, *(None,) * (x.ndim - 1)) if x.ndim else ()

    placed = jax.tree.map(place, new)
    layers = jax.tree.map(lambda x: (None, *place(x)[:-1]), new.layers)
    key = None if new.key is None else (None,) * new.key.ndim
    return dataclasses.replace(placed, layers=layers, key=key)


def _vocab_names(variables: Any) -> tuple[Any, int | None]:
    """The mesh axes that split the vocabulary, and its size."""
    params = variables.get("params", {}) if isinstance(variables, Mapping) else {}
    if "head" in params:
        kernel = params["head"]["kernel"]
        return names_of(kernel)[-1], kernel.shape[-1]
    if "embedding" in params:
        return names_of(params["embedding"])[0], params["embedding"].shape[0]
    return None, None
