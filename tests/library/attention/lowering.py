"""Compiling for hardware that is not there, as far as that goes: to StableHLO."""

from __future__ import annotations

import contextlib

import jax
from jax.sharding import AbstractMesh


def lowered(platform, function, *shapes):
    """StableHLO of a function for ``cuda`` or ``tpu``, made on a machine without it."""
    target = contextlib.nullcontext()
    if platform == "cuda" and jax.__version_info__ >= (0, 11):
        from jax.sharding import AbstractDevice

        device = AbstractDevice("NVIDIA H100", None, "cuda")
        target = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    with target:
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
