"""What is measured: shapes of calls, and the implementations and options that could do them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.attention.request import Request
from tape_jax._src.core import algebra

Array = jax.Array

# What is measured by default, by platform: tokens are those of a batch of several heads. A chip is
# filled as in training; a CPU meets both small models and single sequences, whose best choices
# differ, has no arithmetic in 16 bits, and takes long.
ACCELERATOR: Mapping[str, Any] = {
    "head_dims": (64, 128),
    "lengths": (256, 512, 1024, 2048, 4096, 8192, 16_384),
    "dtypes": ("bfloat16", "float32"),
    "heads": (12,),
    "tokens": 16_384,
}
CPU: Mapping[str, Any] = {
    "head_dims": (64,),
    "lengths": (128, 256, 512, 1024, 2048),
    "dtypes": ("float32",),
    "heads": (1, 8),
    "tokens": 2048,
}


@dataclasses.dataclass(frozen=True, order=True)
class CallShape:
    """The shape of a causal call of attention with as many queries as keys.

    Attributes:
      head_dim: of queries, keys and values.
      length: queries, and keys.
      dtype: name of the type of queries, keys and values.
      state: whether a state is attended; it is in the rotary form.
      batch, heads, kv_heads: sequences, and heads of queries and of keys.
    """

    head_dim: int
    length: int
    dtype: str
    state: bool
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1

    @property
    def rows(self) -> int:
        """Query heads in all sequences."""
        return self.batch * self.heads

    @property
    def logits(self) -> int:
        """Query-key pairs of all heads and sequences."""
        return self.rows * self.length**2

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return (
            f"D {self.head_dim}, T {self.length}, {self.dtype}, {self.batch} x {heads} heads, "
            f"{'state' if self.state else 'no state'}"
        )

    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and types of q, k, v, and with a state e, which models keep in float32."""
        lead = (self.batch, self.length)
        found = [
            jax.ShapeDtypeStruct((*lead, heads, self.head_dim), self.dtype)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        ]
        if self.state:
            kind = algebra.at_least_float32(self.dtype)
            found.append(jax.ShapeDtypeStruct(found[1].shape, kind))
        return tuple(found)

    def arrays(self, seed: int = 0) -> tuple[Array, ...]:
        """Random q, k, v, and with a state e: complex numbers of length about 1."""
        rng = np.random.default_rng(seed)
        found = [rng.normal(size=x.shape).astype(np.float32) for x in self.structs()]
        if self.state:
            radius, angle = np.split(found[3], 2, axis=-1)
            radius, angle = 1 + radius / 10, 3 * angle
            found[3] = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], -1)
        return tuple(jnp.asarray(x, y.dtype) for x, y in zip(found, self.structs(), strict=True))

    @classmethod
    def of(cls, request: Request) -> CallShape | None:
        """The shape of a call on one device; None if it has far more keys than queries.

        The shares that a mesh gives to a device are counted by the rules of the call's sharding.
        """
        queries, keys = request.query_length, request.key_length
        if not keys or not queries or max(queries, keys) > 2 * min(queries, keys):
            return None
        shards = {"batch": 1, "heads": 1}
        if request.sharding is not None:
            shards = {name: request.sharding.shards(name) for name in shards}
        heads = max(1, request.query_heads // shards["heads"])
        return cls(
            head_dim=request.q.shape[-1],
            length=math.isqrt(queries * keys),
            dtype=request.q.dtype.name,
            state=request.state is not None and request.attend_state,
            batch=max(1, request.q.shape[0] // shards["batch"]),
            heads=heads,
            kv_heads=max(1, heads // request.groups),
        )


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to compute a call.

    Attributes:
      implementation: its name in ``BACKENDS``.
      options: keywords of the implementation, in JSON types.
    """

    implementation: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        options = (f"{name}={value}".replace(" ", "") for name, value in self.options.items())
        return " ".join([self.implementation, *options])


@dataclasses.dataclass(frozen=True)
class Measured:
    """What became of a contender.

    Attributes:
      contender: what was measured.
      forward: seconds of the forward pass; infinite if it was not timed.
      gradients: seconds of the forward and backward pass; likewise.
      spreads: half the distance of the quartiles of both, relative to them.
      error: the largest error against the reference; None if it was not compared.
      struck: why it must not, or need not, be taken; None if it may.
      wrong: whether that is because it disagrees with the reference.
    """

    contender: Contender
    forward: float = math.inf
    gradients: float = math.inf
    spreads: tuple[float, float] = (0.0, 0.0)
    error: float | None = None
    struck: str | None = None
    wrong: bool = False

    @property
    def timed(self) -> bool:
        """Whether there are times."""
        return math.isfinite(self.score)

    def clearly_faster(self, other: Measured, gain: float) -> bool:
        """Whether it takes at most ``gain`` of another's time, both ways, and not by noise.

        The medians are further apart than the quartiles are from them.
        """
        mine, theirs = ((x.forward, x.gradients) for x in (self, other))
        return all(
            a <= gain * b and a * (1 + x) <= b * (1 - y)
            for a, b, x, y in zip(mine, theirs, self.spreads, other.spreads, strict=True)
        )

    @property
    def score(self) -> float:
        """What makes one better than another if smaller: the geometric mean of both times.

        A trace does not know whether it will be differentiated, so that one choice serves both. A
        quotient of two scores gives each direction the same say, however long it takes.
        """
        return math.sqrt(self.forward * self.gradients)


def usual() -> Mapping[str, Any]:
    """What :func:`shapes` takes where nothing is given."""
    return CPU if jax.default_backend() == "cpu" else ACCELERATOR


def shapes(
    head_dims: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    *,
    heads: Sequence[int] | None = None,
    tokens: int | None = None,
) -> list[CallShape]:
    """The shapes to measure, what is used most and takes least first; None: by platform.

    Args:
      head_dims, lengths, dtypes: of the calls.
      heads: several numbers of heads. One head stands for one sequence.
      tokens: in a batch.
    """
    given = {
        "head_dims": head_dims, "lengths": lengths, "dtypes": dtypes, "heads": heads,
        "tokens": tokens,
    }  # fmt: skip
    wanted = {**usual(), **{name: x for name, x in given.items() if x is not None}}
    cpu = jax.default_backend() == "cpu"
    # Who runs on a CPU takes float32.
    types = sorted(wanted["dtypes"], key=lambda name: (jnp.dtype(name).itemsize < 4) == cpu)
    found = []
    for dtype, length, dim, count, state in itertools.product(
        types, sorted(wanted["lengths"]), wanted["head_dims"], wanted["heads"], (True, False)
    ):
        batch = 1 if count == 1 else max(1, wanted["tokens"] // length)
        found.append(CallShape(dim, length, dtype, state, batch, count, count))
    return found
