"""Parameters of the model: their creation, their logical axes, and how ``fsdp`` gathers them."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from tape_jax._src.config import ModelConfig
from tape_jax._src.positions.protocol import Param
from tape_jax._src.sharding import Axes, Sharding, constrain

Array = jax.Array


def kernel_std(config: ModelConfig, fan_in: int, *, residual: bool = False) -> float:
    """Standard deviation of an initial kernel; ``residual``: what it gives is added to a stream."""
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


def declare(
    module: nn.Module,
    prefix: str,
    params: dict[str, Param],
    dtype: Any,
    sharding: Sharding | None = None,
) -> dict[str, Array]:
    """Creates in ``module`` the parameters that an encoding asks for, each ``prefix_name``.

    They are returned as they are used: what ``fsdp`` splits is gathered.
    """
    return {
        name: gathered(sharding, create(module, f"{prefix}_{name}", spec, dtype), spec.axes)
        for name, spec in params.items()
    }


def create(module: nn.Module, name: str, spec: Param, dtype: Any) -> Array:
    """Creates a parameter in ``module``; :func:`declared_axes` notes its logical axes."""
    if (record := _declared.get()) is not None:
        record["/".join((*module.path, name))] = spec.axes
    return module.param(name, spec.init, spec.shape, jnp.dtype(dtype))


@contextlib.contextmanager
def declared_axes() -> Iterator[dict[str, Axes]]:
    """Collects by path the logical axes of all parameters created, or traced, inside."""
    record: dict[str, Axes] = {}
    token = _declared.set(record)
    try:
        yield record
    finally:
        _declared.reset(token)


_declared: contextvars.ContextVar[dict[str, Axes] | None] = contextvars.ContextVar(
    "declared", default=None
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gathered_product(sharding: Sharding, axes: Axes, x: Array, kernel: Array) -> Array:
    """``x @ kernel``, of which only the split kernel is kept for the backward pass.

    Left to itself, a scan over layers would keep the gathered kernels of all of them.
    """
    return x @ gathered(sharding, kernel, axes)


def _gathered_product(sharding: Sharding, axes: Axes, x: Array, kernel: Array) -> tuple[Array, Any]:
    # Not by calling gathered_product, inside of which a remat policy sees no product.
    return x @ gathered(sharding, kernel, axes), (x, kernel)


def _gathered_product_gradient(sharding: Sharding, axes: Axes, saved: Any, d_out: Array) -> Any:
    # Without the barrier the first gathering would be shared, and its result kept.
    (x, kernel), d_out = jax.lax.optimization_barrier((saved, d_out))
    _, pull = jax.vjp(jnp.matmul, x, gathered(sharding, kernel, axes))
    d_x, d_kernel = pull(d_out)
    return d_x, constrain(sharding, d_kernel, *axes)


gathered_product.defvjp(_gathered_product, _gathered_product_gradient)


def gathered(sharding: Sharding | None, x: Array, axes: Axes) -> Array:
    """A parameter whole along the width of the residual stream, as products need it."""
    return constrain(sharding, x, *(None if axis == "embed" else axis for axis in axes))
