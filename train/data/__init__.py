"""Tasks: what a model is trained on and how it is judged.

A task is a frozen dataclass of its options. The training loop and the command line use the
:class:`Task` protocol only, so a new task is one class and one line in ``TASKS``.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from tape_jax.config import choose, from_mapping, require

if TYPE_CHECKING:
    import grain
    from matplotlib.figure import Figure

    from train.runs import Trained

Progress = Callable[[int, int], None]

TASKS: dict[str, str] = {
    "addition": "train.data.arithmetic:Addition",
    "algorithm": "train.data.algorithms:Algorithm",
    "passkey": "train.data.passkey:Passkey",
    "scrolls": "train.data.scrolls:Scrolls",
    "text": "train.data.text:Text",
    "words": "train.data.groups:Words",
}


class Result(Protocol):
    """The outcome of an evaluation.

    It may also have a method ``files()``, which gives the content of text files that belong into
    the run folder, by name.
    """

    def summary(self) -> dict[str, float]:
        """Scalars worth logging, by name; those of :attr:`Task.scores` among them."""

    def table(self) -> str:
        """A table to be read by a person."""

    def to_json(self) -> dict[str, Any]:
        """The whole result in JSON types."""


class Score(NamedTuple):
    """A number of :meth:`Result.summary` by which trained models are compared.

    Attributes:
      key: its name there; a result may lack it.
      label: for tables, with the unit.
      higher_is_better: whether it is an accuracy, say, rather than a perplexity.
      factor: by which it is multiplied to be shown: 100 for a share in per cent.
    """

    key: str
    label: str
    higher_is_better: bool
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What a report says of several models of one task, beside their scores.

    Attributes:
      title: of the report.
      introduction: in a paragraph what the models were trained on and asked.
      sections: Markdown by heading; figures appear there by their file names.
      figures: matplotlib figures by file name.
    """

    title: str
    introduction: str
    sections: Mapping[str, str]
    figures: Mapping[str, Figure]


class Task(Protocol):
    """What the training loop and the command line need to know about a task.

    Attributes:
      Evaluation: a frozen dataclass, every field with a default: the options of :meth:`evaluate`,
        which a config gives as ``evaluation``.
      scores: what models are compared by, the most telling one first.
      vocab_size: number of token ids.
      sequence_length: T, the fixed length of every training sequence in tokens.
    """

    Evaluation: ClassVar[type]

    @property
    def scores(self) -> Sequence[Score]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def sequence_length(self) -> int: ...

    def dataset(
        self, seed: int, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> grain.IterDataset:
        """Batches ``{"inputs", "targets": int32 [B, T], "weights": float32 [B, T]}``.

        ``targets`` are the inputs moved on by one token; the loss is weighted by ``weights``. Where
        a sequence holds several documents, also ``"segment_ids"`` and ``"positions"``, int32
        [B, T]. ``batch_size`` counts the examples of all processes together.
        """

    def evaluate(self, trained: Trained, options: Any, progress: Progress | None = None) -> Result:
        """Judges a trained model; ``options`` is an instance of ``Evaluation``."""

    def encode(self, text: str) -> Sequence[int] | np.ndarray:
        """Tokens of a prompt in ordinary writing; ValueError if it is none."""

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The tokens as text."""

    def read_result(self, record: Any) -> Result:
        """The result that :meth:`Result.to_json` described; ValueError if it is none."""

    def compare(self, results: Mapping[str, Sequence[Any]]) -> Comparison:
        """Sets models side by side: for each name its results, one for each seed."""

    def samples(self, trained: Trained, options: Any) -> Sequence[str]:
        """A few lines that show what a trained model does when it is asked something unseen."""


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Prompts with their answers, ready to be judged by :func:`train.evaluate.exact_match`.

    Attributes:
      tokens: integers [E, L]: a prompt, its answer (end symbol included), then padding.
      prompt_lengths: [E] tokens of each prompt, at least 1.
      lengths: [E] tokens of prompt and answer together.
      cells: [E, 2] row and column of the grid that each example belongs to.
    """

    tokens: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray
    cells: np.ndarray

    def __post_init__(self):
        shapes = {f.name: np.shape(getattr(self, f.name)) for f in dataclasses.fields(self)}
        count, width = (*shapes["tokens"], 0, 0)[:2]
        expected = {
            "tokens": (count, width),
            "prompt_lengths": (count,),
            "lengths": (count,),
            "cells": (count, 2),
        }
        require(shapes == expected, f"examples: shapes {shapes}, expected {expected}")
        require(
            bool(
                np.all(self.prompt_lengths >= 1)
                and np.all(self.prompt_lengths < self.lengths)
                and np.all(self.lengths <= width)
            ),
            f"examples: need 1 <= prompt_lengths < lengths <= {width} in every row",
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: np.ndarray, width: int) -> Examples:
        """The given rows, cut to ``width`` tokens."""
        return Examples(
            self.tokens[rows, :width],
            self.prompt_lengths[rows],
            self.lengths[rows],
            self.cells[rows],
        )


def get_task(name: str, /, **options: Any) -> Task:
    """The task called ``name`` with the given options.

    Raises:
      ValueError: an unknown name, an unknown option, or an option out of range.
    """
    choose("task", name, TASKS)
    module, _, attribute = TASKS[name].partition(":")
    cls = getattr(importlib.import_module(module), attribute)
    return from_mapping(cls, options, what=f"task {name!r}")
