"""Parameters of the model: how they are declared and created, and how ``fsdp`` gathers them."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from tape_jax._src.core.sharding import Axes, ParameterSpec, Sharding, constrain
from tape_jax._src.model.config import ModelConfig
from tape_jax._src.positions.protocol import Param

Array = jax.Array


def kernel_std(config: ModelConfig, fan_in: int, *, residual: bool = False) -> float:
    """Standard deviation of an initial kernel; ``residual``: its result is added to a stream."""
    std = fan_in**-0.5 if config.init_scale is None else config.init_scale
    return std / (2 * config.num_layers) ** 0.5 if residual else std


def lora_params(
    fan_in: int, features: int, rank: int, axes: Axes = (None, None)
) -> dict[str, Param]:
    """Low-rank factors of a kernel (Hu et al. 2021, section 4.1): ``A`` normal, ``B`` zero.

    ``axes`` are the logical axes of the kernel.
    """
    return {
        "a": Param((fan_in, rank), nn.initializers.normal(fan_in**-0.5), (axes[0], None)),
        "b": Param((rank, features), nn.initializers.zeros, (None, axes[1])),
    }


def full_name(role: str, name: str) -> str:
    """Returns a module's name for the parameter ``name`` of a group declared beside its own."""
    return f"{role}_{name}"


def declare(
    module: nn.Module,
    role: str,
    params: dict[str, Param],
    dtype: Any,
    sharding: Sharding | None = None,
) -> dict[str, Array]:
    """Creates a group of parameters in ``module``: those of an encoding, or LoRA's.

    They are returned as they are used: those that ``fsdp`` splits are gathered.
    """

    def own(name: str, spec: Param) -> Array:
        return create(module, full_name(role, name), spec, dtype, role=role)

    return {name: gathered(sharding, own(name, spec), spec.axes) for name, spec in params.items()}


def create(
    module: nn.Module, name: str, spec: Param, dtype: Any, *, role: str | None = None
) -> Array:
    """Creates a parameter in ``module``; :func:`declared_params` notes what it is."""
    dtype = jnp.dtype(dtype)
    if (record := _declared.get()) is not None:
        shape = jax.ShapeDtypeStruct(spec.shape, dtype)
        record["/".join((*module.path, name))] = ParameterSpec(shape, spec.axes, role)
    return module.param(name, spec.init, spec.shape, dtype)


@contextlib.contextmanager
def declared_params() -> Iterator[dict[str, ParameterSpec]]:
    """Collects all parameters created, or traced, inside, by path; without any axis of layers."""
    record: dict[str, ParameterSpec] = {}
    token = _declared.set(record)
    try:
        yield record
    finally:
        _declared.reset(token)


_declared: contextvars.ContextVar[dict[str, ParameterSpec] | None] = contextvars.ContextVar(
    "declared", default=None
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gathered_product(sharding: Sharding, axes: Axes, x: Array, kernel: Array) -> Array:
    """``x @ kernel``; the backward pass keeps only the split kernel.

    Without this, a scan over layers would keep the gathered kernels of all of them.
    """
    return x @ gathered(sharding, kernel, axes)


def _gathered_product(sharding: Sharding, axes: Axes, x: Array, kernel: Array) -> tuple[Array, Any]:
    # Not by calling gathered_product, because a remat policy sees no product inside it.
    return x @ gathered(sharding, kernel, axes), (x, kernel)


def _gathered_product_gradient(sharding: Sharding, axes: Axes, saved: Any, d_out: Array) -> Any:
    # Without the barrier the first gathering would be shared, and its result kept.
    (x, kernel), d_out = jax.lax.optimization_barrier((saved, d_out))
    _, pull = jax.vjp(jnp.matmul, x, gathered(sharding, kernel, axes))
    d_x, d_kernel = pull(d_out)
    return d_x, constrain(sharding, d_kernel, *axes)


gathered_product.defvjp(_gathered_product, _gathered_product_gradient)


def gathered(sharding: Sharding | None, x: Array, axes: Axes) -> Array:
    """Gathers a parameter along the width of the residual stream, as products need it."""
    return constrain(sharding, x, *(None if axis == "embed" else axis for axis in axes))
