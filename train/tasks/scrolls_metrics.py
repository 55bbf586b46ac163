"""The metrics of SCROLLS, and the predictions that they judge.

They follow the benchmark's own evaluation. The score of an example is the largest over its right
outputs, and that of a subset the mean over examples:

* ``exact_match``: equal after normalisation;
* ``f1``: the harmonic mean of precision and recall over normalised words, counted with repetition;
* ``rouge``: F-measures of ROUGE-1, ROUGE-2 and ROUGE-L, without stemming, each separately the
  largest over the outputs; the score is the geometric mean of their three means.

Normalisation is that of SQuAD (Rajpurkar et al. 2016): lower case, without punctuation, articles
and surplus space. All values here are shares from 0 to 1; the benchmark prints percentages.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.checks import require
from train.evaluation.grids import read_record, text_table
from train.tasks import Score
from train.tasks.scrolls_files import SUBSETS, ScrollsRecord

FORMAT = "tape-jax SCROLLS, version 1"
_MOST_LISTED = 20

# The first of each metric's scores is the one that counts.
SCORES = {
    "f1": (Score("f1", "F1, %", True, 100),),
    "exact_match": (Score("exact_match", "exact match, %", True, 100),),
    "rouge": (
        Score("rouge", "ROUGE, geometric mean, %", True, 100),
        Score("rouge1", "ROUGE-1, %", True, 100),
        Score("rouge2", "ROUGE-2, %", True, 100),
        Score("rougeL", "ROUGE-L, %", True, 100),
    ),
}

_ROUGE = ("rouge1", "rouge2", "rougeL")


def normalise(text: str) -> str:
    """Converts to lower case, without punctuation (that of ASCII), articles and surplus space."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, output: str) -> float:
    """Returns 1 if both are equal after normalisation, else 0."""
    return float(normalise(prediction) == normalise(output))


def f1(prediction: str, output: str) -> float:
    """Returns the harmonic mean of precision and recall over normalised words, 0 if none match."""
    predicted, right = (Counter(normalise(text).split()) for text in (prediction, output))
    common = (predicted & right).total()
    return 2 * common / (predicted.total() + right.total()) if common else 0.0


