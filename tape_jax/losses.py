"""Language model loss in chunks of logits, and losses that routers and encodings add."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from tape_jax._src.core.algebra import at_least_32_bits, at_least_float32, capped
from tape_jax._src.core.checks import as_array, as_integers, require, typed
from tape_jax._src.core.explicit import automatic_inside, varying
from tape_jax._src.core.sharding import Sharding, constrain
from tape_jax._src.model.config import Experts
from tape_jax._src.model.decoder import Transformer
from tape_jax._src.model.layout import layer_params

__all__ = ["CHUNK_LOGITS", "added_by_encoding", "added_by_routers", "cross_entropy"]

Array = jax.Array

# Logits, over all rows that a device has, in one chunk: 256 MiB in float32.
CHUNK_LOGITS = 2**26

# Of one chunk of logits.
LOGITS_AXES = ("batch", "sequence", None, "vocab")


@typed
@automatic_inside(lambda given, shape: ())
def cross_entropy(
    hidden: Array,
    kernel: Array,
    targets: Array,
    weights: Array | None = None,
    *,
    chunk: int | None = None,
    logit_softcap: float | None = None,
    sharding: Sharding | None = None,
) -> Array:
    """Returns the cross entropy of the logits ``hidden @ kernel``, one chunk of them at a time.

    The backward pass recomputes each chunk's logits. This layer takes a third more operations, but
    its memory does not grow with the vocabulary times the number of tokens.

    Args:
      hidden: what enters the output projection, ``[..., T, D]``
        (``Transformer(...)(tokens, output="hidden")``).
      kernel: of the output projection, ``[D, V]`` (``Transformer.output_kernel``).
      targets: integers ``[..., T]`` in 0 .. V - 1; where the weight is 0, any (such as -100).
        Elsewhere, other values make the loss and its gradients NaN.
      weights: of the tokens, ``[..., T]``; None: 1 each.
      chunk: tokens of each sequence in a chunk, on each device that has a part of it; None: as
        many as ``CHUNK_LOGITS``, the logits of one device at a time, allows.
      logit_softcap: bound ``c`` of the logits, which become ``c tanh(logits / c)``
        (``ModelConfig.final_logit_softcap``); None: none.
      sharding: a mesh and rules; ``hidden`` is then ``[B, T, D]``.

    Returns:
      The weighted sum over all tokens, in nats, a scalar in at least float32.

    Raises:
      ValueError: if shapes disagree, or ``chunk`` or ``logit_softcap`` is not positive.
    """
    hidden, kernel = as_array("hidden", hidden), as_array("kernel", kernel)
    targets = as_integers("targets", targets)
    weights = None if weights is None else as_array("weights", weights)
    require(hidden.ndim > 1, f"expected hidden [..., T, D]; got shape {hidden.shape}")
    *batch, length, dim = hidden.shape
    if weights is None:
        weights = jnp.ones(targets.shape, at_least_float32(hidden.dtype))
    require(
        kernel.ndim == 2 and kernel.shape[0] == dim
        and targets.shape == weights.shape == (*batch, length)
        and jnp.issubdtype(targets.dtype, jnp.integer)
        and all(jnp.issubdtype(x.dtype, jnp.floating) for x in (hidden, kernel))
        and not jnp.iscomplexobj(weights),
        f"expected hidden [..., T, D], kernel [D, V], integer targets and weights [..., T]; got "
        f"{hidden.dtype} {hidden.shape}, {kernel.dtype} {kernel.shape}, {targets.dtype} "
        f"{targets.shape} and {weights.dtype} {weights.shape}",
    )  # fmt: skip
    for name, value in (("chunk", chunk), ("logit_softcap", logit_softcap)):
        require(value is None or value > 0, f"{name} must be positive; got {value}")
    require(hidden.size > 0, f"there are no tokens: hidden has shape {hidden.shape}")
    targets = at_least_32_bits(targets)
    parts = _sequence_parts(sharding, length)
    own = length // parts
    held = _logits_held(sharding, (targets.size // length, parts, 1, kernel.shape[1]))
    size = min(chunk or max(CHUNK_LOGITS // held, 1), own)
    count = -(-own // size)
    # The gradients of all chunks are summed in its type.
    kernel = kernel.astype(at_least_float32(kernel.dtype))
    kernel = constrain(sharding, kernel, None, "vocab")
    # Along manual mesh axes: the gradient of a kernel that devices share is summed over them once.
    hidden, kernel, weights = varying((hidden, kernel, weights), hidden, kernel, weights, targets)

    def chunks(x: Array) -> Array:
        """Reshapes ``[..., T, *]`` to ``[chunks, rows, tokens, *]``; devices share each chunk."""
        x = x.reshape(-1, parts, own, *x.shape[len(batch) + 1 :])
        x = jnp.pad(x, [(0, 0), (0, 0), (0, count * size - own), *[(0, 0)] * (x.ndim - 3)])
        return jnp.moveaxis(x.reshape(*x.shape[:2], count, size, *x.shape[3:]), 2, 0)

    @jax.checkpoint
    def add(total: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
        x, targets, weights = part
        flat = x if sharding is not None else x.reshape(-1, dim)
        logits = (flat @ kernel.astype(x.dtype)).reshape(*targets.shape, -1)
        logits = constrain(sharding, logits, *LOGITS_AXES)
        logits = capped(logits.astype(total.dtype), logit_softcap)
        known = (targets >= 0) & (targets < kernel.shape[1])
        index = jnp.where(known, targets, 0)[..., None]
        chosen = jnp.take_along_axis(logits, index, axis=-1)[..., 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - chosen
        unknown = jnp.where(weights == 0, 0, jnp.nan).astype(losses.dtype)
        losses = losses * jnp.where(known, 1, unknown) * weights.astype(losses.dtype)
        return total + jnp.sum(losses), None

    start = varying(jnp.zeros((), at_least_float32(hidden.dtype)), hidden)
    return jax.lax.scan(add, start, tuple(map(chunks, (hidden, targets, weights))))[0]


def _logits_held(sharding: Sharding | None, shape: tuple[int, ...]) -> int:
    """Returns how many logits of an array with ``LOGITS_AXES`` one device has."""
    if sharding is not None:
        shape = sharding.named(LOGITS_AXES, shape, "the logits").shard_shape(shape)
    return math.prod(shape)


def _sequence_parts(sharding: Sharding | None, length: int) -> int:
    """Returns the number of parts that a mesh splits sequences into."""
    parts = 1 if sharding is None else sharding.shards("sequence")
    if sharding is None or length % parts == 0:
        return parts
    require(
        not sharding.strict,
        f"the mesh splits sequences into {parts} parts, which do not divide {length} tokens",
    )
    return 1


@typed
def added_by_routers(sown: Any, experts: Experts) -> tuple[Array, dict[str, Array]]:
    """Returns the loss that the routers of a mixture of experts add to that of a training step.

    Args:
      sown: the variables that ``model.apply(..., mutable=["losses"])`` returns beside its output.
      experts: of the model.

    Returns:
      The weighted sum of all losses over layers, and the unweighted mean of each over layers, by
      name. ``balance_loss`` is 1 if all experts get the same share, more if some get more (Fedus et
      al. 2021, equations 4 to 6); ``z_loss`` is the mean squared log-sum-exp of the routers' logits
      (Zoph et al. 2022, equation 5).
    """
    mapping = isinstance(sown, Mapping)
    require(
        mapping and "losses" in sown,
        "sown must be {'losses': ...}, as apply(..., mutable=['losses']) returns it beside its "
        f"output; got {f'keys {sorted(map(str, sown))}' if mapping else type(sown).__name__}",
    )
    layers: dict[str, list[Array]] = {}
    for path, values in flatten_dict(sown["losses"]).items():
        layers.setdefault(path[-1], []).extend(jnp.ravel(x) for x in values)
    every = {name: jnp.concatenate(values) for name, values in layers.items()}
    added = sum(getattr(experts, name) * x.sum() for name, x in every.items())
    return jnp.asarray(added), {f"{name}_loss": x.mean() for name, x in every.items()}


@typed
def added_by_encoding(model: Transformer, params: Any, progress: Array | float) -> Array | None:
    """Returns the term that the encoding adds to the loss of a training step, for any batch.

    Args:
      model: the model.
      params: nested dict of the model's parameters.
      progress: share of the training done, 0 at its start and 1 at its end.

    Returns:
      A scalar, or None if the encoding adds nothing (:meth:`Encoding.loss`).
    """
    found = [own.loss(p, progress) for own, p in layer_params(model, params).items()]
    added = [loss for loss in found if loss is not None]
    return sum(added[1:], added[0]) if added else None
