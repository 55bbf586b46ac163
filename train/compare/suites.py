"""The part of a comparison on a suite that all models answered."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from train.checks import choose, require
from train.compare.tasks import Comparison
from train.evaluation import fits
from train.evaluation.grids import text_table
from train.experiment import Experiment
from train.suites import evaluation
from train.suites.evaluation import SuiteOptions, tokenizer_of
from train.suites.results import SuiteResult
from train.tasks import Score, Task
from train.training import runs

# Readers of a suite's options from text.
_READ: dict[str, Callable[[str], Any]] = {
    "lengths": lambda text: tuple(sorted({int(n) for n in text.split(",")})),
    "tasks": lambda text: tuple(text.split(",")),
    **dict.fromkeys(("samples", "seed", "batch_size", "chunk"), int),
    **dict.fromkeys(("form", "background", "squad", "hotpotqa"), str),
}


def parse(text: str) -> SuiteOptions:
    """Parses the options of a suite from text such as ``ruler:lengths=512,2048:form=short``.

    Values may have colons: ``ruler:lengths=512:background=tfds:c4/en:validation``.

    Raises:
      ValueError: for an option that is unknown or given twice, or a value that it does not take.
    """
    name, *given = re.split(":(?=[^:=]*=)", text)
    require(
        ":" not in name, f"expected SUITE:OPTION=VALUE, such as ruler:lengths=512; got {text!r}"
    )
    values: dict[str, Any] = {}
    for option in given:
        key, _, value = option.partition("=")
        choose("option of a suite", key, _READ)
        require(key not in values, f"expected each option of a suite once; got {key} twice")
        try:
            values[key] = _READ[key](value)
        except ValueError:
            raise ValueError(f"{key} of a suite takes whole numbers; got {value!r}") from None
    return SuiteOptions(name, values.pop("lengths", ()), **values)


def check(options: SuiteOptions, experiments: Sequence[Experiment]) -> None:
    """Raises ValueError if one of the models cannot be asked a suite, before it is trained."""
    longest, codecs = options.lengths[-1], {}
    for experiment in experiments:
        codec = tokenizer_of(experiment.task, experiment.name)
        codecs[codec.fingerprint] = codec
        limit = runs.max_length(experiment.model)
        require(
            fits(longest, limit),
            f"{experiment.label} takes at most {limit} tokens: a length of {longest:,} cannot be "
            "asked",
        )
    for codec in codecs.values():
        evaluation.check(options, codec)


def summary(result: SuiteResult) -> dict[str, float]:
    """Returns the mean over tasks at each length, from 0 to 1."""
    return {_key(result, length): result.mean(length) for length in result.lengths}


def scores(result: SuiteResult) -> list[Score]:
    """Returns the scores of :func:`summary`, the longest length first."""
    return [
        Score(_key(result, length), f"{result.suite} at {length:,} tokens, %", True, 100)
        for length in reversed(result.lengths)
    ]


def section(results: Mapping[str, Sequence[SuiteResult]]) -> str:
    """Returns a table of per cent by task and length, with standard deviations over seeds.

    Args:
      results: by name, one for each seed, all of the same questions.
    """
    first = next(iter(results.values()))[0]
    rows = [
        [
            task,
            f"{length:,}",
            *(
                _cell([100 * statistics.fmean(one.scores[task][length]) for one in group])
                for group in results.values()
            ),
        ]
        for task, cells in first.scores.items()
        for length in cells
    ]
    asked = len(next(iter(next(iter(first.scores.values())).values())))
    note = f"Per cent of {asked} questions a cell; ± is the standard deviation over seeds."
    return f"{text_table(['task', 'tokens', *results], rows)}\n\n{note}"


def added(
    compared: Comparison, task: Task, names: Sequence[str], results: Sequence[SuiteResult]
) -> Comparison:
    """Returns a comparison with the scores of a suite added.

    Args:
      compared: the comparison without them.
      task: the models' task.
      names: the models' names, one for each result.
      results: all of the same questions.
    """
    groups: dict[str, list[SuiteResult]] = {}
    for name, result in zip(names, results, strict=True):
        groups.setdefault(name, []).append(result)
    return dataclasses.replace(
        compared,
        sections={**compared.sections, f"Suite {results[0].suite}": section(groups)},
        scores=[*(compared.scores or task.scores), *scores(results[0])],
    )


def _key(result: SuiteResult, length: int) -> str:
    return f"{result.suite}_{length}"


def _cell(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"
