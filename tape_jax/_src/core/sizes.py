"""The sizes of a model that a position encoding needs to know."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that a position encoding is given; ``ModelConfig.sizes`` has a model's.

    Attributes:
      hidden_size: width of the residual stream.
      num_layers: number of blocks.
      num_heads: query heads.
      num_kv_heads: key/value heads, a divisor of ``num_heads``.
      head_dim: numbers per head.
      vocab_size: number of token ids.
      max_length: longest sequence that the model accepts, in tokens; None: no limit.
      dtype: compute type.
      state_dtype: type of position states; None: at least float32.
      embedding_std: standard deviation of initial embeddings.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_length: int | None = None
    dtype: str = "float32"
    state_dtype: str | None = None
    embedding_std: float = 1.0
