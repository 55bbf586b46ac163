"""The two programs of a call that count: forward, and forward with all gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

FORWARD, GRADIENTS = DIRECTIONS = ("forward", "forward and backward")
Program = tuple[jax.stages.Compiled, tuple[Any, ...]]


def both_ways(forward: Callable[..., Any], inputs: Sequence[Array]) -> dict[str, Program]:
    """Both programs of :func:`compiled`."""
    return {direction: compiled(forward, inputs, direction) for direction in DIRECTIONS}


def compiled(forward: Callable[..., Any], inputs: Sequence[Array], direction: str) -> Program:
    """The forward pass, or the forward and backward pass, compiled, with its arguments.

    Gradients are of all inputs, for random gradients of the outputs.
    """
    if direction == FORWARD:
        return jax.jit(forward).lower(*inputs).compile(), tuple(inputs)
    outputs = jax.eval_shape(forward, *inputs)
    rng = np.random.default_rng(1)
    given = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), outputs)

    def both(given, *inputs):
        out, pull = jax.vjp(forward, *inputs)
        return out, pull(given)

    return jax.jit(both).lower(given, *inputs).compile(), (given, *inputs)


def temporary(programs: dict[str, Program]) -> int:
    """Temporary memory in bytes, of the one that needs most; 0 where the backend does not say."""
    plans = [program.memory_analysis() for program, _ in programs.values()]
    return max(plan.temp_size_in_bytes if plan is not None else 0 for plan in plans)
