"""The order in which a ring of devices holds a sequence.

The sequence is cut into two chunks for each of ``n`` devices. Device ``d`` holds chunks ``d`` and
``2n - 1 - d``, one from either end, so that all have equal work under the causal rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tape_jax._src.core.checks import require
from tape_jax._src.core.sharding import Sharding

Array = jax.Array

CHUNKS = 2


def to_zigzag(sharding: Sharding, x: Array, axis: int) -> Array:
    """Reorders tokens along ``axis`` from natural order to the order in which devices hold them.

    Args:
      sharding: a mesh that splits the sequence over ``n`` devices, and rules.
      x: an array with batch first, unless time is first.
      axis: the time axis, a multiple of ``2 n`` long.

    Returns:
      The reordered array; of its ``2 n`` chunks, device ``d`` holds ``d`` and ``2n - 1 - d``.
    """
    return _reordered(sharding, axis, False, x)


def from_zigzag(sharding: Sharding, x: Array, axis: int) -> Array:
    """Inverse of :func:`to_zigzag`."""
    return _reordered(sharding, axis, True, x)


# The derivative is the inverse: shard_map's own would add up what other mesh axes copy.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _reordered(sharding: Sharding, axis: int, back: bool, x: Array) -> Array:
    names, count = sharding.mesh_axes("sequence"), sharding.shards("sequence")
    check_chunks(x.shape[axis], count, names)
    axes = ["sequence" if n == axis else None for n in range(x.ndim)]
    if axis > 0 and x.shape[0] > 1:
        axes[0] = "batch"
    spec = sharding.spec(tuple(axes), x.shape, "an array split over devices")
    run = functools.partial(exchange, names=names, count=count, axis=axis, back=back)
    return jax.jit(on_devices(run, sharding, (spec,), spec))(x)


_reordered.defvjp(
    lambda sharding, axis, back, x: (_reordered(sharding, axis, back, x), None),
    lambda sharding, axis, back, _, d: (_reordered(sharding, axis, not back, d),),
)


def exchange(x: Array, names: tuple[str, ...], count: int, axis: int, back: bool = False) -> Array:
    """Swaps chunks with other devices: ``2d, 2d + 1`` for ``d, 2n - 1 - d``, or ``back``.

    In either order, a device has one even and one odd chunk. All even chunks can travel in one
    permutation, and all odd ones in another.
    """
    even_first = lax.axis_index(names) % 2 == 0

    def swap_if_odd(first: Array, second: Array) -> tuple[Array, Array]:
        return jnp.where(even_first, first, second), jnp.where(even_first, second, first)

    def send(x: Array, parity: int) -> Array:
        last = CHUNKS * count - 1
        zigzag = [c if c < count else last - c for c in range(parity, last + 1, CHUNKS)]
        hops = list(enumerate(zigzag))
        return lax.ppermute(x, names, [(b, a) for a, b in hops] if back else hops)

    first, second = jnp.split(x, CHUNKS, axis)
    if back:
        even, odd = swap_if_odd(first, second)
        return jnp.concatenate([send(even, 0), send(odd, 1)], axis)
    return jnp.concatenate(swap_if_odd(send(first, 0), send(second, 1)), axis)


def check_chunks(length: int, count: int, names: tuple[str, ...]) -> None:
    """Raises ValueError unless ``length`` can be cut for ``count`` devices along axes ``names``."""
    require(
        length % (CHUNKS * count) == 0,
        f"ring attention cuts a sequence into {CHUNKS} chunks for each of the {count} devices "
        f"along {' x '.join(names)}: its length must be a multiple of {CHUNKS * count}; got "
        f"{length}",
    )


def on_devices(
    function: Callable, sharding: Sharding, in_specs: tuple[Any, ...], out_specs: Any
) -> Callable:
    """Applies ``function`` to what each device holds."""
    # Bounds and carries of loops differ between devices, so there is no replication to check.
    return jax.shard_map(
        function, mesh=sharding.inner, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
