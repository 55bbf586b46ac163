"""Recorded position ids of position coupling, compared with those that the encoding gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tape_jax._src.parity.deviations import Deviation
from tape_jax._src.positions import PositionCoupling
from tape_jax._src.positions.protocol import default_positions

# Arrays that the ids are computed from, and others about their draws.
INPUTS = ("kind", "inputs", "labels", "reverse_input", "reverse_output", "start")
NOT_COMPARED = ("padding", "max_position", "random_start", "meta")

# Token ids: digits are their values; END follows what is recorded.
PLUS, EQUALS, END = 10, 11, 12
ABSENT = -1  # where a row has no id


def compare(arrays: Mapping[str, np.ndarray]) -> Iterator[Deviation]:
    """Yields a comparison of the ids of operands, and of those of equals signs and answers.

    Raises:
      ValueError: if something else is recorded.
    """
    recorded = ("input_ids", "label_ids")
    rest = set(arrays) - set(INPUTS) - set(NOT_COMPARED) - set(recorded)
    if rest:
        raise ValueError(f"recorded, but not known here: {sorted(rest)}")
    found = {name: np.full_like(arrays[name], ABSENT) for name in recorded}
    for n in range(len(arrays["inputs"])):
        operands, answer = str(arrays["inputs"][n]), str(arrays["labels"][n])
        ids = _ids({name: arrays[name][n] for name in INPUTS}, operands, answer)
        split = len(operands)
        found["input_ids"][n, :split] = ids[:split]
        found["label_ids"][n, : len(answer) + 1] = ids[split : split + len(answer) + 1]
    for name in recorded:
        wrong = np.abs(found[name] - arrays[name]).max(initial=0)
        yield Deviation(name, "int32", float(wrong), name, 0.0)


def _ids(row: Mapping[str, Any], operands: str, answer: str) -> np.ndarray:
    """Ids of ``operands=answer``."""
    longest = max(len(number) for number in operands.split("+"))
    encoding = PositionCoupling(
        digits=tuple(range(10)),
        plus=PLUS,
        equals=EQUALS,
        reverse_operands=bool(row["reverse_input"]),
        reverse_answer=bool(row["reverse_output"]),
        extra_digits=len(answer) - longest,
        couple_equals=row["kind"] == "two",
    )
    signs = {"+": PLUS, "=": EQUALS}
    tokens = [signs[x] if x in signs else int(x) for x in f"{operands}={answer}"]
    padded = jnp.asarray(tokens + [END] * (-len(tokens) % 32), jnp.int32)
    ids = np.asarray(encoding.coordinates(padded, default_positions(len(padded))))
    return np.where(ids > 0, ids + int(row["start"]) - 1, ids)
