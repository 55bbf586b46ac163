"""Counts the operations of a program that jax traces."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


def matrix_operations(function: Any, *args: Any) -> float:
    """Counts the operations of matrix products in ``function(*args)``: a product and a sum are two.

    Loops count as often as they run; of branches, the largest counts. The result is NaN if a
    loop does not say how often it runs.

    Args:
      function: any.
      *args: arrays, or ``jax.ShapeDtypeStruct``.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: Jaxpr) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            total += _product(equation)
        elif name == "while":
            inner = _count(params["body_jaxpr"].jaxpr)
            total += math.nan if inner else 0.0
        elif name == "cond":
            total += max(_count(branch.jaxpr) for branch in params["branches"])
        else:
            times = params["length"] if name == "scan" else 1
            total += times * sum(_count(inner) for inner in _inside(params))
    return total


def _product(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)


def _inside(params: dict[str, Any]) -> list[Jaxpr]:
    """Programs among the parameters of an operation; of one with derivatives only its own."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if isinstance(found := params.get(name), ClosedJaxpr | Jaxpr):
            return [found.jaxpr if isinstance(found, ClosedJaxpr) else found]
    return []