def score(
    subset: str, predictions: Mapping[str, str], outputs: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Scores of a subset, from 0 to 1, under the names of :data:`SCORES`.

    Args:
      subset: one of :data:`train.tasks.scrolls_files.SUBSETS`.
      predictions: by id.
      outputs: the right ones, at least one for each id.

    Raises:
      ValueError: unless both have the same ids, at least one, and all have outputs.
    """
    check_ids(predictions, outputs)
    require(len(outputs) > 0, f"{subset}: there is nothing to score")
    unpublished = [name for name, right in outputs.items() if not right]
    require(
        not unpublished,
        f"{subset}: the right outputs of {_listed(unpublished)} are not in the data, which "
        "therefore cannot be scored",
    )
    pairs = [(predictions[name], right) for name, right in outputs.items()]
    metric = SUBSETS[subset].metric
    if metric == "rouge":
        return _rouge(pairs)
    compare: Callable[[str, str], float] = {"f1": f1, "exact_match": exact_match}[metric]
    best = [max(compare(prediction, output) for output in right) for prediction, right in pairs]
    return {metric: statistics.fmean(best)}


def _rouge(pairs: Iterable[tuple[str, Sequence[str]]]) -> dict[str, float]:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(_ROUGE, use_stemmer=False)
    scores = [scorer.score_multi(right, prediction) for prediction, right in pairs]
    means = {name: statistics.fmean(s[name].fmeasure for s in scores) for name in _ROUGE}
    return {
        "rouge": statistics.geometric_mean(means.values()) if all(means.values()) else 0,
        **means,
    }


def outputs_by_id(records: Iterable[ScrollsRecord]) -> dict[str, list[str]]:
    """The right outputs of each id, in order; empty if they are not published."""
    outputs: dict[str, list[str]] = {}
    for record in records:
        right = outputs.setdefault(record.id, [])
        if record.output is not None:
            right.append(record.output)
    return outputs


def check_ids(predictions: Iterable[str], wanted: Iterable[str]) -> None:
    """Raises ValueError with a list if ids of predictions are missing or unknown."""
    predictions, wanted = dict.fromkeys(predictions), dict.fromkeys(wanted)
    problems = {
        "missing": [name for name in wanted if name not in predictions],
        "unknown": [name for name in predictions if name not in wanted],
    }
    found = [f"{what}: {_listed(names)}" for what, names in problems.items() if names]
    require(not found, f"predictions do not fit the data; {'; '.join(found)}")


def read_predictions(path: Path) -> dict[str, str]:
    """The predictions of a file ``{id: prediction}``, the form that the benchmark takes.

    Raises:
      ValueError: no such file, one of another form, or an id that is given twice.
    """
    require(path.is_file(), f"there is no file of predictions {path}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        require(not twice, f"{path}: given more than once: {_listed(twice)}")
        return dict(pairs)

    try:
        predictions = json.loads(path.read_bytes(), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    require(isinstance(predictions, dict), f"{path}: expected an object {{id: prediction}}")
    wrong = [name for name, text in predictions.items() if not isinstance(text, str)]
    require(not wrong, f"{path}: the predictions of {_listed(wrong)} are not text")
    return predictions


def _listed(names: Sequence[str]) -> str:
    """Joins names with commas, and says how many more there are."""
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(map(repr, names[:_MOST_LISTED])) + more


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The predictions of a model, and their scores.

    Attributes:
      subset, split: of the questions.
      predictions: by id.
      scores: from 0 to 1, under the names of :data:`SCORES`; empty if the right outputs are not
        published.
    """

    subset: str
    split: str
    predictions: Mapping[str, str]
    scores: Mapping[str, float]

    def summary(self) -> dict[str, float]:
        """The scores."""
        return dict(self.scores)

    def table(self) -> str:
        """The scores in per cent."""
        return f"{scores_table({self.subset: [self]})}\n\n{self.note}"

    @property
    def note(self) -> str:
        """The sentence that names the examples."""
        note = f"{len(self.predictions):,} examples of {self.subset}, {self.split}"
        return f"{note}." if self.scores else f"{note}, whose right outputs are not published."

    def files(self) -> dict[str, str]:
        """Returns ``predictions.json``, in the form that the benchmark takes."""
        content = json.dumps(dict(self.predictions), indent=1, ensure_ascii=False)
        return {"predictions.json": content + "\n"}

    def to_json(self) -> dict[str, Any]:
        """The result in JSON types."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, record: Any) -> Outcome:
        """The result that :meth:`to_json` described.

        Raises:
          ValueError: ``record`` is something else.
        """
        return cls(**read_record(record, cls, FORMAT))


def scores_table(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """A table of scores in per cent, averaged over each name's outcomes."""
    first = next(iter(outcomes.values()))[0]
    columns = SCORES[SUBSETS[first.subset].metric]
    rows = [
        [name, *(_percent(score, group) for score in columns)] for name, group in outcomes.items()
    ]
    return text_table(["", *(score.label for score in columns)], rows)


def _percent(score: Score, group: Sequence[Outcome]) -> str:
    values = [outcome.scores[score.key] for outcome in group if score.key in outcome.scores]
    return f"{score.factor * statistics.fmean(values):.2f}" if values else "-"


def require_same_questions(outcomes: Mapping[str, Sequence[Outcome]]) -> Outcome:
    """Returns the first outcome if all can be compared.

    Raises:
      ValueError: no outcomes, or outcomes of different examples.
    """
    every = [outcome for group in outcomes.values() for outcome in group]
    require(len(every) > 0, "no outcomes to compare")
    first = every[0]
    for other in every[1:]:
        require(
            (other.subset, other.split) == (first.subset, first.split)
            and other.predictions.keys() == first.predictions.keys(),
            f"outcomes of different examples: {first.note} {other.note}",
        )
    return first
