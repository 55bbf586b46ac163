"""When two traced functions are the same program: what jit may take from its cache for either."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core


def jaxpr_key(jaxpr: Any, *, derivatives: bool = True) -> Hashable:
    """A key that only jaxprs which compute the same, of their constants and inputs, share.

    So do their first derivatives, unless ``derivatives`` is False. Names of variables do not count;
    constants of programs within the program do, by their values.

    What this does not understand counts as a thing of its own, equal to nothing else, so that an
    unequal key costs one compilation and an equal one never a wrong answer.
    """
    numbers: dict[Any, int] = {}
    count = itertools.count()

    def new(variables: Any) -> Hashable:
        for variable in variables:
            numbers[variable] = next(count)
        return tuple(str(variable.aval) for variable in variables)

    def read(atom: Any) -> Hashable:
        if isinstance(atom, core.Literal):
            return str(atom.aval), _key(atom.val)
        return numbers[atom]

    def params(eqn: Any) -> Hashable:
        rule = _rule(eqn)
        if rule is None:
            return _key(eqn.params, derivatives)
        others = {name: x for name, x in eqn.params.items() if name != "jvp_jaxpr_fun"}
        return _key(others, derivatives), _key(rule, False) if derivatives else None

    inputs = new(jaxpr.constvars), new(jaxpr.invars)
    equations = tuple(
        (eqn.primitive, tuple(map(read, eqn.invars)), params(eqn), new(eqn.outvars))
        for eqn in jaxpr.eqns
    )
    return inputs, equations, tuple(map(read, jaxpr.outvars))


def _rule(eqn: Any) -> Any:
    """What ``jax.custom_jvp`` computes for the derivative; None if that is not to be known.

    The program and its constants, not the user's function, which may depend on more than itself.
    """
    if "jvp_jaxpr_fun" not in eqn.params or eqn.params.get("symbolic_zeros", True):
        return None
    inputs = len(eqn.invars) - eqn.params.get("num_consts", 0)
    try:
        return tuple(eqn.params["jvp_jaxpr_fun"].call_wrapped(*[False] * inputs))
    except Exception:  # What a rule may raise, or another version of jax.
        return None


def _key(value: Any, derivatives: bool = True) -> Hashable:
    """The key of a constant or of a parameter of an equation."""
    if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
        inner = value.jaxpr if isinstance(value, core.ClosedJaxpr) else value
        return (
            "program",
            jaxpr_key(inner, derivatives=derivatives),
            _key(getattr(value, "consts", ())),
        )
    if isinstance(value, dict):
        return dict, tuple((name, _key(x, derivatives)) for name, x in sorted(value.items()))
    if isinstance(value, tuple | list):
        return type(value), tuple(_key(x, derivatives) for x in value)
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _array_key(value)
    if isinstance(value, bool | int | float | complex):
        # Numbers that are equal may differ: 1 and True, 0.0 and -0.0.
        return type(value), repr(value)
    try:
        hash(value)
    except TypeError:
        return _Only(value)
    return type(value), value


def _array_key(array: Any) -> Hashable:
    traced = isinstance(array, jax.core.Tracer)
    if traced or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return _Only(array)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return _Only(array)
    return "array", str(jax.typeof(array)), np.asarray(array).tobytes()


class _Only:
    """Equal to itself alone; keeps the object, so that no other one gets its address."""

    def __init__(self, value: Any):
        self.value = value
