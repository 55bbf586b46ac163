"""What a report says of passkey retrieval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from train.compare.plots import heat_maps
from train.compare.tasks import Comparison
from train.evaluation.grids import INTERVALS, Grid, averages_table, length_table, pool
from train.tasks.passkey import Passkey


def compare(task: Passkey, results: Mapping[str, Sequence[Grid]]) -> Comparison:
    """Heat maps and exact match by length; of several seeds, their means."""
    grids = {name: pool(list(of_seeds)) for name, of_seeds in results.items()}
    first = next(iter(grids.values()))
    lengths = ", ".join(f"{n:,}" for n in first.columns)
    return Comparison(
        title="Passkey retrieval beyond the trained length",
        introduction=(
            f"Trained to find a key of {task.digits} digits in {task.sequence_length:,} bytes "
            f"of filler, and asked for keys held out of training in {lengths} bytes. An answer "
            "is right if it is to the last digit, and ends there."
        ),
        sections={"Passkey retrieval": section(grids)},
        figures={"passkey.png": heat_maps(grids)},
    )


def section(grids: Mapping[str, Grid]) -> str:
    """What a report says of grids, but for their figure."""
    return (
        f"{INTERVALS}.\n\n"
        f"{averages_table(grids)}\n\n![Passkey retrieval](passkey.png)\n\n{length_table(grids)}"
    )
