"""Tasks that judge encodings, besides those that ``train`` has."""

from train import tasks
from train.compare import tasks as comparisons

TASKS = {
    "algorithm": "research.tasks.algorithms:Algorithm",
    "counting": "research.tasks.counting:Counting",
    "flip_flop": "research.tasks.flip_flop:FlipFlop",
    "line_numbers": "research.tasks.line_numbers:LineNumbers",
    "navigation": "research.tasks.navigation:Navigation",
    "recall": "research.tasks.recall:Recall",
    "selective_copy": "research.tasks.selective_copy:SelectiveCopy",
    "table": "research.tasks.table:Table",
    "words": "research.tasks.words:Words",
}
COMPARISONS = {"words": "research.tasks.words_report:compare"}


def register() -> None:
    """Registers the tasks by name, and what a report says of them."""
    tasks.TASKS.update(TASKS)
    comparisons.COMPARISONS.update(COMPARISONS)
