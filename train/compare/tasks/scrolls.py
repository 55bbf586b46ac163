"""The report on a subset of SCROLLS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from train.compare.tasks import Comparison
from train.tasks.scrolls import Scrolls
from train.tasks.scrolls_metrics import Outcome, require_same_questions, scores_table


def compare(task: Scrolls, results: Mapping[str, Sequence[Outcome]]) -> Comparison:
    """Reports a table of the scores, as means over seeds."""
    first = require_same_questions(results)
    return Comparison(
        title=f"SCROLLS: {first.subset}",
        introduction=(
            f"Fine-tuned on {first.subset} with sequences of {task.sequence_length:,} tokens: "
            "the end of a longer document is cut off, its question is not. Answers are "
            f"greedy, and judged by the benchmark's own metric. {first.note}"
        ),
        sections={"Scores": scores_table(results)},
        figures={},
    )
