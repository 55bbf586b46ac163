"""What a report says of the results of each task."""

import math
import re

import numpy as np
import pytest

from tests.train.small import result
from train.compare import plots
from train.compare.tasks import compare
from train.evaluation.grids import INTERVALS
from train.tasks import get_task
from train.tasks.address_result import AddressResult
from train.tasks.text import Text
from train.tasks.text_evaluation import TextResult


def grid_of(task, right):
    """All cells of an evaluation, of whose 20 questions so many are right."""
    axes = task.axes(task.Evaluation())
    counts = np.full([1, *map(len, axes)][-2:], 20)
    return task.grid(axes, np.full(counts.shape, right), counts)


def test_addressing_of_several_seeds():
    """The mean over the seeds, with an interval over them, not over all questions."""
    task = get_task("address", offsets=2, symbols=8, shortest=3, longest=4)
    results = [AddressResult("offset", grid_of(task, n), None, None) for n in (5, 10, 15)]
    compared = compare(task, {"three": results, "one": [results[1]] * 3})
    assert compared.sections["By length"].startswith(f"{INTERVALS}.\n\n")
    table = compared.sections["Exact match"]
    # Student's interval of 25, 50 and 75 % reaches 62 points to either side.
    assert re.search(r"\| three +\| +50\.0 \[0, 100\] \|", table)
    assert re.search(r"\| one +\| +50\.0 \[50\.0, 50\.0\] \|", table)


def test_perplexities_that_are_not_finite(tmp_path):
    """The report and its figures can be written; rivals without results are left out."""
    groups = {
        "rope": [result(math.nan, 800.0, 3.0, 3.0), result(1.0, 2.0, 3.0, 3.0)],
        "alibi": [result(800.0, 800.0, math.nan, 3.0)],
    }
    results = {name: [TextResult(found) for found in group] for name, group in groups.items()}
    found = compare(Text(sequence_length=4), {**results, "none": []})
    lines = found.sections["Perplexity, disjoint windows"].splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[3:5]] == ["nan", "inf"]
    for name, figure in found.figures.items():
        plots.save(figure, tmp_path / name)
    assert compare(Text(sequence_length=4), {"none": []}).sections == {}


def test_perplexities():
    results = {
        "tape": [TextResult(result(x, 1.0, 1.0, 1.0)) for x in (math.log(10), math.log(20))],
        "rope": [TextResult(result(x, 2.0, 1.0, 1.0)) for x in (math.log(30), math.log(30))],
    }
    compared = compare(Text(), results)
    rows = compared.sections["Perplexity, disjoint windows"].splitlines()
    cells = [[c.strip() for c in row.strip("|").split("|")] for row in rows]
    assert cells[0] == ["tokens", "of trained", "tape", "rope"]
    assert cells[2] == ["4", "1x", "15.00 ± 7.07", "30.00 ± 0.00"]
    assert [score.key for score in compared.scores][:4] == [
        *("perplexity_1x", "perplexity_2x"),
        *("perplexity_windowed_1x", "perplexity_windowed_2x"),
    ]
    assert list(compared.figures) == ["perplexity.png", "loss_by_position.png"]
    line = compared.figures["perplexity.png"].axes[0].lines[0]
    np.testing.assert_allclose(line.get_xydata(), [[4, 15], [8, math.e]])
    other = TextResult(result(1.0, 1.0, 1.0, 1.0, fingerprint="b"))
    message = "'rope' and 'other' were not judged alike: fingerprint is a and b"
    with pytest.raises(ValueError, match=message):
        compare(Text(), {"rope": results["rope"][:1], "other": [other]})
