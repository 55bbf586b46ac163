"""Log-likelihoods of continuations, and whether greedy decoding would write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax import Transformer
from train.evaluation.continuations import batch_rows, batches, place
from train.evaluation.programs import Programs
from train.evaluation.window_losses import CHUNK
from train.training import runs

# The least length, in tokens, that is compiled for.
_LEAST = 32


class Given(NamedTuple):
    """A continuation to be scored, after its context.

    Attributes:
      tokens: context and continuation, integers [L].
      start: of the continuation, at least 1.
    """

    tokens: np.ndarray
    start: int


class Likelihood(NamedTuple):
    """The log-likelihood of a continuation, and whether greedy decoding would write it.

    Attributes:
      sum: of the log-probabilities of its tokens, in nats.
      greedy: whether each is the most probable one.
    """

    sum: float
    greedy: bool


@dataclasses.dataclass
class Scorer:
    """Scores continuations with one model, batched by similar length.

    Lengths are rounded up, so that few programs are compiled however many lengths there are.

    Attributes:
      model, variables: of the model.
      pad: the token of padding.
      batch_size: rows at once.
      programs: those compiled so far.
    """

    model: Transformer
    variables: Any
    pad: int
    batch_size: int = 16
    programs: Programs = dataclasses.field(default_factory=Programs)

    def run(self, given: Sequence[Given]) -> Iterator[tuple[np.ndarray, list[Likelihood]]]:
        """Scores the given continuations, the longest first.

        Yields:
          Rows of ``given``, and how likely each continuation is.

        Raises:
          ValueError: a batch that does not fit into the memory.
        """
        lengths = np.array([len(row.tokens) for row in given])
        starts = np.array([row.start for row in given])
        size = batch_rows(self.model, self.batch_size, len(given))
        limit = runs.max_length(self.model.config)
        for rows, filled in batches(-lengths, size):
            width = rounded(int(lengths[rows].max()) - 1, limit)
            places = rounded(int((lengths - starts)[rows].max()), width)
            tokens = np.full((len(filled), width + 1), self.pad, np.int32)
            for line, row in zip(tokens, filled, strict=True):
                line[: lengths[row]] = given[row].tokens
            arrays = tokens, starts[filled].astype(np.int32), lengths[filled].astype(np.int32)
            with self.programs.speed.measured():
                placed = place(self.model, arrays)
                found = self.programs.run(_Score(self.model, places), self.variables, *placed)
                sums, greedy = map(np.asarray, found)
            self.programs.speed.tokens += int(lengths[rows].sum())
            pairs = zip(sums.tolist(), greedy.tolist(), strict=True)
            yield rows, [Likelihood(*pair) for pair in pairs][: len(rows)]


def rounded(length: int, limit: int | None = None) -> int:
    """Rounds up to the next length to compile for: four lengths per doubling.

    The result never exceeds the limit.

    >>> [rounded(n) for n in (1, 33, 40, 41, 65, 500)]
    [32, 40, 40, 48, 80, 512]
    >>> rounded(98, 100)
    100
    """
    step = max(_LEAST, 1 << (length - 1).bit_length()) // 8
    found = max(_LEAST, -(-length // step) * step)
    return found if limit is None else min(found, limit)


@dataclasses.dataclass(frozen=True)
class _Score:
    """Scores continuations of at most ``count`` tokens."""

    model: Transformer
    count: int

    def __call__(
        self, variables: Any, tokens: jax.Array, starts: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns sums, float32 [B], and whether all tokens are the most probable, bool [B].

        Args:
          variables: of the model.
          tokens: int32 [B, W + 1], padded on the right.
          starts, lengths: int32 [B], of each continuation, and of each row without padding.
        """
        inputs = tokens[:, :-1]
        hidden = self.model.apply(variables, inputs, length=lengths - 1, output="hidden")
        places = starts[:, None] - 1 + jnp.arange(self.count)
        at = jnp.take_along_axis(jnp.asarray(hidden), places[..., None], axis=1, mode="clip")
        targets = jnp.take_along_axis(tokens, places + 1, axis=1, mode="clip")

        def one(pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            logits = self.model.project(variables, pair[0]).astype(jnp.float32)
            chosen = jnp.take_along_axis(logits, pair[1][..., None], axis=-1)[..., 0]
            return chosen - jax.nn.logsumexp(logits, axis=-1), logits.argmax(-1) == pair[1]

        flat = at.reshape(-1, at.shape[-1]), targets.reshape(-1)
        found = jax.lax.map(one, flat, batch_size=CHUNK)
        logs, right = (x.reshape(targets.shape) for x in found)
        counts = places + 1 < lengths[:, None]
        return jnp.where(counts, logs, 0).sum(axis=1), (right | ~counts).all(axis=1)
