"""Tasks: what a model is trained on and how it is judged.

A task is a frozen dataclass of its options. The training loop and the command line use the
:class:`Task` protocol only, so a new task is one class and one line in ``TASKS``.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from train.checks import choose, from_mapping

if TYPE_CHECKING:
    import grain
    import numpy as np

    from train.evaluation import Progress, Trained


TASKS: dict[str, str] = {
    "addition": "train.tasks.arithmetic:Addition",
    "address": "train.tasks.address:Address",
    "passkey": "train.tasks.passkey:Passkey",
    "scrolls": "train.tasks.scrolls:Scrolls",
    "text": "train.tasks.text:Text",
}


class Result(Protocol):
    """The outcome of an evaluation.

    It may also have a method ``files()``, which returns the contents of text files for the run
    folder, by name.
    """

    def summary(self) -> dict[str, float]:
        """Scalars worth logging, by name, including those of :attr:`Task.scores`."""

    def table(self) -> str:
        """A table for people to read."""

    def to_json(self) -> dict[str, Any]:
        """The whole result in JSON types."""


class Score(NamedTuple):
    """A number of :meth:`Result.summary` that compares trained models.

    Attributes:
      key: its name in the summary; a result may lack it.
      label: for tables, with the unit.
      higher_is_better: whether more is better, as for an accuracy but not a perplexity.
      factor: multiplies the number for display: 100 for a share in per cent.
    """

    key: str
    label: str
    higher_is_better: bool
    factor: float = 1.0


class Task(Protocol):
    """The interface of a task to the training loop and the command line.

    It may also have a method ``prepare(options, limit)``, called before training with the tokens
    that the model accepts (None: any number). It raises ValueError if data for training or
    evaluation is missing or does not fit, and returns a line that says how much there is. A task
    may also have ``training_sequences``, the number of sequences in an epoch, and
    ``held_out_batch(size)``, a batch that is not trained on, or None. Training then reports that
    batch's loss.

    Attributes:
      Evaluation: a frozen dataclass, every field with a default: the options of :meth:`evaluate`,
        which a config gives as ``evaluation``.
      scores: the scores that compare models, the most telling one first.
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

        ``targets`` are the inputs shifted by one token; ``weights`` weight the loss. If a sequence
        holds several documents, there are also ``"segment_ids"`` and ``"positions"``, int32 [B, T].
        ``batch_size`` counts the examples of all processes together.
        """

    def evaluate(self, trained: Trained, options: Any, progress: Progress | None = None) -> Result:
        """Judges a trained model; ``options`` is an instance of ``Evaluation``."""

    def encode(self, text: str) -> Sequence[int] | np.ndarray:
        """Tokens of a prompt in ordinary writing; ValueError for other text."""

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The tokens as text."""

    def read_result(self, record: Any) -> Result:
        """The result that :meth:`Result.to_json` described; ValueError for other records."""

    def samples(self, trained: Trained, options: Any) -> Sequence[str]:
        """A few lines that show what a trained model does with unseen prompts."""


def get_task(name: str, /, **options: Any) -> Task:
    """The task called ``name`` with the given options.

    Raises:
      ValueError: an unknown name, an unknown option, or an option out of range.
    """
    return from_mapping(task_type(name), options, what=f"task {name!r}")


def task_type(name: str) -> Any:
    """The class of the task called ``name``; ValueError for an unknown name."""
    choose("task", name, TASKS)
    module, _, attribute = TASKS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def task_name(task: Task) -> str:
    """The name under which a task is registered."""
    return next(name for name in TASKS if task_type(name) is type(task))


def program(task: Task) -> str:
    """The ``main`` module of the package that defines a task."""
    return f"{type(task).__module__.partition('.')[0]}.main"
