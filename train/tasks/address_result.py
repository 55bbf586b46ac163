"""The result of an evaluation of addressing: exact match, and where questions point."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from train.evaluation import Trained
from train.evaluation.grids import Grid, Wording, length_table, read_record
from train.evaluation.inside import look


@dataclasses.dataclass(frozen=True, eq=False)
class Pointing:
    """The places that the last token of a question points at, averaged for each offset.

    Attributes:
      places: [R], places in the list, relative to the token that is asked about (0).
      attention: float [L, H, K, R], the probability of each place, by layer, head and offset.
      states: float [L, H, K, R], the cosine between the last token's state entering each layer and
        each place's state entering the first that reads it; NaN for layers that do not, None for
        encodings without a state.
    """

    places: np.ndarray
    attention: np.ndarray
    states: np.ndarray | None

    def to_json(self) -> dict[str, Any]:
        """The numbers in JSON types, to four digits."""

        def rounded(x: np.ndarray | None) -> Any:
            return x if x is None else np.round(x.astype(float), 4).tolist()

        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: rounded(x) for name, x in values.items()}

    @classmethod
    def from_json(cls, record: Any) -> Pointing:
        """Returns what :meth:`to_json` described; ValueError if it is something else."""
        values = read_record(record, cls)
        states = values.pop("states")
        arrays = {name: np.array(x, float) for name, x in values.items()}
        return cls(**arrays, states=None if states is None else np.array(states, float))


def point(trained: Trained, tokens: np.ndarray, found: np.ndarray, length: int) -> Pointing:
    """Looks inside a model that reads questions.

    Args:
      trained: the model.
      tokens: integers [K, S, T]: S questions of each offset, which start with lists.
      found: int [K, S], the places of the tokens that are asked about.
      length: tokens of each list.
    """
    offsets, samples, width = tokens.shape
    rows = tokens.reshape(-1, width)
    inside = look(trained.model, trained.variables, rows, [[""] * width] * len(rows))
    relative = np.arange(length) - found.reshape(-1, 1)
    places = np.arange(-length + 1, length)

    def mean(values: np.ndarray) -> np.ndarray:
        """Averages values [L, B, T, H] by place from the token asked about: [L, H, K, R]."""
        aligned = np.full((*values.shape[:2], values.shape[3], len(places)), np.nan)
        each = np.arange(len(rows))[:, None]
        columns = relative + length - 1
        aligned[:, each, :, columns] = np.moveaxis(values[:, :, :length], (1, 2), (0, 1))
        grouped = aligned.reshape(len(values), offsets, samples, *aligned.shape[2:])
        known = ~np.isnan(grouped)
        total = np.where(known, grouped, 0).sum(2) / np.maximum(known.sum(2), 1)
        return np.where(known.any(2), total, np.nan).swapaxes(1, 2)

    attention = mean(np.swapaxes(inside.maps[:, :, -1], 2, 3))
    if inside.states is None:
        return Pointing(places, attention, None)
    e = inside.flat_states
    e = e / np.linalg.norm(e, axis=-1, keepdims=True)
    found = mean(np.einsum("lbhd,bthd->lbth", e[:, :, -1], e[0]))
    states = np.full((len(attention), *found.shape[1:]), np.nan)
    states[np.array(inside.layers) - 1] = found
    return Pointing(places, attention, states)


FORMAT = "tape-jax addressing, version 1"


@dataclasses.dataclass(frozen=True, eq=False)
class AddressResult:
    """The result of an evaluation of addressing.

    Attributes:
      rows: what the rows of the grids are.
      grid: exact match.
      pointing: where questions point; None if too long for the model.
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
          wording: of the questions, given the rows.

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
