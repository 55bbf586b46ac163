"""Losses of the tokens of a text, window by window."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tape_jax import Transformer
from train.checks import require
from train.evaluation.programs import Programs

# Tokens whose logits are in memory at a time.
CHUNK = 1024


def windows(targets: int, length: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows that together score each of ``targets`` consecutive targets exactly once.

    Target t is the token after token t. A window that starts at s has the targets s to
    s + length - 1, and scores those that no earlier window has. The last one ends where the targets
    end, and moves on by less than ``stride`` if necessary.

    Returns:
      int [W] starts, and int [W] the first place that each window scores.

    Raises:
      ValueError: unless 1 <= stride <= length <= targets.
    """
    require(
        1 <= stride <= length <= targets,
        f"evaluation: need 1 <= stride <= window <= targets; got stride = {stride}, window = "
        f"{length}, targets = {targets}",
    )
    starts = np.append(np.arange(0, targets - length, stride), targets - length)
    return starts, length - np.diff(starts + length, prepend=0)


@dataclasses.dataclass(frozen=True)
class TokenLosses:
    """The loss of each token except the first, given those before it.

    Attributes:
      model: computes logits for :data:`CHUNK` tokens at a time.
    """

    model: Transformer

    def __call__(self, variables: Any, tokens: jax.Array) -> jax.Array:
        """Returns the cross entropy in nats, float32 [B, L], of ``tokens`` int32 [B, L + 1]."""
        hidden = jnp.asarray(self.model.apply(variables, tokens[:, :-1], output="hidden"))

        def loss(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
            logits = self.model.project(variables, pair[0]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, pair[1])

        flat = hidden.reshape(-1, hidden.shape[-1]), tokens[:, 1:].reshape(-1)
        return jax.lax.map(loss, flat, batch_size=CHUNK).reshape(tokens.shape[0], -1)


def with_window(model: Transformer, window: int) -> Transformer:
    """The same model, but its tokens see at most ``window`` tokens, themselves included."""
    own, before = model.config.local_window_size, window - 1
    if own is not None:
        before = min(before, own[0] if isinstance(own, tuple) else own)
    config = dataclasses.replace(model.config, local_window_size=before)
    return Transformer(config, sharding=model.sharding)


def windows_of(sizes: Sequence[int], length: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Joins :func:`windows` of successive texts, each of them a token longer than its targets."""
    own = [windows(size, length, stride) for size in sizes]
    offsets = np.cumsum([0, *(size + 1 for size in sizes[:-1])])
    starts = [offset + starts for offset, (starts, _) in zip(offsets, own, strict=True)]
    return np.concatenate(starts), np.concatenate([first for _, first in own])


def losses_and_places(
    model: Transformer,
    variables: Any,
    tokens: np.ndarray,
    starts: np.ndarray,
    first: np.ndarray,
    length: int,
    batch_tokens: int,
    advance: Callable[[int], None],
    programs: Programs,
    name: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the loss of each token's target, and the token's place in the window that scores it.

    ``programs`` finds kept results by ``name`` and the contents of the windows.
    """
    losses = np.full(len(tokens), np.nan)
    places = np.zeros(len(tokens), np.int64)
    within = np.arange(length + 1)
    rows = min(max(1, batch_tokens // length), len(starts))
    firsts = range(0, len(starts), rows)

    def batches() -> Iterator[tuple[tuple[np.ndarray], int]]:
        for row in firsts:
            chosen = starts[row : row + rows]
            # The last pass repeats a window: another shape would need another compilation.
            filled = np.pad(chosen, (0, rows - len(chosen)), mode="edge")
            yield (tokens[filled[:, None] + within],), len(chosen) * length

    results = programs.results(name, TokenLosses(model), variables, batches())
    for row, found in zip(firsts, results, strict=True):
        chosen = starts[row : row + rows]
        window, place = np.nonzero(within[:-1] >= first[row : row + rows, None])
        losses[chosen[window] + place] = found[window, place]
        places[chosen[window] + place] = place
        advance((row + len(chosen)) * length)
    return losses, places
