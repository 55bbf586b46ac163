"""Converts weights of models that rotate neighbouring dimensions to rotation by halves."""

from __future__ import annotations

import jax

from tape_jax._src.core.checks import as_array, require, typed

Array = jax.Array


@typed
def halves_from_pairs(kernel: Array, head_dim: int, *, axis: int = -1) -> Array:
    """Reorder the outputs of a projection from neighbouring pairs to halves.

    GPT-J and Meta's Llama files rotate the dimensions ``2 i`` and ``2 i + 1`` of a head together,
    tape-jax, like Hugging Face's Llama, ``i`` and ``i + D/2``. With both the query's and the key's
    projection reordered, logits are the same; values and the output projection stay as they are.
    This also holds if only the first dimensions rotate (``partial_rotary_factor``), and for biases
    and norms over all heads. A norm's scale over one head is an array ``[D]``.

    Args:
      kernel: an array whose ``axis`` has the heads' dimensions, ``H * D`` or ``D``, a head's side
        by side.
      head_dim: ``D``, even.
      axis: of the outputs; 0 for PyTorch's ``[out, in]``.

    Returns:
      An array of the same shape.

    Raises:
      ValueError: if ``head_dim`` is odd or does not divide the axis, or there is no such axis.
    """
    kernel = kernel if hasattr(kernel, "shape") else as_array("kernel", kernel)
    require(
        -kernel.ndim <= axis < kernel.ndim, f"a kernel of shape {kernel.shape} has no axis {axis}"
    )
    size = kernel.shape[axis]
    require(
        head_dim > 0 and head_dim % 2 == 0 and size % head_dim == 0,
        f"head_dim must be even and divide the axis {axis} of the kernel, {size}; got {head_dim}",
    )
    axis %= kernel.ndim
    before, after = kernel.shape[:axis], kernel.shape[axis + 1 :]
    heads = kernel.reshape(*before, size // head_dim, head_dim // 2, 2, *after)
    return heads.swapaxes(axis + 1, axis + 2).reshape(kernel.shape)
