"""Biases and decays that only some of the heads have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from tape_jax._src.core.checks import positive, require
from tape_jax._src.core.padding import pad_to
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Encoding, Param

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class SomeHeads(Encoding):
    """A bias or a decay for all query heads, or for the first ones, as in a model of so many.

    Subclasses describe all heads of the sizes that they are given, with :meth:`head_params` and
    with :meth:`pair_bias` or :meth:`head_terms`.

    Attributes:
      on_heads: number of heads with it; None: all.

    Raises:
      ValueError: for ``on_heads`` out of range.
    """

    on_heads: int | None = dataclasses.field(default=None, kw_only=True)

    def check(self, sizes: Sizes) -> None:
        positive(f"{self.kind}: on_heads", self.on_heads, optional=True)
        require(
            self.on_heads is None or self.on_heads <= sizes.num_heads,
            f"{self.kind}: on_heads = {self.on_heads} are more than the model's "
            f"{sizes.num_heads} heads",
        )

    def head_params(self, sizes: Sizes) -> dict[str, Param]:
        """Parameters of one layer, for all heads."""
        return {}

    def head_terms(self, params: dict[str, Array], layer: Layer) -> Terms:
        """Returns the terms added to the attention of all heads; by default :meth:`pair_bias`."""
        return super().layer_terms(params, layer)

    def layer_params(self, sizes: Sizes, *, updates: bool) -> dict[str, Param]:
        return self.head_params(self._of_its_heads(sizes))

    def layer_terms(self, params: dict[str, Array], layer: Layer) -> Terms:
        if self.on_heads is None:
            return self.head_terms(params, layer)
        own = dataclasses.replace(layer, sizes=self._of_its_heads(layer.sizes))
        others = layer.sizes.num_heads - self.on_heads
        return _with_others(self.head_terms(params, own), others)

    def _of_its_heads(self, sizes: Sizes) -> Sizes:
        if self.on_heads is None:
            return sizes
        return dataclasses.replace(sizes, num_heads=self.on_heads, num_kv_heads=self.on_heads)


def _with_others(terms: Terms, count: int) -> Terms:
    """Pads terms with zeros for ``count`` more heads."""

    def padded(x: Array, axis: int) -> Array:
        return pad_to(x, x.shape[axis] + count, axis)

    def widened(bias: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
        return lambda i, j: padded(bias(i, j), -3)

    decay = terms.log_decay
    return terms._replace(
        bias=None if terms.bias is None else widened(terms.bias),
        log_decay=None if decay is None else (padded(decay[0], -1), padded(decay[1], -1)),
    )
