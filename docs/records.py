"""Results on record that the README and the pictures show."""

from __future__ import annotations

import functools
import json
import math
import statistics
from pathlib import Path
from typing import Any

from research.lines import restored

RECORDS = Path(__file__).parents[1] / "research" / "records"
TRAINED = {"address_4x_again": 16, "passkey": 64, "recall": 16, "counting": 32}
ALPHA = {"address_4x_again": 8.0}  # the demo's options
LEARNED = 95  # per cent of the trained lengths

Record = dict[str, Any]


@functools.cache
def reports(study: str) -> dict[tuple[str, float | None], dict[float, list[Record]]]:
    """The reporting runs of a study, by encoding, its alpha and the learning rate."""
    head, *rest = (RECORDS / f"{study}.jsonl").read_text(encoding="utf-8").splitlines()
    shared = json.loads(head)["shared"]
    runs: dict[tuple[str, float | None], dict[float, list[Record]]] = {}
    for line in rest:
        record = restored(shared, json.loads(line))
        model, position = record["experiment"]["model"], record["experiment"]["model"]["position"]
        usual = position.get("attention_mix", "heads") == "heads"
        if record["protocol"]["asked"] == "test" and usual and not model.get("random_positions"):
            key = position["kind"], position.get("alpha")
            rate = record["experiment"]["train"]["learning_rate"]
            runs.setdefault(key, {}).setdefault(rate, []).append(record["found"]["result"])
    return runs


def exact_match(result: Record, trained: int) -> list[float]:
    """Returns the per cent right up to the trained length, and beyond it."""
    grid = result.get("grid", result)
    right, asked = [0, 0], [0, 0]
    for lengths, correct, counts in zip(
        grid["lengths"], grid["correct"], grid["counts"], strict=True
    ):
        for length, some, all_of_them in zip(lengths, correct, counts, strict=True):
            beyond = int(length > trained)
            right[beyond] += some
            asked[beyond] += all_of_them
    return [100 * some / count for some, count in zip(right, asked, strict=True)]


def perplexity(result: Record, factor: int) -> float:
    """Returns the perplexity of disjoint windows of ``factor`` times the trained length."""
    found = result["perplexity"]
    (one,) = (
        m
        for m in found["measurements"]
        if m["protocol"] == "disjoint" and m["length"] == factor * found["trained"]
    )
    return math.exp(statistics.mean(one["blocks"]))


def scores(
    study: str, factor: int | None, kind: str, alpha: float | None
) -> tuple[list[float], bool] | None:
    """Each seed's score, and whether the trained lengths were learned; None if not asked.

    Args:
      study: a file of records.
      factor: on the trained length, for perplexities; None: per cent right beyond it.
      kind: of the encoding.
      alpha: of TAPE, but for studies that ``ALPHA`` names; None for others.
    """
    rates = reports(study).get((kind, ALPHA.get(study, alpha) if alpha else None))
    if rates is None:
        return None
    if factor:
        # A length has the rate that is best for it.
        found = [[perplexity(r, factor) for r in results] for results in rates.values()]
        return min(found, key=statistics.mean), True
    (results,) = rates.values()
    pairs = [exact_match(result, TRAINED[study]) for result in results]
    inside = statistics.mean(one for one, _ in pairs)
    return [beyond for _, beyond in pairs], inside >= LEARNED
