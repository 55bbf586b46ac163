"""What came out of an evaluation of addressing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from train.evaluation.grids import Grid, Wording, length_table, read_record
from train.tasks.pointing import Pointing

FORMAT = "tape-jax addressing, version 1"


@dataclasses.dataclass(frozen=True, eq=False)
class AddressResult:
    """How well a model addresses, and how.

    Attributes:
      rows: what the rows of the grids are.
      grid: exact match.
      pointing: where questions point; None if the model does not take any.
      without: exact match with the encoding as before training; None if it has learned nothing.
    """

    rows: str
    grid: Grid
    pointing: Pointing | None
    without: Grid | None

    def summary(self) -> dict[str, float]:
        """The averages over offsets and lengths, as scalars for a log."""
        found = self.grid.summary()
        if self.without is not None:
            found |= {f"{name}_untrained": x for name, x in self.without.summary().items()}
        return found

    def table(self) -> str:
        """Exact match by length, as text."""
        grids = {"exact match": self.grid}
        if self.without is not None:
            grids["with the encoding as before training"] = self.without
        return length_table(grids)

    def to_json(self) -> dict[str, Any]:
        """The result in JSON types."""
        return {"format": FORMAT, "rows": self.rows} | {
            name: None if part is None else part.to_json()
            for name, part in (
                ("grid", self.grid),
                ("pointing", self.pointing),
                ("without", self.without),
            )
        }

    @classmethod
    def from_json(cls, record: Any, wording: Callable[[str], Wording]) -> AddressResult:
        """The result that :meth:`to_json` described.

        Args:
          record: of JSON types.
          wording: of the questions, by what the rows are.

        Raises:
          ValueError: ``record`` is something else.
        """
        values = read_record(record, cls, FORMAT)
        for name in ("grid", "without"):
            if values[name] is not None:
                values[name] = Grid.from_json(values[name], wording(values["rows"]))
        if values["pointing"] is not None:
            values["pointing"] = Pointing.from_json(values["pointing"])
        return cls(**values)
