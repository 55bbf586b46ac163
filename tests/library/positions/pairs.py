"""One layer's attention with an encoding, and the same by loops over pairs in numpy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax import ModelConfig, attention
from tape_jax.positions import Encoding, Layer

BATCH, TIME, HEADS, KV_HEADS, DIM, HIDDEN = 2, 9, 4, 2, 6, 10
# Two segments, one behind the other and interleaved.
IDS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], [2, 1, 1, 2, 2, 1, 2, 1, 1]])


@dataclasses.dataclass(frozen=True)
class Pairs:
    """What enters a layer, with the parameters of an encoding.

    Attributes:
      encoding: what is tested.
      arrays: ``q``, ``k``, ``v`` and ``x``, with batch and time in front.
      params: by name.
      ids: segment ids ``[B, T]`` or None.
    """

    encoding: Encoding
    arrays: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    ids: np.ndarray | None = None

    @property
    def config(self) -> ModelConfig:
        """A model with such a layer."""
        q, x = self.arrays["q"], self.arrays["x"]
        return config_of(self.encoding, q.shape[-2], self.arrays["k"].shape[-2], x.dtype.name)

    def attend(self, *, is_causal: bool = True, **options: Any) -> jax.Array:
        """``o [B, T, H, D]`` by this library, compiled: operations one by one are slow."""
        run = functools.partial(attend, self, is_causal=is_causal, **options)
        return jax.jit(run)(self.params, self.arrays)

    def assert_attends(self, want: np.ndarray, *, is_causal: bool = True) -> None:
        """The library's ``o`` is ``want``: of whole rows, and of some queries at a time."""
        for options in ({}, {"implementation": "rows", "block_q": 4}):
            found = self.attend(is_causal=is_causal, **options)
            np.testing.assert_allclose(found, want, atol=1e-12)

    def scores(self, b: int, h: int) -> np.ndarray:
        """Scaled logits ``[T, T]``, nothing added and nothing masked."""
        q, k = (self.arrays[name][b].astype(np.float64) for name in "qk")
        group = q.shape[1] // k.shape[1]
        scale = self.encoding.logits_scale(self.config.sizes) or q.shape[-1] ** -0.5
        return q[:, h] @ k[:, h // group].T * scale

    def seen(self, b: int, i: int, *, is_causal: bool = True) -> list[int]:
        """The keys that a query sees, in order."""
        keys = range(i + 1 if is_causal else self.arrays["q"].shape[1])
        return [j for j in keys if self.ids is None or self.ids[b, i] == self.ids[b, j]]

    def place(self, b: int, t: int) -> int:
        """Position of a token in its segment."""
        return t if self.ids is None else int(np.sum(self.ids[b, :t] == self.ids[b, t]))

    def looped(
        self, weigh: Callable[[int, int, int, Sequence[int]], Any], *, is_causal: bool = True
    ) -> np.ndarray:
        """``o``, given weights of the keys that query ``i`` of row ``b`` and head ``h`` sees."""
        v = self.arrays["v"]
        out = np.zeros_like(self.arrays["q"])
        for b, i, h in np.ndindex(out.shape[:3]):
            seen = self.seen(b, i, is_causal=is_causal)
            weights = weigh(b, h, i, seen)
            values = v[b, seen, h // (out.shape[2] // v.shape[2])]
            out[b, i, h] = np.asarray(weights) @ values
        return out

    def softmax(
        self, logit: Callable[[int, int, int, int], float], *, is_causal: bool = True
    ) -> np.ndarray:
        """``o``, given the final logit of row, head, query and key."""

        def weigh(b: int, h: int, i: int, seen: Sequence[int]) -> np.ndarray:
            logits = np.array([logit(b, h, i, j) for j in seen])
            weights = np.exp(logits - logits.max())
            return weights / weights.sum()

        return self.looped(weigh, is_causal=is_causal)


def config_of(encoding: Encoding, heads: int, kv_heads: int, dtype: str) -> ModelConfig:
    return ModelConfig(
        13, hidden_size=HIDDEN, num_layers=1, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=DIM, position=encoding, dtype=dtype, param_dtype=dtype,
    )  # fmt: skip


def drawn(
    encoding: Encoding,
    *,
    ids: np.ndarray | None = None,
    time: int = TIME,
    dtype: str = "float64",
) -> Pairs:
    """Random arrays and parameters, of which none is near what it starts at."""
    rng = np.random.default_rng(0)
    shapes = {"q": (HEADS, DIM), "k": (KV_HEADS, DIM), "v": (KV_HEADS, DIM), "x": (HIDDEN,)}
    arrays = {
        name: rng.normal(size=(BATCH, time, *shape)).astype(dtype) for name, shape in shapes.items()
    }
    specs = encoding.layer_params(config_of(encoding, HEADS, KV_HEADS, dtype).sizes, updates=False)
    params = {name: rng.normal(size=spec.shape).astype(dtype) for name, spec in specs.items()}
    return Pairs(encoding, arrays, params, ids)


def layer_of(pairs: Pairs, arrays: dict[str, Any], *, is_causal: bool = True) -> Layer:
    """The layer that an encoding is given."""
    places = jnp.arange(arrays["q"].shape[1], dtype=jnp.int32)
    ids = pairs.ids
    if ids is not None:
        rows = [[pairs.place(b, t) for t in range(len(row))] for b, row in enumerate(ids)]
        places, ids = jnp.asarray(rows, jnp.int32), jnp.asarray(ids)
    x, q, k = (arrays[name] for name in "xqk")
    return Layer(x, places, ids, is_causal, pairs.config.sizes, q=q, k=k)


def attend(
    pairs: Pairs,
    params: dict[str, Any],
    arrays: dict[str, Any],
    *,
    is_causal: bool = True,
    implementation: str = "reference",
    **options: Any,
) -> jax.Array:
    """``o`` of one layer, nothing rotated."""
    layer = layer_of(pairs, arrays, is_causal=is_causal)
    terms = pairs.encoding.layer_terms({n: jnp.asarray(x) for n, x in params.items()}, layer)
    return attention(
        *(arrays[name] for name in "qkv"), is_causal=is_causal, segment_ids=layer.segment_ids,
        implementation=implementation, options=options, **terms.keywords(),
        scale=pairs.encoding.logits_scale(layer.sizes),
    )[0]  # fmt: skip


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softplus(x: Any) -> Any:
    return np.log1p(np.exp(x))
