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
    """The forward pass, and the forward and backward pass, compiled, each with its arguments.

    Gradients are of all inputs, for random gradients of the outputs.
    """
    outputs = jax.eval_shape(forward, *inputs)
    rng = np.random.default_rng(1)
    given = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), outputs)

    def both(given, *inputs):
        out, pull = jax.vjp(forward, *inputs)
        return out, pull(given)

    forward_program = jax.jit(forward).lower(*inputs).compile()
    program = jax.jit(both).lower(given, *inputs).compile()
    return {
        FORWARD: (forward_program, tuple(inputs)),
        GRADIENTS: (program, (given, *inputs)),
    }


def temporary(programs: dict[str, Program]) -> int:
    """Temporary memory in bytes, of the one that needs most; 0 where the backend does not say."""
    plans = [program.memory_analysis() for program, _ in programs.values()]
    return max(plan.temp_size_in_bytes if plan is not None else 0 for plan in plans)
