"""How questions of all lengths are asked."""

from __future__ import annotations

import dataclasses

from train.checks import not_negative, positive


@dataclasses.dataclass(frozen=True)
class Options:
    """How questions of all lengths are asked; see :func:`train.evaluation.exact_match.exact_match`.

    A subclass has ``samples``, the questions of each cell, as a field or a property.

    Attributes:
      longest: the greatest length asked for; None: a multiple of the trained one.
      seed: of the choice of questions.
      batch_size: questions of one pass.
    """

    longest: int | None = None
    seed: int = 0
    batch_size: int = 512

    def __post_init__(self):
        for field in dataclasses.fields(self):
            what, value = f"evaluation: {field.name}", getattr(self, field.name)
            if field.name == "seed":
                not_negative(what, value)
            elif not isinstance(field.default, str):
                positive(what, value, optional=field.default is None)
