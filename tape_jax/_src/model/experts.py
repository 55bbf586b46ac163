"""A mixture of experts: a router sends each token to a few of many gated MLPs.

The router and the weights are those of Mixtral (Jiang et al. 2024, section 2.1). Experts have no
capacity and no token is dropped: tokens are sorted by expert and multiplied in groups of unequal
size (Gale et al. 2022), so a token's result does not depend on other tokens.

On a mesh every device sorts its own tokens, and each expert is split along its width ("mlp"), so
that devices have equal work wherever tokens go.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tape_jax._src.core.algebra import at_least_float32
from tape_jax._src.core.checks import require
from tape_jax._src.core.explicit import varying
from tape_jax._src.core.padding import pad_to_multiple
from tape_jax._src.core.segments import reordered
from tape_jax._src.core.sharding import Axes, Sharding, constrain
from tape_jax._src.model.config import ACTIVATIONS, Experts

Array = jax.Array

# Logical axes of the kernels: of the router's, and of those that :func:`mixture` takes.
KERNEL_AXES: dict[str, Axes] = {
    "router": ("embed", "experts"),
    "gate": ("experts", "embed", "mlp"),
    "up": ("experts", "embed", "mlp"),
    "down": ("experts", "mlp", "embed"),
}
TOKEN_AXES = ("batch", "sequence")

# Results of :func:`router_losses`; their weights have the same names in ``Experts``.
ROUTER_LOSSES = ("balance", "z")

# Names by which a ``jax.checkpoint`` policy finds the products.
PRODUCT = "expert_product"


def route(logits: Array, experts: Experts) -> tuple[Array, Array]:
    """Selects the most probable experts.

    Args:
      logits: ``[..., E]``, in at least float32.
      experts: how many are selected, and whether their weights are normalized.

    Returns:
      The numbers of the experts, int32 ``[..., k]``, and the weights of their outputs, ``[..., k]``
      in the type of the logits.
    """
    weights, chosen = lax.top_k(jax.nn.softmax(logits), experts.per_token)
    if experts.normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return chosen, weights


def router_logits(x: Array, kernel: Array, sharding: Sharding | None = None) -> Array:
    """Logits ``[..., E]`` of tokens ``x [..., D]``, in at least float32 and full precision."""
    wide = at_least_float32(x.dtype)

    # Otherwise the wide tokens would be kept for the backward pass.
    @jax.checkpoint
    def product(x: Array, kernel: Array) -> Array:
        kernel = constrain(sharding, kernel.astype(wide), None, "experts")
        return jnp.matmul(x.astype(wide), kernel, precision=lax.Precision.HIGHEST)

    return checkpoint_name(product(x, kernel), PRODUCT)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def gated(gate: Array, up: Array, activation: str) -> Array:
    """``activation(gate) * up``; only ``gate`` and ``up`` are kept for the backward pass."""
    return ACTIVATIONS[activation](gate) * up


def mixture(
    x: Array,
    logits: Array,
    kernels: Mapping[str, Array],
    experts: Experts,
    sharding: Sharding | None = None,
    activation: str = "silu",
) -> tuple[Array, Array]:
    """The weighted sum of ``down(activation(gate(x)) * up(x))`` over each token's experts.

    ``jax.lax.ragged_dot`` does the products. For TPUs XLA compiles it as a product by groups; for
    CPUs and NVIDIA GPUs (jax 0.11) it multiplies all ``k`` copies of a token by all experts and
    masks the rest: ``E`` times the operations, and as many copies of the rows.

    Args:
      x: tokens ``[..., D]``; with a sharding ``[B, T, D]``.
      logits: of the router, ``[..., E]``.
      kernels: ``gate`` and ``up`` ``[E, D, F]``, ``down`` ``[E, F, D]``, in the type of ``x``.
      experts: how many each token takes.
      sharding: a mesh and rules, or None.
      activation: a name in ``config.ACTIVATIONS``.

    Returns:
      ``[..., D]`` in the type of ``x``, and the numbers of the experts taken, int32 ``[..., k]``.

    Raises:
      ValueError: if anything but the experts' width is split over devices with the same tokens.
    """
    kernels = {name: kernels[name] for name in ("gate", "up", "down")}
    if sharding is None:
        return _on_device(x, logits, kernels, experts, None, activation)
    rows = len(x)
    if not sharding.strict:
        # Each device computes its own rows, so there must be some for each.
        parts = sharding.shards("batch")
        x, logits = (pad_to_multiple(array, parts, 0) for array in (x, logits))
        sharding = _dividing(sharding, x.shape[1], kernels["gate"].shape)
    held = _token_axes(sharding)
    for axis in ("experts", "embed"):
        foreign = [name for name in sharding.mesh_axes(axis) if name not in held]
        require(
            not foreign,
            f"sharding: the rule for {axis!r} names {', '.join(foreign)}, along which devices hold "
            "the same tokens: let 'mlp' be split there, which splits every expert",
        )
    tokens = sharding.spec((*TOKEN_AXES, None), x.shape, "the tokens of experts")
    specs = {name: sharding.spec(KERNEL_AXES[name], k.shape, name) for name, k in kernels.items()}
    on_device = functools.partial(
        _on_device, experts=experts, sharding=sharding, activation=activation
    )
    out, chosen = jax.shard_map(
        on_device,
        mesh=sharding.inner,
        in_specs=(tokens, tokens, specs),
        out_specs=(tokens, tokens),
    )(x, logits, kernels)
    return out[:rows], chosen[:rows]


def _dividing(sharding: Sharding, length: int, gate: tuple[int, ...]) -> Sharding:
    """A strict sharding that leaves whole what the mesh does not divide, but for rows.

    Args:
      sharding: a lenient one.
      length: of sequences.
      gate: the shape of that kernel, ``[E, D, F]``.
    """
    sizes = zip(("sequence", "experts", "embed", "mlp"), (length, *gate), strict=True)
    whole = [(axis, None) for axis, size in sizes if size % sharding.shards(axis)]
    return dataclasses.replace(sharding, rules=(*whole, *sharding.rules), strict=True)


def _on_device(
    x: Array,
    logits: Array,
    kernels: Mapping[str, Array],
    experts: Experts,
    sharding: Sharding | None,
    activation: str,
) -> tuple[Array, Array]:
    """Computes :func:`mixture` for the tokens and the parts of kernels that one device has."""
    split = _split_axes(sharding)
    chosen, weights = route(logits, experts)
    taken = chosen.reshape(-1)
    order = jnp.argsort(taken)
    sizes = jnp.sum(taken[:, None] == jnp.arange(experts.count), axis=0, dtype=jnp.int32)

    def product(rows: Array, name: str) -> Array:
        return _product(rows, kernels[name], sizes, KERNEL_AXES[name], sharding)

    # Marked here, ``x`` sums gradients over the parts of an expert by token, not by row.
    rows = varying(x, kernels).reshape(-1, x.shape[-1])
    rows = reordered(jnp.repeat(rows, experts.per_token, axis=0), order)
    rows = product(gated(product(rows, "gate"), product(rows, "up"), activation), "down")
    rows = reordered(rows, jnp.argsort(order)).reshape(*chosen.shape, -1)
    out = jnp.einsum("...kd,...k->...d", rows, weights.astype(x.dtype))
    return (lax.psum(out, split) if split else out), chosen


def _product(
    rows: Array, kernel: Array, sizes: Array, axes: Axes, sharding: Sharding | None
) -> Array:
    """Rows, sorted by expert, times their expert's kernel.

    As in ``layers.gathered_product``, kernels that ``fsdp`` splits are gathered here, and again in
    the backward pass.
    """
    gathers = {} if sharding is None else _gathers(sharding, axes)

    def multiply(rows: Array, kernel: Array) -> Array:
        for dim, names in gathers.items():
            kernel = lax.all_gather(kernel, names, axis=dim, tiled=True)
        return lax.ragged_dot(rows, kernel, sizes)

    kernel = varying(kernel, rows)
    multiply = jax.checkpoint(multiply) if gathers else multiply
    return checkpoint_name(multiply(rows, kernel), PRODUCT)


def _token_axes(sharding: Sharding) -> tuple[str, ...]:
    """Axes of the mesh along which tokens differ."""
    return tuple(name for axis in TOKEN_AXES for name in sharding.mesh_axes(axis))


def _split_axes(sharding: Sharding | None) -> tuple[str, ...]:
    """Axes of the mesh along which devices have the same tokens and parts of every expert."""
    if sharding is None:
        return ()
    held = _token_axes(sharding)
    return tuple(name for name in sharding.mesh_axes("mlp") if name not in held)


def _gathers(sharding: Sharding, axes: Axes) -> dict[int, tuple[str, ...]]:
    """Returns the axes of the mesh over which a kernel is gathered, by its dimension."""
    held = _token_axes(sharding)
    found = {
        dim: tuple(n for n in sharding.mesh_axes(axis) if n in held)
        for dim, axis in enumerate(axes)
        if axis is not None
    }
    return {dim: names for dim, names in found.items() if names}


def router_losses(
    logits: Array, chosen: Array, segment_ids: Array | None = None
) -> dict[str, Array]:
    """Returns a router's auxiliary losses, balance and z, as scalars without their weights.

    ``balance`` is ``E`` times the sum over experts of the share of choices that they got times
    their mean probability (Fedus et al. 2021, equations 4 to 6, with a token's choices sharing its
    vote): 1 if all get the same, more if some get more. ``z`` is the mean squared log-sum-exp of
    the logits (Zoph et al. 2022, equation 5).

    Args:
      logits: of the router, ``[..., E]``.
      chosen: the experts taken, ``[..., k]``.
      segment_ids: integers ``[..., T]``, leading axes may be missing: tokens of segment 0 are
        padding and do not count; if all are, the losses are 0. None: all tokens count, even
        padding.
    """
    counts = jnp.ones(logits.shape[:-1], logits.dtype)
    if segment_ids is not None:
        counts = counts * (segment_ids != 0)
    total = jnp.maximum(counts.sum(), 1)

    def mean(x: Array) -> Array:
        return jnp.einsum("...,...e->e", counts, x) / total

    count = logits.shape[-1]
    votes = jax.nn.one_hot(chosen, count, dtype=logits.dtype).mean(-2)
    balance = count * jnp.sum(mean(votes) * mean(jax.nn.softmax(logits)))
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    return dict(zip(ROUTER_LOSSES, (balance, mean(squares)[0]), strict=True))
