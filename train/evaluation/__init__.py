"""The measurement of models: exact match over grids of questions, perplexity over windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from tape_jax import Transformer

# Called with the number of items done and the total number.
Progress = Callable[[int, int], None]


class Trained(Protocol):
    """A trained model that is to be judged, such as :class:`train.training.runs.TrainedRun`.

    Attributes:
      model: the Flax module.
      variables: its variables.
      apply: ``apply(variables, tokens [B, T], length=[B]) -> logits [B, T, V]``.
      max_length: the longest sequence, in tokens, that the model accepts; None: any.

    Models that a command evaluates also have ``programs``, a
    :class:`train.evaluation.programs.Programs` that plans, keeps and times the computation.
    """

    @property
    def model(self) -> Transformer: ...

    @property
    def variables(self) -> dict[str, Any]: ...

    @property
    def apply(self) -> Callable[..., Any]: ...

    @property
    def max_length(self) -> int | None: ...


def fits(tokens: int, limit: int | None) -> bool:
    """Returns whether a model that takes at most ``limit`` tokens (None: any) takes ``tokens``."""
    return limit is None or tokens <= limit


def few_widths(lengths: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """At most ``count`` lengths to compile for, ascending; each adds equally many rows."""
    return np.unique(np.quantile(lengths, np.arange(1, count + 1) / count, method="higher"))


def part_of(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Reports progress on a part of ``total`` items, of which ``before`` are already done."""
    return progress and (lambda done, _: progress(before + done, total))
